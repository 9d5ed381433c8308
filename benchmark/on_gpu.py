"""A quarter of an hour on a GPU, the most valuable first. Each part has a limit and a file of its own in runs/gpu.

    python benchmark/on_gpu.py --trl1 trl1/bin/python

check: both layouts, all types of models and extensions. mini: one seed of `python rloo.py`. speed: an update of
pythia-1b's shape beside TRL. steps: what a sampled token takes at 64 and at 256 completions of a 1.5B shape. It has not
been run on a GPU.
"""

import os
import signal
import subprocess
import sys
import time

import runs
import torch
import transformers
import tyro
from speed import LLAMA, QWEN

import rloo

PARTS = {  # seconds, command
    "check": [180, "benchmark/check.py", "--device", "cuda"],
    "mini": [360, "benchmark/study.py", "mini", "--rows", "default", "--seeds", "1", "--again"],
    "speed": [240, "benchmark/speed.py", "--shape", "pythia-1b", "--device", "cuda", "--trl", "{trl1}", "--again"],
    "steps": [100, "-c", "import sys; sys.path.insert(0, 'benchmark'); import on_gpu; on_gpu.steps()"],
}


def steps(sizes: dict = QWEN, vocabulary: int = 151_936, T: int = 512, device: str = "cuda"):
    """Prints milliseconds per sampled token, and the share of the time that recording of CUDA graphs takes."""
    graph, spent = torch.cuda.graph, [0.0]

    class Graph(graph):
        def __enter__(self):
            self.begin = time.perf_counter()
            return super().__enter__()

        def __exit__(self, *error):
            super().__exit__(*error)
            spent[0] += time.perf_counter() - self.begin

    torch.cuda.graph = Graph
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(LLAMA(vocab_size=vocabulary, **sizes), dtype=dtype).eval()
    model.layout = "group"
    with torch.no_grad():
        for rows in (64, 64, 256):  # the first initializes libraries
            prompts = torch.randint(32, (rows // 8, 224), device=device)
            begin, spent[0] = time.perf_counter(), 0.0
            rloo.decode(model, prompts, torch.ones_like(prompts, dtype=torch.bool), 8, T, 1.0, [-1])[0].sum().item()
            seconds = time.perf_counter() - begin
            per_token = 1000 * seconds / T
            print(f"{rows} completions: {per_token:.2f} ms a token, {spent[0] / seconds:.0%} recording", flush=True)


def main(trl1: str = "trl1/bin/python"):
    folder = runs.RUNS / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    for part, (seconds, *words) in PARTS.items():
        command = [sys.executable, *(word.format(trl1=trl1) for word in words)]
        with (folder / f"{part}.txt").open("w") as file:
            process = subprocess.Popen(command, cwd=runs.ROOT, stdout=file, stderr=file, start_new_session=True)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # rloo.py saves
                process.wait()
        print(f"{part}: status {process.returncode}, {folder / f'{part}.txt'}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
