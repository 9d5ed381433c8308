"""Tests of this folder: each file runs with its commands and computes the published formula, and the page is right.

python -m pytest -q benchmark/extensions
"""

import importlib
import importlib.util
import itertools
import json
import math
import re
import runpy
import shlex
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import rloo  # noqa: E402

MINI = ROOT / "benchmark" / "mini_tldr"
GSM8K = ROOT / "benchmark" / "mini_gsm8k"
PAGE = HERE.joinpath("README.md").read_text()
# Commands in docstrings: four spaces, then the command; a line that ends with \ goes on, and # begins a comment.
COMMAND = re.compile(r"(?m)^    ((?:python|torchrun|TEXT_REWARD_MODEL=\S+) (?:.*\\\n)*[^#\n]*)")
FILES = {path.stem: path.read_text() for path in sorted(HERE.glob("*.py")) if not path.stem.endswith("test")}
COMMANDS = {name: [x.replace("\\\n", " ") for x in COMMAND.findall(text)] for name, text in FILES.items()}
ORIGINAL = dict(vars(rloo))
torch.set_num_threads(1)


def load(*names):
    """Imports extensions anew, in this order, into rloo.py as it was; returns the last one."""
    vars(rloo).update(ORIGINAL)
    for name in [name for name in sys.modules if name.startswith("benchmark.extensions")]:
        del sys.modules[name]
    return [importlib.import_module(f"benchmark.extensions.{name}") for name in names][-1]


@pytest.fixture(autouse=True)
def rloo_as_it_was(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    vars(rloo).update(ORIGINAL)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def write_data(folder: Path) -> Path:
    """Rows with short prompts: the ends of posts."""
    rows = [json.loads(line) for line in MINI.joinpath("validation.jsonl").read_text().splitlines()[:40]]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row | {"prompt": row["prompt"][-60:]}) + "\n" for row in rows))
    return file


def words_of(flags: dict) -> list[str]:
    """The words of a command line; a flag that is None is left out."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


SMALL = {"response_length": 6, "rloo_k": 2, "per_device_train_batch_size": 8, "total_episodes": 8, "temperature": 1.0}
SMALL |= {"sft_model_path": MINI / "sft", "reward_model_path": MINI / "reward", "learning_rate": 1e-3, "device": "cpu"}
SMALL |= {"num_eval_prompts": 0}


@pytest.fixture
def run(data, tmp_path):
    """run(extension, ..., flag=value, ...) -> metrics of each update, and the output folder. Without an extension it
    runs what was loaded last."""
    numbers = itertools.count()

    def run(*extensions: str, **flags):
        flags = SMALL | {"dataset_name": data, "output_dir": tmp_path / f"run{next(numbers)}"} | flags
        if extensions:
            load(*extensions)
        rloo.command_line(words_of(flags))
        return read(flags["output_dir"]), Path(flags["output_dir"])

    return run


def read(folder, name="metrics") -> list[dict]:
    return [json.loads(line) for line in Path(folder, f"{name}.jsonl").read_text().splitlines()]


def without_times(metrics: list[dict]) -> list[dict]:
    return [{name: x for name, x in row.items() if "time/" not in name and name != "eps"} for row in metrics]


def spy(monkeypatch, name: str) -> list:
    """A list to which each call of a function of rloo.py adds its inputs and its output."""
    calls, function = [], getattr(rloo, name)

    def noted(*inputs, **options):
        calls.append((inputs, function(*inputs, **options)))
        return calls[-1][1]

    monkeypatch.setattr(rloo, name, noted)
    return calls


def constant(prompts, **columns):
    return [1.0] * len(prompts)


def remainder(completion_ids, **columns):
    return [sum(ids) % 7 for ids in completion_ids]


def some_none(completion_ids, **columns):
    return [None if i % 4 == 0 else sum(ids) % 7 for i, ids in enumerate(completion_ids)]


def length_of_some(prompts, completions, **columns):
    return [len(text) * (ord(prompt[0]) % 2) for prompt, text in zip(prompts, completions, strict=True)]


def seven(text):
    return " 7."


# ---- Files and page --------------------------------------------------------------------------------------------------

RUN = [
    x
    for name in FILES.keys() - {"fsdp", "own_loop", "text_reward", "vllm_rollout", "vllm_server"}
    for x in COMMANDS[name]
]


@pytest.mark.parametrize("command", sorted(RUN))
def test_each_file_runs_with_its_commands(command, data, tmp_path, monkeypatch):
    """What a reader does, but only one small update, on few rows."""
    words = shlex.split(command.replace("FLAGS OF rloo.py", "").replace("file.py:function", f"{__file__}:seven"))
    fewer = {"total_episodes": 1, "num_eval_prompts": 0, "output_dir": tmp_path / "out", "response_length": 8}
    fewer |= {"per_device_train_batch_size": 8, "device": "cpu"}
    if "--dataset_name" not in words:
        fewer |= {"dataset_name": data, "sft_model_path": MINI / "sft", "reward_model_path": MINI / "reward"}
    else:
        fewer |= {"dataset_train_split": "validation"}
    load("own_loop")  # which replaces nothing
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [*words[1:], *words_of(fewer)])
    runpy.run_path(words[1], run_name="__main__")
    (metrics,) = read(tmp_path / "out")
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["grad_norm"] > 0 or "maxrl" in command  # which may find no right answer
    args = json.loads((tmp_path / "out/args.json").read_text())
    for flag, value in re.findall(r"--(\w+) ([\d.]+|[a-z]+)(?= |$)", command):
        assert str(args[flag]) == value.removesuffix(" ") or float(args[flag]) == float(value)


def says(name: str) -> set[str]:
    """What the docstring of a file says that it replaces or wraps."""
    docstring = FILES[name].split('"""')[1]
    return set(re.findall(r"`(\w+)`", " ".join(re.findall(r"(?:[Rr]eplaces|[Ww]raps)[^.:]*", docstring))))


@pytest.mark.parametrize("name", [name for name, text in FILES.items() if "    rloo.command_line()" in text])
def test_a_file_replaces_what_its_docstring_and_the_page_say(name):
    load(name)
    if "advantage" in says(name):  # these two choose it by a flag
        rloo.resolve_args(rloo.Args(device="cpu"))
    changed = {x for x in vars(rloo) if vars(rloo)[x] is not ORIGINAL.get(x)}
    assert changed == says(name) and changed
    row = re.search(rf"(?m)^\| \[{name}.py\]\({name}.py\) \|([^|]*)\|", PAGE)
    replaced = re.search(r"Replaces[^;.]*", FILES[name].split('"""')[1])
    assert re.findall(r"`(\w+)`", row[1]) == re.findall(r"`(\w+)`", replaced[0] if replaced else "")


def test_the_page_lists_every_file_and_each_begins_with_a_command():
    assert sorted(re.findall(r"(?m)^\| \[(\w+)\.py\]\(\1\.py\) \|", PAGE)) == sorted(FILES.keys() - {"vllm_server"})
    assert all(COMMANDS[name] for name in FILES if name != "vllm_server")


def test_every_function_of_the_page_s_table_is_called_if_it_is_replaced(run, tmp_path):
    """One run and its continuation, with all of them replaced by what notes the call."""
    table = PAGE.partition("| to change | replace |")[2].partition("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    assert len(names) == len(set(names)) >= 20
    called = set()

    def noting(name):
        original = getattr(rloo, name)
        if name == "Args":
            return type("Args", (original,), {})

        def noted(*inputs, **options):
            called.add(name)
            return original(*inputs, **options)

        return noted

    for name in names:
        setattr(rloo, name, noting(name))
    flags = {"total_episodes": 16, "save_steps": 1, "output_dir": tmp_path / "out"}
    metrics, _ = run(**flags)
    run(**flags | {"total_episodes": 24, "resume": True})
    assert called == {*names} - {"Args"} and len(metrics) == 2


def printed(word: str, **names):
    """Runs the block of the page with `word` in it, but for its last line, where these names are known."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if word in block]
    assert code.endswith("rloo.command_line()\n")
    load("own_loop")
    exec(code.removesuffix("rloo.command_line()\n"), {"__name__": "mine"} | names)


def test_code_that_the_page_prints(run, monkeypatch):
    printed("group_mean")
    assert rloo.advantage(torch.tensor([[[1.0]], [[0.0]], [[0.0]], [[0.0]]])).flatten().tolist() == [0.75] + [-0.25] * 3
    assert run()[0][0]["grad_norm"] > 0
    printed("without_end")
    (metrics,), _ = run(response_length=1, kl_coef=0.0)  # no completion ends
    assert metrics["completions/clipped_ratio"] == 1 and metrics["objective/rlhf_reward"] == -1
    printed("from benchmark.extensions import")
    (metrics,), output = run(lora_rank=2, loss_mean="tokens")
    assert metrics["val/rollout_weight"] == pytest.approx(1, abs=1e-3) and (output / "adapter").is_dir()
    printed("rewards_of_tokens", rewards_of_tokens=lambda batch: batch.response_mask.float())
    seen = spy(monkeypatch, "improve")
    run(kl_coef=0.0, token_level_kl=True)
    experience = seen[0][0][4]
    to_go = experience.batch.response_mask.flip(-1).cumsum(-1).flip(-1)  # each token gets 1
    expected = rloo.advantage(experience.scores[..., None] + to_go) * experience.batch.policy_mask
    assert torch.allclose(experience.advantages, expected, atol=1e-5)


PAIRS = ["lora grpo entropy", "correction lora", "lora correction", "grpo correction", "correction grpo"]
PAIRS += ["truncate value", "truncate lora", "lora truncate", "value correction", "correction value", "lora value"]
PAIRS += ["turns value", "grpo turns", "lora turns", "advantages correction"]


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_that_the_page_allows_train(pair, run, monkeypatch):
    """One update with two completions of unequal score, where each file leaves its trace."""
    flags = {"entropy": {"entropy_coef": 0.5}, "truncate": {"top_k": 5}, "value": {"value_cliprange": 0.1}}
    flags["turns"] = {"tool": f"{__file__}:seven", "tool_mark": " the", "response_length": 24}
    improved = {} if "value" in pair else {"num_ppo_epochs": 2}
    for name in pair.split():
        improved |= flags.get(name, {})
    load(*pair.split())
    seen = spy(monkeypatch, "improve")
    (metrics,), output = run(**improved)
    experience = seen[0][0][4]
    assert metrics["grad_norm"] > 0 and all(math.isfinite(x) for x in metrics.values())
    traces = {
        "lora": (output / "adapter").is_dir(),
        "correction": abs(metrics.get("val/rollout_weight", 9) - 1) < 1e-3,
        "value": hasattr(experience, "returns") and experience.advantages.shape[-1] > 1,
        "turns": metrics.get("tool/tokens", 0) > 0,
        "truncate": metrics["objective/entropy"] / metrics["completions/mean_length"] < math.log(5),
        "grpo": "completions/in_loss" in metrics,
        "entropy": True,  # see its own tests
        "advantages": torch.allclose(experience.advantages, experience.rewards.float(), rtol=1e-3),
    }
    assert all(traces[name] for name in pair.split()), traces


# ---- grpo.py and advantages.py ---------------------------------------------------------------------------------------


def log_probs_apart(k=3, B=4, T=5):
    """New log-probs with a gradient, old ones, advantages (k, B, 1) and a mask of unequal lengths."""
    torch.manual_seed(0)
    mask = torch.arange(T) < torch.randint(1, T + 1, (k, B, 1))
    new, old = torch.randn(2, k, B, T) * 0.4
    return new.requires_grad_(), old, torch.randn(k, B, 1), mask


def experience_of(batch, **fields):
    """An Experience that has these fields only."""
    others = dict.fromkeys(rloo.Experience.__dataclass_fields__)
    return rloo.Experience(**others | {"batch": batch} | fields)


@pytest.mark.parametrize("ratio", ["token", "completion", "cispo"])
@pytest.mark.parametrize("baseline", ["grpo", "group", "update", "rloo"])
@pytest.mark.parametrize("loss_mean", ["tokens-then-completions", "tokens", "completions"])
def test_grpo_equals_the_loops(ratio, baseline, loss_mean):
    """One completion has no score, another is truncated, and a group has equal scores: they leave the loss, its KL and
    its lengths."""
    load("grpo")
    new, old, _, mask = log_probs_apart()
    ref, scores, ended = torch.randn(3, 4, 5) * 0.4, torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool)
    scores[0, 1], ended[2, 2], scores[:, 3] = math.nan, False, 0.5
    flags = {"baseline": baseline, "loss_mean": loss_mean, "ratio": ratio, "kl_coef": 0.3, "cliprange_high": 0.25}
    args = rloo.resolve_args(rloo.Args(**flags, mask_truncated_completions=True, drop_equal_groups=True, device="cpu"))
    rewards = rloo.rewards_of(args, scores, ended, torch.ones(3, 4, 5))
    advantages = rloo.advantages_for_loss(args, rloo.advantage(rewards), ended, mask)
    fields = {"scores": scores, "ref_logprobs": ref, "rewards": rewards, "advantages": advantages}
    experience = experience_of(rloo.Batch([], *[None] * 3, mask, mask, ended), **fields)
    index = slice(0, 3), torch.tensor([2, 0, 1])
    losses, log_ratio, clipped = rloo.completion_loss(args, experience, index, new[index], old[index], None)
    losses.sum().backward()

    out = {(0, 1), (2, 2), (0, 3), (1, 3), (2, 3)}
    lengths = mask.sum(-1)
    counted = sum(int(lengths[j, b]) for j in range(3) for b in range(4) if (j, b) not in out)
    every = [x for x in scores.flatten().tolist() if not math.isnan(x)]
    for j, (i, b) in itertools.product(range(3), enumerate(index[1].tolist())):
        n = int(lengths[j, b])
        if (j, b) in out:
            assert losses[j, i] == 0 and not new.grad[j, b].any() and not advantages[j, b].any()
            continue
        group = [scores[i, b].item() for i in range(3) if not scores[i, b].isnan()]
        others = [scores[i, b].item() for i in range(3) if i != j and not scores[i, b].isnan()]
        base = mean({"update": every, "rloo": others}.get(baseline, group))
        a = (scores[j, b].item() - base) / (stdev(group) + 1e-4 if baseline == "grpo" else 1)
        assert advantages[j, b].tolist() == pytest.approx([a] * n + [0.0] * (5 - n), abs=1e-5)
        weight = {"tokens-then-completions": 1 / n, "tokens": 12 / counted, "completions": 1}[loss_mean]
        expected, slopes = 0.0, []
        apart = (new - old)[j, b, :n].detach()
        for t in range(n):
            rho = math.exp((apart.mean() if ratio == "completion" else apart[t]).item())
            to_ref = (ref[j, b, t] - new[j, b, t]).item()
            expected += 0.3 * (math.exp(to_ref) - 1 - to_ref)
            slopes.append(0.3 * (1 - math.exp(to_ref)))
            if ratio == "cispo":
                expected += -min(rho, 1.25) * a * new[j, b, t].item()
                slopes[t] += -min(rho, 1.25) * a
            else:
                plain, clip = -a * rho, -a * min(max(rho, 0.8), 1.25)
                expected += max(plain, clip)
                slopes[t] += plain if plain >= clip else 0.0
        assert losses[j, i].item() == pytest.approx(weight * expected, abs=1e-5)
        assert new.grad[j, b, :n].tolist() == pytest.approx([weight * x for x in slopes], abs=1e-5)
        assert not new.grad[j, b, n:].any()
    assert len(log_ratio) == len(clipped) == counted and not log_ratio.requires_grad


def test_the_unbiased_k3_of_grpo_has_the_gradient_of_the_kl():
    """Over all tokens of a vocabulary, weighted by their probability; k3 alone has another."""
    load("grpo")
    torch.manual_seed(0)
    logits, ref = torch.randn(7).requires_grad_(), torch.randn(7, 1, 1).log_softmax(0)
    new = logits.log_softmax(-1).view(7, 1, 1)  # seven completions of a token
    (exact,) = torch.autograd.grad((new.exp() * (new - ref)).sum(), logits, retain_graph=True)
    yes = torch.ones(7, 1, 1, dtype=torch.bool)
    fields = {"ref_logprobs": ref, "advantages": torch.zeros(7, 1, 1), "rewards": torch.zeros(7, 1, 1)}
    experience = experience_of(rloo.Batch([], *[None] * 3, yes, yes, yes[..., 0]), **fields)
    for unbiased in (True, False):
        args = rloo.Args(kl_coef=1.0, cliprange_high=0.2, unbiased_kl=unbiased)
        losses, *_ = rloo.completion_loss(args, experience, (slice(0, 7), torch.tensor([0])), new, new.detach(), None)
        assert torch.allclose(losses, ((ref - new).exp() - 1 + new - ref)[..., 0], atol=1e-6)
        (found,) = torch.autograd.grad((new.detach()[..., 0].exp() * losses).sum(), logits, retain_graph=True)
        assert ((found - exact).abs().max() < 1e-6) == unbiased


def test_grpo_logs_the_reward_without_kl_and_refuses_the_token_s(run):
    (_, metrics), _ = run("grpo", total_episodes=16, kl_coef=0.5, normalize_reward=True)
    assert abs(metrics["objective/rlhf_reward"]) < 1e-6 < 1e-3 < abs(metrics["objective/kl"])
    with pytest.raises(SystemExit, match="--token_level_kl: grpo.py has its KL in the loss"):
        run("grpo", token_level_kl=True)


def test_groups_of_equal_scores_leave_the_loss_of_a_run(run):
    """The mean is then over the tokens of the others, which alone have a gradient. Micro-batches of half a group."""
    flags = {"reward_fns": f"{__file__}:length_of_some", "reward_model_path": None, "kl_coef": 0.0}
    flags |= {"max_grad_norm": 0.0, "loss_mean": "tokens", "seed": 3}
    (plain,), _ = run("grpo", **flags)
    half = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    (dropped,), _ = run("grpo", **flags, drop_equal_groups=True)
    (again,), _ = run("grpo", **flags | half, drop_equal_groups=True)
    assert 0 < dropped["completions/in_loss"] < 1 == plain["completions/in_loss"]
    assert dropped["grad_norm"] > plain["grad_norm"] and again["grad_norm"] == pytest.approx(dropped["grad_norm"], 1e-5)
    (none,), _ = run("grpo", **flags | {"reward_fns": f"{__file__}:constant"}, drop_equal_groups=True)
    assert none["completions/in_loss"] == none["grad_norm"] == none["loss/policy_avg"] == 0


def test_advantages_equal_the_loops():
    advantages = load("advantages")
    torch.manual_seed(0)
    rewards = (torch.rand(6, 7, 1) < torch.linspace(0, 1, 7)[:, None]).float()  # all wrong, all right, and between
    rewards[0, 3] = math.nan
    scores = torch.randn(6, 7, 1)
    scores[0, 3] = math.nan
    found = advantages.maxrl(rewards)
    best = advantages.raft(scores)
    for j, b in itertools.product(range(6), range(7)):
        scored = [x for x in rewards[:, b, 0].tolist() if not math.isnan(x)]
        if (j, b) == (0, 3):
            assert found[j, b].isnan() and best[j, b].isnan()
            continue
        expected = (rewards[j, b, 0].item() - mean(scored)) / mean(scored) if any(scored) else 0.0
        assert found[j, b, 0].item() == pytest.approx(expected, abs=1e-6)
        assert best[j, b, 0] == (scores[j, b, 0] == max(x for x in scores[:, b, 0].tolist() if not math.isnan(x)))
    with pytest.raises(rloo.InputError, match="rewards must be 0 or 1"):
        advantages.maxrl(torch.tensor([[[0.5]], [[1.0]]]))
    assert torch.equal(advantages.none(scores).nan_to_num(9), scores.nan_to_num(9))


# ---- entropy.py, correction.py and truncate.py -----------------------------------------------------------------------


def test_the_entropy_bonus_has_the_gradient_of_the_entropy():
    entropy = load("entropy")
    logits, tokens = torch.randn(7, 9).requires_grad_(), torch.arange(7)
    rloo.final_logits = lambda model, hidden: hidden
    logprobs, entropies = entropy.block_logprobs(None, logits, tokens, 0.5)
    table = (logits / 0.5).log_softmax(-1)
    loops = -sum(table[n, v].exp() * table[n, v] for n, v in itertools.product(range(7), range(9)))
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (entropies.sum(), loops)]
    assert torch.allclose(*gradients, atol=1e-6) and logprobs.tolist() == table[tokens, tokens].tolist()


def test_a_run_with_the_entropy_bonus_raises_the_entropy(run):
    """With equal scores and β = 0 there is no other gradient."""
    flags = {"reward_fns": f"{__file__}:constant", "reward_model_path": None, "kl_coef": 0.0}
    metrics, _ = run("entropy", **flags, entropy_coef=0.03, total_episodes=32)
    assert metrics[0]["policy/entropy_avg"] + 0.01 < metrics[-1]["policy/entropy_avg"]
    lengths, entropies = metrics[0]["completions/mean_length"], metrics[0]["policy/entropy_avg"]
    assert metrics[0]["loss/policy_avg"] == pytest.approx(-0.03 * lengths * entropies, rel=1e-4)
    (metrics,), _ = run("entropy", **flags, response_length=2, mask_truncated_completions=True)
    assert metrics["completions/clipped_ratio"] == 1 and metrics["loss/policy_avg"] == 0


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_weights_of_a_mismatch_equal_the_formula_in_loops(kind, per_token):
    torch.manual_seed(0)
    old, sampled, cap = torch.randn(2, 3, 4), torch.randn(2, 3, 4), 1.5
    mask = torch.arange(4) < torch.randint(1, 5, (2, 3, 1))
    importance_weight = load("correction").importance_weight
    weight = importance_weight(old, sampled, mask, kind, cap, per_token)
    for j, b in itertools.product(range(2), range(3)):
        logs = [(old - sampled)[j, b, t].item() for t in range(4) if mask[j, b, t]]
        exact = [math.exp(x) for x in (logs if per_token else [sum(logs)])]
        limited = {"truncate": lambda w: min(w, cap), "mask": lambda w: w if 1 / cap <= w <= cap else 0.0}
        assert weight[j, b, : len(exact)].tolist() == pytest.approx([*map(limited[kind], exact)], rel=1e-5)
    # e^100 is no float32, and infinity times 0 would be NaN.
    far = importance_weight(torch.full((2, 1, 1), 100.0), torch.zeros(2, 1, 1), mask[:, :1, :1], kind, cap, False)
    assert (far == (cap if kind == "truncate" else 0.0)).all()


@pytest.mark.parametrize("kind", ["completion", "token", "grpo"])
def test_a_mismatch_is_corrected_and_logged(kind, run, monkeypatch):
    """A sampler whose log-probs are off by 0.1 to 0.3, which rloo.py alone refuses. Each ratio has a weight."""
    noise = torch.rand(2, 4, 20, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.1
    off = 0

    def noisy(*inputs):
        batch, logprobs = ORIGINAL["rollout"](*inputs)
        return batch, (logprobs - off * noise) * batch.response_mask

    flags = {"kl_coef": 0.3, "response_length": 20, "token_level_kl": kind == "token", "rollout_correction": "mask"}
    flags["rollout_correction_cap"] = cap = 20.0 if kind == "completion" else 1.25
    load(*(["grpo", "correction"] if kind == "grpo" else ["correction"]))
    rloo.rollout = noisy
    seen = spy(monkeypatch, "improve")
    ((exact,), _), off = run(**flags), 1
    (metrics,), _ = run(**flags)
    without_noise, experience = (inputs[4] for inputs, _ in seen)
    mask = experience.batch.response_mask
    log_w = noise * mask
    if kind == "completion":
        log_w, mask = log_w.sum(-1, keepdim=True), mask[..., :1]
    w = log_w.exp() * (log_w.exp() <= cap)
    assert (w == 0).any() and (w > 1).any() and metrics["completions/mean_length"] < 20
    assert torch.allclose(experience.advantages, without_noise.advantages * w, atol=1e-3)  # the KL is the policy's
    assert torch.allclose(experience.kl, without_noise.kl, atol=1e-5)
    assert metrics["val/rollout_weight"] == pytest.approx(w[mask].mean().item(), abs=1e-4)
    assert exact["val/rollout_weight"] == pytest.approx(1, abs=1e-4) and metrics["val/ratio"] == 1
    assert metrics["val/rollout_kl"] == pytest.approx(-0.2, abs=0.02)


def test_flags_out_of_range_are_refused_in_a_line(run):
    for name, message, flags in [
        ("correction", "--rollout_correction_cap 0.5: must be at least 1", {"rollout_correction_cap": 0.5}),
        ("truncate", "--top_p: above 0, at most 1", {"top_p": 0.0}),
        ("value", "value.py: needs --token_level_kl", {"token_level_kl": False}),
        ("value", "a reward must not be None", {"reward_fns": f"{__file__}:some_none", "reward_model_path": None}),
        ("fsdp", "fsdp.py: needs several processes", {}),
        ("turns", "must be one token, is 2", {"tool": f"{__file__}:seven", "tool_mark": " the the"}),
    ]:
        with pytest.raises(SystemExit, match=message):
            run(name, **flags)


def kept_by_hand(logits, temperature, top_k, top_p) -> dict[int, float]:
    """Token -> log-prob: the most likely ones, until there are top_k or those of top_k have a probability of top_p."""
    probs = (logits.double() / temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])[: top_k or None]
    whole = sum(probs[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p * whole and kept:
            break
        kept.append(token)
        mass += probs[token]
    return {token: math.log(probs[token] / mass) for token in kept}


PROMPTS = [[5, 9, 14], [20, 31, 44, 52, 60], [7, 8]]


def models_of(layout="group", **flags):
    """Flags and models of a run of mini TL;DR, with the extensions that are loaded."""
    paths = {"sft_model_path": str(MINI / "sft"), "layout": layout, "device": "cpu", "response_length": 12}
    args = rloo.resolve_args(rloo.Args(**paths | {"dtype": "float32", "temperature": 0.8} | flags))
    return args, *rloo.load_models(args, None)


@pytest.mark.parametrize("layout", ["group", "plain"])
@pytest.mark.parametrize("limits", [{"top_p": 0.7}, {"top_p": 0.9, "top_k": 20}])
def test_log_probs_of_the_sampler_and_the_policy_are_those_of_the_kept_tokens(layout, limits):
    load("truncate")
    args, _, policy, reference = models_of(layout, **limits)
    torch.manual_seed(1)
    batch, sampled = rloo.rollout(args, policy, [{"prompt_ids": ids} for ids in PROMPTS], 4, args.temperature, [0])
    trained, _ = rloo.completion_logprobs(policy, batch, args.temperature)
    full = rloo.chunked_logprobs(reference, batch, args.temperature, 64)
    number = 0
    for row, ids in enumerate(batch.completion_ids()):
        j, b = divmod(row, len(PROMPTS))
        logits = policy(torch.tensor([PROMPTS[b] + ids])).logits[0, len(PROMPTS[b]) - 1 :].detach()
        for t, token in enumerate(ids):
            kept = kept_by_hand(logits[t], args.temperature, args.top_k, args.top_p)
            assert trained[j, b, t].item() == pytest.approx(kept[token], abs=1e-4)
            assert sampled[j, b, t].item() == pytest.approx(kept[token], abs=1e-4)
            of_all = (logits[t] / args.temperature).log_softmax(-1)[token]
            assert full[j, b, t].item() == pytest.approx(of_all.item(), abs=1e-4)
            number += len(kept) > 1
    assert number > 30
    ids = torch.tensor([[[3]], [[4]]])  # not both are the most likely one, but a token that was sampled stays
    rloo.resolve_args(rloo.Args(top_k=1, device="cpu"))
    logprobs, _ = rloo.completion_logprobs(policy, rloo.make_batch([{"prompt_ids": PROMPTS[0]}], ids, [0]), 1.0)
    assert logprobs.isfinite().all() and (logprobs < 0).any()


# ---- value.py --------------------------------------------------------------------------------------------------------


def test_gae_equals_a_loop_over_the_policys_tokens():
    value = load("value")
    torch.manual_seed(1)
    rewards, values = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    mask = torch.rand(2, 3, 7) < 0.7
    found = value.gae(rewards, values, mask, 0.9, 0.8)
    for j, b in itertools.product(range(2), range(3)):
        own = mask[j, b].nonzero().flatten().tolist()
        r, V = rewards[j, b, own].tolist(), [*values[j, b, own].tolist(), 0.0]
        delta = [r[i] + 0.9 * V[i + 1] - V[i] for i in range(len(own))]
        A = [sum((0.9 * 0.8) ** (i - t) * delta[i] for i in range(t, len(own))) for t in range(len(own))]
        assert found[j, b, own].tolist() == pytest.approx(A, abs=1e-5)
        assert not found[j, b][~mask[j, b]].any()


def weights_of(folder) -> torch.Tensor:
    return torch.cat([x.flatten().float() for _, x in sorted(load_file(Path(folder, "model.safetensors")).items())])


def test_with_a_value_of_0_an_update_is_that_of_reinforce_without_a_baseline(run):
    """... with reward-to-go, for γ = λ = 1."""
    flags = {"kl_coef": 0.1, "normalize_advantage": True, "missing_eos_penalty": 1.0, "adam_eps": 1e-5}
    _, ours = run("value", lam=1.0, **flags)
    _, plain = run("advantages", token_level_kl=True, **flags)
    before, ours, plain = (weights_of(path) for path in (MINI / "sft", ours, plain))
    assert (ours - plain).norm() < 1e-3 * (plain - before).norm()


def test_the_critics_loss_and_steps(run, monkeypatch):
    """Advantages are GAE of the critic's values; its loss is the clipped square, and its steps have a rate and a norm
    of their own."""
    value = load("value")
    flags = {
        "value_model_path": str(MINI / "reward"),
        "value_learning_rate": 0.25,
        "learning_rate": 1e-3,
        "kl_coef": 0.3,
    }
    flags |= {
        "max_grad_norm": 1e-3,
        "gamma": 0.9,
        "lam": 0.7,
        "value_cliprange": 0.05,
        "per_device_train_batch_size": 4,
    }
    args, master, policy, reference = models_of(**flags, rloo_k=2)
    optimizer = rloo.make_optimizer(args, master)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.25]
    examples = [{"prompt_ids": ids} for ids in PROMPTS[:2]]
    scores = {"sum": lambda batch: batch.responses.remainder(7).where(batch.response_mask, 0).sum(-1).float()}
    experience = rloo.collect(args, policy, reference, scores, examples, list(range(0, 500, 8)))
    batch, V = experience.batch, experience.values
    for row, ids in enumerate(batch.completion_ids()):
        j, b = divmod(row, 2)
        prompt = PROMPTS[b]
        hidden = value.critic.base_model(torch.tensor([prompt + ids]))[0][0, len(prompt) - 1 : -1]
        assert V[j, b, : len(ids)].tolist() == pytest.approx(value.critic.score(hidden).squeeze(-1).tolist(), abs=1e-4)
        rewards = -0.3 * experience.kl[j, b, : len(ids)]
        rewards[-1] += experience.scores[j, b]
        ones = torch.ones(1, 1, len(ids), dtype=torch.bool)
        A = value.gae(rewards[None, None], V[None, None, j, b, : len(ids)], ones, 0.9, 0.7)[0, 0]
        assert torch.allclose(experience.advantages[j, b, : len(ids)], A, atol=1e-4)
        assert not experience.advantages[j, b, len(ids) :].any()
    with torch.no_grad():
        value.critic.score.weight += 0.3 * value.critic.score.weight.std() * torch.randn_like(value.critic.score.weight)
    index = slice(0, 2), torch.tensor([1, 0])
    zeros = torch.zeros(2, 2, batch.responses.shape[-1])
    losses, *_ = rloo.completion_loss(args, experience, index, zeros, zeros, zeros)
    now, old, returns = (x[index] for x in (value.values_of(batch), V, experience.returns))
    assert torch.allclose(experience.returns, V + experience.advantages, atol=1e-5)
    plain, limited = (now - returns) ** 2, (old + (now - old).clamp(-0.05, 0.05) - returns) ** 2
    assert (limited > plain).any() and (limited < plain).any()
    expected = (torch.maximum(plain, limited) * batch.policy_mask[index]).sum(-1) / 2 - experience.advantages[
        index
    ].sum(-1)
    assert torch.allclose(losses, expected, atol=1e-3)
    rloo.improve(args, policy, master, optimizer, experience)
    for model in (master, value.critic):
        moments = [optimizer.state[weight]["exp_avg"] for weight in model.parameters()]
        norm = sum(x.square().sum() for x in moments).sqrt().item()
        assert norm == pytest.approx(0.1 * 1e-3, rel=1e-3)  # the first moment is a tenth of the gradient


def test_one_completion_per_prompt_is_enough_and_a_resumed_run_equals_an_uninterrupted_one(run, tmp_path):
    flags = {"rloo_k": 1, "num_ppo_epochs": 2, "value_model_path": MINI / "reward", "value_learning_rate": 1e-2}
    flags |= {"per_device_train_batch_size": 7, "save_steps": 1}
    whole, folder = run("value", **flags, total_episodes=14)
    run("value", **flags, total_episodes=7, lr_scheduler_type="constant", output_dir=tmp_path / "again")
    resumed, again = run("value", **flags, total_episodes=14, output_dir=tmp_path / "again", resume=True)
    assert [row["update"] for row in resumed] == [1, 2] and without_times(resumed)[0] == without_times(whole)[0]
    begun, ended = (torch.load(folder / f"checkpoint-{n}" / "critic.pt")["score.weight"] for n in (1, 2))
    found = torch.load(again / "critic.pt")["score.weight"]
    assert torch.equal(found, ended) and not torch.equal(begun, ended)
    assert without_times(resumed) == without_times(whole)


# ---- turns.py --------------------------------------------------------------------------------------------------------

STOP = 2  # <|im_end|> of mini GSM8K's policy


@pytest.fixture
def exchange(tmp_path, monkeypatch):
    """exchange(writes, answer, flag=value, ...) -> batch, log-probs, their texts, what the tool was asked. The policy
    writes writes[text][j] behind a text as lane j; the log-prob of its token number n of a turn is -n."""
    (tmp_path / "own_tool.py").write_text(
        "asked = []\n\n\ndef tool(text):\n    asked.append(text)\n    return answer(text)\n"
    )

    def exchange(writes, answer, prompts=("Tom",), k=1, **flags):
        def one_turn(args, model, examples, k, temperature, stop_ids):
            rows = []
            for j, example in itertools.product(range(k), examples):
                ids = tokenizer(writes[tokenizer.decode(example["prompt_ids"])][j])["input_ids"]
                rows.append((ids + [0] * args.response_length)[: args.response_length])
            batch = rloo.make_batch(examples, torch.tensor(rows).unflatten(0, (k, -1)), stop_ids)
            logprobs = -torch.arange(1.0, args.response_length + 1).expand_as(batch.responses)
            return batch, logprobs.where(batch.policy_mask, 0.0)

        sys.modules.pop("own_tool", None)
        vars(rloo).update(ORIGINAL)
        monkeypatch.setattr(rloo, "rollout", one_turn)
        for name in [name for name in sys.modules if name.endswith("extensions.turns")]:
            del sys.modules[name]
        turns = importlib.import_module("benchmark.extensions.turns")
        flags = {
            "tool": f"{tmp_path}/own_tool.py:tool",
            "tool_mark": " =",
            "response_length": 12,
            "kl_coef": 0.0,
        } | flags
        args, model, *_ = models_of(sft_model_path=str(GSM8K / "sft"), **flags)
        function, _, tokenizer = turns.tool
        function.__globals__["answer"] = answer
        examples = [{"prompt_ids": tokenizer(text)["input_ids"]} for text in prompts]
        batch, logprobs = rloo.rollout(args, model, examples, k, 0.7, [STOP])
        texts = [tokenizer.decode(ids) for ids in batch.completion_ids()]
        return batch, logprobs, texts, function.__globals__["asked"]

    return exchange


def test_answers_are_put_behind_marks_and_are_not_the_policys(exchange):
    writes = {
        "Tom": ["1 + 2 =", "5"],
        "Ann": ["4<|im_end|>", "7 ="],
        "Tom1 + 2 = 8": [". 8 ="],
        "Tom1 + 2 = 8. 8 = 8": ["<|im_end|>"],
        "Ann7 = 8": [" = 3."],  # continues without an end
        "Ann7 = 8 = 8": [" 3."],
    }
    batch, logprobs, texts, asked = exchange(writes, lambda text: " 8", prompts=("Tom", "Ann"), k=2, response_length=20)
    assert texts[:2] == ["1 + 2 = 8. 8 = 8<|im_end|>", "4<|im_end|>"] and texts[2].startswith("5")
    assert texts[3].startswith("7 = 8 = 8 3.")
    assert asked == ["1 + 2 =", "7 =", "1 + 2 = 8. 8 =", "7 = 8 ="]
    assert batch.ended.tolist() == [[True, True], [False, False]]
    # "1", " +", " ", "2", " =" by the policy, " ", "8" by the tool, ".", " ", "8", " =" by the policy, ...
    by_policy = [True] * 5 + [False] * 2 + [True] * 4 + [False] * 2 + [True]
    assert batch.policy_mask[0, 0][batch.response_mask[0, 0]].tolist() == by_policy
    assert logprobs[0, 0, : len(by_policy)].tolist() == [-1, -2, -3, -4, -5, 0, 0, -1, -2, -3, -4, 0, 0, -1]
    assert not logprobs[~batch.policy_mask].any() and (batch.policy_mask <= batch.response_mask).all()


def eight(text):
    return " 8"


RULES = {  # what the policy writes, the tool, flags -> the text, did it end, how often was the tool asked
    "the last turn has no mark": (
        {"Tom": ["1 ="], "Tom1 = 8": [" = 3<|im_end|>"]}, eight, {"max_turns": 2}, "1 = 8 = 3<|im_end|>", True, 1),
    "after no text the policy continues": (
        {"Tom": ["1 ="], "Tom1 =": [" 3<|im_end|>"]}, lambda text: "", {}, "1 = 3<|im_end|>", True, 1),
    "an answer is cut to the room that is left": (
        {"Tom": ["1 ="]}, lambda text: "5" * 50, {}, "1 =" + "5" * 10, False, 1),
    "without room the tool is not asked": ({"Tom": ["1 ="]}, eight, {"response_length": 2}, "1 =", False, 0),
    "a stop token or a mark in an answer has no effect": (
        {"Tom": ["1 ="], "Tom1 = 8<|im_end|> =": [" 3<|im_end|>"]}, lambda text: " 8<|im_end|> =", {},
        "1 = 8<|im_end|> = 3<|im_end|>", True, 1),
    "a mark that is a stop token": (
        {"Tom": ["1<|im_end|>"], "Tom1<|im_end|>8": ["2<|im_end|>"]}, lambda text: "8" * (len(text) == 11),
        {"tool_mark": "<|im_end|>"}, "1<|im_end|>82<|im_end|>", True, 2),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_turns(exchange, rule):
    writes, answer, flags, text, ended, number = RULES[rule]
    batch, _, texts, asked = exchange(writes, answer, **flags)
    assert texts == [text] and len(asked) == number and batch.ended.item() == ended


def test_a_run_with_turns_has_the_sampler_of_its_policy_and_learns_from_its_tokens_alone(run, monkeypatch):
    """Log-probs of the sampler, over prompts with answers in them, are those of training: val/rollout_kl is 0."""
    load("turns")
    seen = spy(monkeypatch, "improve")
    flags = {"dataset_name": GSM8K, "sft_model_path": GSM8K / "sft", "reward_model_path": None, "response_length": 24}
    flags |= {"reward_fns": f"{__file__}:remainder", "tool": f"{__file__}:seven", "tool_mark": " =", "kl_coef": 0.1}
    (metrics,), _ = run(**flags)
    assert abs(metrics["val/rollout_kl"]) < 1e-5 and metrics["grad_norm"] > 0.1
    assert metrics["tool/answers"] > 0.5 and metrics["tool/tokens"] > metrics["tool/answers"]
    batch = seen[0][0][4].batch
    assert (batch.response_mask & ~batch.policy_mask).sum() == metrics["tool/tokens"] * 8
    with pytest.raises(SystemExit, match="positions; the longest prompt and completion need"):
        run(**flags | {"response_length": 250})  # a turn may continue for 250 more


# ---- vllm_rollout.py: without vLLM, a stand-in takes its place in its process ----------------------------------------

STAND_IN = '''
"""A completion: a sum of its prompt, 10 times the number of weights so far, a part of its seed, and a stop token."""
import os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, seed, **options):
        self.seed, self.options = seed, options

class LLM:
    def __init__(self, folder, **settings):
        assert settings["max_model_len"] == 99 + 2 * 24 and settings["dtype"] == "float32"
        assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
        assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ and os.environ["HF_HUB_OFFLINE"] == "1"
        self.weights = 1

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and "model.safetensors" in os.listdir(kwargs["weights_path"])
        self.weights += 1
        self.stale = True

    def reset_prefix_cache(self):
        self.stale = False

    def generate(self, prompts, params, use_tqdm):
        assert self.weights == 1 or not self.stale
        found = []
        for prompt, sampling in zip(prompts, params, strict=True):
            options = sampling.options
            assert 0 in options["stop_token_ids"] and options["ignore_eos"] and options["max_tokens"] <= 24
            ids = [3 + sum(prompt["prompt_token_ids"]) % 800, 10 * self.weights, 3 + sampling.seed % 800, STOP]
            steps = [{token: SimpleNamespace(logprob=-1.0 - i)} for i, token in enumerate(ids)]
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=steps)]))
        return found
'''


LONGER = {"response_length": 24, "max_prompt_length": 99}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in(stop=...) puts the stand-in in vLLM's place, as under torchrun. Its process ends with the pipe."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda stop=0: (tmp_path / "vllm.py").write_text(STAND_IN.replace("STOP", str(stop)))
    sys.modules["benchmark.extensions.vllm_rollout"].pipe.close()


def test_vllm_samples_for_updates_and_evaluations_and_gets_new_weights_each_time(stand_in, run, monkeypatch):
    """Together with the correction, which allows its log-probs, that are not the policy's, and with turns."""
    stand_in()
    load("vllm_rollout")
    seen = spy(monkeypatch, "rollout")
    importlib.import_module("benchmark.extensions.correction")
    metrics, _ = run(total_episodes=16, num_eval_prompts=2, num_sample_generations=0, **LONGER)
    assert [inputs[4] for inputs, _ in seen] == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]  # temperatures
    for weights, (_, (batch, logprobs)) in enumerate(seen, 1):
        k, B, T = batch.responses.shape
        first = [3 + sum(example["prompt_ids"]) % 800 for example in batch.examples]
        assert batch.responses[..., 0].tolist() == [first] * k and len(set(first)) > 1
        assert (batch.responses[..., 1] == 10 * weights).all() and batch.ended.all() and T == 24
        assert logprobs.tolist() == [[[-1.0, -2.0, -3.0, -4.0] + [0.0] * 20] * B] * k
    seeds = [output[0].responses[..., 2].flatten().tolist() for _, output in seen]
    assert len({*seeds[2], *seeds[3]}) > 8 + 4 and seeds[0] == seeds[4]  # evaluations have the same ones
    assert all(update["val/rollout_kl"] != 0 and update["grad_norm"] > 0 for update in metrics)
    importlib.import_module("benchmark.extensions.turns")
    tool = {"tool": f"{__file__}:seven", "tool_mark": " the"}
    (row,), _ = run(**tool, **LONGER)
    assert row["tool/tokens"] >= 0 and row["grad_norm"] > 0


def test_a_completion_that_neither_ends_nor_is_full_is_refused(stand_in, run):
    stand_in(stop=9)
    with pytest.raises(SystemExit, match="vLLM: a completion must have 24 tokens or end with its first stop token"):
        run("vllm_rollout", **LONGER)


def test_without_vllm_a_line_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(rloo.InputError, match="vLLM is not installed; benchmark/extensions/README.md says how"):
        load("vllm_rollout").start(torch.device("cpu"))


MIXTURE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
MIXTURE |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize("kind", ["tied head", "mixture of experts"])
def test_the_files_for_vllm_have_every_weight_by_its_published_name(kind, tmp_path):
    """Whatever the generation config holds: `save_pretrained` refuses a temperature without sampling."""
    if kind == "mixture of experts":
        model = AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**MIXTURE))
    else:
        model = AutoModelForCausalLM.from_pretrained(GSM8K / "sft", dtype=torch.float32)
    model.save_pretrained(tmp_path / "whole")
    model.generation_config.temperature, model.generation_config.pad_token_id = 0.6, -1
    load("vllm_rollout").write_weights(model, tmp_path)
    weights, whole = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors")
    assert set(weights) == set(whole) | ({"lm_head.weight"} if kind == "tied head" else set())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, tie_word_embeddings=False)
    assert torch.equal(again.eval()(torch.arange(20)[None]).logits, model.eval()(torch.arange(20)[None]).logits)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, an optional package: see README.md")
def test_vllm_samples_from_the_newest_weights():
    vllm_rollout = load("vllm_rollout")
    args, _, model, _ = models_of(response_length=4, max_prompt_length=60)
    for _ in range(2):
        examples = [{"prompt_ids": ids} for ids in PROMPTS]
        batch, logprobs = vllm_rollout.rollout(args, model, examples, 2, 0.8, [0])
        own = rloo.chunked_logprobs(model, batch, 0.8, 64)
        assert torch.allclose(own, logprobs, atol=1e-4) and len({tuple(ids) for ids in batch.completion_ids()}) > 3
        for weight in model.parameters():
            weight.data *= 1.01
    vllm_rollout.pipe.close()


# ---- text_reward.py and own_loop.py ----------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}"


@pytest.mark.parametrize("chat, template, dtype", [(False, None, "float32"), (True, TEMPLATE, "bfloat16")])
def test_scores_of_texts_are_those_of_each_text_alone(chat, template, dtype, tmp_path, monkeypatch):
    """The longest text is cut from the left: the model has 24 positions."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MINI / "sft", num_labels=1, max_position_embeddings=24, initializer_range=0.3)
    model = AutoModelForSequenceClassification.from_config(config).to(getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(MINI / "sft")
    tokenizer.chat_template = template
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("TEXT_REWARD_MODEL", str(tmp_path))
    prompts, completions = (
        ["my boss is rude. ", "I ", "a sister " * 20, "last week "],
        ["he left", "", "they have", "x"],
    )
    given = [[{"role": "user", "content": prompt}] for prompt in prompts] if chat else prompts
    scores = load("text_reward").text_reward(given, completions, None)
    for prompt, text, score in zip(prompts, completions, scores, strict=True):
        ids = tokenizer(f"u {prompt} a {text} " if chat else prompt + text + tokenizer.eos_token)["input_ids"]
        last = model.base_model(torch.tensor([ids[-24:]]))[0][0, -1]
        exact = (model.score.weight.float() @ last.float()).item()
        assert score == pytest.approx(exact, abs=1e-4 if dtype == "float32" else 0.1 * abs(exact) + 0.1)
    assert len({round(score, 3) for score in scores}) == 4


def test_a_run_that_refuses_the_model_trains_by_the_function(run, tmp_path, monkeypatch):
    model = AutoModelForSequenceClassification.from_pretrained(GSM8K / "sft", num_labels=1)
    model.save_pretrained(tmp_path / "reward")
    AutoTokenizer.from_pretrained(GSM8K / "sft").save_pretrained(tmp_path / "reward")
    monkeypatch.setenv("TEXT_REWARD_MODEL", str(tmp_path / "reward"))
    with pytest.raises(SystemExit, match="has another tokenizer; see benchmark/extensions/text_reward.py"):
        run(reward_model_path=tmp_path / "reward")
    (metrics,), _ = run(reward_model_path=None, reward_fns=f"{HERE}/text_reward.py:text_reward")
    assert metrics["objective/scores_std"] > 0 and metrics["grad_norm"] > 0


def test_the_loop_of_ones_own_learns_and_log_probs_of_given_completions_are_the_model_s():
    policy, experience, scores, batch, logprobs = load("own_loop").main()
    assert len(scores) == 3 and all(-32 <= x <= -1 for x in scores)
    tokenizer = AutoTokenizer.from_pretrained(MINI / "sft")
    assert rloo.completion_texts(batch, tokenizer) == [" cat trouble", " keys gone"] and batch.ended.all()
    for example, ids, found in zip(batch.examples, batch.completion_ids(), logprobs[0].sum(-1).tolist(), strict=True):
        prompt = example["prompt_ids"]
        table = (policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        assert sum(table[t, token].item() for t, token in enumerate(ids)) == pytest.approx(found, rel=1e-3)
    with torch.no_grad():
        learned = rloo.completion_logprobs(policy, experience.batch, 0.7)[0] - experience.sampler_logprobs
    assert (learned * experience.advantages).sum() > 0.1  # the last update raises what was better than its siblings
