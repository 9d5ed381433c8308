"""Tests of turns.py: its rules by turns that are written down; log-probs, gradients and resuming by a real model."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import GSM8K, load

import rloo
from rloo_test import read_metrics, resumed_at, without_times, write_rows

STOP = 2  # <|im_end|>
NUMBERS = itertools.count()  # of files of tools: each must have a name of its own


@pytest.fixture
def tool(tmp_path):
    """tool(body) -> --tool: a function with this body, which notes what it is asked."""

    def tool(body: str) -> str:
        path = tmp_path / f"tool_number_{next(NUMBERS)}.py"
        path.write_text(f"asked = []\n\ndef tool(text):\n    asked.append(text)\n    {body}\n")
        return f"{path}:tool"

    return tool


def models_of(turns, **flags):
    """Flags and the models of a run with mini GSM8K's policy, whose tool is asked after " =" if they say no other."""
    paths = {"sft_model_path": str(GSM8K / "sft"), "model_name_or_path": str(GSM8K / "sft")}
    args = turns.Args(**{"device": "cpu", "dtype": "float32", "cliprange_high": 0.2, "tool_mark": " ="} | paths | flags)
    return args, *rloo.load_models(args, 60, None)


# ---- The rules -------------------------------------------------------------------------------------------------------


@pytest.fixture
def exchange(tool, monkeypatch):
    """exchange(writes, body, flag=value, ...) -> batch, log-probs, their texts, what the tool was asked. The policy
    writes writes[text][j] behind a text as lane j; the log-prob of its token number n of a turn is -n."""

    def exchange(writes, body, prompts=("Tom",), k=1, **flags):
        def one_turn(args, model, examples, k, temperature, stop_ids):
            assert temperature == 0.7
            exchange.rooms.append(args.response_length)
            rows = []
            for j, example in itertools.product(range(k), examples):
                ids = tokenizer(writes[tokenizer.decode(example["prompt_ids"])][j])["input_ids"]
                rows.append((ids + [0] * args.response_length)[: args.response_length])
            batch = rloo.make_batch(examples, torch.tensor(rows).unflatten(0, (k, -1)), stop_ids)
            logprobs = -torch.arange(1.0, args.response_length + 1).expand_as(batch.responses)
            return batch, logprobs.where(batch.policy_mask, 0.0)

        monkeypatch.setattr(rloo, "rollout", one_turn)
        turns = load("turns")
        args, model, *_ = models_of(turns, **{"tool": tool(body), "response_length": 12, "kl_coef": 0.0} | flags)
        function, _, tokenizer = turns.tool
        examples = [{"prompt_ids": tokenizer(text)["input_ids"]} for text in prompts]
        batch, logprobs = rloo.rollout(args, model, examples, k, 0.7, [STOP])
        texts = [tokenizer.decode(ids) for ids in batch.completion_ids()]
        return batch, logprobs, texts, function.__globals__["asked"]

    exchange.rooms = []  # T of each turn
    return exchange


def test_answers_are_put_behind_marks_and_are_not_the_policys(exchange):
    writes = {
        "Tom": ["1 + 2 =", "5"],
        "Ann": ["4<|im_end|>", "7 ="],
        "Tom1 + 2 = 8": [". 8 ="],
        "Tom1 + 2 = 8. 8 = 8": ["<|im_end|>"],
        "Ann7 = 8": [" = 3."],  # goes on without an end
        "Ann7 = 8 = 8": [" 3."],
    }
    batch, logprobs, texts, asked = exchange(writes, 'return " 8"', prompts=("Tom", "Ann"), k=2, response_length=20)
    assert texts[:2] == ["1 + 2 = 8. 8 = 8<|im_end|>", "4<|im_end|>"] and texts[2].startswith("5")
    assert texts[3].startswith("7 = 8 = 8 3.")
    assert asked == ["1 + 2 =", "7 =", "1 + 2 = 8. 8 =", "7 = 8 ="]
    assert batch.ended.tolist() == [[True, True], [False, False]]
    # "1", " +", " ", "2", " =" by the policy, " ", "8" by the tool, ".", " ", "8", " =" by the policy, ...
    by_policy = [True] * 5 + [False] * 2 + [True] * 4 + [False] * 2 + [True]
    assert batch.policy_mask[0, 0][batch.response_mask[0, 0]].tolist() == by_policy
    assert logprobs[0, 0, : len(by_policy)].tolist() == [-1, -2, -3, -4, -5, 0, 0, -1, -2, -3, -4, 0, 0, -1]
    assert not logprobs[~batch.policy_mask].any()
    assert (batch.policy_mask <= batch.response_mask).all() and batch.policy_mask[0, 1].sum() == 2


def test_the_last_turn_has_no_mark(exchange):
    batch, _, texts, asked = exchange({"Tom": ["1 ="], "Tom1 = 8": [" = 3<|im_end|>"]}, 'return " 8"', max_turns=2)
    assert texts == ["1 = 8 = 3<|im_end|>"] and len(asked) == 1 and batch.ended.all()


def test_after_no_text_the_policy_goes_on(exchange):
    batch, _, texts, _ = exchange({"Tom": ["1 ="], "Tom1 =": [" 3<|im_end|>"]}, 'return ""')
    assert texts == ["1 = 3<|im_end|>"] and batch.ended.all() and torch.equal(batch.policy_mask, batch.response_mask)


def test_an_answer_is_cut_to_the_room_that_is_left(exchange):
    batch, logprobs, texts, _ = exchange({"Tom": ["1 ="]}, 'return "5" * 50')
    assert texts == ["1 =" + "5" * 10] and batch.responses.shape == logprobs.shape == (1, 1, 12)
    assert batch.policy_mask.sum() == 2 and not batch.ended.any()


def test_a_turn_is_as_long_as_its_shortest_exchange_needs_and_the_others_are_cut(exchange):
    writes = {"Tom": ["1 ="], "Ann": ["1 + 2 ="], "Tom1 = 8": ["3456"], "Ann1 + 2 = 8": ["3456"]}
    batch, _, texts, _ = exchange(writes, 'return " 8"', prompts=("Tom", "Ann"), response_length=8)
    assert texts == ["1 = 83456", "1 + 2 = 83"] and not batch.ended.any()
    assert exchange.rooms == [8, 4]


def test_without_room_the_tool_is_not_asked(exchange):
    batch, _, texts, asked = exchange({"Tom": ["1 ="]}, 'return " 8"', response_length=2)
    assert texts == ["1 ="] and not asked and not batch.ended.any()


def test_a_stop_token_or_a_mark_in_an_answer_has_no_effect(exchange):
    writes = {"Tom": ["1 ="], "Tom1 = 8<|im_end|> =": [" 3<|im_end|>"]}
    batch, _, texts, asked = exchange(writes, 'return " 8<|im_end|> ="')
    assert texts == ["1 = 8<|im_end|> = 3<|im_end|>"] and batch.ended.all() and len(asked) == 1


def test_a_mark_that_is_a_stop_token_ends_the_exchange_if_the_tool_has_no_text(exchange):
    writes = {"Tom": ["1<|im_end|>"], "Tom1<|im_end|>8": ["2<|im_end|>"]}
    body = 'return "8" if text == "1<|im_end|>" else ""'
    batch, _, texts, asked = exchange(writes, body, tool_mark="<|im_end|>")
    assert texts == ["1<|im_end|>82<|im_end|>"] and batch.ended.all() and asked == ["1<|im_end|>", texts[0]]


def test_mistakes_of_tools_and_flags(exchange):
    with pytest.raises(rloo.InputError, match="must return text, not None"):
        exchange({"Tom": ["1 ="]}, "return None")
    with pytest.raises(ZeroDivisionError):  # with its trace
        exchange({"Tom": ["1 ="]}, "1 / 0")
    with pytest.raises(rloo.InputError, match="must be one token, is 2"):
        exchange({}, "return text", tool_mark="12")
    with pytest.raises(rloo.InputError, match="512 positions"):  # 60 + 240 would do, but a turn may go on for 240 more
        exchange({}, "return text", response_length=240)


# ---- A real model ----------------------------------------------------------------------------------------------------


def logprobs_by_hand(model, batch, temperature):
    """Of each policy's token, from a forward pass of the model alone over prompt and completion; a list for each of the
    k·B completions."""
    found = []
    for row, ids in enumerate(batch.completion_ids()):
        j, b = divmod(row, len(batch.examples))
        prompt = batch.examples[b]["prompt_ids"]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)[range(len(ids)), ids]
        found.append([logprobs[t] for t in range(len(ids)) if batch.policy_mask[j, b, t]])
    return found


@pytest.fixture
def examples() -> list[dict]:
    tokenizer = rloo.load_tokenizer(rloo.Args(), str(GSM8K / "sft"))
    rows = rloo.load_rows(str(GSM8K), "validation")[:3]
    return [rloo.prepare_example(row, tokenizer) for row in rows]


@pytest.mark.parametrize("layout", ["group", "plain"])
def test_log_probs_and_gradients_are_those_of_loops_that_mask_by_hand(tool, examples, layout):
    turns = load("turns")
    flags = {"kl_coef": 0.3, "response_length": 24, "rloo_k": 2, "per_device_train_batch_size": 2}
    args, master, policy, reference = models_of(turns, tool=tool('return " 7"'), layout=layout, **flags)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.03 * weight.std() * torch.randn_like(weight)

    def reward(batch):
        return batch.responses.remainder(3).where(batch.response_mask, 0).sum(-1).float()

    experience = rloo.collect(args, policy, reference, {"reward": reward}, examples, [STOP])
    batch = experience.batch
    assert (batch.response_mask & ~batch.policy_mask).sum() > 10
    new, old = (logprobs_by_hand(model, batch, args.temperature) for model in (policy, reference))
    for (j, b), own in zip(itertools.product(range(2), range(3)), new):
        mask = batch.policy_mask[j, b]
        torch.testing.assert_close(experience.sampler_logprobs[j, b][mask], torch.stack(own), atol=1e-4, rtol=0)
        assert not experience.sampler_logprobs[j, b][~mask].any()

    kl = [(sum(new[row]) - sum(old[row])).detach() for row in range(6)]
    rewards = [reward(batch).flatten()[row] - 0.3 * kl[row] for row in range(6)]
    loss = sum(-(rewards[row] - rewards[(row + 3) % 6]) * sum(new[row]) for row in range(6)) / 6
    by_hand = torch.autograd.grad(loss, list(policy.parameters()))
    gradients = []
    rloo.clip_gradients = lambda model, limit: gradients.extend(x.grad.clone() for x in model.parameters()) or loss
    rloo.improve(args, policy, master, rloo.make_optimizer(replace(args, learning_rate=1e-3), master), experience)
    norm = sum(x.square().sum() for x in by_hand).sqrt()
    assert sum((x - y).square().sum() for x, y in zip(gradients, by_hand)).sqrt() < 1e-4 * norm


def test_a_resumed_run_equals_an_uninterrupted_one(run, tool, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def letters(completions, **columns):\n    return [sum(map(ord, text)) % 7 for text in completions]\n"
    )
    data = write_rows(tmp_path / "rows.jsonl", rloo.load_rows(str(GSM8K), "validation")[:40])
    flags = {"dataset_name": data, "sft_model_path": GSM8K / "sft", "reward_model_path": None, "response_length": 16}
    flags |= {"reward_fns": f"{tmp_path}/reward.py:letters", "tool": tool('return " 7."'), "tool_mark": " ="}
    flags |= {"total_episodes": 16, "save_steps": 1, "save_total_limit": 9, "num_eval_prompts": 4, "kl_coef": 0.1}
    whole, folder = run("turns", **flags)
    assert (
        whole[0]["grad_norm"] > 0.1
        and whole[0]["tool/answers"] > 0.5
        and whole[0]["tool/tokens"] > whole[0]["tool/answers"]
    )
    assert whole[0]["completions/mean_length"] > whole[0]["tool/tokens"] and whole[0]["val/rollout_logprob_gap"] < 1e-4
    resumed, again = run("turns", **flags, **resumed_at(folder, 1, tmp_path / "again"))
    assert without_times(resumed) == without_times(whole)
    for name in ("completions.jsonl", "checkpoint-2/model.safetensors", "checkpoint-2/optimizer.pt"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert any(" = 7." in sample["completion"] for sample in read_metrics(folder, "completions"))
