"""Does a calculator help with sums that are hard for the policy, and does RLOO raise its use?

    python benchmark/mini_gsm8k/calculator.py              # prints the table; trains what has no record
    python benchmark/mini_gsm8k/calculator.py --seeds 1    # what the setting was chosen with: validation problems

Problems are those of mini_gsm8k.py with larger numbers. The policy is that of sft/, taught on right solutions in which
some results are asked for: "147 + 58? 205. 205 - 99 = 106. #### 106". Then RLOO trains it with the calculator
(../extensions/turns.py) or without, where it must write the result behind the question mark itself. Each seed has
problems, lessons and a taught policy of its own, with which both runs begin.
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

STEP = re.compile(r"(-?\d+) ([-+*]) (\d+)( =|\?) (-?\d+)")
QUESTION = re.compile(r"(-?\d+) ([-+*]) (\d+)\?$")
LARGEST = 200  # first number of a problem; see sample_problem
ASK = 0.3  # share of the results that are asked for in lessons
LESSONS, LEARNING_RATE, BATCH = 25_600, 2e-3, 32
SIZES = {"test": 400, "validation": 400, "train": 3_000}
CHOICE = 1  # the seed that the setting was chosen with; it is evaluated on its validation problems
SEEDS = 2, 3, 4, 5, 6
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


# ---- Grades, for --eval_fns ------------------------------------------------------------------------------------------


def asked(prompts, completions, completion_ids, **columns) -> list[float]:
    """How often the calculator is asked."""
    return [float(text.count("?")) for text in completions]


def share_right(text: str, mark: str) -> float | None:
    """Of the results behind a mark, " =" or "?"; None if there is none."""
    steps = [(task.apply(int(x), sign, int(y)), int(z)) for x, sign, y, found, z in STEP.findall(text) if found == mark]
    return sum(right == written for right, written in steps) / len(steps) if steps else None


def own_right(prompts, completions, completion_ids, **columns) -> list[float | None]:
    return [share_right(text, " =") for text in completions]


def asked_right(prompts, completions, completion_ids, **columns) -> list[float | None]:
    return [share_right(text, "?") for text in completions]


# ---- Problems, and the policy that asks ------------------------------------------------------------------------------


def make_splits(rng: random.Random) -> tuple[dict[str, list[dict]], set[tuple]]:
    """Rows of each split, no two with one key, and the keys."""
    splits, keys = {}, set()
    for split, size in SIZES.items():
        splits[split] = []
        for _ in range(size):
            splits[split].append(task.sample_row(rng, keys, task.STEPS, LARGEST))
            keys.add(task.key(splits[split][-1]["problem"]))
    return splits, keys


def with_questions(solution: str, rng: random.Random) -> str:
    """A solution in which a share ASK of the results is asked for."""
    return re.sub(" =", lambda mark: "?" if rng.random() < ASK else mark[0], solution)


def teach(folder: Path, seed: int, total: int = LESSONS):
    """Writes the splits, and the policy of sft/, fine-tuned on solutions of other problems, with questions."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    splits, keys = make_splits(rng)
    tokenizer = AutoTokenizer.from_pretrained(HERE / "sft")
    model = AutoModelForCausalLM.from_pretrained(HERE / "sft")

    def make_rows(n):
        rows = [task.sample_row(rng, keys, task.STEPS, LARGEST) for _ in range(n)]
        chats = [row["prompt"] for row in rows]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        return [{"prompt": x, "completion": with_questions(row["answer"], rng)} for x, row in zip(prompts, rows)]

    model = task.train_lm("policy", tokenizer, model, total, make_rows, LEARNING_RATE, rng, BATCH)
    model.save_pretrained(folder)
    task.save_tokenizer(tokenizer, folder)
    for split, rows in splits.items():
        task.save_jsonl(folder / f"{split}.jsonl", [{x: row[x] for x in ("prompt", "answer", "steps")} for row in rows])


# ---- Runs and the table ----------------------------------------------------------------------------------------------

GRADED = ("asked", "own_right", "asked_right")
EVAL_FNS = [f"benchmark/mini_gsm8k/calculator.py:{name}" for name in GRADED]
SETTINGS = {
    "reward_fns": "benchmark/mini_gsm8k/gsm8k_reward.py:correctness",
    "num_eval_prompts": 400,
    "num_sample_generations": 0,
    "rloo_k": 8,
    "per_device_train_batch_size": 128,
    "total_episodes": 3072,
    "local_rollout_forward_batch_size": 512,
    "response_length": 64,
    "temperature": 1.0,
    "learning_rate": 5e-4,
}
FLAGS = ["--eval_fns", *EVAL_FNS, *(word for name, value in SETTINGS.items() for word in (f"--{name}", str(value)))]
GRADES = [f"{mode}/{name}" for mode in ("greedy", "sampled") for name in ("score", *GRADED)]


def train(records: common.Records, runs: Path, row: str, seed: int):
    """Trains and records a run; one that was stopped goes on."""
    folder, taught = runs / f"{row}__{seed}", runs / f"taught__{seed}"
    if not (taught / "train.jsonl").is_file():
        teach(taught, seed)
    data = taught.relative_to(common.ROOT)
    command = [*ROWS[row].split(), *FLAGS, "--seed", str(seed), "--sft_model_path", data, "--dataset_name", data]
    command += ["--dataset_test_split", "validation" if seed == CHOICE else "test"]
    if not (folder / "model.safetensors").is_file():
        common.run_logged([sys.executable, *command, "--resume", "--output_dir", folder], Path(f"{folder}.log"))
    records.add(folder.name, command=" ".join(map(str, command)), **found_in(folder))


def found_in(folder: Path) -> dict:
    """Grades before and after a run, without those that no completion has, and the rollouts' share of the time."""
    before, after = (
        {name: x[name] for name in GRADES if name in x} for x in common.read_lines(folder / "evaluations.jsonl")
    )
    updates = common.read_lines(folder / "metrics.jsonl")
    seconds = sum(x[name] for x in updates for name in x if name.startswith("time/"))
    return {"before": before, "after": after, "rollouts": sum(x["time/rollout"] for x in updates) / seconds}


def table(records: common.Records, seeds: tuple[int, ...]) -> str:
    """Of runs that have a record: right answers, questions, own results, and the rollouts' share of the time."""
    head = ["calculator", "RLOO", "right, greedy, %", "sampled, %", "asked, greedy", "sampled", "own results right, %"]
    rows = [[*head, "time in rollouts, %"]]
    for row in ROWS:
        found = [records.all[f"{row}__{seed}"] for seed in seeds if f"{row}__{seed}" in records.all]
        for when in ("before", "after"):
            values = {name: [x[when][name] for x in found if name in x[when]] for name in GRADES}
            cells = [common.plus_minus(values[name], 100) for name in ("greedy/score", "sampled/score")]
            cells += [common.plus_minus(values[name], decimals=2) for name in ("greedy/asked", "sampled/asked")]
            cells.append(common.plus_minus(values["sampled/own_right"], 100))
            cells.append(common.plus_minus([x["rollouts"] for x in found], 100, 0) if when == "after" else "")
            rows.append([row, when, *cells])
    return common.markdown(rows)


def compared(records: common.Records) -> str:
    """What the calculator adds to right answers after RLOO, and what RLOO adds to questions."""

    def of(row, when, name, factor=1):
        return [factor * records.all[f"{row}__{seed}"][when][name] for seed in SEEDS]

    lines = []
    for name in ("greedy/score", "sampled/score"):
        points = common.difference(of("with", "after", name, 100), of("without", "after", name, 100))
        lines.append(f"{name} after RLOO, with less without, in points: {common.with_interval(points)}")
    for row in ROWS:
        added = common.difference(of(row, "after", "sampled/asked"), of(row, "before", "sampled/asked"))
        lines.append(f"sampled/asked {row}, after less before: {common.with_interval(added, 2)}")
    return "\n".join(lines)


def main(seeds: tuple[int, ...] = SEEDS, again: bool = False):
    """Trains what has no record and prints the table.

    Args:
        seeds: of the runs and the table that is printed; README.md's table has all but the one of the choice
        again: trains what has a record too; it is compared with the record, and nothing is written
    """
    records = common.Records(HERE / "calculator.json", again)
    runs = common.folder_of_runs(f"calculator_{LARGEST}", again)
    for seed in seeds:
        for row in ROWS:
            if records.needs(f"{row}__{seed}", "after"):
                train(records, runs, row, seed)
    print(table(records, seeds))
    if CHOICE not in seeds and records.complete([f"{row}__{seed}" for row in ROWS for seed in SEEDS], "the page"):
        common.insert(HERE / "README.md", {"calculator": table(records, SEEDS)})
        print(compared(records))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
