"""Tests of the objectives of this folder and of its page: each file runs with its command, and is the published formula
in loops; each function that the page lists is called if it is replaced."""

import importlib
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
import unlike_siblings
from conftest import MINI, ROOT, command_of, forget, load

import rloo
from rloo_test import read_metrics, spy, without_times

HERE = Path(__file__).resolve().parent
PAGE = HERE.joinpath("README.md").read_text()
# Commands in docstrings: four spaces, then python or torchrun; a line that ends with \ goes on, and # begins a comment.
COMMAND = re.compile(r"(?m)^    ((?:python|torchrun) (?:.*\\\n)*[^#\n]*)")
FILES = {path.stem: path.read_text() for path in sorted(HERE.glob("*.py")) if not path.stem.endswith("test")}
COMMANDS = {name: [x.replace("\\\n", " ") for x in COMMAND.findall(text)] for name, text in FILES.items()}


# ---- Every file runs with its command; the page lists all of them ----------------------------------------------------

OBJECTIVES = ["cispo", "correction", "dapo", "entropy", "grpo", "gspo", "maxrl", "replace_unended", "running_mean"]


@pytest.mark.parametrize("command", [x for name in OBJECTIVES for x in COMMANDS[name]])
def test_each_file_runs_with_its_commands(command, data, tmp_path, monkeypatch):
    """What a reader does, but only one small update, on few rows."""
    words = shlex.split(re.sub(r"FLAGS OF rloo.py.*", "", command))
    fewer = {"total_episodes": 1, "num_eval_prompts": 0, "output_dir": tmp_path / "out", "response_length": 8}
    fewer |= {"per_device_train_batch_size": 8}
    if "--dataset_name" not in words:
        fewer |= {"dataset_name": data, "sft_model_path": MINI / "sft", "reward_model_path": MINI / "reward"}
    elif "benchmark/mini_gsm8k" in words:
        fewer |= {"dataset_train_split": "validation"}
    forget()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [*words[1:], *command_of(fewer | {"device": "cpu"})])
    runpy.run_path(words[1], run_name="__main__")
    (metrics,) = read_metrics(tmp_path / "out")
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["grad_norm"] > 0 or "maxrl" in command  # which may find no right answer
    args = json.loads((tmp_path / "out/args.json").read_text())
    assert args["replaced"].keys() >= replaced_by(Path(words[1]).stem)
    assert f"{Path(words[1]).stem}:" in str(args["replaced"]) and "__main__" not in str(args["replaced"])
    assert args.get("entropy_coef") == (0.02 if "entropy" in command else None)


def replaced_by(name: str) -> set[str]:
    """What a file's docstring says that it replaces or wraps."""
    docstring = FILES[name].split('"""')[1]
    return set(re.findall(r"`(\w+)`", " ".join(re.findall(r"(?:[Rr]eplaces|[Ww]raps)[^.:]*", docstring))))


@pytest.mark.parametrize("name", [name for name, text in FILES.items() if "    rloo.command_line()" in text])
def test_a_file_replaces_what_its_docstring_says(name):
    forget()
    if "Stands on grpo.py" in FILES[name]:
        importlib.import_module("benchmark.extensions.grpo")
    before = dict(vars(rloo))
    importlib.import_module(f"benchmark.extensions.{name}")
    changed = {x for x in vars(rloo) if vars(rloo)[x] is not before.get(x)}
    assert changed == replaced_by(name) and changed


def test_the_page_lists_every_file_and_each_begins_with_a_command():
    listed = re.findall(r"(?m)^\| \[(\w+)\.py\]\(\1\.py\) \|", PAGE)
    assert sorted(listed) == sorted(FILES.keys() - {"conftest", "vllm_server"})
    assert all(COMMANDS[name] for name in listed)


# ---- The formulas ----------------------------------------------------------------------------------------------------


def test_maxrl_equals_the_loop():
    rewards = (torch.rand(6, 7, 1) < torch.linspace(0, 1, 7)[:, None]).float()  # all wrong, all right, and between
    rewards[0, 3] = rewards[1:, 3].mean()  # as rloo.py fills it in if it has no score
    found = load("maxrl").maxrl(rewards)
    for j, b in itertools.product(range(6), range(7)):
        scored = rewards[b == 3 :, b, 0].tolist()
        expected = (rewards[j, b, 0].item() - mean(scored)) / mean(scored) if any(scored) else 0.0
        assert found[j, b, 0].item() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(rloo.InputError, match="rewards must be 0 or 1"):
        rloo.advantage(torch.tensor([[[0.5]], [[1.0]]]))


def log_probs_apart(k=3, B=4, T=5):
    """New log-probs with a gradient, old ones, advantages (k, B, 1) and a mask of unequal lengths."""
    torch.manual_seed(0)
    mask = torch.arange(T) < torch.randint(1, T + 1, (k, B, 1))
    new, old = torch.randn(2, k, B, T) * 0.4
    return new.requires_grad_(), old, torch.randn(k, B, 1), mask


def test_cispo_equals_the_loops():
    """-min(ρ_t, cap) A log π(y_t), where the factor before the log has no gradient."""
    new, old, advantages, mask = log_probs_apart()
    losses, log_ratio, clipped = load("cispo").cispo(new, old, advantages, mask, 0.2, 0.3, True)
    losses.sum().backward()
    ratios = [math.exp(x) for x in (new - old)[mask].tolist()]
    factors = torch.zeros_like(old)
    factors[mask] = torch.tensor([-min(x, 1.3) * a for x, a in zip(ratios, advantages.expand(3, 4, 5)[mask].tolist())])
    assert torch.allclose(new.grad, factors, atol=1e-6) and torch.allclose(losses, (factors * new).sum(-1), atol=1e-5)
    assert log_ratio.exp().tolist() == pytest.approx(ratios, rel=1e-5) and not log_ratio.requires_grad
    assert clipped.tolist() == [x > 1.3 for x in ratios] and 0 < clipped.sum() < len(ratios)


def test_gspo_with_grpo_s_mean_over_tokens_equals_the_loops():
    """The clipped objective of s = (π / π_old)^(1/|y|), one for a completion."""
    new, old, advantages, mask = log_probs_apart()
    gspo = load("gspo")
    losses, log_ratio, clipped = gspo.gspo(new, old, advantages, mask, 0.05, 0.1, True)
    losses = losses * gspo.grpo.token_weights(rloo.Args(), mask)
    losses.sum().backward()
    clips = []
    for j, b in itertools.product(range(3), range(4)):
        length, a = int(mask[j, b].sum()), advantages[j, b].item()
        ratio = math.exp((new - old)[j, b, :length].sum().item() / length)
        plain, clip = -a * ratio, -a * min(max(ratio, 0.95), 1.1)
        assert losses[j, b].item() == pytest.approx(max(plain, clip), abs=1e-6)
        slope = plain / length if plain >= clip else 0.0
        assert new.grad[j, b].tolist() == pytest.approx([slope] * length + [0.0] * (5 - length), abs=1e-6)
        clips += [clip > plain] * length
    assert clipped.tolist() == clips and 0 < sum(clips) < len(clips) and not log_ratio.requires_grad


def experience_of(batch, **fields):
    """An Experience that has these fields only."""
    others = dict.fromkeys(rloo.Experience.__dataclass_fields__)
    return rloo.Experience(**others | {"batch": batch} | fields)


@pytest.mark.parametrize("baseline", ["grpo", "group", "update", "rloo"])
@pytest.mark.parametrize("loss_mean", ["tokens-then-completions", "tokens", "completions"])
def test_grpo_equals_the_loops(baseline, loss_mean):
    """One completion has no score, and another is truncated and left out: neither has a part in loss, KL or lengths."""
    load("grpo")
    new, old, _, mask = log_probs_apart()
    ref, scores, ended = torch.randn(3, 4, 5) * 0.4, torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool)
    scores[0, 1], ended[2, 2] = math.nan, False
    batch = rloo.Batch([], *[None] * 3, mask, mask, ended)
    args = rloo.Args(baseline=baseline, loss_mean=loss_mean, kl_coef=0.3, cliprange_high=0.25)
    args.mask_truncated_completions = True
    shaped = torch.where(scores.isnan(), scores.nanmean(0), scores)
    advantages = rloo.advantages_of(args, batch, shaped, None)
    experience = experience_of(batch, scores=scores, ref_logprobs=ref, advantages=advantages)
    index = torch.tensor([2, 0, 1])
    losses, log_ratio, clipped = rloo.completion_loss(args, experience, index, new[:, index], old[:, index], None)
    losses.sum().backward()

    lengths = mask.sum(-1)
    counted = [lengths[j, b].item() if (j, b) not in ((0, 1), (2, 2)) else 0 for j in range(3) for b in range(4)]
    for j, (i, b) in itertools.product(range(3), enumerate(index.tolist())):
        group, n = shaped[:, b].tolist(), int(lengths[j, b])
        others = [group[i] for i in range(3) if i != j]
        base = (
            mean(shaped.flatten().tolist()) if baseline == "update" else mean(others if baseline == "rloo" else group)
        )
        a = (group[j] - base) / (stdev(group) + 1e-4 if baseline == "grpo" else 1)
        assert advantages[j, b].tolist() == pytest.approx([a] * n + [0.0] * (5 - n), abs=1e-5)
        expected = 0.0
        for t in range(n if counted[4 * j + b] else 0):
            ratio = math.exp((new - old)[j, b, t].item())
            to_ref = (ref[j, b, t] - new[j, b, t]).item()
            expected += max(-a * ratio, -a * min(max(ratio, 0.8), 1.25)) + 0.3 * (math.exp(to_ref) - 1 - to_ref)
        weight = {"tokens-then-completions": 1 / n, "tokens": 12 / sum(counted), "completions": 1}[loss_mean]
        assert losses[j, i].item() == pytest.approx(weight * expected, abs=1e-5)
    assert not new.grad[0, 1].any() and not new.grad[2, 2].any() and not new.grad[:, 3].any() and new.grad.any()
    assert len(log_ratio) == len(clipped) == sum(counted) - sum(counted[3::4])


def test_the_unbiased_k3_of_grpo_has_the_gradient_of_the_kl():
    """Over all tokens of a vocabulary, weighted by their probability; k3 alone has another."""
    load("grpo")
    torch.manual_seed(0)
    logits, ref = torch.randn(7).requires_grad_(), torch.randn(7, 1, 1).log_softmax(0)
    new = logits.log_softmax(-1).view(7, 1, 1)  # seven completions of a token
    (exact,) = torch.autograd.grad((new.exp() * (new - ref)).sum(), logits, retain_graph=True)
    yes = torch.ones(7, 1, 1, dtype=torch.bool)
    fields = {"ref_logprobs": ref, "advantages": torch.zeros(7, 1, 1), "scores": torch.zeros(7, 1)}
    experience = experience_of(rloo.Batch([], *[None] * 3, yes, yes, yes[..., 0]), **fields)
    for unbiased in (True, False):
        args = rloo.Args(kl_coef=1.0, cliprange_high=0.2, unbiased_kl=unbiased)
        losses, *_ = rloo.completion_loss(args, experience, torch.tensor([0]), new, new.detach(), None)
        assert torch.allclose(losses, ((ref - new).exp() - 1 + new - ref)[..., 0], atol=1e-6)
        (found,) = torch.autograd.grad((new.detach()[..., 0].exp() * losses).sum(), logits, retain_graph=True)
        assert ((found - exact).abs().max() < 1e-6) == unbiased


def test_grpo_logs_the_reward_without_kl_and_refuses_the_token_s(run):
    (_, metrics), _ = run("grpo", total_episodes=16, kl_coef=0.5, normalize_reward=True)
    assert abs(metrics["objective/rlhf_reward"]) < 1e-6 < 1e-3 < abs(metrics["objective/kl"])
    with pytest.raises(SystemExit, match="^rloo.py: --token_level_kl: grpo.py has its KL in the loss"):
        run("grpo", token_level_kl=True)


def test_the_entropy_bonus_is_a_term_of_the_loss_with_a_gradient(run):
    """With equal scores and β = 0 there is no other gradient: it raises the entropy."""
    logits, tokens = torch.randn(7, 9).requires_grad_(), torch.arange(7)
    rloo.final_logits = lambda model, hidden: hidden
    logprobs, entropies = load("entropy").block_logprobs(None, logits, tokens, 0.5)
    table = (logits / 0.5).log_softmax(-1)
    loops = -sum(table[n, v].exp() * table[n, v] for n, v in itertools.product(range(7), range(9)))
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (entropies.sum(), loops)]
    assert torch.allclose(*gradients, atol=1e-6) and logprobs.tolist() == table[tokens, tokens].tolist()


def test_a_run_with_the_entropy_bonus(run):
    flags = {"reward_fns": f"{__file__}:constant", "reward_model_path": None, "kl_coef": 0.0, "total_episodes": 32}
    metrics, _ = run("entropy", **flags, entropy_coef=0.03)
    assert metrics[0]["policy/entropy_avg"] + 0.01 < metrics[-1]["policy/entropy_avg"]
    lengths, entropies = metrics[0]["completions/mean_length"], metrics[0]["policy/entropy_avg"]
    assert metrics[0]["loss/policy_avg"] == pytest.approx(-0.03 * lengths * entropies, rel=1e-4)
    (metrics,), _ = run("entropy", **flags | {"total_episodes": 8}, response_length=2, mask_truncated_completions=True)
    assert metrics["completions/clipped_ratio"] == 1 and metrics["loss/policy_avg"] == 0


def constant(prompts, **columns):
    return [1.0] * len(prompts)


# ---- Files that wrap `improve` or the scores -------------------------------------------------------------------------


def test_dapo_leaves_out_groups_of_equal_scores(run, monkeypatch):
    """The mean is then over the tokens of the others, which alone have a gradient."""
    flags = {"reward_fns": f"{__file__}:length_of_some", "reward_model_path": None, "kl_coef": 0.0}
    flags |= {"max_grad_norm": 0.0, "loss_mean": "tokens", "seed": 3}
    (plain,), _ = run("grpo", **flags)
    seen, collected = (spy(monkeypatch, name) for name in ("improve", "collect"))
    (changed,), _ = run("dapo", **flags)
    untouched = collected[0][1].batch  # as other files find it
    assert untouched.policy_mask.equal(untouched.response_mask)
    experience = seen[0][0][4]
    lengths = experience.batch.response_mask.sum(-1)
    unequal = experience.scores[0] != experience.scores[1]  # k = 2
    assert experience.batch.policy_mask.any(-1).all(0).tolist() == unequal.tolist() and 0 < unequal.sum() < len(unequal)
    assert changed["completions/in_loss"] == unequal.float().mean() and "completions/in_loss" not in plain
    share = lengths[:, unequal].sum() / lengths.sum()
    assert changed["grad_norm"] == pytest.approx(plain["grad_norm"] / share.item(), rel=1e-4)
    (none,), _ = run("dapo", **flags | {"reward_fns": f"{__file__}:constant"})
    assert none["completions/in_loss"] == none["grad_norm"] == none["loss/policy_avg"] == 0


def length_of_some(prompts, completions, **columns):
    return [len(text) * (prompt.count("e") % 2) for prompt, text in zip(prompts, completions)]


@pytest.mark.parametrize(
    "extensions", [["running_mean"], ["running_mean", "correction"], ["correction", "running_mean"]]
)
def test_running_means_equal_a_loop(extensions, run, monkeypatch, tmp_path):
    """Three updates of the same four prompts: the first has rloo.py's baseline, later ones have the running mean. What
    has no score has no advantage, and is in no mean."""
    rows = [{"prompt": f"my {x} is rude. TL;DR:"} for x in ("boss", "sister", "cat", "friend")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]))
    CALLS.clear()
    seen = spy(monkeypatch, "improve")
    flags = {"dataset_name": tmp_path, "total_episodes": 24, "kl_coef": 0.5, "reward_fns": f"{__file__}:none_of_a_cat"}
    run(*extensions, **flags, reward_model_path=None)
    assert len(seen) == 3
    means = {}
    for (_, _, _, _, experience), _ in seen:
        for b, example in enumerate(experience.batch.examples):
            prompt = example["prompt"]
            scores, costs = experience.scores[:, b].tolist(), (0.5 * experience.kl[:, b].sum(-1)).tolist()
            scored = [score - cost for score, cost in zip(scores, costs) if not math.isnan(score)]
            filled = mean(x for x in scores if not math.isnan(x)) if scored else 0.0
            rewards = [(filled if math.isnan(score) else score) - cost for score, cost in zip(scores, costs)]
            baselines = [means[prompt]] * 2 if prompt in means else rewards[::-1]
            found = experience.advantages[:, b, 0].tolist()
            for j in range(2):
                expected = 0.0 if math.isnan(scores[j]) else rewards[j] - baselines[j]
                assert found[j] == pytest.approx(expected, abs=1e-4)
            if scored:
                means[prompt] = 0.5 * mean(scored) + 0.5 * means[prompt] if prompt in means else mean(scored)
    assert len(means) == 4
    with pytest.raises(SystemExit, match="one baseline per completion"):
        run(*extensions, token_level_kl=True)


CALLS = []


def none_of_a_cat(prompts, completions, **columns):
    """No score for a cat in the first of three updates, nor for the first completion of each prompt in the second."""
    CALLS.append(1)
    missing = [len(CALLS) == 1 and "cat" in x or len(CALLS) == 2 and i % 2 == 0 for i, x in enumerate(prompts)]
    return [None if gone else float(len(x)) for gone, x in zip(missing, completions)]


def test_unended_scores_are_replaced(run):
    scores, ended = torch.tensor([[2.0, 3.0, -5.0]]), torch.tensor([[True, False, False]])
    assert load("replace_unended").replace_unended(scores, ended, None, False, None).tolist() == [[2, -1, -1]]
    with pytest.raises(SystemExit, match="missing_eos_penalty"):
        run("replace_unended", missing_eos_penalty=1.0)
    (metrics,), _ = run("replace_unended", response_length=1, kl_coef=0.0)  # no completion ends
    assert metrics["completions/clipped_ratio"] == 1 and metrics["objective/rlhf_reward"] == -1


def test_the_bonus_for_being_unlike_siblings_compares_siblings_only():
    prompts = ["p"] * 3 + [[{"role": "user", "content": "q"}]] * 2 + ["alone"]
    texts = ["a b", "a b", "c d", "a b", "b c", ""]
    found = unlike_siblings.unlike_siblings(prompts, texts, None, n=[0] * 6)
    assert found == pytest.approx([0, 0, 1, 2 / 3, 2 / 3, 1])


# ---- The correction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_weights_of_a_mismatch_equal_the_formula_in_loops(kind, per_token):
    torch.manual_seed(0)
    old, sampled, cap = torch.randn(2, 3, 4), torch.randn(2, 3, 4), 1.5
    mask = torch.arange(4) < torch.randint(1, 5, (2, 3, 1))
    weight = load("correction").importance_weight(old, sampled, mask, kind, cap, per_token)
    for j, b in itertools.product(range(2), range(3)):
        logs = [(old - sampled)[j, b, t].item() for t in range(4) if mask[j, b, t]]
        exact = [math.exp(x) for x in (logs if per_token else [sum(logs)])]
        limited = {"truncate": lambda w: min(w, cap), "mask": lambda w: w if 1 / cap <= w <= cap else 0.0}
        assert weight[j, b, : len(exact)].tolist() == pytest.approx([*map(limited[kind], exact)], rel=1e-5)


def test_a_weight_beyond_float32_is_finite_and_masked():
    """A completion that the sampler all but excluded: e^100 is no float32, and infinity times 0 would be NaN."""
    old, mask = torch.full((2, 1, 1), 100.0), torch.ones(2, 1, 1, dtype=torch.bool)
    weight = load("correction").importance_weight
    for kind, expected in (("truncate", 2.0), ("mask", 0.0)):
        assert (weight(old, torch.zeros(2, 1, 1), mask, kind, 2.0, False) == expected).all()


@pytest.mark.parametrize("kind", ["completion", "token", "grpo"])
def test_a_mismatch_is_corrected_and_logged(kind, run, monkeypatch):
    """A sampler whose log-probs are off by up to 0.3, and by 0.2 on average, which rloo.py alone refuses. There is a
    weight for each ratio."""
    noise = torch.rand(2, 4, 20, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.1
    rollout = rloo.rollout
    off = 0

    def noisy(*inputs):
        batch, logprobs = rollout(*inputs)
        return batch, (logprobs - off * noise) * batch.response_mask

    monkeypatch.setattr(rloo, "rollout", noisy)
    seen = spy(monkeypatch, "improve")
    extensions = ["grpo", "correction"] if kind == "grpo" else ["correction"]
    flags = {"kl_coef": 0.3, "response_length": 20, "token_level_kl": kind == "token", "rollout_correction": "mask"}
    flags["rollout_correction_cap"] = cap = 20.0 if kind == "completion" else 1.25
    (exact,), _ = run(*extensions, **flags)
    off = 1
    (metrics,), _ = run(*extensions, **flags)
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
    assert exact["val/rollout_weight"] == pytest.approx(1, abs=1e-4)
    assert metrics["val/rollout_logprob_gap"] == pytest.approx(0.2, abs=0.02) and metrics["val/ratio"] == 1


def test_a_cap_below_1_is_refused_in_a_line(run):
    with pytest.raises(SystemExit, match="--rollout_correction_cap 0.5: must be at least 1$"):
        run("correction", rollout_correction_cap=0.5)


# ---- Seams -----------------------------------------------------------------------------------------------------------


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
    assert json.loads((tmp_path / "out/args.json").read_text())["replaced"].keys() == {*names}


def test_two_compose_and_with_flags_of_both(run):
    """LoRA in bfloat16 with the correction of its merged sampler, and GSPO: each has its effect."""
    flags = {"num_mini_batches": 2, "per_device_train_batch_size": 4, "total_episodes": 16, "lora_rank": 2}
    flags |= {"dtype": "bfloat16", "rollout_correction": "mask", "cliprange": 1e-6, "kl_coef": 0.0}
    one, output = run("lora", "grpo", "correction", **flags)
    both, _ = run("correction", "gspo", "lora", **flags)
    args = json.loads((output / "args.json").read_text())
    assert args["lora_rank"] == 2 and args["rollout_correction"] == "mask" and (output / "adapter").is_dir()
    assert all(0 < abs(update["val/rollout_weight"] - 1) < 0.2 for update in one + both)
    assert without_times(one)[0] != without_times(both)[0]
    ratios = [update["policy/approxkl_avg"] for update in (one[0], both[0])]
    assert 0 < ratios[1] < ratios[0]  # log ρ is a mean over up to 6 tokens


# ---- Code that the page prints, and the loop of one's own ------------------------------------------------------------


def printed(word: str, **names):
    """Runs the block of the page with `word` in it, but for its last line, where these names are known."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if word in block]
    assert code.endswith("rloo.command_line()\n")
    forget()
    exec(code.removesuffix("rloo.command_line()\n"), {"__name__": "mine"} | names)


def test_the_first_example_of_the_page(run):
    printed("to_the_group_s_mean")
    (metrics,), output = run()
    assert metrics["grad_norm"] > 0
    assert json.loads((output / "args.json").read_text())["replaced"] == {"advantage": "mine:to_the_group_s_mean"}
    rewards = torch.tensor([[[1.0]], [[0.0]], [[0.0]], [[0.0]]])
    assert rloo.advantage(rewards).flatten().tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(
    "first, second",
    [
        x.split()
        for x in (
            "entropy grpo",
            "entropy truncate",
            "lora vllm_rollout",
            "grpo maxrl",
            "cispo gspo",
            "grpo running_mean",
        )
    ],
)
def test_a_file_that_would_drop_what_another_has_changed_is_refused(first, second):
    with pytest.raises(rloo.InputError, match=f"would be replaced: import benchmark.extensions.{first}, which"):
        load(first, second)


def test_two_that_compose_are_printed(run):
    printed("from benchmark.extensions import")
    changed = {name for name, x in vars(rloo).items() if callable(x) and x is not rloo.ORIGINAL.get(name)}
    assert {"load_models", "collect", "Args"} <= changed
    run()


def test_rewards_of_last_tokens_are_scores(run, monkeypatch):
    """... so that they change the advantages as the scores do."""
    seen = spy(monkeypatch, "advantages_of")
    run(token_level_kl=True, kl_coef=0.3)
    ((args, batch, scores, kl), _), *_ = seen
    more = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0))
    expected = rloo.advantages_of(args, batch, scores + more, kl)
    last = batch.response_mask & (batch.response_mask.cumsum(-1) == batch.response_mask.sum(-1, keepdim=True))
    printed("rewards_of_tokens", rewards_of_tokens=lambda batch: last * more[..., None])
    assert torch.allclose(rloo.advantages_of(args, batch, scores, kl), expected, atol=1e-5)


def test_a_metric_of_ones_own(run):
    printed("completions/longest")
    (metrics,), _ = run()
    assert metrics["completions/mean_length"] <= metrics["completions/longest"] <= 6


def test_the_loop_of_ones_own_learns_and_log_probs_of_given_completions_are_the_model_s():
    policy, experience, scores, batch, logprobs = load("own_loop").main()
    assert len(scores) == 3 and all(-32 <= x <= -1 for x in scores)
    tokenizer = rloo.load_tokenizer(rloo.Args(), str(rloo.MINI_TLDR / "sft"))
    assert rloo.completion_texts(batch, tokenizer) == [" cat trouble", " keys gone"] and batch.ended.all()
    for example, ids, found in zip(batch.examples, batch.completion_ids(), logprobs[0].sum(-1).tolist(), strict=True):
        prompt = example["prompt_ids"]
        table = (policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        assert sum(table[t, token].item() for t, token in enumerate(ids)) == pytest.approx(found, rel=1e-3)
    with torch.no_grad():
        learned = rloo.completion_logprobs(policy, experience.batch, 0.7)[0] - experience.sampler_logprobs
    assert (learned * experience.advantages).sum() > 0.1  # the last update raises what was better than its siblings
