"""What training on longer completions costs: forward + backward in group and in plain rows, over R.

    python benchmark/length.py                                                # about six minutes on 2 cores
    python benchmark/length.py --shapes tiny tiny-llama --response_lengths 8 16 --output /tmp/length.json

One prompt of 256 tokens with 8 completions, and one of 64 tokens with 2, where there is least to share, for models of a
published shape with random weights; all completions have R tokens. Group and plain rows take turns after a warm-up of
each, as in throughput.py; times are medians, "group faster" is the median of the ratios turn by turn. Peak memory is
of the tensors that the warm-up holds beyond weights and batch: gradients, activations, logits.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import torch
import tyro
from throughput import (
    Dtype,
    Machine,
    Shape,
    Workload,
    fail,
    in_a_process,
    random_batch,
    save,
    seconds,
    set_up,
    shape_config,
    speedups,
    timed,
    train,
)
from transformers import AutoModelForCausalLM

LAYOUTS = ("group", "plain")
GROUPS = ((256, 8), (64, 2))  # tokens of the prompt, completions


@dataclass
class Args(Machine):
    """Seconds and peak memory of forward + backward over the completions' length, in group and in plain rows."""

    shapes: tuple[Shape, ...] = ("pythia-70m", "llama-70m")
    """of throughput.py"""
    vocab_size: int = 8192
    """tokens of the vocabulary; 0: the shape's own"""
    response_lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    """R: tokens per completion"""
    dtype: Dtype = "float32"
    """what the forwards compute in"""
    seed: int = 1
    """of weights and tokens"""
    repetitions: int = 3
    """turns"""
    output: str = "benchmark/speed/length.json"
    """all raw numbers; a figure goes beside it, as .png"""


def measure(args: Args, workload: Workload) -> dict[int, dict]:
    """R -> layout -> its turns, of one shape and group; runs in a process of its own."""
    set_up(args)
    policy = AutoModelForCausalLM.from_config(shape_config(workload), attn_implementation="sdpa").to(args.device).eval()
    found = {}
    for R in (min(args.response_lengths), *args.response_lengths):  # once more at first: libraries set themselves up
        batch = random_batch(dataclasses.replace(workload, response_length=R), args.device)
        lanes = {layout: partial(train, policy, batch, args.dtype, workload.rloo_k, layout) for layout in LAYOUTS}
        found[R] = timed(lanes, args.repetitions, args.device)
    return found


def peak(turns: list[dict]) -> float:
    return turns[0]["peak_gb"]


def report(result: dict) -> str:
    """The table: for each part seconds and peak memory of group and plain rows by R."""
    lines = [result["title"]]
    for part, found in result["found"].items():
        lines.append(
            f"\n{part}\n{'R':>8}{'group, s':>12}{'plain, s':>12}{'group faster':>15}{'group, GiB':>13}"
            f"{'plain, GiB':>13}{'of plain':>11}"
        )
        for R, lanes in found.items():
            times, (group, plain) = ([f(lanes[layout]) for layout in LAYOUTS] for f in (seconds, peak))
            lines.append(
                f"{R:8}{times[0]:12.3f}{times[1]:12.3f}{result['speedups'][part][R]['plain']:14.2f}x"
                f"{group:13.3f}{plain:13.3f}{group / max(plain, 1e-9):11.2f}"
            )
    return "\n".join(lines)


def draw(result: dict, pyplot):
    """For each part, over R: seconds above, peak memory below."""
    parts = result["found"]
    figure, axes = pyplot.subplots(
        2, len(parts), figsize=(4 * len(parts), 7), sharex=True, squeeze=False, layout="constrained"
    )
    for (part, found), column in zip(parts.items(), axes.T):
        lengths = list(found)
        for layout, color in zip(LAYOUTS, ("C0", "C1")):
            for panel, number in zip(column, (seconds, peak)):
                values = [number(found[R][layout]) for R in lengths]
                panel.plot(lengths, values, "o-", color=color, label=f"{layout} rows")
        for R in lengths:
            column[0].annotate(
                f"{result['speedups'][part][R]['plain']:.2f}×",
                (R, seconds(found[R]["group"])),
                textcoords="offset points",
                xytext=(0, -15),
                ha="center",
                fontsize=8,
                color="C0",
            )
        column[0].set_title(part, fontsize=9)
        column[1].set_xlabel("R: tokens per completion")
        for panel in column:
            panel.set_xscale("log", base=2)
            panel.set_xticks(lengths, lengths)
            panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
            panel.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("seconds (×: group rows faster)")
    axes[1, 0].set_ylabel("peak memory, GiB, beyond weights")
    axes[0, 0].legend(frameon=False)
    figure.suptitle(result["title"], fontsize=9)


def main(args: Args):
    args.settle()
    if not args.output.endswith(".json"):
        fail(f"--output {args.output}: must end in .json")
    found = {}
    for shape in args.shapes:
        for prompt, k in GROUPS:
            part = f"{shape}: prompt of {prompt} tokens, {k} completions"
            print(part, flush=True)
            found[part] = in_a_process(
                measure,
                args,
                Workload(
                    shape=shape, vocab_size=args.vocab_size, prompts=1, min_prompt=prompt, max_prompt=prompt, rloo_k=k
                ),
            )
    vocabulary = f"vocabulary of {args.vocab_size:,}, " if args.vocab_size else ""
    result = {
        "title": f"forward + backward of one group, {vocabulary}{args.dtype}\n{args.describe_machine()}",
        "args": dataclasses.asdict(args),
        "found": found,
        "speedups": {part: speedups(lengths) for part, lengths in found.items()},
    }
    print(f"\n{report(result)}\n\n{save(result, args.output, draw)}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, use_underscores=True))
    except torch.OutOfMemoryError:
        fail("out of memory: name shorter --response_lengths")
