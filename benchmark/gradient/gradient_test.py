"""Tests of exact.py, noise.py and stale.py, and of what the page says of their records.

python -m pytest -q benchmark/gradient
"""

import itertools
import json
import math
import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import exact
import noise
import pytest
import stale
import study
import torch
from exact import MASK, OPTIONS, TOKENS, B, N, Option

import rloo

# ---- exact.py: the enumeration against sums written anew and against samples -----------------------------------------


def a_case(reward: str = "dense", away: float = 0.5) -> exact.Case:
    reference, scores = exact.make_reference(1), exact.make_scores(reward, 1)
    return exact.make_case(exact.move_away(reference, scores, away), reference, scores)


def bias(case: exact.Case, option: Option, k: int = 2, sampler=None) -> float:
    base = exact.moments(case, k, Option())
    return exact.judge(case.exact, *exact.moments(case, k, option, sampler), base)[0]


def corrected(correction: str, cap: float = 2.0, token: bool = False) -> Option:
    return Option(rollout_correction=correction, rollout_correction_cap=cap, token_ratio=token)


def another_sampler(case: exact.Case, size: float = 0.5) -> torch.Tensor:
    noise = torch.randn(15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return exact.token_logprobs(case.theta + size * noise)


def test_all_completions_are_listed_once_and_their_probabilities_add_up_to_one():
    lists = [ids[:length].tolist() for ids, length in zip(TOKENS, MASK.sum(-1))]
    assert sorted(lists) == [[0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    for top_p in (1.0, 0.9):
        probability = exact.token_logprobs(a_case().theta, top_p).sum(-1).exp()
        assert probability.sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12)
        assert (probability == 0).any() == (top_p < 1)


def test_the_exact_gradient_is_that_of_finite_differences():
    case, step = a_case(), 1e-6

    def value(theta: torch.Tensor) -> float:
        total = 0.0
        for b, (i, ids) in itertools.product(range(B), enumerate(TOKENS.tolist())):
            logprob = 0.0
            for t in range(int(MASK[i].sum())):
                logits = theta[3 * b : 3 * b + 3] + theta[6:].view(3, 3)[([0, *ids])[t]]
                logprob = logprob + torch.log_softmax(logits, 0)[ids[t]]
            kl = logprob - case.ref_logprobs[b, i].sum()
            total += (logprob.exp() * (case.scores[b, i] - exact.KL_COEF * kl)).item() / B
        return total

    for i in (0, 4, 7, 14):
        move = torch.zeros(15, dtype=torch.float64)
        move[i] = step
        slope = (value(case.theta + move) - value(case.theta - move)) / (2 * step)
        assert slope == pytest.approx(case.exact[i].item(), abs=1e-8)


@pytest.mark.parametrize("k", exact.KS)
@pytest.mark.parametrize("reward", exact.REWARDS)
def test_rloo_has_no_bias_and_a_wrong_baseline_has(reward, k, monkeypatch):
    case = a_case(reward)
    for option in (Option(), Option(kl_level="token"), Option(baseline=False), Option(kl="k3 in both")):
        assert bias(case, option, k) < 1e-10
    assert bias(case, Option(kl="none"), k) > 1e-2  # the KL is seen
    right = rloo.advantage
    monkeypatch.setattr(rloo, "advantage", lambda rewards, estimator: right(rewards) - 0.1 * rewards)
    assert bias(case, Option(), k) > 1e-2  # a baseline that knows the completion's own reward


@pytest.mark.parametrize("name", list(OPTIONS))
def test_an_update_stands_for_all_its_orders(name):
    """The estimate of an update with its completions in another order, its prompts one by one."""
    case, (index, orders) = a_case(), exact.UPDATES[3]
    some = index[:, torch.randint(index.shape[1], (20,), generator=torch.Generator().manual_seed(1))]
    again = torch.stack([some[[2, 0, 1], :, 0], some[[1, 0, 2], :, 1]], dim=-1)
    first, second = (exact.estimates(case, x, OPTIONS[name]) for x in (some, again))
    assert torch.allclose(first, second, rtol=1e-8, atol=1e-10)
    assert orders.sum().item() == N ** (3 * B)


def test_the_enumeration_is_the_sum_over_all_ordered_updates():
    case, option = a_case("sparse"), Option("grpo", normalize_reward=True)
    index = torch.tensor([*itertools.product(range(N), repeat=2 * B)]).view(-1, 2, B).transpose(0, 1)
    g = exact.estimates(case, index, option)
    weight = case.logprobs.sum(-1).exp()[torch.arange(B), index].prod(0).prod(-1)
    mean = weight @ g
    found, variance = exact.moments(case, 2, option)
    assert torch.allclose(found, mean, atol=1e-12)
    assert variance == pytest.approx((weight @ (g - mean).square().sum(-1)).item())


def test_estimates_are_the_written_out_sums():
    """One update, k = 2: g = mean_j v_j A_j ∇ log π(y_j), A_j = R_j - R_other, or each token with its own G_t. v is 1,
    or w = π / μ cut at 1.1, or of a mask 0 outside of [1 / 1.1, 1.1]. With a correction the KL is the policy's, without
    one the sampler's."""
    case, index = a_case(), torch.tensor([[[1, 5]], [[4, 0]]])  # (k, 1, B)
    sampler = another_sampler(case, 0.2)
    names = ("default", "to go", "off", "truncate", "mask", "token")
    expected = {name: torch.zeros(15, dtype=torch.float64) for name in names}
    for b, j in itertools.product(range(B), range(2)):
        own, other = index[j, 0, b], index[1 - j, 0, b]

        def to_go(logprobs, i, t, b=b):
            return case.scores[b, i] - exact.KL_COEF * (logprobs[b, i] - case.ref_logprobs[b, i])[t:].sum()

        slopes = case.jacobian[b, own] / 4  # (R, d)
        A = to_go(case.logprobs, own, 0) - to_go(case.logprobs, other, 0)
        w = (case.logprobs[b, own] - sampler[b, own]).exp()
        expected["default"] += A * slopes.sum(0)
        expected["off"] += (to_go(sampler, own, 0) - to_go(sampler, other, 0)) * slopes.sum(0)
        expected["truncate"] += min(w.prod().item(), 1.1) * A * slopes.sum(0)
        expected["mask"] += w.prod() * (1 / 1.1 <= w.prod() <= 1.1) * A * slopes.sum(0)
        expected["token"] += A * (w.clamp(max=1.1)[:, None] * slopes).sum(0)
        for t in range(2):
            expected["to go"] += (to_go(case.logprobs, own, t) - to_go(case.logprobs, other, t)) * slopes[t]
    found = {
        "default": exact.estimates(case, index, Option()),
        "to go": exact.estimates(case, index, Option(kl_level="token")),
        "off": exact.estimates(case, index, Option(), sampler),
        "truncate": exact.estimates(case, index, corrected("truncate", 1.1), sampler),
        "mask": exact.estimates(case, index, corrected("mask", 1.1), sampler),
        "token": exact.estimates(case, index, corrected("truncate", 1.1, token=True), sampler),
    }
    for name in names:
        assert torch.allclose(found[name][0], expected[name], atol=1e-12), name
    assert not torch.allclose(found["truncate"], found["mask"]) and not torch.allclose(found["token"], found["off"])


# ---- A sampler that is not the policy --------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", ["dense", "sparse"])
def test_the_weight_of_whole_completions_without_a_cap_leaves_no_bias_and_nothing_less_does(reward, monkeypatch):
    case = a_case(reward)
    sampler = another_sampler(case)
    whole = [corrected("truncate", math.inf), corrected("mask", math.inf)]
    less = [Option(), corrected("truncate", math.inf, token=True), corrected("truncate", 1.2), corrected("mask", 1.2)]
    assert all(bias(case, option, sampler=sampler) < 1e-10 for option in whole)
    assert all(bias(case, option, sampler=sampler) > 1e-2 for option in less)
    cut = exact.token_logprobs(case.theta, 0.9)  # what is never sampled cannot be corrected
    assert 1e-2 < bias(case, whole[0], sampler=cut) < math.inf
    right = rloo.rollout_weight
    monkeypatch.setattr(rloo, "rollout_weight", lambda old, sampled, *more: right(sampled, old, *more))
    assert bias(case, whole[0], sampler=sampler) > 1e-2  # upside down


@pytest.mark.parametrize("name", exact.SAMPLERS)
def test_a_sampler_is_a_distribution_that_differs_from_the_policy(name):
    start = a_case()
    case, sampler = exact.differing(start, *exact.SAMPLERS[name], seed=1)
    assert sampler.sum(-1).exp().sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12)
    gap = exact.gap_of(case, sampler)
    assert 1e-3 < gap < 0.5
    kind, size = exact.SAMPLERS[name]
    if kind == "step":
        assert (case.theta - start.theta).norm().item() == pytest.approx(size)
        assert torch.equal(sampler, start.logprobs) and not torch.allclose(case.exact, start.exact)
    if kind == "logits":  # the gap is that of samples
        index = torch.multinomial(sampler.sum(-1).exp(), 50_000, True, generator=torch.Generator().manual_seed(1))
        apart = (case.logprobs - sampler)[torch.arange(B)[:, None], index]  # (B, draws, R)
        assert apart[MASK[index]].abs().mean().item() == pytest.approx(gap, rel=0.02)


def test_the_records_are_what_the_command_makes():
    """The numbers of one case of each part, measured again."""
    recorded = json.loads((exact.HERE / "exact.json").read_text())
    said, case = next(exact.cases([1], ["dense"]))
    base = exact.moments(case, 2, Option())
    for name in ("grpo", "kl_level token"):
        again = exact.judge(case.exact, *exact.moments(case, 2, OPTIONS[name]), base)
        assert recorded["options"][0]["found"][name] == pytest.approx(again, rel=1e-3, abs=1e-9)
    assert recorded["options"][0].items() >= said.items()
    row = recorded["samplers"][0]
    case, sampler = exact.differing(case, *exact.SAMPLERS[row["sampler"]], seed=1)
    again = exact.judge(case.exact, *exact.moments(case, 2, exact.CORRECTIONS["truncate, token"], sampler), base)
    assert row["found"]["truncate, token"] == pytest.approx(again, rel=1e-3, abs=1e-9)


# ---- noise.py: the sketch, the gradients, the errors -----------------------------------------------------------------


def test_the_sketch_keeps_inner_products():
    x = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1))
    x[1] = x[0] + 0.1 * x[1]
    found = torch.stack([s @ s.T for s in (noise.Sketch(5000, 200, seed)(x) for seed in range(60))])
    error = found.std(0) / math.sqrt(60)
    assert ((found.mean(0) - x @ x.T).abs() < 4 * error).all()
    norms = x.norm(dim=1)
    assert (found.std(0) < 1.5 * math.sqrt(1 / 200) * norms[:, None] * norms).all()


def test_every_completion_is_in_one_update_with_its_group():
    x = torch.arange(16 * 8).view(16, 8)
    for k in (2, 4, 8, 16):
        updates = noise.to_updates(x, k, 16 // k)
        assert updates.shape == (8, k, 16 // k) and sorted(updates.flatten().tolist()) == [*range(128)]
        assert (updates % 8 == updates[:, :1] % 8).all()  # a group is of one prompt


def test_figures_are_without_bias_and_their_errors_are_right():
    """Updates with a known mean and covariance, whose noise within a block is shared in part."""
    mean = torch.tensor([1.0, 0.5, 0, 0, 0, 0])
    found = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        shared, own = torch.randn(60, 1, 6, generator=generator), torch.randn(60, 8, 6, generator=generator)
        g = mean + shared + own  # trace of the covariance: 12
        gradients = {("rloo", 16): g.double(), ("grpo", 16): 0.5 * g[..., [1, 0, 2, 3, 4, 5]].double()}
        found.append(noise.with_errors(gradients))
    for row, expected in ((0, 12 / 1.25), (1, 12 / 1.25 / 0.8**2)):  # grpo's mean has the cosine 0.8 with the target
        values = torch.tensor([rows[row]["noise"] for rows in found])
        errors = torch.tensor([rows[row]["noise_stderr"] for rows in found])
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(40) + 0.02 * expected
        assert errors.mean() == pytest.approx(values.std().item(), rel=0.4)


def test_gradients_are_those_of_the_log_probs_and_the_estimate_that_of_rloo():
    torch.manual_seed(1)
    engine = study.Engine()
    policy = engine.policy(study.TASK / "sft", trained=True)
    rows = engine.rows(study.read_lines(study.TASK / "train.jsonl")[:2])
    batch, _ = rloo.rollout(policy, rows, 4, 0.7, 6, engine.stop_ids)
    policy.set_attn_implementation("eager")
    completions = [(batch.responses[:, b], batch.response_mask[:, b]) for b in (0, 1)]
    found = [noise.completion_gradients(policy, rows[b]["prompt_ids"], *completions[b], 0.7) for b in (0, 1)]
    policy.set_attn_implementation("sdpa")
    A = rloo.advantage(torch.arange(8.0).view(4, 2).square())
    new, _ = rloo.completion_logprobs(policy, batch, 0.7)
    losses, _, _ = rloo.policy_loss(new, new.detach(), A[..., None], batch.response_mask, 0.2, 0.2)
    exact = -torch.cat([x.flatten() for x in torch.autograd.grad(losses.mean(), list(policy.parameters()))])
    ours = torch.einsum("jb,jbw->w", A, torch.stack(found, dim=1)) / 8
    assert (ours - exact).norm() < 1e-4 * exact.norm()


def test_a_small_run_has_the_figures_of_the_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(noise, "UPDATE", 16)
    monkeypatch.setattr(noise, "BLOCK", 8)
    noise.main(noise.Args(num_prompts=24, output=tmp_path / "small.json"))
    small, record = (json.loads(path.read_text()) for path in (tmp_path / "small.json", noise.HERE / "noise.json"))
    assert small.keys() == record.keys() and capsys.readouterr().out.startswith("| noise | k = 2 |")
    for name in noise.REWARDS:
        assert [row.keys() for row in small["tables"][name]] == [row.keys() for row in record["tables"][name]]
    with pytest.raises(SystemExit, match="at least 24, 3 blocks"):
        noise.main(noise.Args(num_prompts=16, output=tmp_path / "none.json"))


# ---- stale.py: old weights, the runs ---------------------------------------------------------------------------------


@pytest.fixture
def policy():
    stale.versions.clear()
    stale.copies.clear()
    folder = str(rloo.MINI_TLDR / "sft")
    args = rloo.Args(sft_model_path=folder, model_name_or_path=folder, dtype="float32", device="cpu")
    return rloo.load_model(args, "--sft_model_path", folder, trained=True)


PROMPTS = [[300 + i, 301, 302, 303][: 2 + i] for i in range(3)]


def sampled(engine, policy, version: int, k: int = 4):
    options = {"k": k, "temperature": 0.7, "response_length": 12, "stop_ids": [0], "seed": 5, "max_length": 70}
    return engine(policy, PROMPTS, version=version, **options)


def own(policy, k: int = 4):
    torch.manual_seed(5)
    batch, logprobs = rloo.rollout(policy, [{"prompt_ids": ids} for ids in PROMPTS], k, 0.7, 12, [0])
    return stale.grouped(batch.responses, batch.response_mask), stale.grouped(logprobs, batch.response_mask)


def test_completions_come_from_weights_of_the_given_age_and_evaluations_from_those_of_now(policy):
    assert sampled(stale.updates_0, policy, 0) == own(policy)
    stale.versions.clear()
    expected = []
    for version in range(8):
        expected.append(own(policy))
        assert sampled(stale.updates_4, policy, version)[0] == expected[max(0, version - 4)][0], version
        assert sampled(stale.updates_4, policy, version, k=1)[0] == own(policy, k=1)[0]
        with torch.no_grad():
            for x in policy.parameters():
                x.add_(0.02 * torch.randn_like(x))
    assert expected[0] != expected[4] and len(stale.versions) == 5  # older ones are not kept


def test_it_is_an_engine_of_rloo_and_the_correction_sees_its_age(tmp_path, policy):
    flags = ["--rollout_engine", f"{stale.HERE}/stale.py:updates_1", "--rollout_correction", "mask", *study.QUIET]
    flags += ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1", "--total_episodes", "24"]
    flags += ["--save_steps", "0", "--response_length", "16", "--output_dir", str(tmp_path / "out")]
    rloo.main(rloo.parse_args(flags))
    lines = study.read_lines(tmp_path / "out" / "metrics.jsonl")
    assert lines[0]["val/rollout_logprob_gap"] < 1e-5 and lines[0]["val/rollout_weight_share"] > 0.999
    assert all(line["val/rollout_logprob_gap"] > 1e-3 for line in lines[1:])
    assert all(line["val/ratio"] == 1 for line in lines)
    found = stale.summary([{"val/rollout_logprob_gap": i} for i in range(40)])
    assert found == {"val/rollout_logprob_gap": sum(range(16, 40)) / 24}


def test_all_runs_parse_and_the_records_are_theirs():
    found = {run.name: run for run in stale.runs(study, (1, 2, 3), quick=False)}
    assert len(found) == 6 + 3 * 4 * 2
    for run in found.values():
        args = rloo.parse_args(list(run.command[1:]))
        assert (args.seed, args.learning_rate, args.kl_coef) == (run.seed, 5e-4, 0.05)
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
    for name, record in json.loads((stale.HERE / "stale.json").read_text()).items():
        words = record["command"].split()
        assert found[name].seed == record["seed"] and set(words[2:]) <= set(found[name].command)


# ---- The page --------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_records_say():
    page = (exact.HERE / "README.md").read_text(encoding="utf-8")
    result, of_noise = (json.loads((exact.HERE / f"{name}.json").read_text()) for name in ("exact", "noise"))
    stale_runs = study.Records(stale.HERE / "stale.json")
    tables = {"noise": noise.table(of_noise), "stale": stale.table(study, stale_runs)}
    for name, table in (exact.tables(result) | tables).items():
        assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in page
    (grpo,) = re.findall(r"- GRPO: .*?(?=\n- )", page, re.DOTALL)
    (noise_at, noise_away) = (exact.values(result["options"], "grpo", "noise", position=x) for x in exact.POSITIONS)
    ranges = [exact.values(result["options"], "grpo", column) for column in ("cosine", "variance")]
    assert re.findall(r"-?[\d.]+ to [\d.]+", grpo) == [exact.span(x) for x in (*ranges, noise_at, noise_away)]
    biases = [max(exact.values(result["options"], x, "bias")) for x in ("rloo (the defaults)", "kl_level token")]
    assert f"have no bias except rounding (at most {max(biases):.0e})" in page
    published = exact.values(result["options"], "grpo, k3 in loss, sequence-mean", "cosine")
    assert f"(direction {exact.span(published)})" in page
    pairs = [
        [exact.median(exact.values(result["samplers"], x, column, sampler=name)) for x in ("off", "truncate, token")]
        for name, column in ((name, "bias") for name in exact.SAMPLERS if "top-p" not in name)
    ]
    left = [token / off for off, token in pairs]
    assert f"leaves {100 * min(left):.0f} to {100 * max(left):.0f}% of the bias" in page
    noises = [
        exact.median(exact.values(result["samplers"], "truncate, sequence", "noise", sampler=x)) for x in exact.SAMPLERS
    ]
    assert f"median noise is at most {max(noises):.2f} times" in " ".join(page.split())

    # of the embedded policy
    gold = {(row["estimator"], row["k"]): row for row in of_noise["tables"]["gold"]}
    less = [round(100 * (1 - gold["grpo", k]["relative_noise"])) for k in (4, 8, 16)]
    assert f"GRPO is {min(less)} to {max(less)}% less noisy here than RLOO for k = 4 to 16" in page
    assert sorted(noise.KS, key=lambda k: gold["rloo", k]["noise"])[2:] == [16, 2]
    assert gold["reinforce", 2]["relative_noise"] < 1

    # of training runs
    runs = {name: 100 * x["validation"]["sampled"]["win"]["mean"] for name, x in stale_runs.all.items()}
    usual = [win for name, win in runs.items() if name.startswith("policy")]
    for name, win in runs.items():
        assert win < min(usual) if "stale16" in name else min(usual) <= win <= max(usual), name
