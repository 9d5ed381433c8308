"""rloo.py against TRL's numbers in golden.json, without TRL: `pytest -q benchmark/trl/parity_test.py`.

parity.py trained TRL 0.19 and 1.x on the completions in that file and noted how far their weights moved. On the same
completions rloo.py must move as far, and have the same KL, rewards and loss. If mini TL;DR's SFT policy or reward model
has changed, parity.py must run again.
"""

import json

import parity
import pytest
import run
import torch
from transformers import AutoTokenizer

golden = json.loads(parity.GOLDEN.read_text(encoding="utf-8"))


def test_golden_numbers_are_of_these_settings_and_the_page_says_what_differs():
    assert [(int(x["trl"].split()[1][0]), x["setting"]) for x in golden["table"]] == [
        (r.trl, r.name) for r in parity.ROWS
    ]
    assert {(int(x["trl"].split()[1][0]), x["setting"]) for x in golden["golden"]} == set(parity.KEPT)
    assert all(line["agree"] == (not line["why"]) for line in golden["table"])
    page = (parity.HERE / "README.md").read_text(encoding="utf-8")
    differ = [row for row in golden["table"] if not row["agree"]]
    for row in differ:
        assert f"| {row['setting']} | {row['relative']:.1%} |" in page
    agree = len(parity.ROWS) - len(differ)
    assert f"in {agree} of {len(parity.ROWS)} settings" in page
    for line in parity.summary(golden["table"]).splitlines():
        assert line in page
    ended = (torch.tensor(golden["completions"]) == 0).any(-1)
    assert ended.any() and not ended.all()


LINES = [line for line in golden["golden"] if line["setting"] not in ("1 epoch", "2 epochs")]  # parts of the others


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['trl'].split(',')[0]}, {line['setting']}")
def test_rloo_moves_as_trl_does(line):
    found = parity.errors(line, golden)
    assert 0 < max(found.values()) < 1, found


def test_what_differs_is_said_and_without_all_of_trl_nothing_is_written(monkeypatch, tmp_path, capsys):
    before = parity.GOLDEN.read_text()
    monkeypatch.setattr(parity.common, "run_logged", lambda command, log: None)
    monkeypatch.setattr(parity.common, "ROOT", tmp_path)
    (tmp_path / "runs/parity/0").mkdir(parents=True)
    (tmp_path / "runs/parity/0/found.json").write_text('{"title": "TRL 0.19.1"}')
    agreeing = {"trl": "TRL 0.19.1", "setting": "1 epoch", "agree": True, "difference": 1e-7, "relative": 1e-5}
    differing = agreeing | {"setting": "no KL", "agree": False, "why": ""}
    monkeypatch.setattr(parity, "compare", lambda *_: ([agreeing, differing], []))
    with pytest.raises(SystemExit, match="no reason is known: TRL 0.19.1, no KL"):
        parity.same(["trl0/bin/python"], write=False)
    assert "TRL 0.19.1: 1 of 2 settings agree; weights to 1.0e-07" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="both versions of TRL"):
        parity.same(["trl0/bin/python"], write=True)
    assert parity.GOLDEN.read_text() == before
    monkeypatch.setattr(parity, "errors", lambda *_: {"metrics": 1.5})
    with pytest.raises(SystemExit, match="TRL 0.19.1, 1 epoch"):
        parity.against_golden()


def test_flags_become_settings_of_each_trainer_or_are_refused():
    words = ["--output_dir", "x", "--rloo_k", "2", "--num_ppo_epochs", "3", "--num_mini_batches", "2"]
    words += ["--gradient_accumulation_steps", "4", "--per_device_train_batch_size", "8", "--total_episodes", "100"]

    def config(trainer, version, *more):
        return run.config_of(run.parse_args([trainer, *words, *more]), version)

    v0, ppo, v1 = config("rloo", 0), config("ppo", 0), config("grpo", 1)
    assert (v0["rloo_k"], v0["total_episodes"], v0["reward_clip_range"]) == (2, 100, 10.0)
    assert "rloo_k" not in ppo and ppo["num_mini_batches"] == 2
    assert (v1["num_generations"], v1["steps_per_generation"]) == (2, 8)
    assert v1["max_steps"] == 2 * 3 * 2  # 100 completions are two updates of 64
    clipped = config("rloo", 1, "--reward_clip_range", "2", "--missing_eos_penalty", "1")
    assert clipped["reward_clip_range"] == (-2, 2)
    for trainer, version, flag in (("rloo", 1, "normalize_reward"), ("grpo", 1, "normalize_advantage")):
        with pytest.raises(SystemExit, match=flag):
            config(trainer, version, f"--{flag}")
    with pytest.raises(SystemExit, match="missing_eos_penalty"):  # only with a reward model
        config("rloo", 1, "--missing_eos_penalty", "1", "--reward_fns", "a.py:b")
    with pytest.raises(SystemExit, match="not a trainer"):
        config("ppo", 1)


def test_rewards_of_trl_get_texts_and_token_ids(tmp_path):
    (tmp_path / "own.py").write_text("def size(completions, answer, **columns):\n    return [*map(len, completions)]\n")
    own = run.score_by_function(f"{tmp_path}/own.py:size")
    assert own(["p"], [[{"role": "assistant", "content": "four"}]], [[1]], answer=[1]) == [4]
    words = ["rloo", "--output_dir", "x", "--device", "cpu"]
    tokenizer = AutoTokenizer.from_pretrained(parity.SFT)
    prompts = golden["prompts"][0][:2]
    ids = tokenizer([" a cat", " a dog and a cat"])["input_ids"]
    ids[0].append(tokenizer.eos_token_id)
    raw = run.score_by_ids(run.parse_args(words))
    scores = raw(prompts, None, ids)
    assert scores[0] == pytest.approx(raw(prompts[:1], None, ids[:1])[0], abs=1e-4)  # without padding
    assert raw(prompts[:1], None, [ids[0][:-1]])[0] != pytest.approx(scores[0], abs=1e-3)  # it reads the stop token
    penalised = run.score_by_ids(run.parse_args([*words, "--missing_eos_penalty", "5"]))(prompts, None, ids)
    assert penalised == pytest.approx([scores[0], scores[1] - 5])
