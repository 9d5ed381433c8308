"""Tests of tldr.sh and its steps: complete.py, and prepare, best_of, estimate and table of tldr_steps.py.

python -m pytest -q benchmark/tldr/tldr_test.py
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py

import complete
import judge
import tldr_steps

import rloo

HERE = Path(__file__).resolve().parent
MINI = HERE.parent / "mini_tldr"
STEPS = [
    "prepare",
    "train",
    "sft-greedy",
    "sft-samples",
    "rloo-greedy",
    "rloo-sampled",
    "best_of",
    "gold",
    "reward",
    "table",
]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# ---- tldr.sh ---------------------------------------------------------------------------------------------------------


def shell(*flags, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "tldr.sh", *map(str, flags)],
        capture_output=True,
        text=True,
        cwd=HERE,
        env=os.environ | {"PYTHON": sys.executable} | environment,
    )


@pytest.mark.parametrize("preset", ["mini", "410m", "1b", "1b-k4"])
def test_every_command_parses(tmp_path, preset):
    """Those that --dry_run prints, each by the program that it starts."""
    result = shell(preset, "--dry_run", "--seed", 3, "--output_dir", tmp_path / "out", "--", "--save_steps", 7)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "out").exists()
    commands = [shlex.split(line) for line in result.stdout.splitlines() if line.startswith(sys.executable)]
    names = []
    for _, script, *flags in commands:
        names.append(Path(script).name)
        assert (HERE / script).is_file()
        if names[-1] == "rloo.py":
            args = rloo.parse_args(flags)
            assert args.save_steps == 7 and args.seed == 3 and args.resume
        elif names[-1] == "complete.py":
            assert judge.parse(complete.Args, flags).seed == 3
        elif names[-1] == "judge.py":
            assert judge.parse(judge.Args, flags).completions[0].endswith("sft-greedy.jsonl")
        else:
            judge.parse(tldr_steps.Prepare | tldr_steps.BestOf | tldr_steps.Estimate | tldr_steps.Table, flags)
    assert names == [
        "tldr_steps.py",
        "rloo.py",
        *["complete.py"] * 4,
        "tldr_steps.py",
        "judge.py",
        "judge.py",
        "tldr_steps.py",
    ]
    if preset == "mini":
        assert args.learning_rate == 5e-4 and args.total_episodes == 6400 and args.dtype == "float32"
        return
    assert args.dtype == "bfloat16" and args.learning_rate == 3e-6 and args.missing_eos_penalty == 1.0
    assert args.stop_token == "eos" and "pip install datasets" in result.stdout and "ESTIMATE" in result.stdout
    found = (args.rloo_k, args.num_ppo_epochs, args.num_mini_batches, args.total_episodes, args.kl_coef)
    assert (
        found
        == {"410m": (4, 1, 1, 131_072, 0.05), "1b": (2, 2, 2, 1_000_000, 0.03), "1b-k4": (4, 1, 1, 1_000_000, 0.03)}[
            preset
        ]
    )
    update = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches
    assert update == 512 and args.per_device_train_batch_size % args.rloo_k == 0
    gold_6b = "model:cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
    gold = judge.parse(judge.Args, commands[7][2:]).judge
    assert gold == (gold_6b if preset == "410m" else "openai:gpt-4o-mini")


FAKE = """#!{python}
import os, pathlib, sys
flags = dict(zip(sys.argv[2::1], sys.argv[3::1]))
name = pathlib.Path(sys.argv[1]).stem
output = pathlib.Path(flags["--output_dir" if name == "rloo" else "--output"])
step = {{"data": "prepare", "training": "train", "best-of-4": "best_of"}}.get(output.stem, output.stem)
with open({log!r}, "a") as log:
    print(step, file=log)
if step == os.environ["DIES_IN"]:
    output.with_name(output.name + ".unfinished").write_text("half")
    os.kill(os.getpid(), 9)
output.parent.mkdir(exist_ok=True)
output.mkdir(exist_ok=True) if step in ("prepare", "train") else output.write_text("whole")
"""


def test_killed_at_any_step_it_goes_on(tmp_path):
    """With programs that only note their step: each dies once by SIGKILL; what is done is not done again."""
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(FAKE.format(python=sys.executable, log=str(log)))
    python.chmod(0o755)
    out = tmp_path / "out"
    for step in STEPS:
        result = shell("mini", "--output_dir", out, PYTHON=str(python), DIES_IN=step)
        assert result.returncode == 128 + 9, result.stderr
    last = shell("mini", "--output_dir", out, PYTHON=str(python), DIES_IN="")
    assert last.returncode == 0 and last.stdout.endswith("whole"), last.stderr
    assert log.read_text().split() == [step for step in STEPS for _ in range(2)]
    log.write_text("")
    assert shell("mini", "--output_dir", out, PYTHON=str(python), DIES_IN="").returncode == 0
    assert log.read_text() == "" and (out / "policy").is_dir() and not (out / "training").exists()
    for flags in (["--posts", 7], ["--", "--learning_rate", "1e-5"]):
        other = shell("mini", "--output_dir", out, *flags, PYTHON=str(python), DIES_IN="")
        assert other.returncode == 1 and "holds a run of other settings" in other.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "name a preset"),
        (["7b"], "name a preset"),
        (["mini", "--sed", "1"], "--sed: there is no such option"),
        (["mini", "--seed"], "--seed: needs a value"),
        (["mini", "--seed", "one"], "--seed one: must be a number"),
        (["mini", "--posts", "0"], "--posts 0: must be"),
        (["1b", "--output_dir", "/dev/null/x"], "the judge openai:gpt-4o-mini needs OPENAI_API_KEY"),
    ],
)
def test_mistakes_of_tldr_sh(flags, message):
    result = shell(*flags, OPENAI_API_KEY="", OPENAI_BASE_URL="")
    assert result.returncode == 1 and message in result.stderr and len(result.stderr.splitlines()) == 1


# ---- complete.py -----------------------------------------------------------------------------------------------------


def test_a_runs_folder_tells_its_data_held_out_rows_lengths_and_stop_token(tmp_path):
    """Rows that were held out of a single file are those that the run did not train on."""
    rows = [{"prompt": f"I lost {i} keys. TL;DR:", "n": i} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    flags = [
        "--dataset_name",
        tmp_path / "rows.jsonl",
        "--output_dir",
        out,
        "--stop_token",
        ".",
        "--response_length",
        7,
    ]
    flags += ["--sft_model_path", rloo.MINI_TLDR / "sft", "--reward_model_path", rloo.MINI_TLDR / "reward"]
    flags += ["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 1, "--total_episodes", 4]
    flags += ["--save_steps", 1, "--device", "cpu"]
    rloo.main(rloo.parse_args([str(flag) for flag in flags]))
    for checkpoint in (out, out / "checkpoint-1"):
        output = tmp_path / f"{checkpoint.name}.jsonl"
        complete.main(complete.Args(sft_model_path=str(checkpoint), output=str(output), device="cpu"))
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert [line["columns"] for line in lines] == [{"n": 18}, {"n": 19}]
        assert all(line["tokens"] <= 7 and line["ended"] == line["completion"].endswith(".") for line in lines)


def run_complete(path: Path, **flags) -> list[dict]:
    complete.main(
        complete.Args(
            **(
                {
                    "sft_model_path": str(MINI / "sft"),
                    "output": str(path),
                    "posts": 3,
                    "device": "cpu",
                    "response_length": 12,
                }
                | flags
            )
        )
    )
    return read_lines(path)


def test_greedy_completions_are_those_of_generate(tmp_path):
    rows = run_complete(tmp_path / "greedy.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(MINI / "sft")
    model = AutoModelForCausalLM.from_pretrained(MINI / "sft").eval()
    data = read_lines(MINI / "test.jsonl")
    assert [row["post"] for row in rows] == [0, 1, 2]
    for row, source in zip(rows, data):
        ids = tokenizer(source["prompt"], return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        out = out[0, ids.shape[1] :]
        assert row["completion"] == tokenizer.decode(out, skip_special_tokens=True)
        assert row["tokens"] == len(out) and row["ended"] == (out[-1].item() == tokenizer.eos_token_id)
        assert (row["prompt"], row["reference"]) == (source["prompt"], source["completion"])
        assert row["columns"] == {name: source[name] for name in ("facts", "decoys")} and row["sample"] == 0


def test_samples_follow_the_seed(tmp_path):
    runs = [run_complete(tmp_path / f"{i}.jsonl", n=2, temperature=1.0, seed=seed) for i, seed in enumerate((1, 1, 2))]
    texts = [[row["completion"] for row in rows] for rows in runs]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]
    assert [(row["post"], row["sample"]) for row in runs[0]] == [(post, i) for post in range(3) for i in range(2)]
    cold, greedy = run_complete(tmp_path / "cold.jsonl", n=2, temperature=1e-4), run_complete(tmp_path / "greedy.jsonl")
    assert [row["completion"] for row in cold] == [row["completion"] for row in greedy for _ in range(2)]


def test_mistakes_of_complete(tmp_path):
    (tmp_path / "there.jsonl").write_text("mine")
    for flags, message in [
        ({"output": str(tmp_path / "there.jsonl")}, "nothing is overwritten"),
        ({"n": 2}, "greedy completions are all equal"),
        ({"n": 0}, "--n 0: must be above 0"),
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"output": "x.txt"}, "must end in .jsonl"),
        ({"dataset_test_split": "dev"}, "has no such split"),
        ({"sft_model_path": str(tmp_path)}, "cannot be loaded"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_complete(tmp_path / "new.jsonl", **flags)
    assert (tmp_path / "there.jsonl").read_text() == "mine" and not (tmp_path / "new.jsonl").exists()


# ---- tldr_steps.py ---------------------------------------------------------------------------------------------------


def test_prepare_takes_either_form(tmp_path):
    """Rows of the Hub's dataset have the reference in `messages` alone, and it gets one space before it."""
    turns = [{"role": "user", "content": "POST\n\nTL;DR:"}, {"role": "assistant", "content": "short"}]
    rows = [
        {"prompt": "a", "completion": "  b ", "facts": 1},
        {"prompt": "POST\n\nTL;DR:", "messages": turns},
        {"messages": turns, "info": "x"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tldr_steps.prepare(tldr_steps.Prepare(str(tmp_path), ("train",), str(tmp_path / "data")))
    post = {"prompt": "POST\n\nTL;DR:", "completion": " short"}
    assert read_lines(tmp_path / "data" / "train.jsonl") == [
        {"prompt": "a", "completion": " b", "facts": 1},
        post,
        post | {"info": "x"},
    ]
    for split, output, message in [("train", "data", "nothing is overwritten"), ("dev", "new", "has no split dev")]:
        with pytest.raises(judge.Mistake, match=message):
            tldr_steps.prepare(tldr_steps.Prepare(str(tmp_path), (split,), str(tmp_path / output)))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(judge.Mistake, match="rows need `prompt` and `completion`"):
        tldr_steps.prepare(tldr_steps.Prepare(str(tmp_path), ("train",), str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()


def test_best_of_takes_the_highest_score(tmp_path):
    run_complete(tmp_path / "samples.jsonl", n=4, temperature=1.0)
    reward = str(MINI / "reward")
    tldr_steps.best_of(
        tldr_steps.BestOf(str(tmp_path / "samples.jsonl"), reward, str(tmp_path / "best.jsonl"), device="cpu")
    )
    samples, best = read_lines(tmp_path / "samples.jsonl"), read_lines(tmp_path / "best.jsonl")
    texts = [judge.Text(row["prompt"], row["completion"], row["ended"], {}) for row in samples]
    scores = judge.model_scores(reward, texts, "float32", "cpu", batch_size=1)
    assert [row["post"] for row in best] == [0, 1, 2] and all(row["sample"] == 0 for row in best)
    for post, row in enumerate(best):
        own = scores[4 * post : 4 * post + 4]
        assert row["chosen"] == own.index(max(own)) and row["score"] == pytest.approx(max(own), abs=1e-4)
        assert row["completion"] == samples[4 * post + row["chosen"]]["completion"]


def test_the_estimate_by_hand():
    """Layers of 1,000 M parameters and a head of 100 M, P = 100, k = 2, R = 10, 7.2 M completions, 1 PFLOP/s, 1 TB/s:
    3.6 M rows of 120 tokens, 20 of them with logits; keys and values of 500 groups at half their length, 2.2 GB."""
    args = tldr_steps.Estimate(
        body=1000,
        head=100,
        layers=10,
        width=1000,
        reward_body=500,
        rloo_k=2,
        total_episodes=7200000,
        num_ppo_epochs=2,
        num_mini_batches=2,
        local_rollout_forward_batch_size=1000,
        prompt_length=100,
        response_length=10,
        utilisation=1000 / 989,
        bandwidth=1 / 3.35,
    )
    assert tldr_steps.counted(args) == pytest.approx(
        {
            "prompts": 2e9 * 100 / 1e12,
            "reference": (2e9 * 120 + 2e8 * 20) / 1e12,
            "reward model": 1e9 * 120 / 1e12,
            "old log-probs": (2e9 * 120 + 2e8 * 20) / 1e12,
            "training": 2 * (6e9 * 120 + 8e8 * 20) / 1e12,
            "decoding": 7200 * 10 * (2.2e9 + 2.2e9) / 1e12 / 3600,
        }
    )


def write_run(folder: Path, wins: int, hours: int):
    """A folder as tldr.sh leaves it: 100 posts, one more win from row to row."""
    names = ["sft-greedy", "sft-samples", "best-of-4", "rloo-greedy", "rloo-sampled"]
    results = {name: judge.count([1.0] * (wins + i) + [0.0] * (100 - wins - i)) for i, name in enumerate(names)}
    (folder / "policy").mkdir(parents=True)
    (folder / "settings").write_text(f"bash benchmark/tldr/tldr.sh {folder.name}\n")
    for name, seed in [("gold", 5), ("reward", None)]:
        found = {"judge": f"the {name}", "order_seed": seed, "results": results}
        (folder / f"{name}.json").write_text(json.dumps(found))
    lines = [
        {"update": i, "episode": 64 * i, "objective/kl": 1.5 * i, "time/train": 1800 * hours, "time/rollout": 0.0}
        for i in (1, 2)
    ]
    (folder / "policy" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "sft-samples.jsonl").write_text('{"temperature": 0.7}\n')


def read_table(path: Path) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in path.read_text().splitlines()[1:4]]


def test_the_table(tmp_path):
    """One run: ± is half of Wilson's interval; two: the standard deviation."""
    for i, hours in [(1, 1), (2, 3)]:
        write_run(tmp_path / str(i), 10 * i, hours)
    tldr_steps.table(tldr_steps.Table((str(tmp_path / "1"),), str(tmp_path / "one.txt")))
    half = [f"{50 * (high - low):.1f}" for low, high in (judge.wilson(wins, 100) for wins in range(10, 15))]
    sft, best, trained = read_table(tmp_path / "one.txt")
    assert sft == ["SFT", *[f"10.0 ± {half[0]}", f"11.0 ± {half[1]}"] * 2, "0", "0"]
    assert best == ["best of 4", *["-", f"12.0 ± {half[2]}"] * 2, "≤ 0.64", "0"]
    assert trained == ["RLOO", *[f"13.0 ± {half[3]}", f"14.0 ± {half[4]}"] * 2, "3.00", "1.00"]
    text = (tmp_path / "one.txt").read_text()
    assert "gold: the gold; order of each pair drawn by seed 5; 100 posts; 0 answers" in text
    assert "the 64 completions of the last update" in text and "Wilson" in text

    tldr_steps.table(tldr_steps.Table((str(tmp_path / "1"), str(tmp_path / "2")), str(tmp_path / "two.txt")))
    trained = read_table(tmp_path / "two.txt")[2]
    assert trained == ["RLOO", *["18.0 ± 7.1", "19.0 ± 7.1"] * 2, "3.00 ± 0.00", "2.00 ± 1.41"]
    numbers = json.loads((tmp_path / "two.json").read_text())
    assert [run["command"] for run in numbers] == ["bash benchmark/tldr/tldr.sh 1", "bash benchmark/tldr/tldr.sh 2"]
    assert numbers[1]["gold"]["results"]["rloo-sampled"]["wins"] == 24 and numbers[1]["hours"] == 3.0
