"""Tests of the page of objectives: every file mine.py runs with its command, and is the published formula in loops."""

import io
import itertools
import json
import math
import re
import runpy
import shlex
import sys
import threading
from pathlib import Path
from statistics import mean, median

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import rloo  # noqa: E402
import rloo_test  # noqa: E402
from rloo_test import constant_reward, read_metrics, spy, tiny, tiny_tokenizer, token_logprobs, train  # noqa: E402, F401

README, PAGE = (path.read_text() for path in (ROOT / "README.md", Path(__file__).with_name("README.md")))
FILE = re.compile(
    r"```python\n((?:(?!```).)*rloo.command_line\([^\n]*\)\n)```(?:\n\n```sh\npython mine.py(.*?)```)?", re.DOTALL
)
FILES = {re.search(r"def (\w+)\(", code)[1]: (code, flags) for code, flags in FILE.findall(README + PAGE)}
FLAGS = dict(re.findall(r"(?m)^\| (.*?) \(\d.* \| `(--.*)` \|$", PAGE))  # of objectives that need no file


@pytest.fixture(autouse=True)
def rloo_as_it_was():
    before = dict(vars(rloo))
    yield
    vars(rloo).update(before)
    rloo.REPLACED.clear()


def mine(function: str):
    """A function of a file mine.py, which has replaced what it replaces."""
    names, run = {}, rloo.command_line
    rloo.command_line = lambda **replacements: vars(rloo).update(replacements)
    exec(FILES[function][0], names)
    rloo.command_line = run
    return names[function]


def test_the_page_has_its_files():
    names = ["median", "maxrl", "cispo", "gspo", "unbiased_k3", "without_equal_groups", "with_bonus", "with_decay"]
    assert [*FILES] == names
    assert [*FLAGS] == ["GRPO", "Dr. GRPO", "DAPO's loss", "REINFORCE++-baseline"]


@pytest.mark.parametrize("name", FILES)
def test_each_file_of_the_page_of_objectives_runs_with_its_command(name, tmp_path, monkeypatch):
    """What a reader does, but only one update."""
    code, flags = FILES[name]
    before = dict(vars(rloo))
    (tmp_path / "mine.py").write_text(code)
    fewer = ["--total_episodes", "1", "--num_eval_prompts", "0", "--output_dir", str(tmp_path / "out")]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["mine.py", *shlex.split(flags.replace("\\\n", " ")), *fewer])
    runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
    assert any(vars(rloo)[function] is not before[function] for function in before)
    (metrics,) = read_metrics(tmp_path / "out")
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["grad_norm"] > 0
    args = json.loads((tmp_path / "out/args.json").read_text())
    assert f"{tmp_path}/mine.py:{name}" in args["replaced"].values()
    assert args.get("entropy_coef") == (0.02 if name == "with_bonus" else None)
    if name == "with_decay":
        assert metrics["kl_coef"] == 0.1
        assert metrics["completions/mean_length"] < metrics["completions/longest"] <= args["response_length"]


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_objectives_that_are_flags_run(flags, train):  # noqa: F811
    args = rloo.parse_args(flags.split())
    named = {flag.removeprefix("no_") for flag in re.findall(r"--(\w+)", flags)}
    (metrics,), _ = train(**{flag: getattr(args, flag) for flag in named}, rloo_k=4)
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["grad_norm"] > 0


def test_leave_one_out_median_and_maxrl_equal_the_loops():
    objective, rewards = mine("median"), torch.randn(5, 4, 3)
    found = objective(rewards, "rloo")
    for j, b, t in itertools.product(range(5), range(4), range(3)):
        siblings = [rewards[i, b, t].item() for i in range(5) if i != j]
        assert found[j, b, t].item() == pytest.approx(rewards[j, b, t].item() - median(siblings), abs=1e-6)

    rewards = (torch.rand(6, 7) < torch.linspace(0, 1, 7)).float()  # all wrong, all right, and between
    rewards[0, 3] = math.nan
    found = mine("maxrl")(rewards, "rloo")
    for j, b in itertools.product(range(6), range(7)):
        scored = [x for x in rewards[:, b].tolist() if not math.isnan(x)]
        expected = (rewards[j, b].item() - mean(scored)) / mean(scored) if any(scored) else 0.0
        assert found[j, b].item() == pytest.approx(expected, abs=1e-6, nan_ok=True)


def log_probs_apart(k=3, B=4, T=5):
    """New log-probs with a gradient, old ones, advantages (k, B, 1) and a mask of unequal lengths."""
    torch.manual_seed(0)
    mask = torch.arange(T) < torch.randint(1, T + 1, (k, B, 1))
    new, old = torch.randn(2, k, B, T) * 0.4
    return new.requires_grad_(), old, torch.randn(k, B, 1), mask


def test_cispo_equals_the_loops():
    """-min(ρ_t, cap) A log π(y_t), where the factor before the log has no gradient."""
    new, old, advantages, mask = log_probs_apart()
    losses, log_ratio, clipped = mine("cispo")(new, old, advantages, mask, 0.2, 0.3, "token", 0.5)
    losses.sum().backward()
    ratios = [math.exp(x) for x in (new - old)[mask].tolist()]
    factors = torch.zeros_like(old)
    factors[mask] = torch.tensor(
        [-0.5 * min(x, 1.3) * a for x, a in zip(ratios, advantages.expand(3, 4, 5)[mask].tolist())]
    )
    assert torch.allclose(new.grad, factors, atol=1e-6) and torch.allclose(losses, (factors * new).sum(-1), atol=1e-5)
    assert log_ratio.exp().tolist() == pytest.approx(ratios, rel=1e-5)
    assert clipped.tolist() == [x > 1.3 for x in ratios] and 0 < clipped.sum() < len(ratios)


def test_gspo_equals_the_loops():
    """The clipped objective of s = (π / π_old)^(1/|y|), one for a completion."""
    new, old, advantages, mask = log_probs_apart()
    losses, log_ratio, clipped = mine("gspo")(new, old, advantages, mask, 0.05, 0.1, "sequence", 1.0)
    losses.sum().backward()
    clips = []
    for j, b in itertools.product(range(3), range(4)):
        length, a = int(mask[j, b].sum()), advantages[j, b].item()
        ratio = math.exp((new - old)[j, b, :length].sum().item() / length)
        plain, clip = -a * ratio, -a * min(max(ratio, 0.95), 1.1)
        assert losses[j, b].item() == pytest.approx(max(plain, clip), abs=1e-6)
        slope = plain / length if plain >= clip else 0.0
        assert new.grad[j, b].tolist() == pytest.approx([slope] * length + [0.0] * (5 - length), abs=1e-6)
        clips.append(clip > plain)
    assert clipped.tolist() == clips and 0 < sum(clips) < len(clips) and log_ratio.shape == (12,)


def test_unbiased_k3_has_the_gradient_of_the_kl():
    """Over all tokens of a vocabulary, weighted by their probability; k3 alone has another."""
    torch.manual_seed(0)
    logits, ref, k3 = torch.randn(7).requires_grad_(), torch.randn(7).log_softmax(-1), rloo.kl_penalty
    new = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((new.exp() * (new - ref)).sum(), logits, retain_graph=True)
    gradients = []
    for penalty in (mine("unbiased_k3"), k3):
        values = penalty(new.view(7, 1, 1), ref.view(7, 1, 1), torch.ones(7, 1, 1))[:, 0]
        assert torch.allclose(values, (ref - new).exp() - 1 + new - ref, atol=1e-6)
        gradients += torch.autograd.grad((new.detach().exp() * values).sum(), logits, retain_graph=True)
    assert torch.allclose(gradients[0], exact, atol=1e-6) and (gradients[1] - exact).abs().max() > 1e-2


def test_groups_of_equal_scores_leave_the_loss(train, monkeypatch):  # noqa: F811
    """The mean is then over the tokens of the others, which alone have a gradient."""
    seen = spy(monkeypatch, "collect")
    flags = {"reward_fns": (f"{__file__}:long_in_half_of_the_rows",), "reward_model_path": None, "kl_coef": 0.0}
    flags |= {"max_grad_norm": 0.0, "loss_aggregation": "token"}
    (plain,), _ = train(**flags)
    mine("without_equal_groups")
    (changed,), _ = train(**flags)
    lengths = seen[0][1].batch.response_mask.sum(-1)
    kept = lengths[:, seen[0][1].scores.std(0) > 0].sum().item()
    assert 0 < kept < lengths.sum() and plain["grad_norm"] > 0
    assert changed["grad_norm"] == pytest.approx(plain["grad_norm"] * lengths.sum().item() / kept, rel=1e-4)


def long_in_half_of_the_rows(prompts, completions, completion_ids, n, **columns):
    return [len(ids) * (row % 2) for row, ids in zip(n, completion_ids)]


def test_the_entropy_bonus_raises_the_entropy(train, monkeypatch):  # noqa: F811
    """... if all scores are equal, so that there is no other gradient. Its gradient is that of the formula."""
    torch.manual_seed(0)
    monkeypatch.setattr(rloo.Args, "entropy_coef", 0.01, raising=False)  # for `train`, which makes this class
    mine("with_bonus")
    logits = torch.randn(7, 9).requires_grad_()
    logprobs = logits.log_softmax(-1)
    found = torch.autograd.grad(rloo.entropy_of(logprobs).sum(), logits, retain_graph=True)
    loops = -sum(logprobs[n, v].exp() * logprobs[n, v] for n, v in itertools.product(range(7), range(9)))
    assert torch.allclose(*found, *torch.autograd.grad(loops, logits), atol=1e-6)

    flags = {"reward_fns": (f"{__file__}:constant_reward",), "reward_model_path": None, "kl_coef": 0.0}
    flags |= {"total_episodes": 96, "learning_rate": 1e-3}
    (first, *_, last), _ = train(**flags)
    assert first["policy/entropy_avg"] + 0.01 < last["policy/entropy_avg"] and first["grad_norm"] > 0


# ---- README's first reward -------------------------------------------------------------------------------------------


def test_the_first_reward_of_the_readme_runs_as_printed(tmp_path, monkeypatch, capfd):
    """... with fewer episodes; the table beside it has names of the closing table."""
    (block,) = [block for block in rloo_test.blocks_of(ROOT / "README.md", "sh") if "cat > feelings.py" in block]
    command, other = rloo_test.commands_of([block], tmp_path)  # writes the file, too
    assert command[0] == "rloo.py" and other == [*command, "--kl_coef", "0.2"]
    monkeypatch.chdir(tmp_path)
    rloo.command_line([*command[1:], "--total_episodes", "32", "--num_eval_prompts", "16"])
    screen = capfd.readouterr().out
    for name in ("sampled/score", "sampled/gold_win_rate"):
        assert f"\n{name} " in screen and f"| `{name}` |" in README
    (output,) = (tmp_path / "runs").iterdir()
    assert {line["grades"]["score"] for line in read_metrics(output, "completions")} == {0.0, 1.0}


def test_the_library_example_learns_in_a_thread_whose_output_is_no_file(monkeypatch):
    """As in a notebook. Log-probs of given completions are those of a loop."""
    example, given = (
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "command_line" not in code
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    torch.manual_seed(0)
    names = {}
    thread = threading.Thread(target=exec, args=(example, names))
    thread.start()
    thread.join()
    screen, sys.stdout = sys.stdout.getvalue(), io.StringIO()
    exec(given, names)
    policy, experience = names["policy"], names["experience"]
    assert float(screen.split()[-1]) == pytest.approx(experience.scores.mean().item()) and screen.count("\n") == 3
    learned = rloo.completion_logprobs(policy, experience.batch, 0.7)[0] - experience.old_logprobs
    assert (learned * experience.advantages).sum() > 0.1
    printed = [float(x) for x in re.findall(r"-\d+\.\d+", sys.stdout.getvalue())]
    batch = names["batch"]
    assert rloo.completion_texts(batch, names["tokenizer"]) == [" cat trouble", " keys gone"] and batch.ended.all()
    for example, ids, logprob in zip(batch.examples, batch.completion_ids(), printed, strict=True):
        assert token_logprobs(policy, example["prompt_ids"], ids, 0.7)[0].sum().item() == pytest.approx(
            logprob, rel=1e-3
        )
