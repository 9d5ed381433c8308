"""Tests of value.py: GAE by loops, REINFORCE as its limit, the critic's loss and steps, and resuming."""

import pytest
import torch
from conftest import MINI, load

import rloo
from rloo_test import final_weights, resumed_at, without_times


def test_gae_equals_a_loop_over_the_policys_tokens():
    value = load("value")
    torch.manual_seed(1)
    rewards, values = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    mask = torch.rand(2, 3, 7) < 0.7
    found = value.gae(rewards, values, mask, 0.9, 0.8)
    for j in range(2):
        for b in range(3):
            own = mask[j, b].nonzero().flatten().tolist()
            r, V = rewards[j, b, own].tolist(), [*values[j, b, own].tolist(), 0.0]
            delta = [r[i] + 0.9 * V[i + 1] - V[i] for i in range(len(own))]
            A = [sum((0.9 * 0.8) ** (i - t) * delta[i] for i in range(t, len(own))) for t in range(len(own))]
            assert found[j, b, own].tolist() == pytest.approx(A, abs=1e-5)
            assert not found[j, b][~mask[j, b]].any()


def test_with_a_value_of_0_an_update_is_that_of_reinforce_without_a_baseline(run, monkeypatch):
    flags = {"kl_coef": 0.1, "normalize_advantage": True, "missing_eos_penalty": 1.0, "adam_eps": 1e-5}
    _, folder = run("value", lam=1.0, **flags)

    def no_baseline(rewards):
        return rewards

    monkeypatch.setattr(rloo, "advantage", no_baseline)
    _, plain = run(token_level_kl=True, **flags)
    begin, ours, theirs = (final_weights(path) for path in (MINI / "sft", folder, plain))
    assert (ours - theirs).norm() < 1e-3 * (theirs - begin).norm()


@pytest.fixture
def critic():
    """critic(flag=value, ...) -> value.py, flags, master and an Experience whose critic began as the reward model."""

    def critic(**flags):
        value = load("value")
        paths = {"sft_model_path": str(MINI / "sft"), "value_model_path": str(MINI / "reward"), "device": "cpu"}
        flags = {"dtype": "float32", "cliprange_high": 0.2, "learning_rate": 1e-3, "response_length": 6} | paths | flags
        args = value.Args(rloo_k=2, per_device_train_batch_size=4, **flags)
        master, policy, reference = rloo.load_models(args, 40, None)
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in policy.parameters():  # so that there is a KL
                weight += 0.1 * weight.std() * torch.randn_like(weight)
        examples = [{"prompt_ids": torch.randint(5, 200, (n,)).tolist()} for n in (4, 9)]

        def reward(batch):
            return batch.responses.remainder(7).where(batch.response_mask, 0).sum(-1).float()

        experience = rloo.collect(args, policy, reference, {"reward": reward}, examples, list(range(0, 500, 8)))
        return value, args, master, policy, experience, reward(experience.batch)

    return critic


def values_by_hand(model, batch) -> list[torch.Tensor]:
    """V before each token, by a forward pass over prompt and completion alone, of the k·B completions."""
    found = []
    for row, ids in enumerate(batch.completion_ids()):
        prompt = batch.examples[row % len(batch.examples)]["prompt_ids"]
        hidden = model.base_model(torch.tensor([prompt + ids]))[0][0, len(prompt) - 1 : -1]
        found.append(model.score(hidden).squeeze(-1))
    return found


def test_advantages_and_the_critics_gradient_are_those_of_loops(critic):
    value, args, master, policy, experience, scores = critic(gamma=0.9, lam=0.7, value_cliprange=0.05, kl_coef=0.5)
    batch = experience.batch
    assert batch.ended.any() and not batch.ended.all() and experience.kl.abs().max() > 0.1
    old = [values.detach() for values in values_by_hand(value.critic, batch)]
    advantages = []
    for row, V in enumerate(old):
        j, b = divmod(row, 2)
        r = -args.kl_coef * experience.kl[j, b, : len(V)]
        r[-1] += scores[j, b]
        A, following = [0.0] * len(V), (0.0, 0.0)
        for t in reversed(range(len(V))):
            A[t] = float(r[t] + 0.9 * following[1] - V[t] + 0.9 * 0.7 * following[0])
            following = A[t], V[t]
        advantages.append(torch.tensor(A))
        assert experience.advantages[j, b, : len(V)].tolist() == pytest.approx(A, abs=1e-4)
        assert not experience.advantages[j, b, len(V) :].any()

    with torch.no_grad():
        for weight in value.critic.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    loss = clipped = 0
    for V, before, A in zip(values_by_hand(value.critic, batch), old, advantages):
        for t in range(len(V)):
            R = A[t] + before[t]
            limited = min(max(V[t], before[t] - 0.05), before[t] + 0.05)
            loss += max((V[t] - R) ** 2, (limited - R) ** 2) / 2 / 4
            clipped += (limited - R) ** 2 > (V[t] - R) ** 2
    assert 0 < clipped < sum(map(len, old))
    weights = [weight for weight in value.critic.parameters() if weight.requires_grad]
    by_hand = torch.autograd.grad(loss, weights)
    gradients = {}

    def noted(model, limit):
        gradients[model] = [weight.grad.clone() for weight in model.parameters()]
        return value.before.clip_gradients(model, limit)

    rloo.clip_gradients = lambda model, limit: noted(value.critic, limit) + noted(model, limit)
    optimizer = rloo.make_optimizer(args, master)
    rloo.improve(args, policy, master, optimizer, experience)
    norm = sum(x.square().sum() for x in by_hand).sqrt()
    assert sum((x - y).square().sum() for x, y in zip(gradients[value.critic], by_hand)).sqrt() < 1e-4 * norm
    assert all(weight in optimizer.state for weight in weights)


def test_the_critic_learns_at_a_rate_and_within_a_norm_of_its_own(critic):
    value, args, master, policy, experience, _ = critic(value_learning_rate=0.25, max_grad_norm=1e-3)
    optimizer = rloo.make_optimizer(args, master)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.25]
    args.value_learning_rate = 0.0
    assert rloo.make_optimizer(args, master).param_groups[1]["lr"] == 0
    rloo.improve(args, policy, master, optimizer, experience)
    for model in (master, value.critic):
        moments = [optimizer.state[weight]["exp_avg"] for weight in model.parameters()]
        norm = sum(x.square().sum() for x in moments).sqrt().item()
        assert norm == pytest.approx(0.1 * 1e-3, rel=1e-3)  # the first moment is a tenth of the gradient


def test_one_completion_per_prompt_is_enough_and_a_resumed_run_equals_an_uninterrupted_one(run, tmp_path):
    flags = {"rloo_k": 1, "num_ppo_epochs": 2, "value_model_path": MINI / "reward", "value_learning_rate": 1e-2}
    flags |= {"per_device_train_batch_size": 7, "total_episodes": 14, "save_steps": 1, "save_total_limit": 9}
    whole, folder = run("value", **flags)
    resumed, again = run("value", **flags, **resumed_at(folder, 1, tmp_path / "again"))
    assert without_times(resumed) == without_times(whole)
    for name in ("model.safetensors", "optimizer.pt", "critic.pt"):
        ours, theirs = ((path / "checkpoint-2" / name).read_bytes() for path in (again, folder))
        assert ours == theirs
    first, last = (torch.load(folder / f"checkpoint-{update}" / "critic.pt")["score.weight"] for update in (1, 2))
    assert not torch.equal(first, last)


def none_at_first(prompts, **columns):
    return [None] + [1.0] * (len(prompts) - 1)


def test_what_it_cannot_train_on_is_refused_in_a_line(run):
    for message, flags in {
        "value.py: needs --token_level_kl": {"token_level_kl": False},
        "--gamma, --lam: must be from 0 to 1": {"lam": -0.5},
        "value.py: a reward must not be None": {"reward_fns": f"{__file__}:none_at_first", "reward_model_path": None},
        "must be a multiple of --rloo_k 2": {"rloo_k": 2, "per_device_train_batch_size": 5},
    }.items():
        with pytest.raises(SystemExit, match=message):
            run("value", **flags)
