"""TRL's own RLOO trainers beside rloo.py, on the embedded mini TL;DR task.

    python benchmark/trl/trl_parity.py same --trl trl0/bin/python --trl trl1/bin/python     # a few minutes
    python benchmark/trl/trl_parity.py train --trl trl0/bin/python --trl trl1/bin/python    # two hours
    python benchmark/trl/trl_parity.py report                                               # the tables of README.md

benchmark/requirements.txt says how to make the environments for --trl, TRL 0.19 and 1.x. Everything runs on the CPU.

same    TRL and rloo.py train on the same completions in float32, some of which have no stop token. Three updates later
        the weights must agree to 1e-6; where TRL does something else, the table says why, and how much it matters.
        The completions and TRL's numbers go to golden.json, which trl_parity_test.py checks without TRL.
train   all trainers from the same policy by the same settings: what they learn, and the CPU time of training alone.

TRL's trainers run unchanged, with these exceptions. same: their generation returns the given completions
(0.19: `batch_generation`, 1.x: `_generate_single_turn`), data and completions are not shuffled, and a mini-batch holds
whole prompts.
"""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import transformers
from environment import (
    MINI_TLDR,
    Marks,
    answer_job,
    copy_settings,
    default_flags,
    fail,
    rloo_trainer,
    run_job,
    scored_by_ids,
    training_prompts,
    trl_versions,
    write_mini_tldr,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "study")]
# rloo.py and study.py are imported later: TRL's environments cannot

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden.json"
WORK = Path("runs/trl_parity")
UPDATES, PROMPTS, K, LENGTH = 3, 4, 4, 20  # of `same`: updates, prompts per update, completions each, tokens each
BASE = {  # rloo.py's flags for `same`, which a Row may change
    "rloo_k": K,
    "response_length": LENGTH,
    "temperature": 0.7,
    "kl_coef": 0.2,
    "learning_rate": 1.5e-4,
    "adam_eps": 1e-3,  # so large that AdamW does not amplify rounding
    "max_grad_norm": 0.0,
    "per_device_train_batch_size": PROMPTS * K,
    "gradient_accumulation_steps": 1,
    "total_episodes": UPDATES * PROMPTS * K,
    "device": "cpu",
}
SETTING = {  # of train
    "learning_rate": 5e-4,
    "kl_coef": 0.05,
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "device": "cpu",
}
SEEDS, EPISODES = (1, 2, 3), 6_400
AGREE = 1e-6  # largest difference of a weight between trainers that do the same


@dataclass
class Row:
    """A line of the table of `same`: a setting, in rloo.py's flags, and what of TRL's differs from these."""

    trl: str  # first number of TRL's version
    name: str
    flags: dict = field(default_factory=dict)  # over BASE
    theirs: dict = field(default_factory=dict)  # TRL's config, over what follows from the flags
    why: str = ""  # why the two differ; empty: they must agree
    reward: Literal["ids", "text", "length"] = "ids"  # 1.x: how completions are scored, see trl1_reward
    short_data: bool = False  # the data end with the last update
    golden: bool = True  # its numbers are kept for the test; not where other rows have the same in them


TWO_BY_TWO = {"num_ppo_epochs": 2, "num_mini_batches": 2, "per_device_train_batch_size": PROMPTS * K // 2}
NORMAL = {"normalize_reward": True, "reward_clip_range": 10.0}
MICRO = {"per_device_train_batch_size": K, "gradient_accumulation_steps": PROMPTS}
CONSTANT = {"lr_scheduler_type": "constant"}  # 1.x lowers the learning rate with each optimizer step
ROWS = [
    Row("0", "1 epoch"),
    Row("0", "2 epochs", {"num_ppo_epochs": 2}),
    Row("0", "2 epochs of 2 mini-batches", TWO_BY_TWO, golden=False),
    Row("0", "4 micro-batches", MICRO, golden=False),
    Row("0", "no KL", {"kl_coef": 0.0}, golden=False),
    Row("0", "sequence KL, β = 1", {"kl_coef": 1.0}, golden=False),
    Row("0", "missing-EOS penalty 1", {"missing_eos_penalty": 1.0}, golden=False),
    Row("0", "reward normalisation", NORMAL, golden=False),
    Row("0", "penalty 5, normalisation, clip ±1", NORMAL | {"missing_eos_penalty": 5.0, "reward_clip_range": 1.0}),
    Row("0", "advantage normalisation", {"normalize_advantage": True}, golden=False),
    Row(
        "0",
        "all of these",
        TWO_BY_TWO
        | {"per_device_train_batch_size": K, "gradient_accumulation_steps": 2}
        | NORMAL
        | {"missing_eos_penalty": 1.0, "normalize_advantage": True},
    ),
    Row("0", "its token-level KL, our sequence KL", {"kl_coef": 1.0}, {"token_level_kl": True}, golden=False),
    Row("0", "score clip ±1", {"reward_clip_range": 1.0}, why="0.19 clips only where it normalises"),
    Row("0", "gradient norm ≤ 0.5", {"max_grad_norm": 0.5}, why="0.19 never reads max_grad_norm"),
    Row(
        "0",
        "token-level KL",
        {"kl_level": "token", "kl_coef": 1.0},
        {"token_level_kl": True},
        "0.19 sums it back to the sequence's: a no-op",
    ),
    Row(
        "0",
        "4 micro-batches, data end",
        MICRO,
        short_data=True,
        why="0.19 steps at each micro-batch of the data's last batch",
    ),
    Row("1", "1 epoch"),
    Row("1", "2 epochs", CONSTANT | {"num_ppo_epochs": 2}, golden=False),
    Row("1", "2 epochs of 2 mini-batches", CONSTANT | TWO_BY_TWO),
    Row("1", "4 micro-batches", MICRO, golden=False),
    Row("1", "no KL", {"kl_coef": 0.0}, golden=False),
    Row("1", "sequence KL, β = 1", {"kl_coef": 1.0}, golden=False),
    Row("1", "missing-EOS penalty 1, in the function", {"missing_eos_penalty": 1.0}, golden=False),
    Row("1", "score clip ±1", {"reward_clip_range": 1.0}, golden=False),
    Row("1", "advantage normalisation", {"normalize_advantage": True}, golden=False),  # theirs adds 1e-4, not 1e-8
    Row("1", "gradient norm ≤ 0.5", {"max_grad_norm": 0.5}),
    Row("1", "unscorable completions", {"reward_fns": f"{HERE / 'trl_parity.py'}:length_score"}, reward="length"),
    Row("1", "reward model's folder given", reward="text", why="1.x scores text: no stop token, tokenized again"),
    Row(
        "1",
        "truncated completions masked",
        {"mask_truncated_completions": True},
        why="1.x drops their KL, but not their reward, from their siblings' baselines",
    ),
    Row("1", "2 epochs, linear schedule", {"num_ppo_epochs": 2}, why="1.x lowers the rate at each optimizer step"),
]


def length_score(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """A reward function: short completions score well, and every third has no score."""
    return [None if sum(ids) % 3 == 0 else -len(ids) / 4 for ids in completion_ids]


# ---- What both sides need --------------------------------------------------------------------------------------------


def given_prompts() -> list[list[str]]:
    """Prompts of each update of `same`."""
    texts = training_prompts(UPDATES * PROMPTS)
    return [texts[i : i + PROMPTS] for i in range(0, len(texts), PROMPTS)]


def hash_of(name: str) -> str:
    """Of a model's weights."""
    return hashlib.sha256((MINI_TLDR / name / "model.safetensors").read_bytes()).hexdigest()


def movement(start: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> list[float]:
    """How far a model has moved: the norms of its tensors' changes, in the order of their names, and 8 projections of
    the change of all weights. In these, unlike in single weights, rounding averages out."""
    changes = [(weights[name].double() - start[name].double()).flatten() for name in sorted(start)]
    change = torch.cat(changes)
    place = torch.arange(1, len(change) + 1, dtype=torch.float64)
    return [x.norm().item() for x in changes] + [torch.dot(change, (place * i).cos()).item() for i in range(1, 9)]


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of an entry."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all weights."""
    return sum((a[name].double() - b[name].double()).square().sum().item() for name in a) ** 0.5


def copy_of(model) -> dict[str, torch.Tensor]:
    """A model's weights by the names that they have in its file (transformers 5 calls GPT-NeoX's head lm_head)."""
    return {name.replace("lm_head.", "embed_out."): x.detach().clone() for name, x in model.named_parameters()}


def rounded(x):
    """What JSON makes of it, with 9 digits, so that the file is small."""
    return json.loads(json.dumps(x), parse_float=lambda digits: float(f"{float(digits):.9g}"))


# ---- rloo.py ---------------------------------------------------------------------------------------------------------


def run_rloo(flags: dict) -> dict:
    """What `rloo.main` returns, without what it prints."""
    import rloo

    switches = [f"--{name}" for name, value in flags.items() if value is True]
    options = [f"--{name}={value}" for name, value in flags.items() if value is not True]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return rloo.main(rloo.parse_args(switches + options))


def train_rloo(flags: dict, output: Path) -> list[dict]:
    """Trains by rloo.py, in this process; returns the lines of its metrics.jsonl."""
    shutil.rmtree(output, ignore_errors=True)  # of a run that was ended
    flags = {
        "sft_model_path": MINI_TLDR / "sft",
        "dataset_name": MINI_TLDR,
        "num_eval_prompts": 0,
        "save_steps": 0,
        "output_dir": output,
    } | flags
    if "reward_fns" not in flags:
        flags["reward_model_path"] = MINI_TLDR / "reward"
    run_rloo(flags)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def given_completions(prompts: list[list[str]], completions: list, note: Callable):
    """Within it a rollout of rloo.py returns the given completions (k, B, R) of the given prompts, update by update,
    and calls `note(policy)` before. Mini-batches take prompts in their order."""
    import rloo

    tokenizer = AutoTokenizer.from_pretrained(MINI_TLDR / "sft")
    updates = zip(prompts, completions, strict=True)
    own = rloo.rollout, torch.randperm

    @torch.no_grad()
    def rollout(policy, rows, k, temperature, *, stop_ids, **options):
        note(policy)
        texts, ids = next(updates)
        rows = [rloo.prepare_row({"prompt": text}, tokenizer) for text in texts]
        batch = rloo.make_batch(rows, torch.tensor(ids), stop_ids)
        return batch, rloo.completion_logprobs(policy, batch, temperature)[0]

    rloo.rollout, torch.randperm = rollout, lambda n, **options: torch.arange(n)
    try:
        yield
    finally:
        rloo.rollout, torch.randperm = own


def same_rloo(flags: dict, prompts: list[list[str]], completions: list, output: Path) -> dict:
    """rloo.py on given completions: its weights after each update and its metrics of each."""
    weights, data = [], output.with_suffix(".jsonl")
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts[0]))  # replaced by what is given
    with given_completions(prompts, completions, lambda policy: weights.append(copy_of(policy))):
        lines = train_rloo(BASE | {"seed": 1, "dataset_name": data} | flags, output)
    weights.append(load_file(output / "model.safetensors"))
    return {"weights": weights, "metrics": lines}


def sample_completions() -> list:
    """Completions (k, B, R) of each update's prompts by the policy to begin with, sampled on past the stop token as
    TRL 0.19 does. Each update has some with a stop token and some without."""
    import rloo

    tokenizer = AutoTokenizer.from_pretrained(MINI_TLDR / "sft")
    policy = AutoModelForCausalLM.from_pretrained(MINI_TLDR / "sft").eval()
    transformers.set_seed(1)
    found = []
    for texts in given_prompts():
        rows = [rloo.prepare_row({"prompt": text}, tokenizer) for text in texts]
        batch, _ = rloo.rollout(policy, rows, K, 1.0, response_length=LENGTH, stop_ids=[-1])
        ended = (batch.responses == tokenizer.eos_token_id).any(-1)
        assert 0.1 < ended.float().mean() < 0.9 and (batch.responses != tokenizer.pad_token_id).all()
        found.append(batch.responses.tolist())
    return found


def comparable(version: str, line: dict, ours: bool) -> dict[str, float]:
    """The metrics of an update that both sides log, by our names, from our line or theirs."""
    if version == "0":
        names = ["objective/kl", "objective/non_score_reward", "objective/rlhf_reward", "loss/policy_avg"]
        return {name: line[name] for name in [*names, "policy/approxkl_avg", "policy/clipfrac_avg"]}
    alike = ["completions/mean_length", "completions/clipped_ratio"]
    if ours:
        per_token = line["objective/kl"] / line["completions/mean_length"]
        return {"reward": line["objective/scores"], "kl": per_token} | {name: line[name] for name in alike}
    return {"reward": line["reward"], "kl": line.get("kl", 0.0)} | {name: line[name] for name in alike}


# ---- same: TRL, in its own environment -------------------------------------------------------------------------------


class Notes(transformers.TrainerCallback):
    """Saves the weights after each update of `steps` steps as <prefix>-<update>.safetensors; keeps what is logged."""

    def __init__(self, prefix: str, steps: int):
        self.prefix, self.steps = prefix, steps
        self.lines: list[dict] = []

    def on_step_end(self, args, state, control, model, **options):
        if state.global_step % self.steps == 0:
            save_file(copy_of(model), f"{self.prefix}-{state.global_step // self.steps}.safetensors")

    def on_log(self, args, state, control, logs, **options):
        if "objective/kl" in logs or "reward" in logs:  # once for each rollout
            self.lines.append({name: value for name, value in logs.items() if isinstance(value, (int, float))})


def same_trl(models: str, out: str, prompts: list, completions: list, rows: list[dict], defaults: dict) -> list:
    """Metrics of each update of each row on the given completions, and <row>-<update>.safetensors, the weights."""
    import numpy as np
    import trl
    from trl.trainer import rloo_trainer as trainers

    torch.set_num_threads(1)
    version = trl.__version__[0]
    tokenizer = AutoTokenizer.from_pretrained(f"{models}/policy", padding_side="left")
    eos = tokenizer.eos_token_id
    updates: Iterator = iter(())

    def next_given(prompt_ids: list[list[int]]):
        """Responses of the next update, once it is known that its prompts are those meant."""
        texts, responses = next(updates)
        assert prompt_ids == tokenizer(texts)["input_ids"], "the trainer shuffles its data"
        return torch.tensor(responses)

    def batch_generation(model, queries, size, pad_id, generation_config):  # 0.19
        first = queries[: len(queries) // K]
        responses = next_given([row[row != pad_id].tolist() for row in first]).flatten(0, 1)
        sequences = torch.cat([queries, responses], dim=1)
        with torch.no_grad():
            logits = trainers.forward(model, sequences, pad_id).logits[:, queries.shape[1] - 1 : -1]
        return sequences, logits / generation_config.temperature

    def generate_single_turn(prompt_ids, images, multimodal_fields):  # 1.x
        responses = next_given(prompt_ids[::K]).transpose(0, 1).flatten(0, 1).tolist()
        return [row[: row.index(eos) + 1] if eos in row else row for row in responses]

    if version == "0":
        loader = trainers.DataLoader
        trainers.batch_generation = batch_generation
        trainers.DataLoader = lambda *data, **options: loader(*data, **options | {"shuffle": False})
        np.random.permutation = lambda n: np.arange(n).reshape(K, -1).T.flatten()  # prompt by prompt
    else:
        trainers.shuffle_sequence_dict = lambda batch: batch

    found = []
    for number, row in enumerate(Row(**row) for row in rows):
        flags = defaults | BASE | row.flags
        steps = flags["num_ppo_epochs"] * flags["num_mini_batches"] if version == "1" else 1  # per update
        notes = Notes(f"{out}/{number}", steps)
        updates = iter(zip(prompts, completions))
        data = [text for texts in prompts for text in texts]
        data += [] if row.short_data else data[:PROMPTS]
        theirs = row.theirs | ({"shuffle_dataset": False} if version == "1" else {})
        reward = None
        if row.reward == "length":
            reward = length_score
        elif row.reward == "ids" and version == "1":
            reward = scored_by_ids(models, flags["missing_eos_penalty"])
        trainer = rloo_trainer(flags, models, out, data, notes, reward, **theirs)
        if version == "1":
            trainer._generate_single_turn = generate_single_turn
        trainer.train()
        assert len(notes.lines) == UPDATES
        found.append(notes.lines)
    return found


def same(trl: dict[str, str]):
    work = WORK / "same"
    write_mini_tldr(work)
    prompts, completions = given_prompts(), sample_completions()
    start = load_file(MINI_TLDR / "sft" / "model.safetensors")
    table, golden = [], []
    for title, python in trl.items():
        rows = [row for row in ROWS if row.trl == title.split()[1][0]]
        out = work / title.split(",")[0].replace(" ", "-")
        print(f"{title}: {len(rows)} settings", flush=True)
        given = {"prompts": prompts, "completions": completions, "defaults": default_flags()}
        given["rows"] = [dataclasses.asdict(row) for row in rows]
        for number, (row, theirs) in enumerate(zip(rows, run_job(python, __file__, out, "same", models=work, **given))):
            ours = same_rloo(row.flags, prompts, completions, work / "rloo")["weights"]
            weights = [load_file(out / f"{number}-{i}.safetensors") for i in range(1, UPDATES + 1)]
            difference = largest(ours[-1], weights[-1])
            said = {"trl": title, "setting": row.name}
            relative = distance(ours[-1], weights[-1]) / distance(start, weights[-1])
            found = {"TRL moved": largest(weights[-1], start), "difference": difference, "relative": relative}
            table.append(said | found | {"agree": difference <= AGREE, "why": row.why})
            if row.golden and not row.why:
                flags = {name: value for name, value in row.flags.items() if name != "reward_fns"}
                metrics = [comparable(row.trl, line, ours=False) for line in theirs]
                moved = {"movement": [movement(start, after) for after in weights]}
                golden.append(said | {"flags": flags, "reward": row.reward, "metrics": metrics} | moved)
    result = {
        "command": command(),
        "torch": torch.__version__,
        "table": table,
        "models": {name: hash_of(name) for name in ("sft", "reward")},
        "prompts": prompts,
        "completions": completions,
        "golden": golden,
    }
    GOLDEN.write_text(json.dumps(rounded(result), separators=(",", ":"), ensure_ascii=False) + "\n")
    for line in table:
        print(f"{line['trl']}, {line['setting']}: {line['difference']:.1e} {line['why']}")
    wrong = [f"{line['trl']}, {line['setting']}" for line in table if not line["agree"] and not line["why"]]
    if wrong:
        fail(f"the weights differ by more than {AGREE:g} and no reason is known: {'; '.join(wrong)}")


# ---- train -----------------------------------------------------------------------------------------------------------


def learn_trl(models: str, out: str, prompts: list, flags: dict, by_ids: bool) -> dict:
    """Trains freely, and saves the model. The CPU seconds of training alone."""
    torch.set_num_threads(1)
    marks = Marks(out, flags["per_device_train_batch_size"] * flags["gradient_accumulation_steps"])
    reward = scored_by_ids(models) if by_ids else None
    trainer = rloo_trainer(flags, models, out, prompts, marks, reward)
    trainer.train()
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(out)
    return {"cpu_seconds": sum(line["cpu_time"] for line in marks.lines)}


def evaluate(model: Path, seed: int) -> dict[str, float]:
    """Any trainer's model on the 500 test posts, by the evaluation of rloo.py in float32."""
    output = model / "evaluation"
    shutil.rmtree(output, ignore_errors=True)
    copy_settings(model)
    flags = {"sft_model_path": model, "output_dir": output, "total_episodes": 0, "seed": seed}
    return run_rloo(flags | {"kl_coef": 0, "device": "cpu"})["before"]


def train(trl: dict[str, str]):
    """Finished runs are not repeated."""
    work = WORK / "train"
    write_mini_tldr(work / "models")
    trainers: dict[str, tuple] = {"rloo.py": (None, False)}
    for title, python in trl.items():
        name = title.split(",")[0]
        trainers[name] = (python, False)
        if name.startswith("TRL 1."):
            trainers[f"{name}, scored by ids"] = (python, True)
    found: dict[str, list] = {name: [] for name in trainers}
    for seed, (trainer, (python, by_ids)) in itertools.product(SEEDS, trainers.items()):
        flags = SETTING | {"seed": seed, "total_episodes": EPISODES, "dtype": "float32"}
        out = work / f"{trainer}-{seed}".replace(" ", "")
        if not (out / "learned.json").is_file():
            shutil.rmtree(out, ignore_errors=True)
            if python:
                given = {"models": work / "models", "prompts": training_prompts(), "by_ids": by_ids}
                seconds = run_job(python, __file__, out, "train", flags=default_flags(**flags), **given)
            else:
                seconds = {"cpu_seconds": sum(line["cpu_time"] for line in train_rloo(flags, out))}
            (out / "learned.json").write_text(json.dumps(seconds | evaluate(out, seed)))
        learned = json.loads((out / "learned.json").read_text())
        found[trainer].append({name: learned[name] for name in LEARNED})
        print(f"{trainer}, seed {seed}: {found[trainer][-1]}", flush=True)
    path = HERE / "train.json"
    result = {"command": command(), "torch": torch.__version__, "found": found}
    path.write_text(json.dumps(rounded(result), indent=1, ensure_ascii=False) + "\n")
    print(f"numbers: {path}")


# ---- Tables ----------------------------------------------------------------------------------------------------------

LEARNED = {  # figure: its title, scale and decimals
    "sampled/judge_win_rate": ("gold win rate, sampled, %", 100, 1),
    "greedy/judge_win_rate": ("greedy, %", 100, 1),
    "cpu_seconds": ("CPU seconds", 1, 0),
}


def tables() -> dict[str, str]:
    """All tables of the page, by their names, from the records."""
    from study import markdown, plus_minus

    rows = json.loads(GOLDEN.read_text(encoding="utf-8"))["table"]
    other = [["TRL", "setting", "max \\|Δw\\|", "of its way", "what TRL does"]]
    for row in rows:
        if row["why"]:
            cells_of_row = [row["trl"].split(",")[0], row["setting"], f"{row['difference']:.1e}"]
            other.append([*cells_of_row, f"{row['relative']:.1%}", row["why"]])
    train = json.loads((HERE / "train.json").read_text())["found"]
    learned = [["", *(title for title, *_ in LEARNED.values())]]
    for trainer, runs in train.items():
        figures = ((name, scale, decimals) for name, (_, scale, decimals) in LEARNED.items())
        learned.append([trainer, *(plus_minus([run[x] for run in runs], factor, n) for x, factor, n in figures)])
    return {"other": markdown(other), "train": markdown(learned)}


# ---- Command line ----------------------------------------------------------------------------------------------------


@dataclass
class Args:
    """TRL's own RLOO trainers beside rloo.py, on the embedded task."""

    part: Literal["same", "train", "report"]
    """what to compare; report: write the tables into README.md, from the numbers that are there"""
    trl: tuple[str, ...] = ()
    """python of an environment with TRL 0.19 or 1.x; may be given several times"""


def command() -> str:
    """What was typed, with the ends of long paths."""
    short = ["/".join(Path(part).parts[-3:]) if part.startswith("/") else part for part in sys.argv[1:]]
    return " ".join(["python", "benchmark/trl/trl_parity.py", *short])


def main(args: Args):
    if args.part == "report":
        from study import insert

        insert(HERE / "README.md", tables())
        return
    if not args.trl:
        fail("--trl is needed: python of an environment with TRL, see benchmark/requirements.txt")
    trl = trl_versions(args.trl)
    for title in trl:
        if not title.startswith(("TRL 0.19", "TRL 1.")):
            fail(f"--trl: {title} is neither TRL 0.19 nor 1.x")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    {"same": same, "train": train}[args.part](trl)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        answer_job({"same": same_trl, "train": learn_trl})
    else:
        import tyro

        main(tyro.cli(Args, config=(tyro.conf.PositionalRequiredArgs, tyro.conf.UseAppendAction), use_underscores=True))
