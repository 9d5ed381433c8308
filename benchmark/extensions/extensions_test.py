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
from statistics import mean

import pytest
import torch
from conftest import MINI, ROOT, command_of, read_lines, rloo, without_times

import cispo  # isort: skip
import correction
import dapo
import entropy
import gspo
import k3
import lora
import maxrl
import own_loop
import replace_unended
import running_mean
import unlike_siblings

HERE = Path(__file__).resolve().parent
PAGE = HERE.joinpath("README.md").read_text()
# Commands in docstrings: four spaces, then python or torchrun; a line that ends with \ goes on.
COMMAND = re.compile(r"(?m)^    ((?:python|torchrun) (?:.*\\\n)*.*)$")
FILES = {path.stem: path.read_text() for path in sorted(HERE.glob("*.py"))}
COMMANDS = {name: COMMAND.search(text) for name, text in FILES.items()}
COMMANDS = {name: match[1].replace("\\\n", " ") for name, match in COMMANDS.items() if match}


def finite_and_learning(metrics: list[dict]):
    for update in metrics:
        assert all(math.isfinite(value) for value in update.values()) and update["grad_norm"] > 0


# ---- Every file runs with its command; the page lists all of them ----------------------------------------------------


@pytest.mark.parametrize(
    "name", ["cispo", "correction", "dapo", "entropy", "gspo", "k3", "maxrl", "replace_unended", "running_mean"]
)
def test_each_file_runs_with_its_command(name, data, tmp_path, monkeypatch):
    """What a reader does, but only one small update, on few rows."""
    words = shlex.split(re.sub(r"FLAGS OF rloo.py.*", "", COMMANDS[name]))
    assert words[:2] == ["python", f"benchmark/extensions/{name}.py"]
    fewer = {"total_episodes": 1, "num_eval_prompts": 0, "output_dir": tmp_path / "out", "response_length": 16}
    fewer |= {"per_device_train_batch_size": 16}
    if "--dataset_name" not in words:
        fewer |= {"dataset_name": data, "sft_model_path": MINI / "sft", "reward_model_path": MINI / "reward"}
    elif "benchmark/mini_gsm8k" in words:
        fewer |= {"dataset_train_split": "validation"}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [*words[1:], *command_of(fewer | {"device": "cpu"})])
    runpy.run_path(words[1], run_name="__main__")
    (metrics,) = read_lines(tmp_path / "out/metrics.jsonl")
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["grad_norm"] > 0 or name == "maxrl"  # which may find no right answer
    args = json.loads((tmp_path / "out/args.json").read_text())
    assert args["replaced"].keys() == importlib.import_module(name).SEAMS.keys()
    assert args.get("entropy_coef") == (0.02 if name == "entropy" else None)


def test_the_page_lists_every_file_with_its_command():
    table = dict(re.findall(r"(?m)^\| \[(\w+)\.py\]\(\1\.py\) \| (.*) \|$", PAGE))
    assert table.keys() == FILES.keys() - {"conftest", "vllm_server"} - {x for x in FILES if x.endswith("_test")}
    for name, row in table.items():
        lines, *_ = row.split(" | ")
        assert int(lines) == FILES[name].count("\n"), name
        assert name in COMMANDS


FLAGS = dict(re.findall(r"(?m)^\| (.*?) \(\d.* \| `(--.*)` \|$", PAGE))  # of objectives that need no file


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_objectives_that_are_flags_run(flags, run):
    args = rloo.parse_args(flags.split())
    named = {flag.removeprefix("no_") for flag in re.findall(r"--(\w+)", flags)}
    metrics, _ = run({}, **{flag: getattr(args, flag) for flag in named}, rloo_k=4)
    finite_and_learning(metrics)


def test_the_page_names_the_objectives_that_are_flags():
    assert [*FLAGS] == ["GRPO", "Dr. GRPO", "DAPO's loss", "REINFORCE++-baseline"]


# ---- The formulas ----------------------------------------------------------------------------------------------------


def test_maxrl_equals_the_loop():
    rewards = (torch.rand(6, 7) < torch.linspace(0, 1, 7)).float()  # all wrong, all right, and between
    rewards[0, 3] = math.nan
    found = maxrl.maxrl(rewards, "rloo")
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
    losses, log_ratio, clipped = cispo.cispo(new, old, advantages, mask, 0.2, 0.3, "token")
    losses.sum().backward()
    ratios = [math.exp(x) for x in (new - old)[mask].tolist()]
    factors = torch.zeros_like(old)
    factors[mask] = torch.tensor([-min(x, 1.3) * a for x, a in zip(ratios, advantages.expand(3, 4, 5)[mask].tolist())])
    assert torch.allclose(new.grad, factors, atol=1e-6) and torch.allclose(losses, (factors * new).sum(-1), atol=1e-5)
    assert log_ratio.exp().tolist() == pytest.approx(ratios, rel=1e-5) and not log_ratio.requires_grad
    assert clipped.tolist() == [x > 1.3 for x in ratios] and 0 < clipped.sum() < len(ratios)


def test_gspo_equals_the_loops():
    """The clipped objective of s = (π / π_old)^(1/|y|), one for a completion."""
    new, old, advantages, mask = log_probs_apart()
    losses, log_ratio, clipped = gspo.gspo(new, old, advantages, mask, 0.05, 0.1, "sequence")
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
    logits, ref = torch.randn(7).requires_grad_(), torch.randn(7).log_softmax(-1)
    new = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((new.exp() * (new - ref)).sum(), logits, retain_graph=True)
    gradients = []
    for penalty in (k3.unbiased_k3, rloo.kl_penalty):
        values = penalty(new.view(7, 1, 1), ref.view(7, 1, 1), torch.ones(7, 1, 1))[:, 0]
        assert torch.allclose(values, (ref - new).exp() - 1 + new - ref, atol=1e-6)
        gradients += torch.autograd.grad((new.detach().exp() * values).sum(), logits, retain_graph=True)
    assert torch.allclose(gradients[0], exact, atol=1e-6) and (gradients[1] - exact).abs().max() > 1e-2


def test_the_entropy_bonus_is_a_term_of_the_loss_with_a_gradient(run, monkeypatch):
    """With equal scores and β = 0 there is no other gradient: it raises the entropy."""
    logits = torch.randn(7, 9).requires_grad_()
    logprobs = logits.log_softmax(-1)
    found = torch.autograd.grad(entropy.entropy_with_gradient(logprobs).sum(), logits, retain_graph=True)
    loops = -sum(logprobs[n, v].exp() * logprobs[n, v] for n, v in itertools.product(range(7), range(9)))
    assert torch.allclose(*found, *torch.autograd.grad(loops, logits), atol=1e-6)

    flags = {"reward_fns": f"{__file__}:constant", "reward_model_path": None, "kl_coef": 0.0, "total_episodes": 32}
    metrics, _ = run(entropy.SEAMS, **flags, entropy_coef=0.03)
    assert metrics[0]["policy/entropy_avg"] + 0.01 < metrics[-1]["policy/entropy_avg"]
    lengths, entropies = metrics[0]["completions/mean_length"], metrics[0]["policy/entropy_avg"]
    assert metrics[0]["loss/policy_avg"] == pytest.approx(-0.03 * lengths * entropies, rel=1e-4)


def constant(prompts, **columns):
    return [1.0] * len(prompts)


# ---- Files that wrap `collect` or the scores -------------------------------------------------------------------------


def spy(monkeypatch, name: str) -> list:
    """Notes inputs and output of every call of a function of rloo.py."""
    seen, original = [], getattr(rloo, name)

    def noted(*inputs):
        output = original(*inputs)
        seen.append((inputs, output))
        return output

    monkeypatch.setattr(rloo, name, noted)
    return seen


def test_dapo_leaves_out_groups_of_equal_scores(run, monkeypatch):
    """The mean is then over the tokens of the others, which alone have a gradient."""
    flags = {"reward_fns": f"{__file__}:length_of_some", "reward_model_path": None, "kl_coef": 0.0}
    flags |= {"max_grad_norm": 0.0, "loss_aggregation": "token", "seed": 3}
    (plain,), _ = run({}, **flags)
    seen = spy(monkeypatch, "improve")
    (changed,), _ = run(dapo.SEAMS, **flags)
    experience = seen[0][0][3]
    lengths = experience.batch.response_mask.sum(-1)
    unequal = experience.scores[0] != experience.scores[1]  # k = 2
    assert experience.in_loss.all(0).tolist() == unequal.tolist() and 0 < unequal.sum() < len(unequal)
    assert changed["completions/in_loss"] == unequal.float().mean() and plain["completions/in_loss"] == 1
    share = lengths[:, unequal].sum() / lengths.sum()
    assert changed["grad_norm"] == pytest.approx(plain["grad_norm"] / share.item(), rel=1e-4)


def length_of_some(prompts, completions, **columns):
    return [len(text) * (len(prompt) % 2) for prompt, text in zip(prompts, completions)]


def test_running_means_equal_a_loop(run, monkeypatch, tmp_path):
    """Three updates of the same four prompts: the first has rloo.py's baseline, later ones have the running mean."""
    rows = [{"prompt": f"my {x} is rude. TL;DR:"} for x in ("boss", "sister", "cat", "friend")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]))
    monkeypatch.setattr(running_mean, "means", {})
    seen = spy(monkeypatch, "improve")
    flags = {"dataset_name": tmp_path, "total_episodes": 24, "kl_coef": 0.5, "reward_fns": f"{__file__}:none_of_a_cat"}
    run(running_mean.SEAMS, **flags, reward_model_path=None)
    assert len(seen) == 3
    means = {}
    for (_, _, _, experience), _ in seen:
        for b, example in enumerate(experience.batch.examples):
            prompt, rewards = example["prompt"], []
            for j in range(2):
                rewards.append(experience.scores[j, b].item() - 0.5 * sum(experience.kl[j, b].tolist()))
            found = experience.advantages[:, b, 0].tolist()
            if math.isnan(rewards[0]):
                assert "cat" in prompt and found == [0, 0]
                continue
            baselines = [means[prompt]] * 2 if prompt in means else rewards[::-1]
            assert found == pytest.approx([r - baseline for r, baseline in zip(rewards, baselines)], abs=1e-5)
            means[prompt] = 0.5 * mean(rewards) + 0.5 * means[prompt] if prompt in means else mean(rewards)
    assert len(means) == 4
    with pytest.raises(SystemExit, match="one baseline per completion"):
        run(running_mean.SEAMS, token_level_kl=True)


CALLS = []


def none_of_a_cat(prompts, completions, **columns):
    """... in the first of three updates."""
    CALLS.append(1)
    return [None if "cat" in prompt and len(CALLS) == 1 else float(len(x)) for prompt, x in zip(prompts, completions)]


def test_unended_scores_are_replaced(run):
    scores, ended = torch.tensor([[2.0, 3.0, -5.0, torch.nan]]), torch.tensor([[True, False, False, False]])
    replaced = replace_unended.replace_unended(scores, ended, None, False, None)
    assert replaced[0, :3].tolist() == [2, -1, -1] and replaced[0, 3].isnan()
    with pytest.raises(SystemExit, match="missing_eos_penalty"):
        run(replace_unended.SEAMS, missing_eos_penalty=1.0)
    (metrics,), output = run(replace_unended.SEAMS, response_length=1, kl_coef=0.0)  # no completion ends
    assert metrics["completions/clipped_ratio"] == 1 and metrics["objective/rlhf_reward"] == -1
    replaced = json.loads((output / "args.json").read_text())["replaced"]
    assert replaced["shape_scores"].endswith("replace_unended:replace_unended")


def test_the_bonus_for_being_unlike_siblings_compares_siblings_only():
    prompts = ["p"] * 3 + [[{"role": "user", "content": "q"}]] * 2 + ["alone"]
    texts = ["a b", "a b", "c d", "a b", "b c", ""]
    found = unlike_siblings.unlike_siblings(prompts, texts, None, n=[0] * 6)
    assert found == pytest.approx([0, 0, 1, 2 / 3, 2 / 3, 1])


# ---- The correction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_weights_of_a_mismatch_equal_the_formula_in_loops(kind, level):
    torch.manual_seed(0)
    old, sampled, cap = torch.randn(2, 3, 4), torch.randn(2, 3, 4), 1.5
    mask = torch.arange(4) < torch.randint(1, 5, (2, 3, 1))
    weight = correction.importance_weight(old, sampled, mask, kind, cap, level)
    for j, b in itertools.product(range(2), range(3)):
        logs = [(old - sampled)[j, b, t].item() for t in range(4) if mask[j, b, t]]
        exact = [math.exp(x) for x in ([sum(logs)] if level == "sequence" else logs)]
        limited = {"truncate": lambda w: min(w, cap), "mask": lambda w: w if 1 / cap <= w <= cap else 0.0}
        assert weight[j, b, : len(exact)].tolist() == pytest.approx([*map(limited[kind], exact)], rel=1e-5)


def test_a_weight_beyond_float32_is_finite_and_masked():
    """A completion that the sampler all but excluded: e^100 is no float32, and infinity times 0 would be NaN."""
    old, mask = torch.full((2, 1, 1), 100.0), torch.ones(2, 1, 1, dtype=torch.bool)
    for kind, expected in (("truncate", 2.0), ("mask", 0.0)):
        assert (correction.importance_weight(old, torch.zeros(2, 1, 1), mask, kind, 2.0) == expected).all()


def test_untruncated_weights_make_the_update_of_another_samplers_completions_exact():
    """All tokens of a vocabulary, sampled by μ: with w the mean gradient is that under π, without w it is not."""
    torch.manual_seed(0)
    logits, mu, A = torch.randn(5).requires_grad_(), torch.randn(5).log_softmax(-1), torch.randn(5)
    new = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad(-(new.exp() * A).sum(), logits, retain_graph=True)
    tokens = [x.view(5, 1, 1) for x in (new.detach(), mu, torch.ones(5, dtype=torch.bool))]
    w = correction.importance_weight(*tokens, "truncate", math.inf)
    for advantages, is_exact in ((A * w[:, 0, 0], True), (A, False)):
        losses, _, _ = rloo.policy_loss(
            new.view(5, 1, 1), tokens[0], advantages.view(5, 1, 1), tokens[2], 0.2, 0.2, "sequence"
        )
        (found,) = torch.autograd.grad((mu.exp() * losses[:, 0]).sum(), logits, retain_graph=True)
        assert torch.allclose(found, exact, atol=1e-6) == is_exact


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_a_mismatch_is_corrected_and_logged(level, run, monkeypatch):
    """A sampler whose log-probs are off by up to 0.3, and by 0.2 on average: what padding weighs is in no metric."""
    noise = torch.rand(2, 4, 20, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.1
    rollout = rloo.rollout

    def noisy(*inputs):
        batch, logprobs = rollout(*inputs)
        return batch, (logprobs - noise) * batch.response_mask

    seen = spy(monkeypatch, "improve")
    flags = {"kl_coef": 0.3, "response_length": 20, "ratio_level": level}
    cap = {"sequence": 20.0, "token": 1.25}[level]
    mask_flags = {"rollout_correction": "mask", "rollout_correction_cap": cap}
    (plain,), _ = run({"rollout": noisy}, **flags)
    (exact,), _ = run(correction.SEAMS, **flags, **mask_flags)
    (metrics,), _ = run(correction.SEAMS | {"rollout": noisy}, **flags, **mask_flags)
    uncorrected, without_noise, experience = (inputs[3] for inputs, _ in seen)
    mask = experience.batch.response_mask
    log_w = noise * mask
    if level == "sequence":
        log_w, mask = log_w.sum(-1, keepdim=True), mask[..., :1]
    w = log_w.exp() * (log_w.exp() <= cap)
    assert (w == 0).any() and (w > 1).any() and metrics["completions/mean_length"] < 20
    assert torch.allclose(experience.advantages, without_noise.advantages * w, atol=1e-3)  # the KL is the policy's
    assert not torch.allclose(experience.advantages, uncorrected.advantages * w, atol=1e-3)
    assert metrics["val/rollout_weight"] == pytest.approx(w[mask].mean().item(), abs=1e-4)
    assert exact["val/rollout_weight"] == pytest.approx(1, abs=1e-4) and "val/rollout_weight" not in plain
    assert metrics["val/rollout_logprob_gap"] == pytest.approx(0.2, abs=0.02) and metrics["val/ratio"] == 1
    assert metrics["time/correction"] > 0


def test_a_cap_below_1_is_refused_in_a_line(run):
    with pytest.raises(SystemExit, match="--rollout_correction_cap 0.5: must be at least 1$"):
        run(correction.SEAMS, rollout_correction_cap=0.5)


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

    seams = {name: noting(name) for name in names}
    flags = {"kl_in_reward": False, "total_episodes": 16, "save_steps": 1, "gradient_checkpointing": True}
    flags |= {"dtype": "bfloat16", "output_dir": tmp_path / "out"}
    metrics, _ = run(seams, **flags)
    run(seams, **flags | {"total_episodes": 24, "resume": True})
    assert called == {*names} - {"Args"} and len(metrics) == 2
    assert json.loads((tmp_path / "out/args.json").read_text())["replaced"].keys() == {*names}


@pytest.mark.parametrize("name", [name for name, text in FILES.items() if "\nSEAMS = " in text])
def test_a_file_replaces_what_its_docstring_says(name):
    said = FILES[name].partition("Replaces")[2].partition('"""')[0]
    module = importlib.import_module(name)
    assert set(re.findall(r"`(\w+)`", said)) == module.SEAMS.keys() <= vars(rloo).keys()


def test_two_compose(run):
    """LoRA and GSPO, each with effect; two that replace one function are refused by Python."""
    flags = {"num_mini_batches": 2, "per_device_train_batch_size": 4, "total_episodes": 16, "cliprange": 1e-6}
    one, output = run({**lora.SEAMS}, **flags)
    both, _ = run({**lora.SEAMS, **gspo.SEAMS}, **flags)
    finite_and_learning(both)
    assert (output / "adapter").is_dir() and without_times(one)[0] != without_times(both)[0]
    ratios = [update["policy/approxkl_avg"] for update in (one[0], both[0])]
    assert 0 < ratios[1] < ratios[0] / 9  # log ρ is divided by up to 6 tokens
    with pytest.raises(TypeError, match="multiple values for keyword argument 'policy_loss'"):
        rloo.command_line(**gspo.SEAMS, **cispo.SEAMS)


# ---- Code that the page prints, and the loop of one's own ------------------------------------------------------------


def printed(word: str) -> dict:
    """What the block of the page with `word` in it replaces."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if word in block]
    given, command_line = {}, rloo.command_line
    rloo.command_line = lambda **seams: given.update(seams)
    sys.path.insert(0, str(ROOT))  # as a file beside rloo.py, which finds benchmark.extensions
    exec(code, {"__name__": "mine"})
    sys.path.remove(str(ROOT))
    rloo.command_line = command_line
    return given


def test_two_that_compose_are_printed():
    assert printed("gspo.SEAMS").keys() == lora.SEAMS.keys() | gspo.SEAMS.keys()


def test_two_with_flags_compose_by_a_class_with_both_and_two_around_collect(run, monkeypatch):
    """LoRA in bfloat16, with the correction of its merged sampler, and the filter, which drops all groups here."""
    monkeypatch.setattr(rloo, "equal_groups", lambda scores: torch.ones(scores.shape[1], dtype=torch.bool))
    flags = {"lora_rank": 2, "dtype": "bfloat16", "rollout_correction": "mask"}
    (metrics,), output = run(printed("correction.SEAMS"), **flags)
    args = json.loads((output / "args.json").read_text())
    assert args["lora_rank"] == 2 and args["rollout_correction"] == "mask"
    assert 0 < abs(metrics["val/rollout_weight"] - 1) < 0.2 and (output / "adapter").is_dir()
    assert metrics["completions/in_loss"] == 0


def test_a_metric_of_ones_own(run):
    (metrics,), _ = run(printed("completions/longest"))
    assert metrics["completions/mean_length"] <= metrics["completions/longest"] <= 6


def test_top_p_is_seen_by_the_trial_and_by_the_gap(run, monkeypatch, capsys):
    torch.manual_seed(0)
    (sample,) = printed("top_p").values()
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(2000, 1)
    tokens, logprobs = sample(logits, 1.0, torch.rand(2000, 1))
    kept = torch.tensor([0.5, 0.3, 0.15]) / 0.95  # the first ones with 0.9 or more in all
    assert torch.allclose(tokens.bincount() / 2000, kept, atol=0.05)
    assert torch.allclose(logprobs.exp(), kept[tokens])

    with pytest.raises(SystemExit, match="the replaced `sample` is used in group rows only"):
        run({"sample": sample})
    assert "in group rows the decoder of this file gives other log-probs" in capsys.readouterr().out
    monkeypatch.setattr(rloo, "choose_layout", lambda *inputs: "group")  # a `rollout` has no trial
    (metrics,), _ = run({"sample": sample}, attn_implementation=rloo.GROUP_KERNEL)
    assert 0.01 < metrics["val/rollout_logprob_gap"] < -math.log(0.9)


def test_the_loop_of_ones_own_learns_and_log_probs_of_given_completions_are_the_model_s():
    policy, experience, scores, batch, logprobs = own_loop.main()
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
