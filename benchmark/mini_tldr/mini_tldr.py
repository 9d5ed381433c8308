"""Mini TL;DR: OpenAI's TL;DR summarisation benchmark in miniature, made from a seed.

    python benchmark/mini_tldr/mini_tldr.py                                   # about 40 minutes, on one core
    python benchmark/mini_tldr/mini_tldr.py --quick --output_dir /tmp/mini    # under a minute, smaller

It writes posts with human-like reference summaries, a tokenizer, a policy fine-tuned on the
references (sft/) and a reward model trained on noisy comparisons (reward/). The ground truth
behind each post is known, so a gold judge can score any summary exactly. As in the real
benchmark the policy never sees the judge, only the reward model.

Reading order is running order: tables, posts, references, judge, tokenizer, training, main.
"""

import json
import math
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tldr"))  # for text_reward.py, which loads torch

# ------------------------------------------------------------------------------------ tables
# A post has one value per slot. A value is a list of surface forms: any of them states the
# fact. No form may contain another value's form (checked in `check_tables`).

SLOTS = {
    "who": [
        ["roommate", "flatmate"], ["boss", "manager"], ["sister", "sis"], ["brother", "bro"],
        ["girlfriend", "gf"], ["boyfriend", "bf"], ["landlord", "landlady"], ["neighbor", "neighbour"],
        ["coworker", "colleague"], ["cousin", "cuz"], ["mother", "mom"], ["father", "dad"],
    ],
    "problem": [
        ["eating my food", "taking my food"], ["reading my messages", "checking my phone"],
        ["borrowing money", "asking for cash"], ["telling lies", "making up stories"],
        ["playing loud music", "blasting music"], ["forgetting my name", "mixing up my name"],
        ["canceling our plans", "dropping our plans"], ["stealing my ideas", "copying my ideas"],
        ["mocking my cooking", "insulting my cooking"], ["using my car", "driving my car"],
        ["bringing home pets", "collecting pets"], ["wearing my clothes", "losing my clothes"],
    ],
    "when": [
        ["last week", "a week ago"], ["yesterday", "one day ago"], ["in march", "this spring"],
        ["over christmas", "in december"], ["two months ago", "a couple months back"],
        ["on friday", "friday night"], ["this morning", "early today"], ["last summer", "in july"],
        ["last year", "a year ago"], ["on monday", "monday night"], ["last autumn", "in october"],
        ["during exams", "in exam week"],
    ],
    "where": [
        ["at work", "at the office"], ["at the gym", "in the gym"], ["in the kitchen", "near the stove"],
        ["at a wedding", "at the wedding"], ["on a road trip", "on the highway"], ["at a party", "at the party"],
        ["at school", "on campus"], ["at the beach", "by the sea"], ["at a cafe", "in a coffee shop"],
        ["on the train", "on a train"], ["in the garden", "in the backyard"], ["at church", "in church"],
    ],
    "feeling": [
        ["angry", "furious"], ["sad", "heartbroken"], ["anxious", "nervous"], ["guilty", "ashamed"],
        ["confused", "puzzled"], ["jealous", "envious"], ["tired", "exhausted"], ["embarrassed", "humiliated"],
        ["lonely", "isolated"], ["relieved", "calm"], ["hopeful", "optimistic"], ["scared", "afraid"],
    ],
    "question": [
        ["move out", "move away"], ["apologize", "say sorry"], ["call a lawyer", "get a lawyer"],
        ["break up", "end things"], ["tell the family", "involve the family"], ["demand a refund", "ask for a refund"],
        ["stay silent", "keep quiet"], ["set a boundary", "set some rules"], ["find a job", "get a job"],
        ["try therapy", "see a therapist"], ["write a letter", "send a letter"], ["forgive it", "let it go"],
    ],
}  # fmt: skip

# Sentences in which the writer of the post states a fact about their own story ...
STATE = {
    "who": [
        "So this is about my {}.", "I need to vent about my {}.", "The person I mean is my {}.",
        "It is my {} I have trouble with.",
    ],
    "problem": [
        "The trouble is them {}.", "What gets me is them {}.", "I found them {} again.", "It began with them {}.",
    ],
    "when": ["For me it all happened {}.", "I noticed it {}.", "My story took place {}.", "It got bad for me {}."],
    "where": ["I was {} when it happened.", "We were {} at the time.", "I saw it myself {}.", "It happened to us {}."],
    "feeling": ["I feel {} about it.", "Now I am just {}.", "Honestly it makes me {}.", "I have been {} ever since."],
    "question": ["Should I {}?", "Is it time for me to {}?", "I wonder if I should {}.", "Would I be wrong to {}?"],
}  # fmt: skip
# ... and about somebody else's, which a summary should leave out: {o} is one of OTHERS.
DECOY = {
    "who": ["{o} has a nice {}.", "{o} once dated a {}."],
    "problem": ["{o} saw a stranger {}.", "{o} got in trouble for {}."],
    "when": ["{o} had a baby {}.", "{o} got a new dog {}."],
    "where": ["{o} met an actor {}.", "{o} lost a shoe {}."],
    "feeling": ["{o} was {} about the news.", "{o} is always {} anyway."],
    "question": ["{o} wants to {}.", "{o} was told to {}."],
}  # fmt: skip
OTHERS = [
    "A guy I know", "My old teacher", "Some woman online", "My dentist", "A friend of mine", "The mailman",
    "Another student", "My barber", "Our coach", "Someone else", "My aunt", "A random stranger",
]  # fmt: skip
FILLERS = [
    "Sorry for the long post.", "English is not my first language.", "Throwaway for obvious reasons.",
    "I am on mobile.", "Bear with me here.", "Thanks for reading this far.", "No names for privacy.",
    "I will try to keep it short.", "Ask me anything in the comments.", "I could not make this up.",
]  # fmt: skip
SUBREDDITS = [
    "relationships", "AskReddit", "tifu", "relationship_advice", "advice", "offmychest", "self", "personalfinance",
]  # fmt: skip
TITLES = [
    "What would you do?", "I need some advice.", "How do I handle this?", "Am I overreacting?", "Not sure what to do.",
    "Please help.",
]  # fmt: skip

# A summary is built from one fragment per slot, in one of three orders. Dropped facts leave
# nothing, or for who and problem a word which says nothing.
FRAGMENTS = {
    "who": ["my {}"],
    "problem": ["keeps {}", "won't stop {}", "was caught {}"],
    "when": ["{}"],
    "where": ["{}"],
    "feeling": ["feeling {}", "I'm {}"],
    "question": ["should I {}?", "do I {}?"],
}
DROPPED = {"who": "someone", "problem": "is difficult"}
ORDERS = [
    ["who", "problem", "when", "where", "feeling", "question"],
    ["who", "problem", "where", "when", "feeling", "question"],
    ["feeling", "who", "problem", "where", "when", "question"],
]
RAMBLES = [
    "it is a long story and I do not know where to start", "anyway that is pretty much all I can say about it",
    "any advice would be great because I really do not know", "you would have to read the whole thing to get it",
    "things are complicated and people are strange", "I could go on about this for hours to be honest",
]  # fmt: skip


# ------------------------------------------------------------------------------------ posts


def sample_facts(rng):
    """One story: dict slot -> index of its value."""
    return {slot: rng.randrange(len(values)) for slot, values in SLOTS.items()}


def sample_post(facts, rng):
    """Facts -> (prompt, decoys): the post in the benchmark's format, and what others did, slot -> index."""

    def say(slot, value):
        return rng.choice(SLOTS[slot][value])

    decoys = {}
    for slot in rng.sample(list(SLOTS), rng.choice([2, 3])):
        decoys[slot] = rng.choice([v for v in range(len(SLOTS[slot])) if v != facts[slot]])
    sentences = [rng.choice(STATE[s]).format(say(s, v)) for s, v in facts.items()]
    sentences += [rng.choice(DECOY[s]).format(say(s, v), o=rng.choice(OTHERS)) for s, v in decoys.items()]
    sentences += rng.sample(FILLERS, rng.choice([0, 1, 2]))
    rng.shuffle(sentences)
    post = " ".join(sentences)
    return f"SUBREDDIT: r/{rng.choice(SUBREDDITS)}\n\nTITLE: {rng.choice(TITLES)}\n\nPOST: {post}\n\nTL;DR:", decoys


# ------------------------------------------------------------------------------------ summaries


def write_summary(facts, decoys, rng, drop=0.0, wrong=0.0, ramble=0.0):
    """A summary as a string which starts with a space.

    drop, wrong, ramble are probabilities: of leaving out a fact, of stating a wrong one (half
    of the time a decoy's, when the post has one for the slot), of adding empty talk.
    """
    said = {}
    for slot, value in facts.items():
        if rng.random() < drop:
            said[slot] = DROPPED.get(slot, "")
            continue
        if rng.random() < wrong:
            others = [v for v in range(len(SLOTS[slot])) if v != facts[slot]]
            value = decoys[slot] if slot in decoys and rng.random() < 0.5 else rng.choice(others)
        said[slot] = rng.choice(FRAGMENTS[slot]).format(rng.choice(SLOTS[slot][value]))
    parts = {s: t for s, t in said.items() if t}
    order = [s for s in rng.choice(ORDERS) if s in parts]
    text = ""
    for i, slot in enumerate(order):  # commas around the feeling and before the question
        comma = i and (slot in ("feeling", "question") or order[i - 1] == "feeling")
        text += ("," if comma else "") + " " + parts[slot]
    if rng.random() < ramble:
        text += (" " if text.endswith("?") else ", ") + rng.choice(RAMBLES)
    return " " + text.strip()


def write_reference(facts, decoys, rng):
    """The simulated human: usually right, rarely complete, now and then rambling."""
    return write_summary(facts, decoys, rng, drop=0.35, wrong=0.05, ramble=0.1)


def sample_row(rng, taken=None):
    """One row of the data; `taken` is a set of fact combinations not to use, and is added to."""
    facts = sample_facts(rng)
    while taken is not None and tuple(facts.values()) in taken:
        facts = sample_facts(rng)
    if taken is not None:
        taken.add(tuple(facts.values()))
    prompt, decoys = sample_post(facts, rng)
    completion = write_reference(facts, decoys, rng)

    def names(d):
        return {s: SLOTS[s][v][0] for s, v in d.items()}

    return {"prompt": prompt, "completion": completion, "facts": names(facts), "decoys": names(decoys)}


def values_of(named):
    """A row's facts or decoys, slot -> value's name, as slot -> index."""
    return {s: [v[0] for v in SLOTS[s]].index(name) for s, name in named.items()}


def complete_row(row, rng):
    """The row with a summary which has all of the facts right."""
    return {**row, "completion": write_summary(values_of(row["facts"]), {}, rng)}


# ------------------------------------------------------------------------------------ judge

FREE_WORDS = 24  # a complete summary has about 18 words
WORD_COST = 0.1  # for each word beyond
VALUE_OF = {s: {form: forms[0] for forms in values for form in forms} for s, values in SLOTS.items()}
PATTERN = {s: re.compile(r"\b(" + "|".join(sorted(v, key=len, reverse=True)) + r")\b") for s, v in VALUE_OF.items()}


def stated(text):
    """The values which a text states: dict slot -> set of values (named by their first form)."""
    text = " ".join(re.sub(r"[^a-z0-9]+", " ", text.lower()).split())
    return {slot: {VALUE_OF[slot][m] for m in PATTERN[slot].findall(text)} for slot in SLOTS}


def check_tables():
    """Every form states exactly its own value, and the words around the facts state none."""
    for slot, values in SLOTS.items():
        for forms in values:
            for form in forms:
                assert stated(form) == {s: {forms[0]} if s == slot else set() for s in SLOTS}, form
    templates = [t for table in (STATE, DECOY, FRAGMENTS) for ts in table.values() for t in ts]
    for text in templates + OTHERS + FILLERS + TITLES + SUBREDDITS + RAMBLES + list(DROPPED.values()):
        assert not any(stated(text).values()), text


def judge_parts(facts, completion):
    """(correct facts, wrong facts, excess words) of one summary; facts is a dict slot -> value."""
    said = stated(completion)
    correct = sum(facts[s] in said[s] for s in SLOTS)
    wrong = sum(len(said[s] - {facts[s]}) for s in SLOTS)
    words = max(len(completion.split()), len(completion) / 8)  # text without spaces is long too
    return correct, wrong, max(0.0, words - FREE_WORDS)


def gold_judge(prompts, completions, completion_ids=None, *, facts, **columns):
    """Correct facts - wrong facts - 0.1 per excess word, for each completion: list of floats.

    A fact counts once however often it is repeated, and each wrong value counts, so that
    naming many values of a slot loses. An empty summary has 0.
    """
    scores = []
    for fact, completion in zip(facts, completions):
        correct, wrong, excess = judge_parts(fact, completion.replace("<|endoftext|>", ""))
        scores.append(float(correct - wrong - WORD_COST * excess))
    return scores


def gold_win_rate(prompts, completions, completion_ids=None, *, facts, completion, **columns):
    """1 where the gold judge prefers a completion to the row's own, the reference `completion`; 0.5 for a tie."""
    ours, theirs = gold_judge(prompts, completions, facts=facts), gold_judge(prompts, completion, facts=facts)
    return [(x > y) + 0.5 * (x == y) for x, y in zip(ours, theirs)]


# ------------------------------------------------------------------------------------ sizes


@dataclass
class Config:
    seed: int = 1
    output_dir: str = str(Path(__file__).resolve().parent)
    quick: bool = False
    """a small build which shows that everything runs; its models are poor"""


@dataclass
class Sizes:
    train: int = 10000  # rows
    validation: int = 500
    test: int = 500
    sft: int = 24000  # examples; how long the policy trains decides its win rate, almost alone
    reader: int = 20000  # examples
    pool: int = 4000  # posts with two SFT samples each, for the reward model
    stages: tuple = (8000, 9000, 3000)  # posts for the reward model, GROUP completions each


QUICK = Sizes(200, 12, 12, 64, 48, 8, (16, 16, 16))
VOCABULARY = 1024  # tokens
BATCH = 16  # examples
GROUP = 6  # completions of one post, all compared with each other
LABEL_NOISE = 0.1  # the share of comparisons which the labellers get wrong


# ------------------------------------------------------------------------------------ tokenizer


def train_bpe(texts, vocabulary, special, digits=False):
    """Byte-level BPE whose first tokens are `special`; with `digits` each digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if digits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": vocabulary, "special_tokens": special, "show_progress": False}
    trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tokenizer(texts):
    """<|endoftext|> (id 0) is eos and [PAD] (id 1) is pad."""
    from transformers import PreTrainedTokenizerFast

    eos, pad = special = ["<|endoftext|>", "[PAD]"]
    names = {"bos_token": eos, "eos_token": eos, "unk_token": eos, "pad_token": pad}
    bpe = train_bpe(texts, VOCABULARY, special)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **names, model_max_length=512)


# ------------------------------------------------------------------------------------ training


def model_config(tokenizer, layers, **extra):
    """A GPT-NeoX of pythia's shape, but tiny. With an initialisation of 0.02 it hardly learns to read."""
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=512, initializer_range=0.06, attention_dropout=0.0,
        hidden_dropout=0.0, tie_word_embeddings=False, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **extra,
    )  # fmt: skip


def pad(sequences, value, left=False):
    """List of lists of numbers -> tensor [B, longest]."""
    import torch

    n = max(map(len, sequences))
    fill = [[value] * (n - len(s)) for s in sequences]
    return torch.tensor([f + list(s) if left else list(s) + f for s, f in zip(sequences, fill)])


def optimise(name, model, total, make_chunk, length_of, loss_fn, lr, rng, batch_size=BATCH):
    """One pass over `total` fresh examples: AdamW, warm-up, cosine down to a twentieth of lr.

    make_chunk(n) returns n examples; sorted by length they make batches with little padding.
    """
    import torch
    from tqdm import tqdm

    steps, batches, mean = total // batch_size, [], None
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)

    def decay(s):
        return min(1.0, (s + 1) / 50) * max(0.05, 0.5 * (1 + math.cos(math.pi * s / steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    model.train()
    bar = tqdm(range(steps), desc=name, mininterval=10)
    for _ in bar:
        if not batches:
            chunk = sorted(make_chunk(batch_size * 20), key=length_of)
            batches = [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
            rng.shuffle(batches)
        loss = loss_fn(batches.pop())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
    return model.eval()


def train_lm(name, tokenizer, model, total, make_rows, lr, rng, batch_size=BATCH):
    """The model, trained to say the completions given the prompts; make_rows(n) returns n rows of texts."""
    import torch

    def make_chunk(n):
        rows = make_rows(n)
        prompts = tokenizer([r["prompt"] for r in rows]).input_ids
        completions = tokenizer([r["completion"] + tokenizer.eos_token for r in rows]).input_ids
        return list(zip(prompts, completions))

    def loss_fn(batch):
        ids = pad([p + c for p, c in batch], tokenizer.pad_token_id)
        labels = pad([[-100] * len(p) + c for p, c in batch], -100)[:, 1:]
        hidden = model.base_model(ids).last_hidden_state[:, :-1]  # causal: padding on the right is not seen
        keep = labels != -100  # logits for the completions only: half of the work is saved
        return torch.nn.functional.cross_entropy(model.get_output_embeddings()(hidden[keep]), labels[keep])

    return optimise(name, model, total, make_chunk, lambda x: len(x[0]) + len(x[1]), loss_fn, lr, rng, batch_size)


def generate(model, tokenizer, prompts, temperature, max_new_tokens=48, batch_size=256):
    """One completion per prompt (greedy at temperature 0): list of (text, whether it ended with eos)."""
    import torch

    out, order = [None] * len(prompts), sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for i in range(0, len(order), batch_size):
        index = order[i : i + batch_size]
        ids = tokenizer([prompts[j] for j in index]).input_ids
        ids = pad(ids, tokenizer.pad_token_id, left=True)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        with torch.no_grad():
            new = model.generate(
                ids, attention_mask=(ids != tokenizer.pad_token_id).long(), max_new_tokens=max_new_tokens, **sampling
            )
        for j, row in zip(index, new[:, ids.shape[1] :].tolist()):
            ended = tokenizer.eos_token_id in row
            row = row[: row.index(tokenizer.eos_token_id)] if ended else row
            out[j] = (tokenizer.decode(row, skip_special_tokens=True), ended)
    return out


# ------------------------------------------------------------------------------------ reward model


def hack(row, rng):
    """A summary such as a policy might try on a reward model, rather than a good one."""
    facts, decoys = values_of(row["facts"]), values_of(row["decoys"])

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
        fragment = rng.choice([",", "", " and"]) + " " + rng.choice([rng.choice(FRAGMENTS[slot]).format(value), value])
        return (rng.choice([good(), ""]) + fragment * rng.randint(2, 10)).lstrip(",")
    if kind == 3:  # many values of one slot, the right one perhaps among them
        slot = rng.choice(list(SLOTS))
        return good() + "".join(
            "," * rng.randrange(2) + " " + rng.choice(v) for v in rng.sample(SLOTS[slot], rng.randint(1, 5))
        )
    if kind == 4:  # copied sentences, whosever they are
        sentences = re.findall(r"[^.?]+[.?]", row["prompt"].split("POST: ")[1].split("\n\n")[0])
        return " " + " ".join(s.strip() for s in rng.sample(sentences, rng.randint(1, 5)))
    if kind == 5:  # what others did
        return write_summary({**facts, **decoys}, {}, rng, drop=rng.choice([0, 0.3]))
    return good() + "".join(" " + r for r in rng.sample(RAMBLES, rng.randint(1, 3)))


def candidates(row, samples, rng, hacks):
    """GROUP completions of one post to compare: its SFT samples, perhaps a hack, simulated writers'."""
    facts, decoys = values_of(row["facts"]), values_of(row["decoys"])
    texts = list(samples) + ([hack(row, rng)] if rng.random() < hacks else [])
    drop = rng.choice([0, 0.1, 0.25, 0.5])
    while len(texts) < GROUP:
        texts.append(write_summary(facts, decoys, rng, drop=drop, wrong=rng.choice([0, 0.2, 0.5, 0.8]), ramble=0.1))
    return texts


def token_labels(facts, text, spans):
    """What each token of a completion teaches; spans: its tokens' (start, end) characters.

    Returns the judge's score of the text up to and with each token, and each token's kind:
    1 in a correct fact, 2 in a wrong one, 0 elsewhere.
    """
    flat, first, kinds, scores = re.sub(r"[^a-z0-9]", " ", text.lower()), {}, [0] * len(spans), []
    for slot in SLOTS:
        for match in PATTERN[slot].finditer(flat):
            value = VALUE_OF[slot][match.group()]
            first.setdefault((slot, value), match.end())  # a fact counts once
            for i, (start, end) in enumerate(spans):
                if start < match.end() and end > match.start():
                    kinds[i] = 1 if value == facts[slot] else 2
    for _, end in spans:
        words = max(len(text[:end].split()), end / 8)
        count = sum((1 if facts[slot] == value else -1) for (slot, value), e in first.items() if e <= end)
        scores.append(count - WORD_COST * max(0.0, words - FREE_WORDS))
    return scores, kinds


def train_reward_model(tokenizer, reader, stages, make_rows, pool, rng):
    """Reader -> reward model; `pool` is a list of (row, SFT samples), `stages` three numbers of posts.

    Comparisons alone teach a small model hardly more than that longer is better. So it learns
    first to check each token against the post, then to count, and only then to compare:

        checking   is this token in a correct fact, in a wrong one, or in none? (a head thrown away)
        reading    the next token, except in wrong facts (the reader's head, thrown away)
        counting   at each token the score is to be the judge's score so far, which also teaches
                   what a completion cut short is worth
        comparing  the logistic loss on which of two completions noisy labellers prefer
    """
    import torch
    from transformers import GPTNeoXForSequenceClassification

    F, pad_id, eos_id = torch.nn.functional, tokenizer.pad_token_id, tokenizer.eos_token_id
    model = GPTNeoXForSequenceClassification(model_config(tokenizer, reader.config.num_hidden_layers, num_labels=1))
    model.gpt_neox.load_state_dict(reader.gpt_neox.state_dict())
    model.read = reader.get_output_embeddings()
    model.check = torch.nn.Linear(model.config.hidden_size, 3)

    def make_chunk(n, hacks, sampled):
        """n posts -> list of (prompt ids, GROUP x (completion ids, scores so far, kinds)).

        hacks, sampled: the shares of posts with a hack, and with SFT samples, in their group.
        """
        chosen = [rng.choice(pool) if rng.random() < sampled else (row, []) for row in make_rows(n)]
        texts = [candidates(row, samples, rng, hacks) for row, samples in chosen]
        prompts = tokenizer([row["prompt"] for row, _ in chosen]).input_ids
        encoded = tokenizer([t for group in texts for t in group], return_offsets_mapping=True)
        encoded = zip(encoded.input_ids, encoded.offset_mapping)
        groups = []
        for (row, _), prompt, group in zip(chosen, prompts, texts):
            labelled = []
            for text in group:
                ids, spans = next(encoded)
                scores, kinds = token_labels(row["facts"], text, spans)
                read = text[: spans[:63][-1][1]] if spans else ""
                scores = scores[:63] + gold_judge(None, [read], facts=[row["facts"]])
                ids, kinds = ids[:63] + [eos_id], kinds[:63] + [0]
                if rng.random() < 0.1 and len(ids) > 2:  # cut short, without eos
                    cut = rng.randint(1, len(ids) - 1)
                    ids, scores, kinds = ids[:cut], scores[:cut], kinds[:cut]
                labelled.append((ids, scores, kinds))
            groups.append((prompt, labelled))
        return groups

    def length(example):
        return len(example[0]) + GROUP * max(len(ids) for ids, _, _ in example[1])

    def loss_fn(batch, weights):
        prompt = pad([p for p, _ in batch], pad_id, left=True)
        ids, target, kinds = (pad([c[i] for _, g in batch for c in g], v) for i, v in enumerate((pad_id, 0.0, 0)))
        prompt_mask, mask = (prompt != pad_id).long(), (ids != pad_id).long()
        # A post is read once: its keys and values serve all of its completions [B * GROUP, C].
        cache = model.gpt_neox(prompt, attention_mask=prompt_mask, use_cache=True).past_key_values
        cache.batch_repeat_interleave(GROUP)
        seen = torch.cat([prompt_mask.repeat_interleave(GROUP, 0), mask], 1)
        hidden = model.gpt_neox(ids, attention_mask=seen, past_key_values=cache, use_cache=True).last_hidden_state
        scores, real = model.score(hidden).squeeze(-1), mask > 0

        # Bradley-Terry over the pairs of each group which are not tied; some labels are flipped.
        def at_end(x):
            return x.gather(1, mask.sum(1, keepdim=True) - 1).view(-1, GROUP)

        margin, gap = (at_end(x)[:, :, None] - at_end(x)[:, None, :] for x in (scores, target))
        flip = torch.where(torch.rand_like(margin) < LABEL_NOISE, -1.0, 1.0)
        loss = weights["comparing"] * F.softplus(-margin * flip)[gap > 1e-6].mean()
        if weights["counting"]:
            loss = loss + weights["counting"] * F.smooth_l1_loss(scores[real], target[real])
        if weights["checking"]:
            loss = loss + weights["checking"] * F.cross_entropy(model.check(hidden[real]), kinds[real])
            right = real[:, 1:] & (kinds[:, 1:] != 2)
            loss = loss + 0.5 * F.cross_entropy(model.read(hidden[:, :-1][right]), ids[:, 1:][right])
        return loss

    for name, total, batch_size, lr, hacks, sampled, *weights in [  # simulated writers err more than the policy
        ("reward model, checking", stages[0], 8, 1e-3, 0.2, 0.0, 2.0, 0.2, 0.1),
        ("reward model, counting", stages[1], 16, 8e-4, 0.5, 0.5, 2.0, 1.0, 0.5),
        ("reward model, comparing", stages[2], 16, 3e-4, 0.5, 0.5, 0.0, 0.0, 1.0),
    ]:
        weights = dict(zip(("checking", "counting", "comparing"), weights))
        chunk = partial(make_chunk, hacks=hacks, sampled=sampled)
        loss = partial(loss_fn, weights=weights)
        optimise(name, model, total, chunk, length, loss, lr, rng, batch_size)
    del model.read, model.check
    return model


def reward(model, tokenizer, prompts, completions):
    """Scores of prompt + completion + eos: list of floats."""
    from text_reward import scores_of

    ends = tokenizer([c + tokenizer.eos_token for c in completions]).input_ids
    return scores_of(model, [p + c for p, c in zip(tokenizer(prompts).input_ids, ends)], size=128)


# ------------------------------------------------------------------------------------ evaluation


def win_rate(rows, completions):
    """Share of the rows on which the judge prefers the completion to the reference; ties count half."""
    facts = [r["facts"] for r in rows]
    ours = gold_judge(None, completions, facts=facts)
    theirs = gold_judge(None, [r["completion"] for r in rows], facts=facts)
    return sum((a > b) + 0.5 * (a == b) for a, b in zip(ours, theirs)) / len(rows)


def mean(xs):
    return sum(xs) / max(1, len(xs))


def evaluate(policy, reward_model, tokenizer, rows):
    """Figures on held-out rows: dict name -> number."""
    prompts, facts, figures = [r["prompt"] for r in rows], [r["facts"] for r in rows], {}
    for name, temperature in [("greedy", 0.0), ("sampled", 0.7)]:
        texts = [t for t, _ in generate(policy, tokenizer, prompts, temperature)]
        figures[f"sft {name} win rate"] = win_rate(rows, texts)
        figures[f"sft {name} gold score"] = mean(gold_judge(None, texts, facts=facts))
    figures["reference gold score"] = mean(gold_judge(None, [r["completion"] for r in rows], facts=facts))

    rows, prompts, facts = rows[:300], prompts[:300], facts[:300]
    n = 16  # samples of each prompt; pairs are the first with the second, the third with the fourth, ...
    texts = [t for t, _ in generate(policy, tokenizer, [p for p in prompts for _ in range(n)], 0.7)]
    gold = gold_judge(None, texts, facts=[f for f in facts for _ in range(n)])
    score = reward(reward_model, tokenizer, [p for p in prompts for _ in range(n)], texts)
    words = [len(t.split()) for t in texts]
    pairs = [(i, i + 1) for i in range(0, len(texts), 2) if gold[i] != gold[i + 1]]

    def sign(x):
        return (x > 0) - (x < 0)

    def agree(value):
        return mean([0.5 + 0.5 * sign(value[i] - value[j]) * sign(gold[i] - gold[j]) for i, j in pairs])

    figures["reward model agreement"] = agree(score)
    # Length-only rules: the summary nearer to so many words wins; 0 is "the shorter", 999 "the longer".
    rules = {n_words: agree([-abs(w - n_words) for w in words]) for n_words in (0, *range(8, 40), 999)}
    best = max(rules, key=rules.get)
    figures["best length-only rule agreement"], figures["its words"] = rules[best], best
    figures["held-out pairs"] = len(pairs)
    return figures


# ------------------------------------------------------------------------------------ main


def save_tokenizer(tokenizer, folder: Path):
    """Writes a tokenizer with names that transformers 4 knows as well."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    extra = config.pop("extra_special_tokens", None)
    if extra:
        config["additional_special_tokens"] = extra
    file.write_text(json.dumps(config, indent=2) + "\n")


def save_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def move_into(build: Path, output: Path):
    """Moves all that `build` holds into `output`; nothing else there is touched."""
    output.mkdir(parents=True, exist_ok=True)
    for new in build.iterdir():
        old = output / new.name
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        new.rename(old)
    build.rmdir()


def main(config: Config):
    import torch
    from transformers import GPTNeoXForCausalLM

    sizes, start = (QUICK if config.quick else Sizes()), time.time()

    def log(message):
        return print(f"[{(time.time() - start) / 60:5.1f} min] {message}", flush=True)

    check_tables()
    rng, taken = random.Random(config.seed), set()
    torch.manual_seed(config.seed)
    torch.set_num_threads(1)  # so small a model gains nothing from a second thread
    build = Path(config.output_dir + ".build")
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)

    def save(model, name):
        model.save_pretrained(build / name)
        save_tokenizer(tokenizer, build / name)

    # No combination of facts is in two splits, nor in what the models are trained on beyond the splits.
    splits = {s: [sample_row(rng, taken) for _ in range(getattr(sizes, s))] for s in ("test", "validation", "train")}

    def fresh(n):
        return [sample_row(rng, taken) for _ in range(n)]

    for split, rows in splits.items():
        save_jsonl(build / f"{split}.jsonl", rows)
    tokenizer = train_tokenizer([r["prompt"] + r["completion"] for r in splits["train"]])
    log(f"{len(tokenizer)} tokens; posts, references and tokenizer made; first row:")
    print(splits["train"][0]["prompt"] + splits["train"][0]["completion"], flush=True)

    epochs = (row for _ in iter(int, 1) for row in rng.sample(splits["train"], len(splits["train"])))

    def references(n):
        return [next(epochs) for _ in range(n)]

    policy = GPTNeoXForCausalLM(model_config(tokenizer, layers=3))
    policy = train_lm("policy", tokenizer, policy, sizes.sft, references, 2e-3, rng)
    save(policy, "sft")
    some = splits["validation"][:200]
    texts = [[t for t, _ in generate(policy, tokenizer, [r["prompt"] for r in some], t)] for t in (0.7, 0.0)]
    log("policy fine-tuned; win rate sampled {:.2f}, greedy {:.2f}".format(*(win_rate(some, t) for t in texts)))

    # The reward model begins as a language model of complete and correct summaries: it can read.
    def complete(n):
        return [complete_row(row, rng) for row in fresh(n)]

    reader = GPTNeoXForCausalLM(model_config(tokenizer, layers=4))
    reader = train_lm("reader", tokenizer, reader, sizes.reader, complete, 2e-3, rng)
    log("reader trained on complete summaries")
    rows = fresh(sizes.pool)
    drawn = [generate(policy, tokenizer, [row["prompt"] for row in rows], t) for t in (0.7, 1.0)]
    pool = [(row, [a, b]) for row, (a, _), (b, _) in zip(rows, *drawn)]
    log("policy sampled")
    reward_model = train_reward_model(tokenizer, reader, sizes.stages, fresh, pool, rng)
    log("reward model trained")
    save(reward_model, "reward")

    figures = evaluate(policy, reward_model, tokenizer, splits["test"])
    for name, value in figures.items():
        print(f"{name:36} {value:8.3f}")
    (build / "figures.json").write_text(json.dumps({"seed": config.seed, **figures}, indent=2) + "\n")
    move_into(build, Path(config.output_dir))
    log(f"saved in {config.output_dir}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
