"""Tests of tldr.sh and complete.py."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import complete
import judge
import pytest
import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloo

HERE = Path(__file__).resolve().parent
MINI = HERE.parent / "mini_tldr"
STEPS = ["training", "sft-greedy", "sft-sampled", "rloo-greedy", "rloo-sampled", "gold", "reward"]


def shell(*flags, **environment) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable} | environment
    command = ["bash", "tldr.sh", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=environment)


PRESETS = {
    "410m": (4, 1, 1, 131_072, 0.05, 3e-6, "bfloat16"),
    "1b": (2, 2, 2, 1_000_000, 0.03, 3e-6, "bfloat16"),
    "1b-k4": (4, 1, 1, 1_000_000, 0.03, 3e-6, "bfloat16"),
    "mini": (4, 1, 1, 6_400, 0.02, 2.5e-4, "float32"),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_command_parses(tmp_path, preset):
    """Those that --dry_run prints, each by the program that it starts."""
    result = shell(preset, "--dry_run", "--seed", 3, "--output_dir", tmp_path / "out", "--", "--save_steps", 7)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "out").exists()
    training, *others = [shlex.split(line)[1:] for line in result.stdout.splitlines()]
    args = rloo.parse_args(training[1:])
    assert Path(training[0]).name == "rloo.py" and (args.save_steps, args.seed, args.resume) == (7, 3, True)
    found = (args.rloo_k, args.num_ppo_epochs, args.num_mini_batches, args.total_episodes, args.kl_coef)
    assert (*found, args.learning_rate, args.dtype) == PRESETS[preset]
    update = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches
    assert update == (32 if preset == "mini" else 512) and args.per_device_train_batch_size % args.rloo_k == 0
    assert (args.missing_eos_penalty, args.stop_token) == ((None, None) if preset == "mini" else (1.0, "eos"))
    names = [Path(script).name for script, *_ in others]
    assert names == ["complete.py"] * 4 + ["judge.py"] * 2
    outputs = []
    for script, *flags in others:
        kind = complete.Args if script.endswith("complete.py") else judge.Args
        outputs.append(Path(tyro.cli(kind, args=flags, use_underscores=True).output).stem)
    assert outputs == STEPS[1:]


FAKE = """#!{python}
import os, pathlib, sys
flags = dict(zip(sys.argv[2::1], sys.argv[3::1]))
output = pathlib.Path(flags["--output_dir"] if "--output_dir" in flags else flags["--output"])
with open({log!r}, "a") as log:
    print(output.stem, file=log)
if output.stem == os.environ["DIES_IN"]:
    os.kill(os.getpid(), 9)
if "--output_dir" in flags:
    output.mkdir(parents=True, exist_ok=True)
    output = output / "model.safetensors"
output.write_text("whole")
"""


def test_killed_at_any_step_it_goes_on(tmp_path):
    """With programs that only note their step: each dies once by SIGKILL; what is done is not done again."""
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(FAKE.format(python=sys.executable, log=str(log)))
    python.chmod(0o755)
    for step in [*STEPS, "", ""]:
        result = shell("mini", "--output_dir", tmp_path / "out", PYTHON=str(python), DIES_IN=step)
        assert result.returncode == (128 + 9 if step else 0), result.stderr
    assert log.read_text().split() == [step for step in STEPS for _ in range(2)]


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "name a preset"),
        (["mini", "--sed", "1"], "--sed: there is no such option"),
        (["mini", "--seed"], "--seed: needs a value"),
        (["mini", "--posts", "0"], "--seed and --posts must be numbers"),
        (["1b", "--output_dir", "/dev/null/x"], "the judge openai:gpt-4o-mini needs OPENAI_API_KEY"),
    ],
)
def test_mistakes_of_tldr_sh(flags, message):
    result = shell(*flags, OPENAI_API_KEY="", OPENAI_BASE_URL="")
    assert result.returncode == 1 and message in result.stderr and len(result.stderr.splitlines()) == 1


# ---- complete.py -----------------------------------------------------------------------------------------------------


def run_complete(path: Path, **flags) -> list[dict]:
    flags = {"sft_model_path": str(MINI / "sft"), "posts": 3, "device": "cpu", "response_length": 12} | flags
    complete.main(complete.Args(output=str(path), **flags))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_runs_folder_tells_its_data_lengths_and_stop_token(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "test"):
        rows = [{"prompt": f"I lost {i} keys. TL;DR:", "completion": f"  {split} ", "n": i} for i in range(4)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    flags = {"dataset_name": data, "output_dir": out, "stop_token": ".", "response_length": 7, "device": "cpu"}
    flags |= {"sft_model_path": MINI / "sft", "reward_model_path": MINI / "reward", "total_episodes": 4}
    flags |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "save_steps": 1}
    rloo.main(rloo.parse_args([str(part) for name, value in flags.items() for part in (f"--{name}", value)]))
    for checkpoint in (out, out / "checkpoint-1"):
        options = {"sft_model_path": str(checkpoint), "response_length": None, "posts": None}
        lines = run_complete(tmp_path / f"{checkpoint.name}.jsonl", **options)
        assert [line["columns"] for line in lines] == [{"n": i} for i in range(4)]
        assert {line["reference"] for line in lines} == {" test"}
        assert all(line["ended"] == line["completion"].endswith(".") for line in lines)


def test_greedy_completions_are_those_of_generate(tmp_path):
    rows = run_complete(tmp_path / "greedy.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(MINI / "sft")
    model = AutoModelForCausalLM.from_pretrained(MINI / "sft").eval()
    data = [json.loads(line) for line in (MINI / "test.jsonl").read_text().splitlines()]
    assert [row["post"] for row in rows] == [0, 1, 2]
    for row, source in zip(rows, data):
        ids = tokenizer(source["prompt"], return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        out = out[0, ids.shape[1] :]
        assert row["completion"] == tokenizer.decode(out, skip_special_tokens=True)
        assert row["ended"] == (out[-1].item() == tokenizer.eos_token_id)
        assert (row["prompt"], row["reference"]) == (source["prompt"], source["completion"])
        assert row["columns"] == {name: source[name] for name in ("facts", "decoys")} and row["sample"] == 0


def test_samples_follow_the_seed(tmp_path):
    runs = [run_complete(tmp_path / f"{i}.jsonl", n=2, temperature=1.0, seed=seed) for i, seed in enumerate((1, 1, 2))]
    texts = [[row["completion"] for row in rows] for rows in runs]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]
    assert [(row["post"], row["sample"]) for row in runs[0]] == [(post, i) for post in range(3) for i in range(2)]


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"n": 2}, "greedy completions are all equal"),
        ({"output": "x.txt"}, "must end in .jsonl"),
        ({"dataset_test_split": "dev"}, "has no such split"),
    ],
)
def test_mistakes_of_complete(tmp_path, flags, message):
    with pytest.raises(SystemExit, match=message):
        complete.main(
            complete.Args(**({"sft_model_path": str(MINI / "sft"), "output": str(tmp_path / "x.jsonl")} | flags))
        )
