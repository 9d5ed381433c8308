"""rloo.py against TRL's numbers in golden.json, without TRL: `pytest -q benchmark/trl/trl_parity_test.py`.

`python benchmark/trl/trl_parity.py same` trained TRL 0.19 and 1.x on the completions in that file and noted how far
their weights moved. On the same completions rloo.py must move as far, and have the same KL, rewards and loss.
"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import torch
import transformers
import trl_parity
from environment import MINI_TLDR, run_job, write_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(trl_parity.HERE.parent / "study"))
import study  # noqa: E402

golden = json.loads(trl_parity.GOLDEN.read_text(encoding="utf-8"))
RUNS: dict[str, dict] = {}  # flags -> what rloo.py did; rows of both versions share it


@pytest.fixture(scope="module", autouse=True)
def quiet():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from a second thread
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


def run(flags: dict, folder) -> dict:
    key = json.dumps(flags, sort_keys=True)
    if key not in RUNS:
        RUNS[key] = trl_parity.same_rloo(flags, golden["prompts"], golden["completions"], folder / "out")
    return RUNS[key]


def test_golden_numbers_are_of_these_models_and_settings():
    for name, value in golden["models"].items():
        assert trl_parity.hash_of(name) == value, f"mini_tldr/{name} is another one: run `{golden['command']}` again"
    known = [(line["trl"].split()[1][0], line["setting"]) for line in golden["golden"]]
    assert known == [(row.trl, row.name) for row in trl_parity.ROWS if row.golden and not row.why]
    assert all(line["agree"] == (not line["why"]) for line in golden["table"])
    ended = (torch.tensor(golden["completions"]) == 0).any(-1)
    assert ended.any() and not ended.all()


@pytest.mark.parametrize("line", golden["golden"], ids=lambda line: f"{line['trl'].split(',')[0]}, {line['setting']}")
def test_rloo_moves_as_trl_does(line, tmp_path):
    functions = {"reward_fns": f"{trl_parity.HERE}/trl_parity.py:length_score"} if line["reward"] == "length" else {}
    ours = run(line["flags"] | functions, tmp_path)
    start = load_file(MINI_TLDR / "sft" / "model.safetensors")
    tensors = len(start)
    for weights, theirs in zip(ours["weights"][1:], line["movement"], strict=True):
        found, total = trl_parity.movement(start, weights), sum(norm**2 for norm in theirs[:tensors]) ** 0.5
        # What rounding costs on any CPU: 5e-6 of a tensor's norm, 3e-5 of a projection.
        assert sum(norm**2 for norm in found[:tensors]) ** 0.5 == pytest.approx(total, rel=1e-5)
        assert found[:tensors] == pytest.approx(theirs[:tensors], rel=5e-5)
        assert found[tensors:] == pytest.approx(theirs[tensors:], abs=1e-4 * total)
    for our_line, their_line in zip(ours["metrics"], line["metrics"], strict=True):
        our_line = trl_parity.comparable(line["trl"].split()[1][0], our_line, ours=True)
        assert our_line == pytest.approx(their_line, rel=1e-5, abs=1e-5)


def test_a_job_runs_in_another_process_and_its_models_are_read_there(tmp_path):
    """By this python; what the job is called with, and its result, are JSON."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(trl_parity.HERE)!r})\nfrom environment import answer_job\n"
        "def double(out, number):\n    return {'number': 2 * number, 'out': out}\n"
        "answer_job({'double': double})\n"
    )
    found = run_job(sys.executable, str(script), tmp_path / "out", "double", number=21)
    assert found == {"number": 42, "out": str(tmp_path / "out")}
    script.write_text("raise SystemExit('it went wrong')")
    with pytest.raises(SystemExit, match="it went wrong"):
        run_job(sys.executable, str(script), tmp_path / "out", "double")
    write_model(MINI_TLDR / "sft", tmp_path / "policy")
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert (config["torch_dtype"], config["rotary_pct"], config["rotary_emb_base"]) == ("float32", 0.25, 10_000)
    ids = torch.arange(9)[None]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(x) for x in (MINI_TLDR / "sft", tmp_path / "policy"))
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_the_page_says_what_the_records_say():
    page = (trl_parity.HERE / "README.md").read_text(encoding="utf-8")
    for name, table in trl_parity.tables().items():
        assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in page
    said = " ".join(page.split())
    assert all(line["setting"] in said for line in golden["table"])
    equal = [line for line in golden["table"] if line["agree"]]
    moved = [line["TRL moved"] for line in equal]
    numbers = (max(line["difference"] for line in equal), min(moved), max(moved))
    largest, least, most = (f"{x:.1e}".replace("e-0", "e-") for x in numbers)
    assert f"within {largest}, in {len(equal)} settings" in said and f"moves by {least} to {most}" in said
    assert f"In {len(golden['table']) - len(equal)} settings TRL" in said
    assert f"For {len(golden['golden'])} of the {len(equal)} equal settings" in said
    found = json.loads((trl_parity.HERE / "train.json").read_text())["found"]
    for name, by in (("TRL 0.19.1", " by seed"), ("TRL 1.16.0", "")):
        theirs, ours = ([run["cpu_seconds"] for run in found[trainer]] for trainer in (name, "rloo.py"))
        by_seed = [a / b for a, b in zip(theirs, ours, strict=True)]
        ratio = sum(theirs) / sum(ours)
        assert f"{name} takes {ratio:.1f} times ({min(by_seed):.1f} to {max(by_seed):.1f}{by})" in said
    greedy, sampled = (
        {name: [100 * run[f"{mode}/judge_win_rate"] for run in runs] for name, runs in found.items()}
        for mode in ("greedy", "sampled")
    )
    apart = study.differences(greedy, "rloo.py")
    for name in ("TRL 1.16.0", "TRL 1.16.0, scored by ids"):
        assert study.with_interval(apart[name]).replace(" [", " points [") in said
    assert f"p = {apart['TRL 1.16.0'].holm:.2f} after Holm's" in said
    both = [*apart.values(), *study.differences(sampled, "rloo.py").values()]
    assert {x.verdict for x in both} == {"not told apart"}


@pytest.mark.parametrize("pythons, message", [((), "--trl is needed"), (("/no/such/python",), "cannot be run")])
def test_a_mistake_is_one_line(pythons, message):
    with pytest.raises(SystemExit) as end:
        trl_parity.main(trl_parity.Args(part="same", trl=pythons))
    assert message in end.value.code and "\n" not in end.value.code
