"""TRL's RLOO trainers beside rloo.py on the same completions of mini TL;DR: do they end in the same weights?

    python benchmark/trl/parity.py                               # rloo.py against TRL's numbers in golden.json: seconds
    python benchmark/trl/parity.py --trl trl0/bin/python --trl trl1/bin/python     # trains by TRL anew: a few minutes

benchmark/requirements.txt says how to make the environments for --trl, TRL 0.19 and 1.x. Everything runs on a CPU. Both
together, with --write, write golden.json.

Both sides train on given completions in float32, some of which have no stop token. Three updates later the weights must
agree to 1e-6, but for rows with a reason. golden.json has the completions, once sampled by the SFT policy, and TRL's
numbers, with which parity_test.py compares without TRL.

TRL's trainers run unchanged, with these exceptions: their generation returns the given completions (0.19:
`batch_generation`, 1.x: `_generate_single_turn`), data and completions are not shuffled, and a mini-batch holds whole
prompts.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import run
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
import common  # noqa: E402

GOLDEN = HERE / "golden.json"
SFT, REWARD = common.TASK / "sft", common.TASK / "reward"
UPDATES, PROMPTS, K, LENGTH = 3, 4, 4, 20  # prompts per update, completions of each, tokens of each
AGREE = 1e-6  # largest difference of a weight between trainers that do the same
BASE = {  # flags of both sides, which a Row may change
    "rloo_k": K,
    "response_length": LENGTH,
    "temperature": 0.7,
    "kl_coef": 0.2,
    "learning_rate": 1.5e-4,
    "adam_eps": 1e-3,  # so large that AdamW does not amplify rounding
    "max_grad_norm": 0.0,
    "per_device_train_batch_size": PROMPTS * K,
    "total_episodes": UPDATES * PROMPTS * K,
    "device": "cpu",
    "dtype": "float32",
}


@dataclass
class Row:
    """A setting, in flags of rloo.py, and what of TRL's differs from these."""

    trl: int  # first number of TRL's version
    name: str
    flags: dict = field(default_factory=dict)  # over BASE
    why: str = ""  # why the two differ; empty: they must agree
    theirs: dict = field(default_factory=dict)  # TRL's config, over what follows from the flags
    reward_by: str = "ids"  # 1.x: what its reward model reads, see run.py
    short_data: bool = False  # the data end with the last update


TWO_BY_TWO = {"num_ppo_epochs": 2, "num_mini_batches": 2, "per_device_train_batch_size": PROMPTS * K // 2}
NORMAL = {"normalize_reward": True, "reward_clip_range": 10.0}
MICRO = {"per_device_train_batch_size": K, "gradient_accumulation_steps": PROMPTS}
ALL = TWO_BY_TWO | {"per_device_train_batch_size": K, "gradient_accumulation_steps": 2} | NORMAL
ALL |= {"missing_eos_penalty": 1.0, "normalize_advantage": True}
CONSTANT = {"lr_scheduler_type": "constant"}  # 1.x lowers the learning rate with each optimizer step
BOTH = {
    "1 epoch": {},
    "2 epochs": {"num_ppo_epochs": 2},
    "2 epochs of 2 mini-batches": TWO_BY_TWO,
    "4 micro-batches": MICRO,
    "no KL": {"kl_coef": 0.0},
    "sequence KL, β = 1": {"kl_coef": 1.0},
    "advantage normalisation": {"normalize_advantage": True},  # 1.x adds 1e-4 to the divisor, not 1e-8
}
CLIPPED = {"reward_clip_range": 1.0}
SHORT = {"max_grad_norm": 0.5}
TOKEN_KL = {"token_level_kl": True}
MASKED = {"mask_truncated_completions": True}
OWN_SCORE = {"reward_fns": f"{HERE / 'parity.py'}:length_score"}
ROWS = [
    *(Row(0, name, flags) for name, flags in BOTH.items()),
    Row(0, "missing-EOS penalty 1", {"missing_eos_penalty": 1.0}),
    Row(0, "reward normalisation", NORMAL),
    Row(0, "penalty 5, normalisation, clip ±1", NORMAL | CLIPPED | {"missing_eos_penalty": 5.0}),
    Row(0, "all of these", ALL),
    Row(0, "its token-level KL, our sequence KL", {"kl_coef": 1.0}, theirs=TOKEN_KL),
    Row(0, "score clip ±1", CLIPPED, "0.19 clips only where it normalises"),
    Row(0, "gradient norm ≤ 0.5", SHORT, "0.19 never reads max_grad_norm"),
    Row(0, "token-level KL", TOKEN_KL | {"kl_coef": 1.0}, "0.19 sums it back to the sequence's: a no-op"),
    Row(0, "4 micro-batches, data end", MICRO, "0.19 steps at each micro-batch of the last batch", short_data=True),
    *(Row(1, name, flags | (CONSTANT if "num_ppo_epochs" in flags else {})) for name, flags in BOTH.items()),
    Row(1, "missing-EOS penalty 1, in the function", {"missing_eos_penalty": 1.0}),
    Row(1, "score clip ±1", CLIPPED),
    Row(1, "gradient norm ≤ 0.5", SHORT),
    Row(1, "reward model's folder given", {}, "1.x scores text: no stop token, tokenized again", reward_by="text"),
    Row(1, "truncated completions masked", MASKED, "1.x drops their KL, not their reward, from siblings' baselines"),
    Row(1, "2 epochs, linear schedule", {"num_ppo_epochs": 2}, "1.x lowers the rate at each optimizer step"),
    Row(1, "unscorable completions", OWN_SCORE, "1.x leaves them out of the group; here they score its mean"),
]
# Rows whose numbers are kept for the test; in the others that agree it would find the same once more.
KEPT = [(0, name) for name in ("1 epoch", "2 epochs", "penalty 5, normalisation, clip ±1", "all of these")]
KEPT += [(1, "1 epoch"), (1, "2 epochs of 2 mini-batches"), (1, "gradient norm ≤ 0.5")]


def rows_of(trl: int) -> list[Row]:
    return [row for row in ROWS if row.trl == trl]


def length_score(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """A reward function: short completions score well, and every third has no score."""
    return [None if sum(ids) % 3 == 0 else -len(ids) / 4 for ids in completion_ids]


# ---- What both sides need --------------------------------------------------------------------------------------------


def command_line(flags: dict) -> list[str]:
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]


def copy_of(model) -> dict[str, torch.Tensor]:
    """A model's weights by the names that they have in its file (transformers 5 calls GPT-NeoX's head lm_head)."""
    return {name.replace("lm_head.", "embed_out."): x.detach().clone() for name, x in model.named_parameters()}


def movement(start: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> list[float]:
    """How far a model has moved: the norms of its tensors' changes, in the order of their names, and 8 projections of
    the change of all weights. In these, unlike in single weights, rounding averages out."""
    changes = [(weights[name].double() - start[name].double()).flatten() for name in sorted(start)]
    change = torch.cat(changes)
    place = torch.arange(1, len(change) + 1, dtype=torch.float64)
    return [x.norm().item() for x in changes] + [torch.dot(change, (place * i).cos()).item() for i in range(1, 9)]


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all weights."""
    return sum((a[name].double() - b[name].double()).square().sum().item() for name in a) ** 0.5


def comparable(trl: int, line: dict, ours: bool) -> dict[str, float]:
    """The metrics of an update that both sides log, by our names, from our line or theirs."""
    if trl == 0:
        names = ("objective/kl", "objective/non_score_reward", "objective/rlhf_reward", "loss/policy_avg")
        return {name: line[name] for name in (*names, "policy/approxkl_avg", "policy/clipfrac_avg")}
    if ours:  # TRL 1.x has the KL per token
        per_token = line["objective/kl"] / line["completions/mean_length"]
        line = line | {"reward": line["objective/scores"], "kl": per_token}
    names = ("reward", "kl", "completions/mean_length", "completions/clipped_ratio")
    return {name: line.get(name, 0.0) for name in names}


# ---- rloo.py ---------------------------------------------------------------------------------------------------------


def train_rloo(flags: dict, prompts: list[list[str]], completions: list) -> tuple[list[dict], list[dict]]:
    """rloo.py's updates on given completions (k, B, T) of given prompts: its weights after each, and its metrics."""
    import rloo  # environments with TRL cannot

    flags = {"sft_model_path": str(SFT), "dataset_name": str(common.TASK)} | BASE | flags
    if "reward_clip_range" in flags:
        flags["reward_clip_range"] = (flags["reward_clip_range"],)
    if "reward_fns" in flags:
        flags["reward_fns"] = (flags["reward_fns"],)
    else:
        flags["reward_model_path"] = str(REWARD)
    args = rloo.resolve_args(rloo.Args(**flags))
    tokenizer = rloo.load_tokenizer(args, args.sft_model_path)
    updates = [[rloo.prepare_example({"prompt": text}, tokenizer) for text in texts] for texts in prompts]
    examples = sum(updates, [])
    longest = max(len(example["prompt_ids"]) for example in examples)
    master, policy, reference = rloo.load_models(args, longest, resumed=None)
    reward_functions = rloo.load_reward_model(args, tokenizer, longest)
    reward_functions |= rloo.load_functions(args.reward_fns, examples[0], tokenizer)
    stop_ids = rloo.stop_token_ids(args, policy, tokenizer)
    optimizer = rloo.make_optimizer(args, master)
    weights, metrics = [], []
    for done in range(UPDATES):
        batch = rloo.make_batch(updates[done], torch.tensor(completions[done]), stop_ids)
        given = batch, rloo.chunked_logprobs(policy, batch, args.temperature, args.local_rollout_forward_batch_size)
        with mock.patch.object(rloo, "rollout", lambda *_, given=given: given):
            experience = rloo.collect(args, policy, reference, reward_functions, updates[done], stop_ids)
        optimizer.param_groups[0]["lr"] = args.learning_rate * rloo.share_of_peak(args, done, UPDATES)
        with mock.patch.object(torch, "randperm", torch.arange):  # mini-batches take prompts in their order
            improved = rloo.improve(args, policy, master, optimizer, experience)
        weights.append(copy_of(master))
        metrics.append(rloo.metrics_of(args, experience, improved))
    return weights, metrics


# ---- TRL, in its own environment -------------------------------------------------------------------------------------


class Notes(transformers.TrainerCallback):
    """Saves the weights after each update of `steps` steps as <prefix>-<update>.safetensors; keeps what is logged."""

    def __init__(self, prefix: Path, steps: int):
        self.prefix, self.steps = prefix, steps
        self.lines: list[dict] = []

    def on_step_end(self, args, state, control, model, **options):
        if state.global_step % self.steps == 0:
            save_file(copy_of(model), f"{self.prefix}-{state.global_step // self.steps}.safetensors")

    def on_log(self, args, state, control, logs, **options):
        if "objective/kl" in logs or "reward" in logs:  # once for each rollout
            self.lines.append({name: value for name, value in logs.items() if isinstance(value, (int, float))})


def train_trl(folder: Path):
    """Each row on the completions in golden.json. The folder gets found.json, the metrics of each row's updates, and
    the weights after them, <row>-<update>.safetensors."""
    import numpy as np
    import trl
    from trl.trainer import rloo_trainer as trainers

    version = int(trl.__version__[0])
    given = json.loads(GOLDEN.read_text(encoding="utf-8"))
    run.write_for_transformers_4(SFT, folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    eos = tokenizer.eos_token_id
    updates = iter(())

    def next_given(prompt_ids: list[list[int]]) -> torch.Tensor:
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

    if version == 0:
        loader = trainers.DataLoader
        trainers.batch_generation = batch_generation
        trainers.DataLoader = lambda *data, **options: loader(*data, **options | {"shuffle": False})
        np.random.permutation = lambda n: np.arange(n).reshape(K, -1).T.flatten()  # prompt by prompt
    else:
        trainers.shuffle_sequence_dict = lambda batch: batch

    found = []
    for number, row in enumerate(rows_of(version)):
        args = run.parse_args(
            ["rloo", f"--output_dir={folder}", *command_line(BASE | row.flags | {"reward_by": row.reward_by})]
        )
        steps = args.num_ppo_epochs * args.num_mini_batches if version == 1 else 1  # per update
        notes = Notes(folder / str(number), steps)
        updates = iter(zip(given["prompts"], given["completions"]))
        data = [{"prompt": text} for texts in given["prompts"] for text in texts]
        data += [] if row.short_data else data[:PROMPTS]
        theirs = row.theirs | ({"shuffle_dataset": False} if version == 1 else {})
        trainer = run.trainer_of(args, folder, data, notes, **theirs)
        if version == 1:
            trainer._generate_single_turn = generate_single_turn
        trainer.train()
        assert len(notes.lines) == UPDATES
        found.append(notes.lines)
    found = {"title": f"TRL {trl.__version__}, transformers {transformers.__version__}", "metrics": found}
    (folder / "found.json").write_text(json.dumps(found))


# ---- Both ------------------------------------------------------------------------------------------------------------


def compare(found: dict, folder: Path, given: dict) -> tuple[list[dict], list[dict]]:
    """The lines of the table of one version of TRL, and its golden numbers."""
    version = int(found["title"].removeprefix("TRL ")[0])
    start, table, golden = load_file(SFT / "model.safetensors"), [], []
    for number, row in enumerate(rows_of(version)):
        ours = train_rloo(row.flags, given["prompts"], given["completions"])[0][-1]
        weights = [load_file(folder / f"{number}-{i}.safetensors") for i in range(1, UPDATES + 1)]
        said = {"trl": found["title"], "setting": row.name}
        difference = max((ours[name] - weights[-1][name]).abs().max().item() for name in ours)
        relative = distance(ours, weights[-1]) / distance(start, weights[-1])
        line = {"difference": difference, "relative": relative, "agree": difference <= AGREE, "why": row.why}
        table.append(said | line)
        before = [x["difference"] for x in given["table"] if x["trl"] == found["title"] and x["setting"] == row.name]
        recorded = f"recorded {before[0]:.1e}, now " if before else ""
        print(f"{found['title']}, {row.name}: {recorded}{difference:.1e} {row.why}", flush=True)
        if (version, row.name) in KEPT:
            metrics = [comparable(version, theirs, ours=False) for theirs in found["metrics"][number]]
            moved = [movement(start, after) for after in weights]
            golden.append(said | {"metrics": metrics, "movement": moved})
    return table, golden


def errors(line: dict, golden: dict) -> dict[str, float]:
    """How far rloo.py is from the golden numbers of a row, in units of what is allowed: over 1 is too far. Rounding
    costs, on any CPU, 5e-6 of a tensor's norm and 3e-5 of a projection."""
    version = int(line["trl"].split()[1][0])
    (flags,) = (row.flags for row in rows_of(version) if row.name == line["setting"])
    weights, metrics = train_rloo(flags, golden["prompts"], golden["completions"])
    start = load_file(SFT / "model.safetensors")
    found = {"movement": 0.0, "metrics": 0.0}
    for after, theirs in zip(weights, map(torch.tensor, line["movement"]), strict=True):
        ours = torch.tensor(movement(start, after))
        norms, projections = theirs[: len(start)], theirs[len(start) :]
        allowed = torch.cat([5e-5 * norms, (1e-4 * norms.norm()).expand(len(projections))])
        apart = ((ours - theirs).abs() / allowed).max()
        whole = (ours[: len(start)].norm() / norms.norm() - 1).abs() / 1e-5
        found["movement"] = max(found["movement"], apart.item(), whole.item())
    for ours, theirs in zip(metrics, line["metrics"], strict=True):
        ours = comparable(version, ours, ours=True)
        apart = [abs(ours[name] - x) / (1e-5 * max(1, abs(x))) for name, x in theirs.items()]
        found["metrics"] = max(found["metrics"], *apart)
    return found


def against_golden():
    """Compares rloo.py with TRL's numbers in golden.json."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    wrong = []
    for line in golden["golden"]:
        found = errors(line, golden)
        name = f"{line['trl'].split(',')[0]}, {line['setting']}"
        print(f"{name}: {max(found.values()):.2f} of the difference that rounding may make", flush=True)
        wrong += [name] if max(found.values()) > 1 else []
    if wrong:
        sys.exit(f"rloo.py differs from TRL's numbers: {'; '.join(wrong)}")


def same(pythons: list[str], write: bool):
    """Trains by each python's TRL and by rloo.py, on the completions in golden.json."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    result = golden | {"made": common.provenance(), "table": [], "golden": []}
    for number, python in enumerate(pythons):
        folder = common.ROOT / "runs" / "parity" / str(number)
        common.run_logged([python, HERE / "parity.py", "--inside", folder], folder / "log")
        found = json.loads((folder / "found.json").read_text())
        table, movements = compare(found, folder, golden)
        result["table"] += table
        result["golden"] += movements
    print(summary(result["table"]))
    if write:
        if len(result["table"]) < len(ROWS):
            sys.exit(f"{GOLDEN.name} is left as it is: it takes both versions of TRL")
        short = json.loads(json.dumps(result), parse_float=lambda digits: float(f"{float(digits):.9g}"))
        GOLDEN.write_text(json.dumps(short, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
    wrong = [f"{line['trl']}, {line['setting']}" for line in result["table"] if not line["agree"] and not line["why"]]
    if wrong:
        sys.exit(f"the weights differ by more than {AGREE:g} and no reason is known: {'; '.join(wrong)}")


def summary(rows: list[dict]) -> str:
    """A line for each version of TRL."""
    lines = []
    for version in dict.fromkeys(row["trl"] for row in rows):
        of_version = [row for row in rows if row["trl"] == version]
        agree = [row for row in of_version if row["agree"]]
        difference = max(row["difference"] for row in agree)
        relative = max(row["relative"] for row in agree)
        counts = f"{len(agree)} of {len(of_version)} settings agree"
        lines.append(f"{version}: {counts}; weights to {difference:.1e}, {relative:.3%} of their way")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", action="append", default=[], help="python of an environment with TRL 0.19 or 1.x")
    parser.add_argument("--write", action="store_true", help="with both versions of TRL: write golden.json")
    parser.add_argument("--inside", type=Path, metavar="FOLDER", help="how this script runs itself in an environment")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.inside:
        train_trl(args.inside)
    elif args.trl:
        same(args.trl, args.write)
    else:
        against_golden()


if __name__ == "__main__":
    main()
