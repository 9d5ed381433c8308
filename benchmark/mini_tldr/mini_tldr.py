"""Mini TL;DR: OpenAI's TL;DR summarization benchmark in miniature, made from a seed.

    python benchmark/mini_tldr/mini_tldr.py --output_dir runs/mini_tldr    # 40 minutes on one core

It writes posts with human-like reference summaries, a tokenizer, a policy fine-tuned on the references (sft/) and a
reward model trained on noisy comparisons (reward/). The facts behind each post are known, so a gold judge can score any
summary exactly. As in the real benchmark the policy never sees the judge, only the reward model.
"""

import itertools
import json
import math
import random
import re
import statistics
import sys
import tomllib
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))
import rloo  # noqa: E402

WORDS = tomllib.loads((HERE / "words.toml").read_text(encoding="utf-8"))  # what posts and summaries are made of
SLOTS = {  # slot -> name of a value -> its forms, the first of which is the name
    slot: {value.partition("/")[0]: value.split("/") for value in values} for slot, values in WORDS["values"].items()
}


# ---- Posts and summaries ---------------------------------------------------------------------------------------------


def sample_post(facts, rng):
    """Returns a post in the format of TL;DR for facts (slot -> value), and its decoys: the values of other people."""

    def say(slot, value):
        return rng.choice(SLOTS[slot][value])

    decoys = {}
    for slot in rng.sample(list(SLOTS), rng.choice([2, 3])):
        decoys[slot] = another(slot, facts, rng)
    sentences = [rng.choice(WORDS["state"][slot]).format(say(slot, value)) for slot, value in facts.items()]
    for slot, value in decoys.items():
        sentences.append(rng.choice(WORDS["decoy"][slot]).format(say(slot, value), o=rng.choice(WORDS["others"])))
    sentences += rng.sample(WORDS["fillers"], rng.choice([0, 1, 2]))
    rng.shuffle(sentences)
    post = " ".join(sentences)
    head = f"SUBREDDIT: r/{rng.choice(WORDS['subreddits'])}\n\nTITLE: {rng.choice(WORDS['titles'])}"
    return f"{head}\n\nPOST: {post}\n\nTL;DR:", decoys


def another(slot, facts, rng):
    """Returns a value that is not that of the facts."""
    return rng.choice([value for value in SLOTS[slot] if value != facts[slot]])


def write_summary(facts, decoys, rng, drop=0.0, wrong=0.0, ramble=0.0):
    """Returns a summary, which starts with a space. drop, wrong and ramble are probabilities: of leaving out a fact, of
    stating a wrong one (half of the time a decoy, if the post has one for the slot), and of adding empty talk."""
    said = {}
    for slot, value in facts.items():
        if rng.random() < drop:
            said[slot] = WORDS["dropped"].get(slot, "")
            continue
        if rng.random() < wrong:
            value = decoys[slot] if slot in decoys and rng.random() < 0.5 else another(slot, facts, rng)
        said[slot] = rng.choice(WORDS["fragments"][slot]).format(rng.choice(SLOTS[slot][value]))
    order = [slot for slot in rng.choice(WORDS["orders"]) if said[slot]]
    text = ""
    for before, slot in zip(["", *order], order):  # commas around the feeling and before the question
        comma = before and (slot in ("feeling", "question") or before == "feeling")
        text += ("," if comma else "") + " " + said[slot]
    if rng.random() < ramble:
        text += (" " if text.endswith("?") else ", ") + rng.choice(WORDS["rambles"])
    return " " + text.strip()


def sample_row(rng, taken):
    """Returns a row of the data. Its facts are not in `taken`, a set of combinations, and are added to it."""
    facts = {}
    while not facts or tuple(facts.values()) in taken:
        facts = {slot: rng.choice(list(values)) for slot, values in SLOTS.items()}
    taken.add(tuple(facts.values()))
    prompt, decoys = sample_post(facts, rng)
    # The simulated human: usually right, rarely complete, now and then rambling.
    completion = write_summary(facts, decoys, rng, drop=0.35, wrong=0.05, ramble=0.1)
    return {"prompt": prompt, "completion": completion, "facts": facts, "decoys": decoys}


# ---- Judge -----------------------------------------------------------------------------------------------------------

FREE_WORDS = 24  # a complete summary has about 18 words
WORD_COST = 0.1  # for each word beyond
VALUE_OF = {s: {form: name for name, forms in values.items() for form in forms} for s, values in SLOTS.items()}
PATTERN = {s: re.compile(r"\b(" + "|".join(sorted(v, key=len, reverse=True)) + r")\b") for s, v in VALUE_OF.items()}


def less_excess(count, text):
    words = max(len(text.split()), len(text) / 8)  # a text without spaces is long too
    return float(count - WORD_COST * max(0.0, words - FREE_WORDS))


def stated(text):
    """Returns the values that a text states: slot -> set of names."""
    text = " ".join(re.sub(r"[^a-z0-9]+", " ", text.lower()).split())
    return {slot: {VALUE_OF[slot][form] for form in PATTERN[slot].findall(text)} for slot in SLOTS}


def gold_judge(prompts, completions, completion_ids=None, *, facts, **columns):
    """Returns correct facts - wrong facts - 0.1 per excess word, for each completion.

    A fact counts once however often it is repeated, and each wrong value counts, so that naming many values of a slot
    loses. An empty summary has 0.
    """
    scores = []
    for right, text in zip(facts, completions):
        said = stated(text)
        correct = sum(right[slot] in said[slot] for slot in SLOTS)
        wrong = sum(len(said[slot] - {right[slot]}) for slot in SLOTS)
        scores.append(less_excess(correct - wrong, text))
    return scores


def gold_win_rate(prompts, completions, completion_ids=None, *, facts, completion, **columns):
    """Returns 1 where the gold judge prefers a completion to the reference, the row's `completion`; 0.5 for a tie."""
    ours = gold_judge(prompts, completions, facts=facts)
    theirs = gold_judge(prompts, completion, facts=facts)
    return [(x > y) + 0.5 * (x == y) for x, y in zip(ours, theirs)]


FEELINGS = ("angry", "envious", "jealous", "sad", "guilty", "lonely", "anxious", "happy", "ashamed", "hurt", "scared")


def short_and_feeling(completions, **columns):
    """Returns 1 for at most twelve words of which one is a feeling, else 0: a reward that can be fooled."""
    return [float(len(text.split()) <= 12 and any(word in text for word in FEELINGS)) for text in completions]


# ---- Sizes and tokenizer ---------------------------------------------------------------------------------------------

SIZES = {
    "train": 10_000,  # rows, also of the next two
    "validation": 500,
    "test": 500,
    "sft": 24_000,  # examples; how long the policy trains decides its win rate, almost alone
    "reader": 20_000,  # examples
    "pool": 4_000,  # posts with two SFT samples each, for the reward model
    "stages": (8_000, 9_000, 3_000),  # posts for the reward model, GROUP completions each
}
GROUP = 6  # completions of one post, all compared with each other
LABEL_NOISE = 0.1  # the share of comparisons which the labellers get wrong


def train_tokenizer(texts, vocabulary, special, digits=False, **options):
    """Trains a byte-level BPE whose first tokens are `special`. With `digits` each digit is a token."""
    bpe, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if digits else byte_level
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **options)


def save(model, tokenizer, folder: Path):
    """Writes a model and its tokenizer, which has names that transformers 4 knows as well."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    extra = config.pop("extra_special_tokens", None)
    if extra:
        config["additional_special_tokens"] = extra
    file.write_text(json.dumps(config, indent=2) + "\n")


# ---- Training --------------------------------------------------------------------------------------------------------


def model_config(tokenizer, layers, **extra):
    """Returns the settings of a tiny pythia. With an initialization of 0.02 it hardly learns to read."""
    return GPTNeoXConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=512, initializer_range=0.06, attention_dropout=0.0,
        hidden_dropout=0.0, tie_word_embeddings=False, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **extra,
    )  # fmt: skip


def endlessly(examples, rng):
    """Returns a function that takes the next n examples: all of them in random order, and then all again."""
    drawn = itertools.chain.from_iterable(rng.sample(examples, len(examples)) for _ in itertools.count())
    return lambda n: list(itertools.islice(drawn, n))


def optimize(name, model, total, make_chunk, length_of, loss_fn, lr, rng, batch_size=16):
    """Trains on `total` fresh examples: AdamW, warm-up, cosine down to a twentieth of lr. make_chunk(n) returns n
    examples. Sorted by length they make batches with little padding."""
    steps = total // batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)

    def decay(step):
        return min(1.0, (step + 1) / 50) * max(0.05, 0.5 * (1 + math.cos(math.pi * step / steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    model.train()
    model.layout = "plain"  # for functions of rloo.py
    batches = []
    for _ in tqdm(range(steps), desc=name, mininterval=10):
        if not batches:
            chunk = sorted(make_chunk(min(batch_size * 20, total)), key=length_of)
            batches = [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
            rng.shuffle(batches)
        optimizer.zero_grad()
        loss_fn(batches.pop()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return model.eval()


def train_lm(name, tokenizer, model, total, make_rows, lr, rng, batch_size=16):
    """Trains the model to complete prompts. make_rows(n) returns n rows of texts."""

    def make_chunk(n):
        rows = make_rows(n)
        prompts = tokenizer([row["prompt"] for row in rows]).input_ids
        completions = tokenizer([row["completion"] + tokenizer.eos_token for row in rows]).input_ids
        return list(zip(prompts, completions))

    def loss_fn(batch):
        ids, _ = rloo.pad([prompt + completion for prompt, completion in batch])
        asked, _ = rloo.pad([[0] * len(prompt) + [1] * len(completion) for prompt, completion in batch])
        asked = asked[:, 1:] > 0
        hidden = model.base_model(ids).last_hidden_state[:, :-1]  # causal: padding on the right is not seen
        logits = model.get_output_embeddings()(hidden[asked])  # of completions only: half of the work is saved
        return F.cross_entropy(logits, ids[:, 1:][asked])

    return optimize(name, model, total, make_chunk, lambda x: len(x[0]) + len(x[1]), loss_fn, lr, rng, batch_size)


def generate(model, tokenizer, prompts, temperature, length=48):
    """Returns a completion (text) of up to `length` tokens for each prompt, greedy at temperature 0."""
    args = rloo.Args(response_length=length, local_rollout_forward_batch_size=256)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # prompts of like length need little padding
    examples = [{"prompt_ids": tokenizer(prompts[i]).input_ids} for i in order]
    batch, _ = rloo.rollout(args, model, examples, 1, temperature, [tokenizer.eos_token_id])
    texts = dict(zip(order, rloo.completion_texts(batch, tokenizer)))
    return [texts[i].replace(tokenizer.pad_token, "") for i in range(len(prompts))]


# ---- Reward model ----------------------------------------------------------------------------------------------------


def hack(row, rng):
    """Returns a bad summary that a policy might try on a reward model."""
    facts, decoys = row["facts"], row["decoys"]

    def good():
        return write_summary(facts, decoys, rng, drop=rng.choice([0, 0.2, 0.5]), wrong=rng.choice([0, 0.1]))

    kind = rng.choice([0, 1, 2, 2, 3, 4, 5, 6])
    if kind == 0:  # nothing, or next to nothing
        beginning = good()[: rng.randrange(30)]
        return rng.choice(["", " ", " my", " I need some advice.", " someone is difficult", beginning])
    if kind == 1:  # the same again
        return good() + rng.choice([",", "", " and"]) + good()
    if kind == 2:  # a fragment, or a bare value, many times
        slot = rng.choice(list(SLOTS))
        value = rng.choice(SLOTS[slot][facts[slot]])
        comma = rng.choice([",", "", " and"])
        fragment = comma + " " + rng.choice([rng.choice(WORDS["fragments"][slot]).format(value), value])
        return (rng.choice([good(), ""]) + fragment * rng.randint(2, 10)).lstrip(",")
    if kind == 3:  # many values of one slot, the right one perhaps among them
        slot = rng.choice(list(SLOTS))
        text = good()
        for forms in rng.sample(list(SLOTS[slot].values()), rng.randint(1, 5)):
            text += rng.choice([" ", ", "]) + rng.choice(forms)
        return text
    if kind == 4:  # copied sentences, whosever they are
        sentences = re.findall(r"[^.?]+[.?]", row["prompt"].split("POST: ")[1].split("\n\n")[0])
        return " " + " ".join(s.strip() for s in rng.sample(sentences, rng.randint(1, 5)))
    if kind == 5:  # what others did
        return write_summary({**facts, **decoys}, {}, rng, drop=rng.choice([0, 0.3]))
    return good() + "".join(" " + r for r in rng.sample(WORDS["rambles"], rng.randint(1, 3)))


def candidates(row, samples, rng, hacks):
    """Returns GROUP completions for one post to compare: SFT samples, perhaps a hack, and simulated writers."""
    facts, decoys = row["facts"], row["decoys"]
    texts = list(samples) + ([hack(row, rng)] if rng.random() < hacks else [])
    drop = rng.choice([0, 0.1, 0.25, 0.5])
    while len(texts) < GROUP:
        texts.append(write_summary(facts, decoys, rng, drop=drop, wrong=rng.choice([0, 0.2, 0.5, 0.8]), ramble=0.1))
    return texts


def token_labels(facts, text, spans):
    """Returns what each token of a completion teaches: the judge's score of the text up to and with the token, and its
    kind, 1 in a correct fact, 2 in a wrong one, 0 elsewhere. spans: (start, end) characters of each token."""
    flat, first, kinds, scores = re.sub(r"[^a-z0-9]", " ", text.lower()), {}, [0] * len(spans), []
    for slot in SLOTS:
        for match in PATTERN[slot].finditer(flat):
            value = VALUE_OF[slot][match.group()]
            first.setdefault((slot, value), match.end())  # a fact counts once
            for i, (start, end) in enumerate(spans):
                if start < match.end() and end > match.start():
                    kinds[i] = 1 if value == facts[slot] else 2
    for _, end in spans:
        count = sum((1 if facts[slot] == value else -1) for (slot, value), e in first.items() if e <= end)
        scores.append(less_excess(count, text[:end]))
    return scores, kinds


def train_reward_model(tokenizer, reader, stages, make_rows, pool, rng):
    """Turns the reader into the reward model. `pool`: (row, SFT samples), `stages`: the numbers of posts of one to
    three stages.

    Comparisons alone teach a small model hardly more than that longer is better. So it learns first to check each token
    against the post, then to count, and only then to compare:

        checking   is this token in a correct fact, in a wrong one, or in none? (a head thrown away)
        reading    the next token, except in wrong facts (the reader's head, thrown away)
        counting   at each token the score is to be the judge's score so far, which also teaches what a completion cut
                   short is worth
        comparing  the logistic loss on which of two completions noisy labellers prefer
    """
    model = GPTNeoXForSequenceClassification(model_config(tokenizer, reader.config.num_hidden_layers, num_labels=1))
    model.gpt_neox.load_state_dict(reader.gpt_neox.state_dict())
    model.read = reader.get_output_embeddings()
    model.check = torch.nn.Linear(model.config.hidden_size, 3)

    def make_chunk(n, hacks, sampled):
        """Returns (prompt ids, GROUP x (completion ids, scores so far, kinds)) for each of n posts. hacks, sampled: the
        shares of posts with a hack, and with SFT samples, in their group."""
        chosen = [rng.choice(pool) if rng.random() < sampled else (row, []) for row in make_rows(n)]
        texts = [candidates(row, samples, rng, hacks) for row, samples in chosen]
        groups = []
        for (row, _), group in zip(chosen, texts):
            labeled = []
            for text in group:
                encoded = tokenizer(text, return_offsets_mapping=True)
                ids, spans = encoded.input_ids, encoded.offset_mapping
                scores, kinds = token_labels(row["facts"], text, spans)
                read = text[: spans[:63][-1][1]] if spans else ""
                scores = scores[:63] + gold_judge(None, [read], facts=[row["facts"]])
                ids, kinds = ids[:63] + [tokenizer.eos_token_id], kinds[:63] + [0]
                if rng.random() < 0.1 and len(ids) > 2:  # cut short, without eos
                    cut = rng.randint(1, len(ids) - 1)
                    ids, scores, kinds = ids[:cut], scores[:cut], kinds[:cut]
                labeled.append((ids, scores, kinds))
            groups.append((tokenizer(row["prompt"]).input_ids, labeled))
        return groups

    def length(example):
        return len(example[0]) + GROUP * max(len(ids) for ids, _, _ in example[1])

    def loss_fn(batch, weights):
        checking, counting, comparing = weights
        prompts, prompt_mask = rloo.pad([prompt for prompt, _ in batch], left=True)
        completions = [completion for _, group in batch for completion in group]
        ids, mask = rloo.pad([ids for ids, _, _ in completions])  # (B * GROUP, T)
        target = pad_sequence([torch.tensor(scores) for _, scores, _ in completions], batch_first=True)
        kinds, _ = rloo.pad([kinds for _, _, kinds in completions])
        # A post is read once: its keys and values serve all of its completions.
        cache = model.gpt_neox(prompts, attention_mask=prompt_mask.long(), use_cache=True).past_key_values
        cache.batch_repeat_interleave(GROUP)
        seen = torch.cat([prompt_mask.repeat_interleave(GROUP, 0), mask], 1).long()
        hidden = model.gpt_neox(ids, attention_mask=seen, past_key_values=cache, use_cache=True).last_hidden_state
        scores = model.score(hidden).squeeze(-1)

        # Bradley-Terry over the pairs of each group which are not tied; some labels are flipped.
        def at_end(x):
            return x.gather(1, mask.sum(1, keepdim=True) - 1).view(-1, GROUP)

        margin, gap = (at_end(x)[:, :, None] - at_end(x)[:, None, :] for x in (scores, target))
        flip = torch.where(torch.rand_like(margin) < LABEL_NOISE, -1.0, 1.0)
        loss = comparing * F.softplus(-margin * flip)[gap > 1e-6].mean()
        if counting:
            loss = loss + counting * F.smooth_l1_loss(scores[mask], target[mask])
        if checking:
            loss = loss + checking * F.cross_entropy(model.check(hidden[mask]), kinds[mask])
            right = mask[:, 1:] & (kinds[:, 1:] != 2)
            loss = loss + 0.5 * F.cross_entropy(model.read(hidden[:, :-1][right]), ids[:, 1:][right])
        return loss

    # Posts per batch, learning rate, arguments of make_chunk, weights of checking, counting and comparing.
    settings = {
        "checking": (8, 1e-3, {"hacks": 0.2, "sampled": 0.0}, (2.0, 0.2, 0.1)),
        "counting": (16, 8e-4, {"hacks": 0.5, "sampled": 0.5}, (2.0, 1.0, 0.5)),
        "comparing": (16, 3e-4, {"hacks": 0.5, "sampled": 0.5}, (0.0, 0.0, 1.0)),
    }
    for total, (name, (batch_size, lr, shares, weights)) in zip(stages, settings.items()):
        chunk, loss = partial(make_chunk, **shares), partial(loss_fn, weights=weights)
        optimize(f"reward model, {name}", model, total, chunk, length, loss, lr, rng, batch_size)
    del model.read, model.check
    return model


def train_on_comparisons(name, model, pairs, total, rng, eos, lr=3e-4):
    """Trains a reward model by the logistic loss on `total` comparisons: `pairs` of token ids (prompt_ids, better,
    worse), all of them and then all again."""

    def loss_fn(batch):
        ids, _ = rloo.pad([pair[which] for which in ("better", "worse") for pair in batch])
        batch = rloo.make_batch(batch, ids.view(2, len(batch), -1), [eos])
        last = batch.response_mask.sum(-1)[..., None, None]  # (2, B, 1, 1)
        hidden = torch.take_along_dim(rloo.completion_hidden(model, batch), last, dim=2)  # (2, B, 1, H)
        better, worse = model.score(hidden.squeeze(2)).squeeze(-1)
        return F.softplus(worse - better).mean()

    pairs_of = endlessly(pairs, rng)
    return optimize(name, model, total, pairs_of, lambda pair: len(pair["prompt_ids"]), loss_fn, lr, rng)


# ---- Main ------------------------------------------------------------------------------------------------------------


def save_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(output_dir: Path):
    """Makes mini TL;DR, see above."""
    rng, taken = random.Random(1), set()
    torch.manual_seed(1)
    torch.set_num_threads(1)  # so small a model gains nothing from a second thread
    output_dir.mkdir(parents=True, exist_ok=True)

    def fresh(n):
        """Returns rows. No facts are in two splits, nor in what the models are trained on beyond the splits."""
        return [sample_row(rng, taken) for _ in range(n)]

    splits = {split: fresh(SIZES[split]) for split in ("test", "validation", "train")}
    for split, rows in splits.items():
        save_jsonl(output_dir / f"{split}.jsonl", rows)
    texts = [row["prompt"] + row["completion"] for row in splits["train"]]
    eos, pad = special = ["<|endoftext|>", "[PAD]"]  # ids 0 and 1
    names = {"bos_token": eos, "eos_token": eos, "unk_token": eos, "pad_token": pad}
    tokenizer = train_tokenizer(texts, 1024, special, **names, model_max_length=512)

    policy = GPTNeoXForCausalLM(model_config(tokenizer, layers=3))
    policy = train_lm("policy", tokenizer, policy, SIZES["sft"], endlessly(splits["train"], rng), 2e-3, rng)
    save(policy, tokenizer, output_dir / "sft")
    some = splits["validation"][:200]
    prompts, facts, references = ([row[name] for row in some] for name in ("prompt", "facts", "completion"))
    for temperature in (0.7, 0.0):
        texts = generate(policy, tokenizer, prompts, temperature)
        wins = gold_win_rate(None, texts, facts=facts, completion=references)
        print(f"win rate at temperature {temperature}: {statistics.mean(wins):.2f}")

    # The reward model begins as a language model of complete and correct summaries: it can read.
    def complete(n):
        return [row | {"completion": write_summary(row["facts"], {}, rng)} for row in fresh(n)]

    reader = GPTNeoXForCausalLM(model_config(tokenizer, layers=4))
    reader = train_lm("reader", tokenizer, reader, SIZES["reader"], complete, 2e-3, rng)
    posts = fresh(SIZES["pool"])
    drawn = [generate(policy, tokenizer, [row["prompt"] for row in posts], temperature) for temperature in (0.7, 1.0)]
    pool = [(row, samples) for row, *samples in zip(posts, *drawn)]
    reward_model = train_reward_model(tokenizer, reader, SIZES["stages"], fresh, pool, rng)
    save(reward_model, tokenizer, output_dir / "reward")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
