"""Does a calculator help on mini GSM8K, and does RLOO raise its use?

    python benchmark/mini_gsm8k/calculator.py                        # prints the table; trains what has no record
    python benchmark/mini_gsm8k/calculator.py --teach_into FOLDER    # only writes the policy that all runs begin with

The policy is that of sft/, fine-tuned on 3,200 solutions of the same pupil, who now asks the calculator for half of the
results: "3 + 4? 7. 7 - 2 = 5. #### 5". Here most problems have two or three steps, as in the data, and results that are
asked for are right. Then RLOO trains it with the calculator (../extensions/turns.py) or without, where it must write
the result behind the question mark itself.
"""

import random
import re
import sys
from pathlib import Path

import mini_gsm8k as task
import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import common  # noqa: E402

STEP = re.compile(r"(-?\d+) ([-+*]) (\d+) = -?\d+\.")
QUESTION = re.compile(r"(-?\d+) ([-+*]) (\d+)\?$")
ASK = 0.5  # share of the steps in which the pupil asks
LESSONS, LEARNING_RATE, BATCH = 3_200, 1e-3, 32
SEEDS = 1, 2, 3
ROWS = {
    "with": "benchmark/extensions/turns.py --tool benchmark/mini_gsm8k/calculator.py:calculate --tool_mark ?",
    "without": "rloo.py",
}


def calculate(text: str) -> str:
    """The tool: the result of the computation that the text ends with, as "3 + 4?"; "" if there is none."""
    asked = QUESTION.search(text)
    if asked is None:
        return ""
    x, sign, y = asked.groups()
    return f" {task.apply(int(x), sign, int(y))}"


def asked(prompts, completions, completion_ids, **columns) -> list[float]:
    """For --eval_fns: how often the calculator is asked."""
    return [float(text.count("?")) for text in completions]


# ---- The policy that asks --------------------------------------------------------------------------------------------


def with_questions(solution: str, rng: random.Random) -> str:
    def ask(step: re.Match) -> str:
        x, sign, y = step.groups()
        return f"{x} {sign} {y}? {task.apply(int(x), sign, int(y))}." if rng.random() < ASK else step[0]

    return STEP.sub(ask, solution)


def key_of(solution: str) -> tuple:
    """The key of the problem that has this right solution."""
    steps = STEP.findall(solution)
    return (int(steps[0][0]), *((sign, int(number)) for _, sign, number in steps))


def held_out() -> set[tuple]:
    rows = [row for split in ("validation", "test") for row in common.read_lines(HERE / f"{split}.jsonl")]
    return {key_of(row["answer"]) for row in rows}


def teach(folder: Path, total: int = LESSONS):
    """Writes the policy of sft/, fine-tuned on solutions with questions."""
    rng, keys = random.Random(1), held_out()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(HERE / "sft")
    model = AutoModelForCausalLM.from_pretrained(HERE / "sft")

    def make_rows(n):
        rows = [task.sample_row(rng, keys, task.STEPS) for _ in range(n)]
        chats = [row["prompt"] for row in rows]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        solutions = [with_questions(task.solve(row["problem"], rng), rng) for row in rows]
        return [{"prompt": prompt, "completion": text} for prompt, text in zip(prompts, solutions)]

    model = task.train_lm("policy", tokenizer, model, total, make_rows, LEARNING_RATE, rng, BATCH)
    model.save_pretrained(folder)
    task.save_tokenizer(tokenizer, folder)


# ---- Runs and the table ----------------------------------------------------------------------------------------------

SETTINGS = {
    "dataset_name": "benchmark/mini_gsm8k",
    "reward_fns": "benchmark/mini_gsm8k/gsm8k_reward.py:correctness",
    "eval_fns": "benchmark/mini_gsm8k/calculator.py:asked",
    "num_eval_prompts": 400,
    "num_sample_generations": 0,
    "rloo_k": 8,
    "per_device_train_batch_size": 128,
    "total_episodes": 3072,
    "local_rollout_forward_batch_size": 512,
    "response_length": 48,
    "temperature": 1.0,
    "learning_rate": 5e-4,
}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
GRADES = "greedy/score", "sampled/score", "greedy/asked", "sampled/asked"


def names_of(row: str) -> list[str]:
    return [f"{row}__{seed}" for seed in SEEDS]


NAMES = [name for row in ROWS for name in names_of(row)]


def train(records: common.Records, runs: Path, row: str, seed: int):
    """Trains and records a run; one that was stopped goes on."""
    folder = runs / f"{row}__{seed}"
    taught = runs / "taught"
    if not (taught / "tokenizer_config.json").is_file():
        teach(taught)
    command = [*ROWS[row].split(), *FLAGS, "--seed", str(seed), "--sft_model_path", taught.relative_to(common.ROOT)]
    if not (folder / "model.safetensors").is_file():
        common.run_logged([sys.executable, *command, "--resume", "--output_dir", folder], Path(f"{folder}.log"))
    evaluations = common.read_lines(folder / "evaluations.jsonl")
    found = {when: {name: x[name] for name in GRADES} for when, x in zip(("before", "after"), evaluations)}
    updates = common.read_lines(folder / "metrics.jsonl")
    seconds = sum(x[name] for x in updates for name in x if name.startswith("time/"))
    found["rollouts"] = sum(x["time/rollout"] for x in updates) / seconds
    records.add(folder.name, command=" ".join(map(str, command)), **found)


def table(records: common.Records) -> str:
    """Of runs that have a record: right answers, questions, and the rollouts' share of the time."""
    rows = [["calculator", "RLOO", "right, greedy, %", "sampled, %", "asked, greedy", "sampled", "time in rollouts, %"]]
    for row in ROWS:
        found = [records.all[name] for name in names_of(row) if name in records.all]
        for when in ("before", "after"):
            cells = [common.plus_minus([x[when][name] for x in found], 100) for name in GRADES[:2]]
            cells += [common.plus_minus([x[when][name] for x in found], decimals=2) for name in GRADES[2:]]
            cells.append(common.plus_minus([x["rollouts"] for x in found], 100, 0) if when == "after" else "")
            rows.append([row, when, *cells])
    return common.markdown(rows)


def compared(records: common.Records) -> str:
    """After RLOO: right answers with the calculator less those without, in points."""
    lines = []
    for name in GRADES[:2]:
        ours, theirs = ([100 * records.all[run]["after"][name] for run in names_of(row)] for row in ROWS)
        lines.append(f"{name}, with less without: {common.with_interval(common.difference(ours, theirs))}")
    return "\n".join(lines)


def main(teach_into: Path | None = None, again: bool = False):
    """Trains what has no record and prints the table.

    Args:
        teach_into: only writes the taught policy into this folder
        again: trains what has a record too; it is compared with the record, and nothing is written
    """
    if teach_into:
        return teach(teach_into)
    records, runs = common.Records(HERE / "calculator.json", again), common.folder_of_runs("calculator", again)
    for seed in SEEDS:
        for row in ROWS:
            if records.needs(f"{row}__{seed}", "after"):
                train(records, runs, row, seed)
    if records.added and records.complete(NAMES, "README.md's table"):
        common.insert(HERE / "README.md", {"calculator": table(records)})
    print(table(records))
    if set(NAMES) <= records.all.keys():
        print(compared(records))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
