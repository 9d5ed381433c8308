"""Tests of this folder: each file runs with its commands and computes the published formula, and the page is right.

python -m pytest -q benchmark/extensions
"""

import functools
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
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rloo
import rloo_test
from rloo_test import (
    flag_of,
    random_batch,
    read_metrics,
    run_flags,
    save,
    spy,
    tiny_model,
    tiny_tokenizer,
    without_times,
)

HERE = Path(__file__).resolve().parent
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
    last = None
    for name in names:
        last = importlib.import_module(f"benchmark.extensions.{name}")
    return last


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
    """run(extension, ..., flag=value, ...) -> metrics of each update, the output folder, the last Experience. Without
    an extension it runs what was loaded last."""
    numbers = itertools.count()

    def run(*extensions: str, **flags):
        if extensions:
            load(*extensions)
        output = Path(flags.pop("output_dir", tmp_path / f"run{next(numbers)}"))
        updates = spy(monkeypatch, "improve")
        rloo.main(rloo.Args(**run_flags(tiny, output, **flags)))
        return read_metrics(output), output, updates[-1][0][3]

    return run


def models_of(tiny, **flags):
    """Flags and models of a run, with the extensions that are loaded."""
    common = {"sft_model_path": str(tiny / "sft"), "device": "cpu", "dtype": "float32", "response_length": 12}
    args = rloo.resolve_args(rloo.Args(**common | {"temperature": 0.8} | flags))
    return args, *rloo.load_models(args, None)


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder, "model.safetensors"))


def tool(text):
    return "g"


# ---- Files and page --------------------------------------------------------------------------------------------------

NOT_RUN = {"fsdp", "own_loop", "text_reward", "vllm_rollout"}  # these have tests of their own


@pytest.mark.parametrize("command", sorted(x for name in FILES.keys() - NOT_RUN for x in COMMANDS[name]))
def test_each_file_runs_with_its_commands(command, tiny, tmp_path, monkeypatch):
    """What a reader does, but one update of a tiny model."""
    command = command.replace("FLAGS OF rloo.py", "").replace("file.py:function", f"{__file__}:tool")
    _, script, *words = shlex.split(command)
    flags = run_flags(tiny, tmp_path / "out", total_episodes=1)
    if "--dataset_name" in words:
        flags = {"output_dir": tmp_path / "out", "total_episodes": 1, "response_length": 8, "num_eval_prompts": 0}
        flags |= {"dataset_train_split": "validation", "device": "cpu"}
    load()
    monkeypatch.chdir(HERE.parents[1])
    monkeypatch.setattr(sys, "argv", [script, *(str(x) for name in flags for x in (f"--{name}", flags[name])), *words])
    runpy.run_path(script, run_name="__main__")
    (metrics,) = read_metrics(tmp_path / "out")
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["grad_norm"] > 0 or "maxrl" in command  # which may find no right answer


def test_the_page_lists_every_file_with_what_it_replaces():
    """A file wraps all else that it changes, and extends `Args`."""
    rows = dict(re.findall(r"(?m)^\| \[(\w+)\.py\]\(\1\.py\) \|([^|]*)\|", PAGE))
    assert rows.keys() == FILES.keys() and all(COMMANDS.values())
    for name in FILES.keys() - {"own_loop", "text_reward"}:
        load(name)
        changed = {x for x in ORIGINAL if vars(rloo)[x] is not ORIGINAL[x]}
        replaced = {x for x in changed - {"Args"} if not isinstance(vars(rloo)[x], functools.partial)}
        assert changed and {*re.findall(r"`(\w+)`", rows[name])} == replaced, name


def not_together() -> list[tuple[str, str]]:
    """Returns pairs of files of which the page says that they do not work together."""
    rows = re.findall(r"(?m)^\| \[(\w+)\.py\].*\|([^|]*)\|$", PAGE)
    return [(name, other) for name, others in rows for other in re.findall(r"(\w+)\.py", others)]


@pytest.mark.parametrize("names", [*not_together(), ("turns", "vllm_rollout"), ("entropy", "grpo")], ids=" ".join)
def test_a_file_that_would_drop_another_ones_function_is_refused(names):
    with pytest.raises(rloo.InputError, match="two files replace"):
        load(*names)


def test_every_function_of_the_page_s_table_is_called_if_it_is_replaced(run, tmp_path, monkeypatch):
    """One run and its continuation, with all of them replaced by what notes the call."""
    table = PAGE.partition("| to change | replace |")[2].partition("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    assert len(names) == len(set(names)) >= 20
    load()
    calls = {name: spy(monkeypatch, name) for name in names}
    flags = {"save_steps": 1, "output_dir": tmp_path / "out"}
    run(**flags)
    run(**flags, total_episodes=32, resume=True)
    assert [name for name in names if not calls[name]] == []


def printed(word: str, **names):
    """Runs the block of this page or README with `word` in it, without its last line; these names are known there."""
    pages = PAGE + HERE.parents[1].joinpath("README.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", pages, re.DOTALL) if word in block]
    assert code.endswith("rloo.command_line()\n")
    load()
    exec(code.removesuffix("rloo.command_line()\n"), {"__name__": "mine"} | names)


def test_code_that_the_pages_print(run):
    printed("nanmean")
    assert rloo.advantage(torch.tensor([[3.0, 1.0], [2.0, 6.0]])).tolist() == [[0.5, -2.5], [-0.5, 2.5]]
    assert run()[0][0]["grad_norm"] > 0
    printed("from benchmark.extensions import")
    (metrics,), output, experience = run(lora_rank=2)
    assert metrics["grad_norm"] > 0 and hasattr(experience, "returns") and (output / "adapter").is_dir()
    printed("rewards_of_tokens", rewards_of_tokens=lambda batch: batch.response_mask.float())
    *_, experience = run(kl_coef=0.0, token_level_kl=True)
    to_go = experience.batch.response_mask.flip(-1).cumsum(-1).flip(-1)  # each token gets 1
    expected = rloo.advantage(experience.scores[..., None] + to_go) * experience.batch.policy_mask
    assert torch.allclose(experience.advantages, expected, atol=1e-5)


TOGETHER = ["lora turns grpo entropy correction", "lora value truncate correction", "turns value"]


@pytest.mark.parametrize("files", [*TOGETHER, "turns advantages truncate"])
def test_files_that_the_page_allows_together_train(files, run):
    """One update, where each file leaves its trace."""
    flags = {"entropy": {"entropy_coef": 0.5}, "truncate": {"top_k": 5}, "value": {"value_cliprange": 0.1}}
    flags["turns"] = {"tool": f"{__file__}:tool", "tool_mark": "m", "response_length": 24}
    flags = {name: x for file in files.split() for name, x in flags.get(file, {}).items()}
    (metrics,), output, experience = run(*files.split(), **flags)
    assert metrics["grad_norm"] > 0 and all(math.isfinite(x) for x in metrics.values())
    batch, per_token = experience.batch, experience.advantages.shape[-1] > 1
    traces = {
        "lora": (output / "adapter").is_dir(),
        "correction": abs(metrics.get("val/rollout_weight", 9) - 1) < 1e-3,
        "value": hasattr(experience, "returns") and per_token,
        "turns": (batch.response_mask & ~batch.policy_mask).any(),
        "truncate": metrics["objective/entropy"] / metrics["completions/mean_length"] < math.log(5),
        "grpo": "value" not in files and per_token,
        "entropy": metrics["loss/policy_avg"] < -0.3 * metrics["objective/entropy"],
        "advantages": torch.allclose(experience.advantages, experience.rewards.float(), rtol=1e-3),
    }
    assert all(traces[name] for name in files.split()), traces


# ---- grpo.py and advantages.py ---------------------------------------------------------------------------------------


def experience_of(mask, ended, **fields):
    """An Experience that has these fields only."""
    others = dict.fromkeys(rloo.Experience.__dataclass_fields__)
    return rloo.Experience(**others | {"batch": rloo.Batch([], None, mask, mask, ended)} | fields)


@pytest.mark.parametrize("ratio", ["token", "completion", "cispo"])
@pytest.mark.parametrize("baseline", ["grpo", "group", "rloo"])
@pytest.mark.parametrize("loss_mean", ["tokens-then-completions", "tokens", "completions"])
def test_grpo_equals_the_loops(ratio, baseline, loss_mean):
    """In a micro-batch of two of three lanes. One completion has no score, another is truncated, and a group has equal
    scores: they leave the loss, its KL and its lengths."""
    load("grpo")
    torch.manual_seed(0)
    mask = torch.arange(5) < torch.randint(1, 6, (3, 4, 1))
    new, old, ref = torch.randn(3, 3, 4, 5) * 0.4
    scores, ended = torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool)
    scores[0, 1], ended[2, 2], scores[:, 3] = math.nan, False, 0.5
    unbiased = baseline == "rloo"
    flags = {"baseline": baseline, "loss_mean": loss_mean, "ratio": ratio, "unbiased_kl": unbiased, "kl_coef": 0.3}
    flags |= {"cliprange_high": 0.25, "mask_truncated_completions": True, "drop_equal_groups": True, "device": "cpu"}
    args = rloo.resolve_args(rloo.Args(**flags))
    rloo.check_args(args)
    rewards = rloo.rewards_of(args, scores, ended, torch.rand(3, 4, 5))  # the KL is not in the reward
    advantages = rloo.advantages_for_loss(args, rloo.advantage(rewards), ended, mask)
    experience = experience_of(mask, ended, scores=scores, ref_logprobs=ref, rewards=rewards, advantages=advantages)
    prompts = torch.tensor([2, 0, 1])
    index = slice(1, 3), prompts
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    losses, log_ratio, clipped = rloo.completion_loss(args, experience, index, ours[index], old[index])

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
        a = scores[j, b].item() - mean(others if baseline == "rloo" else group)
        a /= stdev(group) + 1e-4 if baseline == "grpo" else 1
        assert advantages[j, b].tolist() == pytest.approx([a] * n + [0.0] * (5 - n), abs=1e-5)
        apart = (theirs - old)[j, b, :n]
        for t in range(n):
            rho = (apart.mean() if ratio == "completion" else apart[t]).exp()
            loss = torch.max(-a * rho, -a * rho.clamp(0.8, 1.25))
            if ratio == "cispo":
                loss = -rho.detach().clamp(max=1.25) * a * theirs[j, b, t]
            to_ref = ref[j, b, t] - theirs[j, b, t]
            k3 = (to_ref.exp() - 1 - to_ref) * (apart[t].exp() if unbiased else 1)
            expected[j, b] += loss + 0.3 * k3
        expected[j, b] *= {"tokens-then-completions": 1 / n, "tokens": 12 / counted, "completions": 1}[loss_mean]
    assert torch.allclose(losses, expected[index], atol=1e-5)
    losses.sum().backward()
    expected[index].sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
    assert len(log_ratio) == len(clipped) == mask[1:, :2].sum() + mask[1, 2].sum() and not log_ratio.requires_grad


def test_advantages_equal_the_loops():
    """Prompts with all answers wrong, all right, and between; one completion has no score."""
    load("advantages")
    torch.manual_seed(0)
    rewards = (torch.rand(6, 7, 1) < torch.linspace(0, 1, 7)[:, None]).float()
    rewards[0, 3] = math.nan
    found = {}
    for name in ("none", "raft", "maxrl"):
        rloo.check_args(rloo.resolve_args(rloo.Args(advantages=name, kl_coef=0.0, device="cpu")))
        found[name] = rloo.advantage(rewards)
        assert found[name][0, 3].isnan()
    for b in range(7):
        scored = ~rewards[:, b, 0].isnan()
        group = rewards[scored, b, 0].tolist()
        maxrl = [(x - mean(group)) / mean(group) if any(group) else 0.0 for x in group]
        raft = [float(i == group.index(max(group)) and max(group) > min(group)) for i in range(len(group))]
        for name, expected in {"none": group, "raft": raft, "maxrl": maxrl}.items():
            assert found[name][scored, b, 0].tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(rloo.InputError, match="rewards must be 0 or 1"):
        rloo.advantage(torch.tensor([[[0.5]], [[1.0]]]))
    with pytest.raises(rloo.InputError, match="maxrl: needs --kl_coef 0"):
        rloo.check_args(rloo.resolve_args(rloo.Args(advantages="maxrl", device="cpu")))
    with pytest.raises(rloo.InputError, match="raft: not with --token_level_kl"):
        rloo.check_args(rloo.resolve_args(rloo.Args(advantages="raft", token_level_kl=True, device="cpu")))


# ---- entropy.py, correction.py and truncate.py -----------------------------------------------------------------------


def test_the_entropy_bonus_has_the_gradient_of_the_entropy_and_raises_it(run):
    """In the run scores are equal and β = 0, so there is no other gradient."""
    entropy = load("entropy")
    logits, tokens = torch.randn(7, 9).requires_grad_(), torch.arange(7)
    rloo.final_logits = lambda model, hidden: hidden
    logprobs, entropies = entropy.block_logprobs(None, logits, tokens, 0.5)
    table = (logits / 0.5).log_softmax(-1)
    loops = -sum(table[n, v].exp() * table[n, v] for n, v in itertools.product(range(7), range(9)))
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (entropies.sum(), loops)]
    assert torch.allclose(*gradients, atol=1e-6) and logprobs.tolist() == table[tokens, tokens].tolist()
    flags = {"reward_fns": (f"{rloo_test.__file__}:constant_reward",), "reward_model_path": None, "kl_coef": 0.0}
    (first, *_, last), *_ = run("entropy", **flags, entropy_coef=0.03, total_episodes=64)
    assert first["policy/entropy_avg"] + 0.01 < last["policy/entropy_avg"]
    expected = -0.03 * first["completions/mean_length"] * first["policy/entropy_avg"]
    assert first["loss/policy_avg"] == pytest.approx(expected, rel=1e-4)
    (some,), *_ = run("entropy", **flags, entropy_coef=0.03, mask_truncated_completions=True)
    assert 0.9 * expected < some["loss/policy_avg"] < 0  # less, without those of truncated completions
    flags["reward_fns"] = flag_of(half=lambda completions, **_: [0.0, None] * (len(completions) // 2))
    (half,), _, experience = run("entropy", **flags, entropy_coef=0.03)
    entropies = -0.03 * half["policy/entropy_avg"] * experience.batch.policy_mask.sum(-1)
    expected = entropies.where(~experience.scores.isnan(), 0.0).mean().item()  # as many nats in each token
    assert half["loss/policy_avg"] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("kind, correction", [("completion", "truncate"), ("token", "mask"), ("grpo", "mask")])
def test_a_mismatch_is_corrected_and_logged(kind, correction, run):
    """A sampler whose log-probs are off. Each ratio has a weight; the KL is that of the policy."""
    noise = torch.rand(2, 8, 6, generator=torch.Generator().manual_seed(0)) * 2 - 0.7
    off = 0

    def noisy(*inputs):
        batch, logprobs = ORIGINAL["rollout"](*inputs)
        return batch, (logprobs - off * noise[:, : len(batch.examples)]) * batch.response_mask

    flags = {"kl_coef": 0.3, "token_level_kl": kind == "token", "rollout_correction": correction}
    module = load(*(["grpo", "correction"] if kind == "grpo" else ["correction"]))
    rloo.rollout = noisy
    ((exact,), _, without_noise), off = run(**flags, rollout_correction_cap=1.5), 1
    (metrics,), _, experience = run(**flags, rollout_correction_cap=1.5)
    mask = experience.batch.response_mask
    log_w = noise * mask
    assert metrics["val/rollout_kl"] == pytest.approx(-noise[mask].mean().item(), abs=1e-4)
    if kind == "completion":
        log_w, mask = log_w.sum(-1, keepdim=True), mask[..., :1]
    w = log_w.exp()
    assert (w[mask] > 1.5).any() and (w[mask] < 1 / 1.5).any()
    w = w.clamp(max=1.5) if correction == "truncate" else w * (w <= 1.5) * (w >= 1 / 1.5)
    assert torch.allclose(experience.advantages, without_noise.advantages * w, atol=1e-3)
    assert torch.allclose(experience.kl, without_noise.kl, atol=1e-5)
    assert metrics["val/rollout_weight"] == pytest.approx(w[mask].mean().item(), abs=1e-4)
    assert exact["val/rollout_weight"] == pytest.approx(1, abs=1e-4) and metrics["val/ratio"] == 1
    # e^100 is no float32, and infinity times 0 would be NaN.
    far = module.importance_weight(torch.full((1, 1, 1), 100.0), torch.zeros(1, 1, 1), True, correction, 1.5, False)
    assert far.item() == (1.5 if correction == "truncate" else 0.0)


PROMPTS = [[5, 9, 14], [10, 3, 4, 12, 6], [7, 8]]


def kept_by_hand(logits, top_k, top_p) -> dict[int, float]:
    """Token -> log-prob: the most likely ones, until there are top_k or those of top_k have a probability of top_p."""
    order = logits.argsort(descending=True).tolist()[: top_k or None]
    probs = logits.double()[order].softmax(0).tolist()
    count = next(n for n in range(1, len(order) + 1) if sum(probs[:n]) >= top_p or n == len(order))
    return {token: math.log(p / sum(probs[:count])) for token, p in zip(order[:count], probs, strict=False)}


@pytest.mark.parametrize("layout", ["group", "plain"])
@pytest.mark.parametrize("limits", [{"top_p": 0.7, "top_k": 0}, {"top_p": 0.9, "top_k": 5}])
def test_log_probs_of_the_sampler_and_the_policy_are_those_of_the_kept_tokens(layout, limits, tiny):
    truncate = load("truncate")
    truncate.limits.update(limits)
    args, _, policy, reference = models_of(tiny, layout=layout)
    torch.manual_seed(1)
    batch, sampled = rloo.rollout(args, policy, [{"prompt_ids": ids} for ids in PROMPTS], 4, args.temperature, [0])
    trained, _ = rloo.completion_logprobs(policy, batch, args.temperature)
    full = rloo.logprobs_in_parts(args, reference, batch)
    for row, ids in enumerate(batch.completion_ids()):
        j, b = divmod(row, len(PROMPTS))
        logits = policy(torch.tensor([PROMPTS[b] + ids])).logits[0, len(PROMPTS[b]) - 1 :].detach() / 0.8
        for t, token in enumerate(ids):
            kept = kept_by_hand(logits[t], limits["top_k"], limits["top_p"])
            expected = [kept[token], kept[token], logits[t].log_softmax(-1)[token].item()]
            assert [x[j, b, t].item() for x in (trained, sampled, full)] == pytest.approx(expected, abs=1e-4)
            assert len(kept) < 16
    truncate.limits.update(top_k=1)
    ids = torch.tensor([[[3]], [[4]]])  # not both are the most likely one, but a token that was sampled stays
    logprobs, _ = rloo.completion_logprobs(policy, rloo.make_batch([{"prompt_ids": PROMPTS[0]}], ids, [0]), 1.0)
    assert logprobs.isfinite().all() and (logprobs < 0).any()


# ---- value.py --------------------------------------------------------------------------------------------------------


def gae_by_hand(r, V, gamma, lam) -> list[float]:
    delta = [r[i] + gamma * next_V - V[i] for i, next_V in enumerate([*V[1:], 0.0])]
    return [sum((gamma * lam) ** (i - t) * delta[i] for i in range(t, len(r))) for t in range(len(r))]


def with_a_tool(*inputs):
    """`rollout`, where a tool wrote tokens 1 and 2 of each completion."""
    batch, logprobs = ORIGINAL["rollout"](*inputs)
    mask = batch.policy_mask.clone()
    mask[..., 1:3] = False
    return batch._replace(policy_mask=mask), logprobs * mask


def test_the_critics_loss_and_steps(tiny):
    """Advantages are GAE of the critic's values over the policy's tokens; its loss is the clipped square, and its steps
    have a rate of their own and a norm in common. One completion has no score."""
    value = load("value")
    rloo.rollout = with_a_tool
    flags = {"value_model_path": f"{tiny}/reward", "value_learning_rate": 0.25, "learning_rate": 1e-3, "kl_coef": 0.3}
    flags |= {
        "reward_model_path": f"{tiny}/reward",
        "max_grad_norm": 1e-3,
        "gamma": 0.9,
        "lam": 0.7,
        "value_cliprange": 0.05,
    }
    args, master, policy, reference = models_of(tiny, **flags, rloo_k=2, per_device_train_batch_size=4)
    rloo.load_reward_model(args, tiny_tokenizer(), [{"prompt_ids": ids} for ids in PROMPTS[:2]])
    optimizer = rloo.make_optimizer(args, master, policy)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.25]
    examples = [{"prompt_ids": ids} for ids in PROMPTS[:2]]
    scores = {"some": lambda batch: torch.tensor([[2.0, -1.0], [0.5, math.nan]])}
    experience = rloo.collect(args, policy, reference, scores, examples, [0, 3])
    batch, V, A = experience.batch, experience.values, experience.advantages
    assert not A[1, 1].any() and not A[~batch.policy_mask].any()
    for row, ids in enumerate(batch.completion_ids()[:3]):
        j, b = divmod(row, 2)
        own = batch.policy_mask[j, b]
        prompt = PROMPTS[b]
        hidden = value.critic.base_model(torch.tensor([prompt + ids]))[0][0, len(prompt) - 1 : -1]
        assert torch.allclose(V[j, b, own], value.critic.score(hidden).squeeze(-1)[own[: len(ids)]], atol=1e-4)
        rewards = -0.3 * experience.kl[j, b, own]
        rewards[-1] += experience.scores[j, b]
        by_hand = gae_by_hand(rewards.tolist(), V[j, b, own].tolist(), 0.9, 0.7)
        assert A[j, b, own].tolist() == pytest.approx(by_hand, abs=1e-4)
    torch.nn.init.normal_(value.critic.score.weight, std=0.3)
    index = slice(0, 2), torch.tensor([1, 0])
    zeros = torch.zeros(2, 2, batch.responses.shape[-1])
    losses, *_ = rloo.completion_loss(args, experience, index, zeros, zeros)
    now, old, returns = (x[index] for x in (value.values_of(batch), V, V + A))
    plain, limited = (now - returns) ** 2, (old + (now - old).clamp(-0.05, 0.05) - returns) ** 2
    assert (limited > plain).any() and (limited < plain).any()
    scored = batch.policy_mask & ~experience.scores.isnan()[..., None]
    squares = (torch.maximum(plain, limited) * scored[index]).sum(-1)
    assert torch.allclose(losses, squares / 2 - A[index].sum(-1), atol=1e-3)
    rloo.improve(args, policy, optimizer, experience)
    weights = [*master.parameters(), *value.critic.parameters()]
    norm = sum(optimizer.state[weight]["exp_avg"].square().sum() for weight in weights).sqrt().item()
    assert norm == pytest.approx(0.1 * 1e-3, rel=1e-3)  # the first moment is a tenth of the gradient


def test_a_critic_is_checked_like_a_reward_model(run, tmp_path):
    save(tmp_path, tiny_model(classifier=True), tiny_tokenizer(words={word: i for i, word in enumerate("mlkji", 3)}))
    with pytest.raises(rloo.InputError, match="another tokenizer"):
        run("value", value_model_path=str(tmp_path))
    save(tmp_path, tiny_model("mistral", classifier=True), tiny_tokenizer())  # has a window
    with pytest.raises(rloo.InputError, match="differ from"):
        run("value", value_model_path=str(tmp_path), response_length=12)


def resumed_and_whole(run, folder, *files, **flags):
    """Returns metrics and folders of a run that stopped after one of two updates and was continued, and of one that did
    not stop. Their metrics are equal."""
    flags |= {"save_steps": 1, "lr_scheduler_type": "constant"}
    whole, output, _ = run(*files, **flags, total_episodes=32)
    run(*files, **flags, total_episodes=16, output_dir=folder)
    resumed, *_ = run(*files, **flags, total_episodes=32, output_dir=folder, resume=True)
    assert without_times(resumed) == without_times(whole) and len(whole) == 2
    return folder, output


def test_one_completion_per_prompt_is_enough_and_a_resumed_run_equals_an_uninterrupted_one(run, tiny, tmp_path):
    flags = {"rloo_k": 1, "num_ppo_epochs": 2, "value_model_path": f"{tiny}/reward"}
    again, whole = resumed_and_whole(run, tmp_path / "again", "value", **flags)
    files = [whole / "checkpoint-1" / "critic.pt", whole / "critic.pt", again / "critic.pt"]
    begun, ended, resumed = (torch.load(file)["score.weight"] for file in files)
    assert torch.equal(resumed, ended) and not torch.equal(begun, ended)


# ---- lora.py ---------------------------------------------------------------------------------------------------------

FAMILIES = {"gpt_neox": {}, "qwen3": {"tie_word_embeddings": True}, "qwen3_moe": {}}
FAMILIES |= {"llama4_text": {}}  # its routers are linear layers that return a tuple
TOKENS = torch.tensor([[5, 3, 8, 4, 9, 11]])


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_reference_and_merged_copy_are_those_of_the_formula(family, tmp_path):
    """Every linear layer but the head has an adapter, which begins as in PEFT and depends on the seed alone. The
    reference is the base model to the last bit and has its tensors. The merged copy equals the policy, and its gradient
    dW gives dB = s dW Aᵀ and dA = s Bᵀ dW. PEFT reads the adapters and computes the same."""
    lora = load("lora")
    save(tmp_path / "sft", tiny_model(family, layout="plain", **FAMILIES[family]), tiny_tokenizer())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "sft").requires_grad_(False).eval()
    flags = {"kl_coef": 0.1, "lora_rank": 3, "lora_alpha": 6, "layout": "plain"}
    first, policy, reference = models_of(tmp_path, **flags)[1:]
    other = models_of(tmp_path, **flags, seed=2)[1]
    assert first is policy and torch.equal(policy(TOKENS).logits, base(TOKENS).logits)
    adapted, again = policy.adapted, models_of(tmp_path, **flags)[1].adapted
    linears = {name for name, module in base.named_modules() if type(module) is torch.nn.Linear}
    assert set(adapted) == {name for name in linears if ".layers." in name} < linears
    assert sum(x.requires_grad for x in policy.parameters()) == 2 * len(adapted) >= 16
    for name, linear in adapted.items():
        A, B = linear.lora_A.weight, linear.lora_B.weight
        assert (A.shape, B.shape) == ((3, linear.in_features), (linear.out_features, 3)) and A.dtype == torch.float32
        assert 0.7 < A.abs().max() * linear.in_features**0.5 <= 1 and not B.any()  # uniform within ± 1 / √in
        assert torch.equal(A, again[name].lora_A.weight) and not torch.equal(A, other.get_submodule(name).lora_A.weight)
        torch.nn.init.normal_(B, std=0.1)
    assert torch.equal(reference(TOKENS).logits, base(TOKENS).logits) and not hasattr(reference, "adapted")
    own = dict(policy.named_parameters())
    assert all(x is own[name] for name, x in reference.named_parameters())

    for _ in range(2):  # again and again from W, not from what was merged before
        merged = lora.merged(policy).requires_grad_(True)
    logits = policy(TOKENS).logits
    assert (logits - base(TOKENS).logits).abs().max() > 1e-3 and (merged(TOKENS).logits - logits).abs().max() < 1e-4
    for model in (merged, policy):
        model(TOKENS).logits.log_softmax(-1)[..., 3].sum().backward()
    for name, linear in adapted.items():
        A, B, s = linear.lora_A.weight, linear.lora_B.weight, linear.lora_scale
        dW = merged.get_submodule(name).weight.grad
        assert torch.allclose(B.grad, s * dW @ A.T, rtol=1e-3, atol=1e-4) and B.grad.any() and s == 2
        assert torch.allclose(A.grad, s * B.T @ dW, rtol=1e-3, atol=1e-4) and A.grad.any()
    if family != "llama4_text":
        peft = pytest.importorskip("peft", reason="needs peft, an optional package: pip install peft")
        rloo.save_policy(tmp_path / "merged", policy, tiny_tokenizer())
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "merged" / "adapter").eval()
        assert (theirs(TOKENS).logits - logits).abs().max() < 1e-5


def test_the_learning_rate_of_adapters_is_ten_times_that_of_all_weights_unless_given():
    load("lora")
    assert rloo.resolve_args(rloo.Args(device="cpu")).learning_rate == pytest.approx(2.5e-3)
    assert rloo.resolve_args(rloo.Args(device="cpu", learning_rate=3e-4)).learning_rate == 3e-4


def test_what_a_resumed_run_in_bfloat16_leaves_is_merged_at_their_own_update(run, tiny, tmp_path):
    """Checkpoints and the final folder hold merged weights, equal to those of an uninterrupted run to the last bit."""
    flags = {"dtype": "bfloat16", "weight_decay": 0.1, "num_mini_batches": 2, "per_device_train_batch_size": 8}
    again, output = resumed_and_whole(run, tmp_path / "again", "lora", **flags, lora_rank=3, lora_alpha=6)
    for folder in (output / "checkpoint-2", again):
        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            assert (folder / file).read_bytes() == (output / file).read_bytes()
    config = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]
    assert config["r"] == 3 and config["lora_alpha"] == 6 and config["base_model_name_or_path"] == f"{tiny}/sft"
    base, saved = weights_of(tiny / "sft"), load_file(output / "adapter" / "adapter_model.safetensors")
    for name, weight in weights_of(output).items():
        A, B = (saved.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight") for x in "AB")
        expected = base[name].bfloat16()
        if B is not None:
            expected = (expected.float() + 2 * (B @ A)).bfloat16()
            assert not torch.equal(expected, base[name].bfloat16())
        assert torch.equal(weight, expected), name
    flags |= {"output_dir": again, "resume": True, "lora_alpha": 6}
    with pytest.raises(rloo.InputError, match="no adapters of this policy .its --lora_rank is 3"):
        run("lora", **flags, lora_rank=4)
    del saved["base_model.model.gpt_neox.layers.1.attention.dense.lora_A.weight"]
    save_file(saved, again / "checkpoint-2" / "adapter" / "adapter_model.safetensors")
    with pytest.raises(rloo.InputError, match="only one of them has .*layers.1.attention.dense.lora_A"):
        run("lora", **flags, lora_rank=3)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.1)])
def test_adapters_that_prompts_and_completions_use_have_the_gradient_of_plain_rows(dtype, tolerance, tiny):
    """In group rows a weight is used in several forward passes, whose gradients are summed in backward."""
    load("lora")
    gradients = []
    for layout in ("group", "plain"):
        _, _, policy, _ = models_of(tiny, layout=layout, dtype=dtype, kl_coef=0.0)
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        logprobs, _ = rloo.completion_logprobs(policy, random_batch(max_prompt=20), 1.0)
        logprobs.sum().backward()
        gradients.append(torch.cat([x.grad.flatten() for x in policy.parameters() if x.requires_grad]))
    found, expected = gradients
    assert found.dtype == torch.float32 and (found - expected).norm() < tolerance * expected.norm()


# ---- turns.py --------------------------------------------------------------------------------------------------------


def exchange(tiny, writes, answer, prompts=("a",), k=1, **flags):
    """Returns batch, log-probs, their texts, and what the tool was asked. The policy writes writes[text][j] behind a
    text as lane j; the log-prob of its token number n of a turn is -n."""
    asked = []

    def one_turn(args, model, examples, k, temperature, stop_ids):
        rows = []
        for j, example in itertools.product(range(k), examples):
            ids = tokenizer(writes[tokenizer.decode(example["prompt_ids"])][j])["input_ids"]
            rows.append((ids + [3] * args.response_length)[: args.response_length])
        batch = rloo.make_batch(examples, torch.tensor(rows).unflatten(0, (k, -1)), stop_ids)
        logprobs = -torch.arange(1.0, args.response_length + 1).expand_as(batch.responses)
        return batch, logprobs.where(batch.policy_mask, 0.0)

    turns = load("turns")
    rloo.rollout = functools.partial(turns.rollout, one_turn)
    args, model, *_ = models_of(tiny, **{"tool": f"{__file__}:tool", "tool_mark": "m", "kl_coef": 0.0} | flags)
    _, mark, tokenizer = turns.tool
    turns.tool = lambda text: [asked.append(text), answer(text)][1], mark, tokenizer
    examples = [{"prompt_ids": tokenizer(text)["input_ids"]} for text in prompts]
    batch, logprobs = rloo.rollout(args, model, examples, k, 0.7, [0])
    return batch, logprobs, [tokenizer.decode(ids) for ids in batch.completion_ids()], asked


def test_answers_are_put_behind_marks_and_are_not_the_policys(tiny):
    writes = {
        "a": ["c d m", "e"],
        "b": ["f <eos>", "g m"],
        "a c d m h i": ["d m"],
        "a c d m h i d m h i": ["<eos>"],
        "b g m h i": ["m c"],  # continues without an end
        "b g m h i m h i": ["c"],
    }
    batch, logprobs, texts, asked = exchange(
        tiny, writes, lambda text: "h i", prompts=("a", "b"), k=2, response_length=15
    )
    assert texts == ["c d m h i d m h i <eos>", "f <eos>", "e" + " a" * 14, "g m h i m h i c" + " a" * 7]
    assert asked == ["c d m", "g m", "c d m h i d m", "g m h i m"]
    assert batch.ended.tolist() == [[True, True], [False, False]]
    by_policy = [True, True, True, False, False, True, True, False, False, True]
    assert batch.policy_mask[0, 0][batch.response_mask[0, 0]].tolist() == by_policy
    assert logprobs[0, 0, : len(by_policy)].tolist() == [-1, -2, -3, 0, 0, -1, -2, 0, 0, -1]
    assert not logprobs[~batch.policy_mask].any() and (batch.policy_mask <= batch.response_mask).all()


RULES = {  # what the policy writes, the tool, flags -> the text, did it end, how often was the tool asked
    "in the last turn the tool is not asked": (
        {"a": ["b <eos>"]}, lambda text: "h", {"tool_mark": "<eos>", "max_turns": 1}, "b <eos>", True, 0),
    "the last turn has no mark": (
        {"a": ["b m"], "a b m h": ["m d <eos>"]}, lambda text: "h", {"max_turns": 2}, "b m h m d <eos>", True, 1),
    "after no text the policy continues": (
        {"a": ["b m"], "a b m": ["d <eos>"]}, lambda text: "", {}, "b m d <eos>", True, 1),
    "an answer is cut to the room that is left": (
        {"a": ["b m"]}, lambda text: "h " * 50, {}, "b m" + " h" * 10, False, 1),
    "without room the tool is not asked": (
        {"a": ["b m"]}, lambda text: "h", {"response_length": 2}, "b m", False, 0),
    "a stop token or a mark in an answer has no effect": (
        {"a": ["b m"], "a b m h <eos> m": ["d <eos>"]}, lambda text: "h <eos> m", {}, "b m h <eos> m d <eos>", True, 1),
    "a mark that is a stop token": (
        {"a": ["b <eos>"], "a b <eos> h": ["c <eos>"]}, lambda text: "h" * (text == "b <eos>"),
        {"tool_mark": "<eos>"}, "b <eos> h c <eos>", True, 2),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_turns(rule, tiny):
    writes, answer, flags, text, ended, number = RULES[rule]
    batch, logprobs, texts, asked = exchange(tiny, writes, answer, **flags)
    assert texts == [text] and len(asked) == number and batch.ended.item() == ended
    assert batch.responses.shape == logprobs.shape == (1, 1, flags.get("response_length", 12))  # T, on all ranks


def test_a_run_with_turns_has_the_sampler_of_its_policy_and_learns_from_its_tokens_alone(run, monkeypatch):
    """Log-probs of the sampler, over prompts with answers in them, are those of training: val/rollout_kl is 0."""
    load("turns")
    checked = spy(monkeypatch, "check_model")
    flags = {"tool": f"{__file__}:tool", "tool_mark": "m", "kl_coef": 0.1}
    (metrics,), _, experience = run(**flags, response_length=24)
    assert abs(metrics["val/rollout_kl"]) < 1e-5 and metrics["grad_norm"] > 0.1
    batch = experience.batch
    assert (batch.response_mask & ~batch.policy_mask).sum() > 8 and batch.responses.shape[-1] == 24
    assert checked[0][0][0].response_length == 48  # a turn may continue for 24 more
    with pytest.raises(rloo.InputError, match="must be one token, is 2"):
        run(**flags | {"tool_mark": "m m"})


# ---- vllm_rollout.py: without vLLM, a stand-in takes its place in its process ----------------------------------------

STAND_IN = '''
"""A completion: a sum of its prompt, the number of weights so far, a part of its seed, and 0, if it is a stop token."""
import os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, seed, **options):
        self.seed, self.options = seed, options

class LLM:
    def __init__(self, folder, **settings):
        assert settings["max_model_len"] >= 99 + 2 * 12 and settings["dtype"] == "float32"
        assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
        assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ and os.environ["HF_HUB_OFFLINE"] == "1"
        self.weights, self.stale = 1, False

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and "model.safetensors" in os.listdir(kwargs["weights_path"])
        self.weights, self.stale = self.weights + 1, True

    def reset_prefix_cache(self):
        self.stale = False

    def generate(self, prompts, params, use_tqdm):
        assert not self.stale
        found = []
        for prompt, sampling in zip(prompts, params, strict=True):
            options = sampling.options
            assert options["ignore_eos"] and options["stop_token_ids"] and options["max_tokens"] <= 24
            ids = [3 + sum(prompt["prompt_token_ids"]) % 11, self.weights, 3 + sampling.seed % 11]
            ids += [0] if 0 in options["stop_token_ids"] else [4] * (options["max_tokens"] - 3)
            steps = [{token: SimpleNamespace(logprob=-1.0 - i)} for i, token in enumerate(ids)]
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=steps)]))
        return found
'''


def test_vllm_samples_for_updates_and_evaluations_and_gets_new_weights_each_time(tmp_path, run, monkeypatch):
    """As under torchrun, and with the correction, which allows log-probs that are not the policy's, and turns."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", "1")
    vllm_rollout = load("vllm_rollout")
    rollouts = spy(monkeypatch, "rollout")
    importlib.import_module("benchmark.extensions.correction")
    importlib.import_module("benchmark.extensions.turns")
    flags = {"response_length": 12, "max_prompt_length": 99, "tool": f"{__file__}:tool", "tool_mark": "m"}
    metrics, *_ = run(**flags, total_episodes=32, num_eval_prompts=2)
    checks = sum(0 not in inputs[5] for inputs, _ in rollouts)  # by check_policy, without a stop token
    rollouts = rollouts[checks:]
    assert checks and [inputs[4] for inputs, _ in rollouts] == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]  # temperatures
    for weights, (_, (batch, logprobs)) in enumerate(rollouts, checks + 1):
        k, B, T = batch.responses.shape
        first = [3 + sum(example["prompt_ids"]) % 11 for example in batch.examples]
        assert batch.responses[..., 0].tolist() == [first] * k and len(set(first)) > 1
        assert (batch.responses[..., 1] == weights).all() and batch.ended.all() and T == 12
        assert logprobs.tolist() == [[[-1.0, -2.0, -3.0, -4.0] + [0.0] * 8] * B] * k
    seeds = [batch.responses[..., 2].flatten().tolist() for _, (batch, _) in rollouts]
    assert len({*seeds[2]}) > 4 and seeds[2] != seeds[3] and seeds[0] == seeds[4]  # evaluations have the same ones
    assert all(update["val/rollout_kl"] != 0 and update["grad_norm"] > 0 for update in metrics)
    vllm_rollout.pipe.close()  # which ends its process


def test_a_completion_that_vllm_cuts_off_is_refused_and_one_that_ends_is_not(monkeypatch):
    vllm_rollout, model = load("vllm_rollout"), tiny_model()
    args = rloo.Args(sft_model_path="a", device="cpu", dtype="float32", response_length=3)
    for ids in ([5, 0], [5, 6, 7], [5, 6]):  # the stop token is 0
        answer = [ids], [[-1.0] * len(ids)]
        pipe = SimpleNamespace(send=lambda message: None, recv=lambda answer=answer: answer)
        monkeypatch.setattr(vllm_rollout, "pipe", pipe)
        sample = functools.partial(vllm_rollout.rollout, args, model, [{"prompt_ids": [4]}], 1, 1.0, [0])
        if ids == [5, 6]:
            with pytest.raises(rloo.InputError, match="cut a completion off"):
                sample()
        else:
            assert sample()[0].ended.item() == (ids[-1] == 0)


@pytest.mark.parametrize("family, config", [("qwen3", {"tie_word_embeddings": True}), ("qwen3_moe", {})])
def test_the_files_for_vllm_have_every_weight_by_its_published_name(family, config, tmp_path):
    """Whatever the generation config holds: `save_pretrained` refuses a temperature without sampling."""
    model = tiny_model(family, layout="plain", **config)
    model.save_pretrained(tmp_path / "whole")
    model.generation_config.temperature, model.generation_config.pad_token_id = 0.6, -1
    load("vllm_rollout").write_weights(model, tmp_path)
    head = {"lm_head.weight"} if config else set()
    assert weights_of(tmp_path).keys() == weights_of(tmp_path / "whole").keys() | head
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, tie_word_embeddings=False)
    assert torch.equal(again.eval()(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, an optional package: see README.md")
def test_vllm_samples_from_the_newest_weights():
    vllm_rollout = load("vllm_rollout")
    path = str(rloo.MINI_TLDR / "sft")  # of a size that vLLM's kernels have
    args, _, model, _ = models_of(None, sft_model_path=path, response_length=4, max_prompt_length=60)
    for _ in range(2):
        examples = [{"prompt_ids": ids} for ids in PROMPTS]
        batch, logprobs = vllm_rollout.rollout(args, model, examples, 2, 0.8, [0])
        own = rloo.logprobs_in_parts(args, model, batch)
        assert torch.allclose(own, logprobs, atol=1e-4) and len({tuple(ids) for ids in batch.completion_ids()}) > 3
        for weight in model.parameters():
            weight.data *= 1.01
    vllm_rollout.pipe.close()


# ---- text_reward.py and own_loop.py ----------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}"


@pytest.mark.parametrize("chat, template, dtype", [(False, None, "float32"), (True, TEMPLATE, "bfloat16")])
def test_scores_of_texts_are_those_of_each_text_alone(chat, template, dtype, tmp_path, monkeypatch, run):
    """The longest text is cut from the left: the model has 24 positions. A run trains by them."""
    model = tiny_model(classifier=True, layout="plain", max_position_embeddings=24).to(getattr(torch, dtype))
    tokenizer = tiny_tokenizer(words={word: i for i, word in enumerate([*"abcdefghijklu"], 3)})
    tokenizer.chat_template = template
    save(tmp_path, model, tokenizer)
    monkeypatch.setenv("TEXT_REWARD_MODEL", str(tmp_path))
    prompts, completions = ["b c d e ", "f ", "g h " * 20, "i j "], ["k l", "", "a b", "c"]
    given = prompts, completions
    if chat:
        roles = ("user", "assistant")
        given = ([[{"role": role, "content": text}] for text in texts] for role, texts in zip(roles, given))
    scores = load("text_reward").text_reward(*given, None)
    for prompt, text, score in zip(prompts, completions, scores, strict=True):
        ids = tokenizer(f"u {prompt} a {text} " if chat else f"{prompt}{text} <eos>")["input_ids"]
        last = model.base_model(torch.tensor([ids[-24:]]))[0][0, -1]
        exact = (model.score.weight.float() @ last.float()).item()
        assert score == pytest.approx(exact, abs=1e-4 if dtype == "float32" else 0.1 * abs(exact) + 0.1)
    assert len({round(score, 3) for score in scores}) == 4
    if not chat:
        (metrics,), *_ = run(reward_model_path=None, reward_fns=(f"{HERE}/text_reward.py:text_reward",))
        assert metrics["objective/scores_std"] > 0 and metrics["grad_norm"] > 0


def test_a_model_without_a_head_is_no_reward_model(tmp_path, monkeypatch):
    save(tmp_path, tiny_model(), tiny_tokenizer())
    monkeypatch.setenv("TEXT_REWARD_MODEL", str(tmp_path))
    with pytest.raises(rloo.InputError, match="lacks weights, .*score"):
        load("text_reward").load()


def test_lora_needs_a_linear_layer(tmp_path):
    save(tmp_path, tiny_model("gpt2"), tiny_tokenizer())  # its layers are Conv1D
    load("lora")
    with pytest.raises(rloo.InputError, match="no torch.nn.Linear"):
        models_of(tmp_path, sft_model_path=str(tmp_path))


def test_the_loop_of_ones_own_learns_and_log_probs_of_given_completions_are_the_model_s(monkeypatch):
    updates = spy(monkeypatch, "improve")
    names = runpy.run_path(HERE / "own_loop.py")
    policy, batch, experience = (names[name] for name in ("policy", "batch", "experience"))
    assert len(updates) == 3
    assert rloo.completion_texts(batch, names["tokenizer"]) == [" cat trouble", " keys gone"] and batch.ended.all()
    sums = names["logprobs"][0].sum(-1).tolist()
    for example, ids, total in zip(batch.examples, batch.completion_ids(), sums, strict=True):
        prompt = example["prompt_ids"]
        table = (policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        assert sum(table[t, token].item() for t, token in enumerate(ids)) == pytest.approx(total, rel=1e-3)
    with torch.no_grad():
        learned = rloo.completion_logprobs(policy, experience.batch, 0.7)[0] - experience.sampler_logprobs
    assert (learned * experience.advantages).sum() > 0.1  # the last update raises what was better than its siblings


@pytest.mark.parametrize("epochs", [1, 2])
def test_prompts_without_a_gradient_are_not_read_in_training_and_change_nothing(run, tiny, monkeypatch, epochs):
    """Half of the prompts have equal scores; in the last update all have."""
    calls = itertools.count()

    def score(completion_ids, n, **columns):
        last = next(calls) == 2
        return [0.0 if last or number % 2 else float(len(ids)) for number, ids in zip(n, completion_ids)]

    flags = {"reward_fns": flag_of(score=score), "reward_model_path": None, "kl_coef": 0.0, "total_episodes": 48}
    flags |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_ppo_epochs": epochs}
    flags |= {"weight_decay": 0.1, "learning_rate": 1e-3, "adam_eps": 1e-5}  # which does not amplify rounding
    monkeypatch.setattr(rloo, "check_policy", lambda *_, **__: None)
    whole, whole_folder, _ = run(**flags)
    calls, read = itertools.count(), []
    load("skip")
    monkeypatch.setattr(rloo, "check_policy", lambda *_, **__: None)
    spy(monkeypatch, "completion_logprobs", lambda x, found: read.append(x[1].ended.numel()) or found)
    skipped, folder, _ = run(**flags)
    ours, theirs = (rloo_test.final_weights(path) for path in (folder, whole_folder))
    assert (ours - theirs).norm() < 1e-3 * (theirs - rloo_test.final_weights(tiny / "sft")).norm()
    for one, other in zip(skipped, whole, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert one["objective/scores"] == pytest.approx(other["objective/scores"])
    assert sum(read) < 0.9 * 3 * 16 * (1 if epochs == 1 else 3)


@pytest.mark.parametrize("name", ["grpo", "entropy"])
def test_skip_needs_the_loss_of_rloo(name, run):
    with pytest.raises(rloo.InputError, match="another file's loss"):
        run(name, "skip")


def test_skip_needs_the_policy_loss_of_rloo(run, monkeypatch):
    load("skip")
    monkeypatch.setattr(rloo, "policy_loss", lambda *inputs: None)
    with pytest.raises(rloo.InputError, match="another file's loss"):
        run()


def test_skip_needs_one_mini_batch(run):
    with pytest.raises(rloo.InputError, match="skip.py needs --num_mini_batches 1"):
        run("skip", num_mini_batches=2, per_device_train_batch_size=8)
