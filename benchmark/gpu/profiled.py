"""Where does the time of an update go? rloo.py with torch.profiler around each part of its third update.

    python benchmark/gpu/profiled.py FLAGS OF rloo.py       # in place of `python rloo.py`

Prints the seconds of each kind of work in each part, and what took longest. On a GPU they are those of kernels, by
name: a gap is time in which none ran, and capture the time in which CUDA graphs were recorded. On a CPU a gap is
Python. In a step of the decoder attention is matrix products and a softmax, and only the latter counts as attention.

Replaces `timed` and `cuda_graph`.
"""

import re
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
import common  # noqa: E402

import rloo  # noqa: E402

UPDATE = 3
ELEMENTWISE = "elementwise, sums"
KINDS = {  # of kernels and operations: the first pattern that is in the name, else ELEMENTWISE
    "optimizer": r"adam|l2norm|foreach_norm|lpnorm",
    ELEMENTWISE: r"log_?softmax",
    "attention": r"flash|fmha|attention|attn|softmax",
    "matrix products": r"gemm|gemv|cutlass|cublas|xmma|nvjet|wgmma|splitk|::(mm|addmm|bmm|baddbmm|linear)$",
    "copies": r"copy|memcpy|memset|catarray|::(cat|clone|contiguous|_to_copy|repeat)$|index|gather|scatter",
}
timed, cuda_graph = rloo.timed, rloo.cuda_graph
times_of_part = Counter()  # part -> how often it ran
found = {}  # part -> kind -> seconds
longest = Counter()  # "part: name" -> seconds
captures = Counter()  # "capture" -> seconds, in the part that runs


def kind_of(name: str) -> str:
    matches = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(matches, ELEMENTWISE)


def kernels(profiled, on_gpu: bool) -> Counter:
    """Name of a kernel, on a CPU of an operation -> seconds in itself."""
    seconds = Counter()
    for row in profiled.key_averages():
        if not on_gpu:
            seconds[row.key] += row.self_cpu_time_total / 1e6
        elif row.device_type == torch.autograd.DeviceType.CUDA and not row.key.startswith(
            ("Optimizer.", "ProfilerStep")
        ):
            seconds[row.key] += row.self_device_time_total / 1e6
    return seconds


@contextmanager
def profiled_part(times, name, device):
    times_of_part[name] += 1
    if times_of_part[name] != UPDATE:
        with timed(times, name, device):
            yield
        return
    captures.clear()
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled, timed(times, name, device):
        yield
    kinds = Counter(captures)
    for kernel, seconds in kernels(profiled, on_gpu).items():
        kinds[kind_of(kernel)] += seconds
        longest[f"{name}: {kernel[:90]}"] += seconds
    wall = times[f"time/{name}"]
    found[name] = dict(kinds) | {"gaps": wall - sum(kinds.values()), "together": wall}


def timed_graph(step):
    torch.cuda.synchronize()
    start = time.perf_counter()
    replay = cuda_graph(step)
    captures["capture"] += time.perf_counter() - start
    return replay


def table() -> str:
    rows = [["seconds", *found]]
    for kind in [*KINDS, "capture", "gaps", "together"]:
        rows.append([kind, *(f"{seconds.get(kind, 0.0):.3f}" for seconds in found.values())])
    lines = [f"{seconds:8.3f}  {name}" for name, seconds in longest.most_common(15)]
    return "\n".join([common.markdown(rows), "", "longest:", *lines])


if __name__ == "__main__":
    rloo.timed, rloo.cuda_graph = profiled_part, timed_graph
    rloo.command_line()
    print(table())
