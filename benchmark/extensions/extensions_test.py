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


def load(*names):
    """Imports extensions anew, in this order, into rloo.py as it was; returns the last one."""
    vars(rloo).update(ORIGINAL)
    for name in [name for name in sys.modules if name.startswith("benchmark.extensions")]:
        del sys.modules[name]
    return [importlib.import_module(f"benchmark.extensions.{name}") for name in names][-1]


def write_data(folder: Path) -> str:
    """Rows with short prompts: the ends of posts."""
    rows = [json.loads(line) for line in MINI.joinpath("validation.jsonl").read_text().splitlines()[:40]]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row | {"prompt": row["prompt"][-60:]}) + "\n" for row in rows))
    return str(file)


SMALL = {"response_length": 6, "rloo_k": 2, "per_device_train_batch_size": 8, "total_episodes": 8, "temperature": 1.0}
SMALL |= {"sft_model_path": f"{MINI}/sft", "reward_model_path": f"{MINI}/reward", "learning_rate": 1e-3}
SMALL |= {"num_eval_prompts": 0, "device": "cpu"}


@pytest.fixture
def run(tmp_path):
    """run(extension, ..., flag=value, ...) -> metrics of each update, the output folder, the last Experience. Without
    an extension it runs what was loaded last."""
    numbers = itertools.count()
    data = write_data(tmp_path)

    def run(*extensions: str, by=None, **flags):
        flags = SMALL | {"dataset_name": data, "output_dir": str(tmp_path / f"run{next(numbers)}")} | flags
        if by:
            flags |= {"reward_fns": (f"{__file__}:{by}",), "reward_model_path": None}
        if extensions:
            load(*extensions)
        improve, seen = rloo.improve, []
        rloo.improve = lambda *inputs: [improve(*inputs), seen.append(inputs[4])][0]
        rloo.main(rloo.Args(**flags))
        rloo.improve = improve
        return read(flags["output_dir"]), Path(flags["output_dir"]), seen[-1]

    return run


def read(folder, name="metrics") -> list[dict]:
    return [json.loads(line) for line in Path(folder, f"{name}.jsonl").read_text().splitlines()]


def without_times(metrics: list[dict]) -> list[dict]:
    return [{name: x for name, x in row.items() if "time/" not in name and name != "eps"} for row in metrics]


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

NOT_RUN = {"fsdp", "own_loop", "text_reward", "vllm_rollout"}  # these have tests of their own


@pytest.mark.parametrize("command", sorted(x for name in FILES.keys() - NOT_RUN for x in COMMANDS[name]))
def test_each_file_runs_with_its_commands(command, tmp_path, monkeypatch):
    """What a reader does, but only one small update, on few rows."""
    words = shlex.split(command.replace("FLAGS OF rloo.py", "").replace("file.py:function", f"{__file__}:seven"))
    fewer = {"total_episodes": 1, "num_eval_prompts": 0, "output_dir": tmp_path / "out", "response_length": 8}
    fewer |= {"per_device_train_batch_size": 8, "device": "cpu"}
    if "--dataset_name" in words:
        fewer |= {"dataset_train_split": "validation"}
    else:
        fewer |= {"dataset_name": write_data(tmp_path), "sft_model_path": MINI / "sft"}
        fewer |= {"reward_model_path": MINI / "reward"}
    load("own_loop")  # which replaces nothing
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [*words[1:], *(str(x) for name in fewer for x in (f"--{name}", fewer[name]))])
    runpy.run_path(words[1], run_name="__main__")
    (metrics,) = read(tmp_path / "out")
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["grad_norm"] > 0 or "maxrl" in command  # which may find no right answer
    args = json.loads((tmp_path / "out/args.json").read_text())
    for flag, value in re.findall(r"--(\w+) ([\d.]+|[a-z]+)(?= |$)", command):
        assert str(args[flag]) == value or float(args[flag]) == float(value)


@pytest.mark.parametrize("name", [name for name, text in FILES.items() if "    rloo.command_line()" in text])
def test_a_file_changes_what_its_docstring_and_the_page_say(name):
    docstring = FILES[name].split('"""')[1]
    replaced, extended = (
        re.findall(r"`(\w+)`", "".join(re.findall(rf"{x} ([^.]*)\.", docstring))) for x in ("Replaces", "Extends")
    )
    load(name)
    if "advantage" in replaced:  # these files choose it by a flag
        rloo.resolve_args(rloo.Args(device="cpu"))
    temporary = {"rollout"} if name == "correction" else set()
    changed = {x for x in vars(rloo) if vars(rloo)[x] is not ORIGINAL.get(x)}
    assert changed == {*replaced, *extended} - temporary and changed
    row = re.search(rf"(?m)^\| \[{name}.py\]\({name}.py\) \|([^|]*)\|", PAGE)
    assert re.findall(r"`(\w+)`", row[1]) == replaced


def test_the_page_lists_every_file_and_each_begins_with_a_command():
    assert set(re.findall(r"(?m)^\| \[(\w+)\.py\]\(\1\.py\) \|", PAGE)) == FILES.keys() and all(COMMANDS.values())


def test_every_function_of_the_page_s_table_is_called_if_it_is_replaced(run, tmp_path):
    """One run and its continuation, with all of them replaced by what notes the call."""
    table = PAGE.partition("| to change | replace |")[2].partition("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    assert len(names) == len(set(names)) >= 20
    called = set()

    def noting(name, original):
        def noted(*inputs, **options):
            called.add(name)
            return original(*inputs, **options)

        return noted

    for name in names:
        setattr(rloo, name, noting(name, getattr(rloo, name)))
    flags = {"save_steps": 1, "output_dir": str(tmp_path / "out")}
    run(**flags, total_episodes=16)
    run(**flags, total_episodes=24, resume=True)
    assert called == {*names} and len(read(tmp_path / "out")) == 3


def printed(word: str, **names):
    """Runs the block of the page with `word` in it, but for its last line, where these names are known."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if word in block]
    assert code.endswith("rloo.command_line()\n")
    load("own_loop")
    exec(code.removesuffix("rloo.command_line()\n"), {"__name__": "mine"} | names)


def test_code_that_the_page_prints(run):
    printed("group_mean")
    assert rloo.advantage(torch.tensor([[[1.0]], [[0.0]], [[0.0]], [[0.0]]])).flatten().tolist() == [0.75] + [-0.25] * 3
    assert run()[0][0]["grad_norm"] > 0
    printed("from benchmark.extensions import")
    (metrics,), output, experience = run(lora_rank=2)
    assert metrics["grad_norm"] > 0 and hasattr(experience, "returns") and (output / "adapter").is_dir()
    printed("rewards_of_tokens", rewards_of_tokens=lambda batch: batch.response_mask.float())
    *_, experience = run(kl_coef=0.0, token_level_kl=True)
    to_go = experience.batch.response_mask.flip(-1).cumsum(-1).flip(-1)  # each token gets 1
    expected = rloo.advantage(experience.scores[..., None] + to_go) * experience.batch.policy_mask
    assert torch.allclose(experience.advantages, expected, atol=1e-5)


PAIRS = ["lora grpo entropy", "correction lora", "lora correction", "grpo correction", "correction grpo"]
PAIRS += ["truncate value", "lora truncate", "value correction", "correction value", "lora value"]
PAIRS += ["turns value", "grpo turns", "lora turns", "advantages correction"]


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_that_the_page_allows_train(pair, run):
    """One update with two completions of unequal score, where each file leaves its trace."""
    flags = {"entropy": {"entropy_coef": 0.5}, "truncate": {"top_k": 5}, "value": {"value_cliprange": 0.1}}
    flags["turns"] = {"tool": f"{__file__}:seven", "tool_mark": " the", "response_length": 24}
    flags = {name: x for file in pair.split() for name, x in flags.get(file, {}).items()}
    (metrics,), output, experience = run(*pair.split(), **flags)
    assert metrics["grad_norm"] > 0 and all(math.isfinite(x) for x in metrics.values())
    traces = {
        "lora": (output / "adapter").is_dir(),
        "correction": abs(metrics.get("val/rollout_weight", 9) - 1) < 1e-3,
        "value": hasattr(experience, "returns") and experience.advantages.shape[-1] > 1,
        "turns": metrics.get("tool/tokens", 0) > 0,
        "truncate": metrics["objective/entropy"] / metrics["completions/mean_length"] < math.log(5),
        "grpo": "completions/in_loss" in metrics,
        "entropy": True,  # see its own test
        "advantages": torch.allclose(experience.advantages, experience.rewards.float(), rtol=1e-3),
    }
    assert all(traces[name] for name in pair.split()), traces


# ---- grpo.py and advantages.py ---------------------------------------------------------------------------------------


def experience_of(mask, ended, **fields):
    """An Experience that has these fields only."""
    others = dict.fromkeys(rloo.Experience.__dataclass_fields__)
    return rloo.Experience(**others | {"batch": rloo.Batch([], *[None] * 3, mask, mask, ended)} | fields)


@pytest.mark.parametrize("ratio", ["token", "completion", "cispo"])
@pytest.mark.parametrize("baseline", ["grpo", "group", "update", "rloo"])
@pytest.mark.parametrize("loss_mean", ["tokens-then-completions", "tokens", "completions"])
def test_grpo_equals_the_loops(ratio, baseline, loss_mean):
    """One completion has no score, another is truncated, and a group has equal scores: they leave the loss, its KL and
    its lengths."""
    load("grpo")
    torch.manual_seed(0)
    mask = torch.arange(5) < torch.randint(1, 6, (3, 4, 1))
    new, old, ref = torch.randn(3, 3, 4, 5) * 0.4
    scores, ended = torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool)
    scores[0, 1], ended[2, 2], scores[:, 3] = math.nan, False, 0.5
    flags = {"baseline": baseline, "loss_mean": loss_mean, "ratio": ratio, "kl_coef": 0.3, "cliprange_high": 0.25}
    args = rloo.resolve_args(rloo.Args(**flags, mask_truncated_completions=True, drop_equal_groups=True, device="cpu"))
    rewards = rloo.rewards_of(args, scores, ended, torch.rand(3, 4, 5))  # the KL is not in the reward
    advantages = rloo.advantages_for_loss(args, rloo.advantage(rewards), ended, mask)
    experience = experience_of(mask, ended, scores=scores, ref_logprobs=ref, rewards=rewards, advantages=advantages)
    prompts = torch.tensor([2, 0, 1])
    index = slice(0, 3), prompts
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    losses, log_ratio, clipped = rloo.completion_loss(args, experience, index, ours[index], old[index], None)

    out = [(0, 1), (2, 2), (0, 3), (1, 3), (2, 3)]
    counted = sum(int(mask[j, b].sum()) for j, b in itertools.product(range(3), range(4)) if (j, b) not in out)
    expected = torch.zeros(3, 4)
    for j, b in itertools.product(range(3), prompts.tolist()):
        n = int(mask[j, b].sum())
        if (j, b) in out:
            assert not advantages[j, b].any()
            continue
        group = [x for x in scores[:, b].tolist() if not math.isnan(x)]
        others = [scores[i, b].item() for i in range(3) if i != j and not scores[i, b].isnan()]
        every = [x for x in scores.flatten().tolist() if not math.isnan(x)]
        a = scores[j, b].item() - mean({"update": every, "rloo": others}.get(baseline, group))
        a /= stdev(group) + 1e-4 if baseline == "grpo" else 1
        assert advantages[j, b].tolist() == pytest.approx([a] * n + [0.0] * (5 - n), abs=1e-5)
        apart = (theirs - old)[j, b, :n]
        for t in range(n):
            rho = (apart.mean() if ratio == "completion" else apart[t]).exp()
            loss = torch.max(-a * rho, -a * rho.clamp(0.8, 1.25))
            if ratio == "cispo":
                loss = -rho.detach().clamp(max=1.25) * a * theirs[j, b, t]
            to_ref = ref[j, b, t] - theirs[j, b, t]
            expected[j, b] += loss + 0.3 * (to_ref.exp() - 1 - to_ref)
        expected[j, b] *= {"tokens-then-completions": 1 / n, "tokens": 12 / counted, "completions": 1}[loss_mean]
    assert torch.allclose(losses, expected[index], atol=1e-5)
    losses.sum().backward()
    expected.sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
    assert len(log_ratio) == len(clipped) == counted and not log_ratio.requires_grad


def test_the_unbiased_k3_of_grpo_has_the_gradient_of_the_kl():
    """Over all tokens of a vocabulary, weighted by their probability; k3 alone has another."""
    load("grpo")
    torch.manual_seed(0)
    logits, ref = torch.randn(7).requires_grad_(), torch.randn(7, 1, 1).log_softmax(0)
    new = logits.log_softmax(-1).view(7, 1, 1)  # seven completions of a token
    (exact,) = torch.autograd.grad((new.exp() * (new - ref)).sum(), logits, retain_graph=True)
    yes, zeros = torch.ones(7, 1, 1, dtype=torch.bool), torch.zeros(7, 1, 1)
    experience = experience_of(yes, yes[..., 0], ref_logprobs=ref, advantages=zeros, rewards=zeros)
    for unbiased in (True, False):
        args = rloo.Args(kl_coef=1.0, cliprange_high=0.2, unbiased_kl=unbiased)
        losses, *_ = rloo.completion_loss(args, experience, (slice(0, 7), torch.tensor([0])), new, new.detach(), None)
        assert torch.allclose(losses, ((ref - new).exp() - 1 + new - ref)[..., 0], atol=1e-6)
        (slope,) = torch.autograd.grad((new.detach()[..., 0].exp() * losses).sum(), logits, retain_graph=True)
        assert ((slope - exact).abs().max() < 1e-6) == unbiased


def test_groups_of_equal_scores_leave_the_loss_of_a_run(run):
    """The mean is then over the tokens of the others, which alone have a gradient. Micro-batches of half a group."""
    flags = {"by": "length_of_some", "kl_coef": 0.0, "max_grad_norm": 0.0, "loss_mean": "tokens", "seed": 3}
    (plain,), *_ = run("grpo", **flags)
    (dropped,), *_ = run("grpo", **flags, drop_equal_groups=True)
    half = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    (again,), *_ = run("grpo", **flags, **half, drop_equal_groups=True)
    assert 0 < dropped["completions/in_loss"] < 1 == plain["completions/in_loss"]
    assert dropped["grad_norm"] > plain["grad_norm"] and again["grad_norm"] == pytest.approx(dropped["grad_norm"], 1e-5)
    (none,), *_ = run("grpo", **flags | {"by": "constant"}, drop_equal_groups=True)
    assert none["completions/in_loss"] == none["grad_norm"] == none["loss/policy_avg"] == 0
    with pytest.raises(rloo.InputError, match="--token_level_kl: grpo.py has its KL in the loss"):
        run("grpo", token_level_kl=True)


def test_advantages_equal_the_loops():
    """Prompts with all answers wrong, all right, and between; one completion has no score."""
    advantages = load("advantages")
    torch.manual_seed(0)
    rewards, scores = (torch.rand(6, 7, 1) < torch.linspace(0, 1, 7)[:, None]).float(), torch.randn(6, 7, 1)
    rewards[0, 3] = scores[0, 3] = math.nan
    share, best = advantages.maxrl(rewards), advantages.raft(scores)
    assert share[0, 3].isnan() and best[0, 3].isnan()
    for j, b in set(itertools.product(range(6), range(7))) - {(0, 3)}:
        scored = [x for x in rewards[:, b, 0].tolist() if not math.isnan(x)]
        expected = (rewards[j, b].item() - mean(scored)) / mean(scored) if any(scored) else 0.0
        assert share[j, b].item() == pytest.approx(expected, abs=1e-6)
        assert best[j, b].item() == (scores[j, b].item() == max(x for x in scores[:, b, 0].tolist() if x == x))
    with pytest.raises(rloo.InputError, match="rewards must be 0 or 1"):
        advantages.maxrl(torch.tensor([[[0.5]], [[1.0]]]))
    assert torch.equal(advantages.none(scores).nan_to_num(9), scores.nan_to_num(9))


# ---- entropy.py, correction.py and truncate.py -----------------------------------------------------------------------


def test_the_entropy_bonus_has_the_gradient_of_the_entropy_and_raises_it(run):
    """With equal scores and β = 0 there is no other gradient."""
    entropy = load("entropy")
    logits, tokens = torch.randn(7, 9).requires_grad_(), torch.arange(7)
    rloo.final_logits = lambda model, hidden: hidden
    logprobs, entropies = entropy.block_logprobs(None, logits, tokens, 0.5)
    table = (logits / 0.5).log_softmax(-1)
    loops = -sum(table[n, v].exp() * table[n, v] for n, v in itertools.product(range(7), range(9)))
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (entropies.sum(), loops)]
    assert torch.allclose(*gradients, atol=1e-6) and logprobs.tolist() == table[tokens, tokens].tolist()
    (first, *_, last), *_ = run("entropy", by="constant", kl_coef=0.0, entropy_coef=0.03, total_episodes=32)
    assert first["policy/entropy_avg"] + 0.01 < last["policy/entropy_avg"]
    expected = -0.03 * first["completions/mean_length"] * first["policy/entropy_avg"]
    assert first["loss/policy_avg"] == pytest.approx(expected, rel=1e-4)
    (metrics,), *_ = run("entropy", by="constant", kl_coef=0.0, response_length=2, mask_truncated_completions=True)
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
        logs = (old - sampled)[j, b, mask[j, b]].tolist()
        exact = [math.exp(x) for x in (logs if per_token else [sum(logs)])]
        limited = {"truncate": lambda w: min(w, cap), "mask": lambda w: w if 1 / cap <= w <= cap else 0.0}
        assert weight[j, b, : len(exact)].tolist() == pytest.approx([*map(limited[kind], exact)], rel=1e-5)
    # e^100 is no float32, and infinity times 0 would be NaN.
    far = importance_weight(torch.full((2, 1, 1), 100.0), torch.zeros(2, 1, 1), mask[:, :1, :1], kind, cap, False)
    assert (far == (cap if kind == "truncate" else 0.0)).all()


@pytest.mark.parametrize("kind", ["completion", "token", "grpo"])
def test_a_mismatch_is_corrected_and_logged(kind, run):
    """A sampler whose log-probs are off by 0.1 to 0.3, which rloo.py alone refuses. Each ratio has a weight."""
    noise = torch.rand(2, 4, 20, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.1
    off = 0

    def noisy(*inputs):
        batch, logprobs = ORIGINAL["rollout"](*inputs)
        return batch, (logprobs - off * noise) * batch.response_mask

    cap = 20.0 if kind == "completion" else 1.25
    flags = {"kl_coef": 0.3, "response_length": 20, "token_level_kl": kind == "token", "rollout_correction": "mask"}
    load(*(["grpo", "correction"] if kind == "grpo" else ["correction"]))
    rloo.rollout = noisy
    ((exact,), _, without_noise), off = run(**flags, rollout_correction_cap=cap), 1
    (metrics,), _, experience = run(**flags, rollout_correction_cap=cap)
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


PROMPTS = [[5, 9, 14], [20, 31, 44, 52, 60], [7, 8]]


def models_of(**flags):
    """Flags and models of a run of mini TL;DR, with the extensions that are loaded."""
    common = {"sft_model_path": f"{MINI}/sft", "device": "cpu", "dtype": "float32", "response_length": 12}
    args = rloo.resolve_args(rloo.Args(**common | {"temperature": 0.8} | flags))
    return args, *rloo.load_models(args, None)


def kept_by_hand(logits, top_k, top_p) -> dict[int, float]:
    """Token -> log-prob: the most likely ones, until there are top_k or those of top_k have a probability of top_p."""
    order = logits.argsort(descending=True).tolist()[: top_k or None]
    probs = logits.double()[order].softmax(0).tolist()
    count = next(n for n in range(1, len(order) + 1) if sum(probs[:n]) >= top_p or n == len(order))
    return {token: math.log(p / sum(probs[:count])) for token, p in zip(order[:count], probs, strict=False)}


@pytest.mark.parametrize("layout", ["group", "plain"])
@pytest.mark.parametrize("limits", [{"top_p": 0.7}, {"top_p": 0.9, "top_k": 20}])
def test_log_probs_of_the_sampler_and_the_policy_are_those_of_the_kept_tokens(layout, limits):
    truncate = load("truncate")
    args, _, policy, reference = models_of(layout=layout, **limits)
    torch.manual_seed(1)
    batch, sampled = rloo.rollout(args, policy, [{"prompt_ids": ids} for ids in PROMPTS], 4, args.temperature, [0])
    trained, _ = rloo.completion_logprobs(policy, batch, args.temperature)
    full = rloo.chunked_logprobs(reference, batch, args.temperature, 64)
    number = 0
    for row, ids in enumerate(batch.completion_ids()):
        j, b = divmod(row, len(PROMPTS))
        logits = policy(torch.tensor([PROMPTS[b] + ids])).logits[0, len(PROMPTS[b]) - 1 :].detach() / 0.8
        for t, token in enumerate(ids):
            kept = kept_by_hand(logits[t], args.top_k, args.top_p)
            expected = [kept[token], kept[token], logits[t].log_softmax(-1)[token].item()]
            assert [x[j, b, t].item() for x in (trained, sampled, full)] == pytest.approx(expected, abs=1e-4)
            number += len(kept) > 1
    assert number > 30
    ids = torch.tensor([[[3]], [[4]]])  # not both are the most likely one, but a token that was sampled stays
    rloo.resolve_args(rloo.Args(top_k=1, device="cpu"))
    logprobs, _ = rloo.completion_logprobs(policy, rloo.make_batch([{"prompt_ids": PROMPTS[0]}], ids, [0]), 1.0)
    assert logprobs.isfinite().all() and (logprobs < 0).any() and truncate.limits["top_k"] == 1


# ---- value.py --------------------------------------------------------------------------------------------------------


def test_gae_equals_a_loop_over_the_policys_tokens():
    value = load("value")
    torch.manual_seed(1)
    rewards, values = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    mask = torch.rand(2, 3, 7) < 0.7
    advantages = value.gae(rewards, values, mask, 0.9, 0.8)
    for j, b in itertools.product(range(2), range(3)):
        own = mask[j, b].nonzero().flatten().tolist()
        r, V = rewards[j, b, own].tolist(), [*values[j, b, own].tolist(), 0.0]
        delta = [r[i] + 0.9 * V[i + 1] - V[i] for i in range(len(own))]
        A = [sum((0.9 * 0.8) ** (i - t) * delta[i] for i in range(t, len(own))) for t in range(len(own))]
        assert advantages[j, b, own].tolist() == pytest.approx(A, abs=1e-5)
        assert not advantages[j, b][~mask[j, b]].any()


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder, "model.safetensors"))


def test_with_a_value_of_0_an_update_is_that_of_reinforce_without_a_baseline(run):
    """... with reward-to-go, for γ = λ = 1. Some completions have no score."""
    flags = {"by": "some_none", "kl_coef": 0.1, "normalize_advantage": True, "adam_eps": 1e-5}
    _, ours, _ = run("value", lam=1.0, **flags)
    _, plain, experience = run("advantages", token_level_kl=True, **flags)
    before, ours, plain = (
        torch.cat([x.flatten() for x in weights_of(y).values()]) for y in (MINI / "sft", ours, plain)
    )
    assert (ours - plain).norm() < 1e-3 * (plain - before).norm() and experience.scores.isnan().any()


def test_the_critics_loss_and_steps():
    """Advantages are GAE of the critic's values; its loss is the clipped square, and its steps have a rate and a norm
    of their own."""
    value = load("value")
    flags = {"value_model_path": f"{MINI}/reward", "value_learning_rate": 0.25, "learning_rate": 1e-3, "kl_coef": 0.3}
    flags |= {"max_grad_norm": 1e-3, "gamma": 0.9, "lam": 0.7, "value_cliprange": 0.05}
    args, master, policy, reference = models_of(**flags, rloo_k=2, per_device_train_batch_size=4)
    optimizer = rloo.make_optimizer(args, master)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.25]
    examples = [{"prompt_ids": ids} for ids in PROMPTS[:2]]
    scores = {"sum": lambda batch: batch.responses.remainder(7).where(batch.response_mask, 0).sum(-1).float()}
    experience = rloo.collect(args, policy, reference, scores, examples, list(range(0, 500, 8)))
    batch, V = experience.batch, experience.values
    for row, ids in enumerate(batch.completion_ids()):
        j, b = divmod(row, 2)
        n, prompt = len(ids), PROMPTS[b]
        hidden = value.critic.base_model(torch.tensor([prompt + ids]))[0][0, len(prompt) - 1 : -1]
        assert torch.allclose(V[j, b, :n], value.critic.score(hidden).squeeze(-1), atol=1e-4)
        rewards = -0.3 * experience.kl[j, b, :n]
        rewards[-1] += experience.scores[j, b]
        A = value.gae(rewards, V[j, b, :n], torch.ones(n, dtype=torch.bool), 0.9, 0.7)
        assert torch.allclose(experience.advantages[j, b, :n], A, atol=1e-4)
        assert not experience.advantages[j, b, n:].any()
    value.critic.score.weight.data += (
        0.3 * value.critic.score.weight.std() * torch.randn(value.critic.score.weight.shape)
    )
    index = slice(0, 2), torch.tensor([1, 0])
    zeros = torch.zeros(2, 2, batch.responses.shape[-1])
    losses, *_ = rloo.completion_loss(args, experience, index, zeros, zeros, zeros)
    now, old, returns = (x[index] for x in (value.values_of(batch), V, V + experience.advantages))
    plain, limited = (now - returns) ** 2, (old + (now - old).clamp(-0.05, 0.05) - returns) ** 2
    assert (limited > plain).any() and (limited < plain).any()
    squares = (torch.maximum(plain, limited) * batch.policy_mask[index]).sum(-1)
    assert torch.allclose(losses, squares / 2 - experience.advantages[index].sum(-1), atol=1e-3)
    rloo.improve(args, policy, master, optimizer, experience)
    for model in (master, value.critic):
        moments = [optimizer.state[weight]["exp_avg"] for weight in model.parameters()]
        norm = sum(x.square().sum() for x in moments).sqrt().item()
        assert norm == pytest.approx(0.1 * 1e-3, rel=1e-3)  # the first moment is a tenth of the gradient


def test_one_completion_per_prompt_is_enough_and_a_resumed_run_equals_an_uninterrupted_one(run, tmp_path):
    flags = {"rloo_k": 1, "num_ppo_epochs": 2, "value_model_path": f"{MINI}/reward", "value_learning_rate": 1e-2}
    flags |= {"per_device_train_batch_size": 7, "save_steps": 1, "lr_scheduler_type": "constant"}
    whole, folder, _ = run("value", **flags, total_episodes=14)
    run("value", **flags, total_episodes=7, output_dir=str(tmp_path / "again"))
    resumed, again, _ = run("value", **flags, total_episodes=14, output_dir=str(tmp_path / "again"), resume=True)
    assert without_times(resumed) == without_times(whole) and len(whole) == 2
    files = [folder / "checkpoint-1" / "critic.pt", folder / "critic.pt", again / "critic.pt"]
    begun, ended, resumed = (torch.load(file)["score.weight"] for file in files)
    assert torch.equal(resumed, ended) and not torch.equal(begun, ended)


# ---- lora.py ---------------------------------------------------------------------------------------------------------

SIZE = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZE |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
FAMILIES = {
    "gpt_neox": {},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "llama4_text": {"intermediate_size_mlp": 48, "head_dim": 8},  # its routers are linear layers that return a tuple
    # Its Mamba layers read the weight of dt_proj directly.
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False},
}
TOKENS = torch.tensor([[5, 3, 8, 4, 9, 11]])


def backward(model):
    model(TOKENS).logits.log_softmax(-1)[..., 3].sum().backward()


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_reference_and_merged_copy_are_those_of_the_formula(family, tmp_path):
    """Every linear layer but the head has an adapter, which begins as in PEFT and depends on the seed alone. The
    reference is the base model to the last bit and has its tensors. The merged copy equals the policy, and its gradient
    dW gives dB = s dW Aᵀ and dA = s Bᵀ dW. PEFT reads the adapters and computes the same."""
    lora = load("lora")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZE | FAMILIES[family])).save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False).eval()
    flags = {"sft_model_path": str(tmp_path), "kl_coef": 0.1, "lora_rank": 3, "lora_alpha": 6, "layout": "plain"}
    first, policy, reference = models_of(**flags)[1:]
    other = models_of(**flags, seed=2)[1]
    assert first is policy and torch.equal(policy(TOKENS).logits, base(TOKENS).logits)
    adapted, again = lora.adapted_layers(policy), lora.adapted_layers(models_of(**flags)[1])
    linears = {name for name, module in base.named_modules() if type(module) is torch.nn.Linear}
    assert set(adapted) == {name for name in linears if ".layers." in name and "dt_proj" not in name} < linears
    assert sum(x.requires_grad for x in policy.parameters()) == 2 * len(adapted) >= 16
    for name, linear in adapted.items():
        A, B = linear.lora_A.weight, linear.lora_B.weight
        assert (A.shape, B.shape) == ((3, linear.in_features), (linear.out_features, 3)) and A.dtype == torch.float32
        assert 0.7 < A.abs().max() * linear.in_features**0.5 <= 1 and not B.any()  # uniform within ± 1 / √in
        assert torch.equal(A, again[name].lora_A.weight) and not torch.equal(A, other.get_submodule(name).lora_A.weight)
        torch.nn.init.normal_(B, std=0.1)
    assert torch.equal(reference(TOKENS).logits, base(TOKENS).logits) and not lora.adapted_layers(reference)
    own = dict(policy.named_parameters())
    assert all(x is own[name] for name, x in reference.named_parameters())

    for _ in range(2):  # again and again from W, not from what was merged before
        merged = lora.merged(policy).requires_grad_(True)
    logits = policy(TOKENS).logits
    assert (logits - base(TOKENS).logits).abs().max() > 1e-3 and (merged(TOKENS).logits - logits).abs().max() < 1e-4
    backward(merged)
    backward(policy)
    for name, linear in adapted.items():
        A, B, s = linear.lora_A.weight, linear.lora_B.weight, linear.lora_scale
        dW = merged.get_submodule(name).weight.grad
        assert torch.allclose(B.grad, s * dW @ A.T, rtol=1e-3, atol=1e-4) and B.grad.any() and s == 2
        assert torch.allclose(A.grad, s * B.T @ dW, rtol=1e-3, atol=1e-4) and A.grad.any()
    if family in ("gpt_neox", "mixtral", "qwen3"):
        peft = pytest.importorskip("peft", reason="needs peft, an optional package: pip install peft")
        rloo.save_policy(tmp_path / "merged", policy, AutoTokenizer.from_pretrained(MINI / "sft"))
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "merged" / "adapter", is_trainable=True).eval()
        assert (theirs(TOKENS).logits - logits).abs().max() < 1e-5
        backward(theirs)
        slopes = {name.replace(".default", ""): x.grad for name, x in theirs.named_parameters() if x.grad is not None}
        for name, linear in adapted.items():
            for x in ("lora_A", "lora_B"):
                ours = linear.get_submodule(x).weight.grad
                assert torch.allclose(slopes[f"base_model.model.{name}.{x}.weight"], ours, rtol=1e-3, atol=1e-4)


def test_the_learning_rate_of_adapters_is_ten_times_that_of_all_weights_unless_given():
    load("lora")
    assert rloo.resolve_args(rloo.Args(device="cpu")).learning_rate == pytest.approx(2.5e-3)
    assert rloo.resolve_args(rloo.Args(device="cpu", learning_rate=3e-4)).learning_rate == 3e-4


def test_what_a_resumed_run_in_bfloat16_leaves_is_merged_at_their_own_update(run, tmp_path):
    """Checkpoints and the final folder hold merged weights, equal to those of an uninterrupted run to the last bit. A
    run of another kind is refused."""
    flags = {"dtype": "bfloat16", "save_steps": 1, "weight_decay": 0.1, "learning_rate": 1e-2, "num_mini_batches": 2}
    flags |= {"per_device_train_batch_size": 4, "lr_scheduler_type": "constant"}
    adapters, again = {"lora_rank": 3, "lora_alpha": 6}, {"output_dir": str(tmp_path / "again")}
    metrics, output, _ = run("lora", **flags, **adapters, total_episodes=16)
    run("lora", **flags, **adapters, **again, total_episodes=8)
    resumed, *_ = run("lora", **flags, **adapters, **again, total_episodes=16, resume=True)
    assert without_times(resumed) == without_times(metrics) and len(metrics) == 2
    for folder, file in itertools.product(
        (output / "checkpoint-2", tmp_path / "again"), ("model.safetensors", "adapter/adapter_model.safetensors")
    ):
        assert (folder / file).read_bytes() == (output / file).read_bytes()
    config = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]
    assert config["r"] == 3 and config["lora_alpha"] == 6 and config["base_model_name_or_path"] == f"{MINI}/sft"
    base, saved = weights_of(MINI / "sft"), load_file(output / "adapter" / "adapter_model.safetensors")
    for name, weight in weights_of(output).items():
        A, B = (saved.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight") for x in "AB")
        expected = base[name].bfloat16()
        if B is not None:
            expected = (expected.float() + 2 * (B @ A)).bfloat16()
            assert not torch.equal(expected, base[name].bfloat16())
        assert torch.equal(weight, expected), name
    load("own_loop")  # which replaces nothing
    with pytest.raises(rloo.InputError, match="optimizer.pt: .*other weights"):
        run(**flags, **again, total_episodes=24, resume=True)


# ---- turns.py --------------------------------------------------------------------------------------------------------

STOP = 2  # <|im_end|> of mini GSM8K's policy


def exchange(writes, answer, prompts=("Tom",), k=1, **flags):
    """Returns batch, log-probs, their texts, and what the tool was asked. The policy writes writes[text][j] behind a
    text as lane j; the log-prob of its token number n of a turn is -n."""
    asked = []

    def one_turn(args, model, examples, k, temperature, stop_ids):
        rows = []
        for j, example in itertools.product(range(k), examples):
            ids = tokenizer(writes[tokenizer.decode(example["prompt_ids"])][j])["input_ids"]
            rows.append((ids + [0] * args.response_length)[: args.response_length])
        batch = rloo.make_batch(examples, torch.tensor(rows).unflatten(0, (k, -1)), stop_ids)
        logprobs = -torch.arange(1.0, args.response_length + 1).expand_as(batch.responses)
        return batch, logprobs.where(batch.policy_mask, 0.0)

    turns = load("turns")
    turns.found.rollout = one_turn
    flags = {"tool": f"{__file__}:seven", "tool_mark": " =", "kl_coef": 0.0} | flags
    args, model, *_ = models_of(sft_model_path=f"{GSM8K}/sft", **flags)
    _, mark, tokenizer = turns.tool
    turns.tool = lambda text: [asked.append(text), answer(text)][1], mark, tokenizer
    examples = [{"prompt_ids": tokenizer(text)["input_ids"]} for text in prompts]
    batch, logprobs = rloo.rollout(args, model, examples, k, 0.7, [STOP])
    return batch, logprobs, [tokenizer.decode(ids) for ids in batch.completion_ids()], asked


def test_answers_are_put_behind_marks_and_are_not_the_policys():
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
    "in the last turn the tool is not asked": (
        {"Tom": ["1<|im_end|>"]}, eight, {"tool_mark": "<|im_end|>", "max_turns": 1}, "1<|im_end|>", True, 0),
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
def test_rules_of_turns(rule):
    writes, answer, flags, text, ended, number = RULES[rule]
    batch, _, texts, asked = exchange(writes, answer, **flags)
    assert texts == [text] and len(asked) == number and batch.ended.item() == ended


def test_a_run_with_turns_has_the_sampler_of_its_policy_and_learns_from_its_tokens_alone(run):
    """Log-probs of the sampler, over prompts with answers in them, are those of training: val/rollout_kl is 0."""
    flags = {"dataset_name": str(GSM8K), "dataset_train_split": "validation", "sft_model_path": f"{GSM8K}/sft"}
    flags |= {"by": "remainder", "tool": f"{__file__}:seven", "tool_mark": " =", "kl_coef": 0.1}
    (metrics,), _, experience = run("turns", **flags, response_length=24)
    assert abs(metrics["val/rollout_kl"]) < 1e-5 and metrics["grad_norm"] > 0.1
    assert metrics["tool/answers"] > 0.5 and metrics["tool/tokens"] > metrics["tool/answers"]
    batch = experience.batch
    assert (batch.response_mask & ~batch.policy_mask).sum() == metrics["tool/tokens"] * 8
    with pytest.raises(rloo.InputError, match="positions; the longest prompt and completion need"):
        run(**flags, response_length=250)  # a turn may continue for 250 more
    with pytest.raises(rloo.InputError, match="must be one token, is 2"):
        run(**flags | {"tool_mark": " = ="})


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
            last = 9 if self.weights == 7 else 0  # a token that is no stop token
            ids = [3 + sum(prompt["prompt_token_ids"]) % 800, 10 * self.weights, 3 + sampling.seed % 800, last]
            steps = [{token: SimpleNamespace(logprob=-1.0 - i)} for i, token in enumerate(ids)]
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=steps)]))
        return found
'''


def test_vllm_samples_for_updates_and_evaluations_and_gets_new_weights_each_time(tmp_path, run, monkeypatch):
    """As under torchrun, and with the correction, which allows log-probs that are not the policy's, and turns. The
    seventh rollout neither ends nor is full."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", "1")
    vllm_rollout = load("vllm_rollout")
    rollout, seen = rloo.rollout, []
    rloo.rollout = lambda *inputs: [seen.append((inputs[4], *rollout(*inputs))), seen[-1][1:]][1]
    importlib.import_module("benchmark.extensions.correction")
    importlib.import_module("benchmark.extensions.turns")
    flags = {"response_length": 24, "max_prompt_length": 99, "num_sample_generations": 0}
    flags |= {"tool": f"{__file__}:seven", "tool_mark": " the"}
    metrics, *_ = run(**flags, total_episodes=16, num_eval_prompts=2)
    assert [temperature for temperature, *_ in seen] == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    for weights, (_, batch, logprobs) in enumerate(seen, 1):
        k, B, T = batch.responses.shape
        first = [3 + sum(example["prompt_ids"]) % 800 for example in batch.examples]
        assert batch.responses[..., 0].tolist() == [first] * k and len(set(first)) > 1
        assert (batch.responses[..., 1] == 10 * weights).all() and batch.ended.all() and T == 24
        assert logprobs.tolist() == [[[-1.0, -2.0, -3.0, -4.0] + [0.0] * 20] * B] * k
    seeds = [batch.responses[..., 2].flatten().tolist() for _, batch, _ in seen]
    assert len({*seeds[2], *seeds[3]}) > 8 + 4 and seeds[0] == seeds[4]  # evaluations have the same ones
    assert all(update["val/rollout_kl"] != 0 and update["grad_norm"] > 0 for update in metrics)
    with pytest.raises(
        rloo.InputError, match="vLLM: a completion must have 24 tokens or end with its first stop token"
    ):
        run(**flags)
    vllm_rollout.pipe.close()  # which ends its process


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
    head = {"lm_head.weight"} if kind == "tied head" else set()
    assert weights_of(tmp_path).keys() == weights_of(tmp_path / "whole").keys() | head
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
def test_scores_of_texts_are_those_of_each_text_alone(chat, template, dtype, tmp_path, monkeypatch, run):
    """The longest text is cut from the left: the model has 24 positions. A run trains by them."""
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
    if not chat:
        (metrics,), *_ = run(reward_model_path=None, reward_fns=(f"{HERE}/text_reward.py:text_reward",))
        assert metrics["objective/scores_std"] > 0 and metrics["grad_norm"] > 0


def test_the_loop_of_ones_own_learns_and_log_probs_of_given_completions_are_the_model_s():
    policy, experience, scores, batch, logprobs = load("own_loop").main()
    assert len(scores) == 3 and all(-32 <= x <= -1 for x in scores)
    tokenizer = AutoTokenizer.from_pretrained(MINI / "sft")
    assert rloo.completion_texts(batch, tokenizer) == [" cat trouble", " keys gone"] and batch.ended.all()
    for example, ids, sum_of in zip(batch.examples, batch.completion_ids(), logprobs[0].sum(-1).tolist(), strict=True):
        prompt = example["prompt_ids"]
        table = (policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        assert sum(table[t, token].item() for t, token in enumerate(ids)) == pytest.approx(sum_of, rel=1e-3)
    with torch.no_grad():
        learned = rloo.completion_logprobs(policy, experience.batch, 0.7)[0] - experience.sampler_logprobs
    assert (learned * experience.advantages).sum() > 0.1  # the last update raises what was better than its siblings
