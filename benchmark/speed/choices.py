"""Two choices of rloo.py, and what they save on one thread of a CPU.

    python benchmark/speed/choices.py                         # both; writes choices.json and a table of README.md
    python benchmark/speed/choices.py --part lanes --again    # one; compares with the record instead

shapes   a row per prompt (group rows) against a row per completion (plain rows), forward and backward or forward alone
lanes    lanes that have ended leave the decoder, the cache of the others doubles; against all staying in a full cache

Times are CPU seconds of the process on one thread, so other programs on the machine matter little. What is compared
takes turns, and a ratio is that of two times within a round. Models have random weights.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
import common  # noqa: E402
import throughput  # noqa: E402

import rloo  # noqa: E402

RECORDS = HERE / "choices.json"
ROUNDS = 2
LLAMA = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 2, "num_attention_heads": 8}
LLAMA |= {"vocab_size": 1000, "max_position_embeddings": 4096}
SHAPES = [(448, 53, 4), (200, 24, 4), (128, 128, 4), (256, 256, 8), (64, 256, 8), (16, 256, 4)]  # P, T, k
SHAPES += [(64, 512, 8), (64, 1024, 4), (256, 1024, 8)]
LANES = {"prompts": (128, 100, 80, 60), "k": 8, "lengths": (512, 1024), "stops": 10}  # 10 of 1,000 tokens stop


def small_llama():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    model.set_attn_implementation(rloo.GROUP_KERNEL)
    model.layout = "group"
    return model


def cpu_seconds(function) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def measure_shapes() -> dict:
    """Shape -> pass -> for each layout the seconds of each round. A batch has two prompts, of P and of 3/4 P tokens;
    half of the completions end after 3/4 of T."""
    model, found = small_llama(), {}

    def forward_and_backward(batch):
        rloo.completion_hidden(model, batch).sum().backward()
        model.zero_grad()

    @torch.no_grad()
    def forward(batch):
        rloo.completion_hidden(model, batch)

    for P, T, k in SHAPES:
        examples = [{"prompt_ids": torch.randint(1, 999, (n,)).tolist()} for n in (P, 3 * P // 4)]
        responses = torch.randint(1, 999, (k, 2, T))
        responses[1::2, :, 3 * T // 4] = 0
        batch = rloo.make_batch(examples, responses, [0])
        times = {f.__name__: {"plain": [], "group": []} for f in (forward_and_backward, forward)}
        for _ in range(ROUNDS):
            for function in (forward_and_backward, forward):
                for layout in ("plain", "group"):
                    model.layout = layout
                    times[function.__name__][layout].append(cpu_seconds(lambda f=function, b=batch: f(b)))
        found[f"{P} {T} {k}"] = times
        print(P, T, k, times, flush=True)
    return {"shapes": found}


def measure_lanes() -> dict:
    """T -> for each way the seconds of each round. Each token stops with about 1%."""
    model, found = small_llama(), {}
    ids, mask = rloo.pad([torch.randint(20, 999, (n,)).tolist() for n in LANES["prompts"]], left=True)

    @torch.no_grad()
    def decode(T):
        torch.manual_seed(1)
        rloo.decode(model, ids, mask, LANES["k"], T, 1.0, [*range(LANES["stops"])])

    for T in LANES["lengths"]:
        times = {"leave": [], "stay": []}
        for _ in range(ROUNDS):
            times["leave"].append(cpu_seconds(lambda T=T: decode(T)))
            with mock.patch.object(rloo, "FIRST_SLOTS", T):  # a full cache from the start, which nobody leaves
                times["stay"].append(cpu_seconds(lambda T=T: decode(T)))
        found[str(T)] = times
        print(T, times, flush=True)
    return {"lanes": found}


MEASURES = {"shapes": measure_shapes, "lanes": measure_lanes}


# ---- Tables ----------------------------------------------------------------------------------------------------------


def ratios(times: dict[str, list[float]], over: str, under: str) -> str:
    """Median and range, over the rounds, of one time over the other."""
    found = [a / b for a, b in zip(times[over], times[under], strict=True)]
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def table_of_shapes(found: dict) -> str:
    rows = [["P, T, k", "tokens computed, plain / group", "time, plain / group (range)"]]
    for shape, times in found["shapes"].items():
        P, T, k = map(int, shape.split())
        tokens = f"{k * (P + T) / (P + k * T):.2f}"
        rows.append([f"{P}, {T}, {k}", tokens, ratios(times["forward_and_backward"], "plain", "group")])
    return common.markdown(rows)


def sentence_of_lanes(found: dict) -> str:
    found = found["lanes"]
    times = [f"{ratios(x, 'stay', 'leave')} times as long at T = {int(T):,}" for T, x in found.items()]
    return f"Without it, decoding takes {' and '.join(times)}."


def tables(records) -> dict[str, str]:
    """That of README.md."""
    found = records.all["shapes"]
    return {"shapes": f"{table_of_shapes(found)}\n\n{throughput.made_by(found['made'])}."}


def report():
    """Writes the tables of README.md."""
    common.insert(HERE / "README.md", tables(common.Records(RECORDS)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=MEASURES, help="measure this part alone")
    parser.add_argument("--again", action="store_true", help="compare with the records instead of replacing them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = common.Records(RECORDS, args.again)
    for part in [args.part] if args.part else MEASURES:
        records.add(part, **MEASURES[part]())
    print(sentence_of_lanes(records.all["lanes"]))
    if not args.again:
        report()


if __name__ == "__main__":
    main()
