"""The commands that TRL's page of RLOO shows, word for word but for rloo.py as the script, run to their end.

Models and data are stand-ins in folders that have the names which the commands give, so nothing is downloaded.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers

import rloo
from rloo_test import read_metrics, write_rows

# Source: docs/source/rloo_trainer.md of huggingface/trl, commit 1894146fb; columns of the data:
# examples/datasets/tldr_preference.py.
SMOKE_TEST = """python rloo.py
    --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style
    --dataset_train_split descriptiveness
    --learning_rate 3e-6
    --output_dir models/minimal/rloo
    --per_device_train_batch_size 64
    --gradient_accumulation_steps 1
    --total_episodes 10000
    --model_name_or_path EleutherAI/pythia-14m
    --reward_model_path EleutherAI/pythia-14m
    --missing_eos_penalty 1.0"""
TLDR = """python rloo.py
    --output_dir models/minimal/rloo_tldr
    --dataset_name trl-internal-testing/tldr-preference-sft-trl-style
    --dataset_test_split validation
    --num_ppo_epochs 2
    --num_mini_batches 2
    --learning_rate 3e-6
    --per_device_train_batch_size 16
    --gradient_accumulation_steps 16
    --total_episodes 1000000
    --model_name_or_path EleutherAI/pythia-1b-deduped
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr
    --local_rollout_forward_batch_size 16
    --missing_eos_penalty 1.0
    --stop_token eos
    --kl_coef 0.03"""
WORDS = [f"w{i}" for i in range(60)]


def save_tokenizer(folder: str, pad: bool):
    """One word, one token. Pythia's tokenizer has no pad token, those of its SFT and reward models have one."""
    vocabulary = {word: i for i, word in enumerate(["<|endoftext|>", *WORDS, "[PAD]"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]"} if pad else {}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", **special)
    tokenizer.save_pretrained(folder)


def save_model(folder: str, auto_class=transformers.AutoModelForCausalLM):
    """A model of pythia's kind with random weights. Its next token is often the stop token, as after SFT."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.GPTNeoXConfig(**sizes, vocab_size=62, bos_token_id=0, eos_token_id=0, num_labels=1)
    model = auto_class.from_config(config)
    head = model.get_output_embeddings()
    if head is not None:
        torch.nn.init.ones_(model.base_model.final_layer_norm.bias)
        torch.nn.init.constant_(head.weight[0].data, 0.15)
    model.save_pretrained(folder)


def write_splits(folder: str, **splits: list[dict]):
    Path(folder).mkdir(parents=True)
    for split, rows in splits.items():
        write_rows(Path(folder, f"{split}.jsonl"), rows)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(command, flags that follow it): in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda command, *more: rloo.command_line([*shlex.split(command)[2:], *more])


def text(i: int) -> str:
    return " ".join(WORDS[(i * j) % 60] for j in range(1, 6 + i % 5))


def test_names_and_defaults_of_the_page_are_those_of_rloo_py():
    page = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (`.*) \| (`.*) \| both(?: \((.*?)\))?", page)
    assert len(rows) > 7
    for old, new, default in rows:
        names = re.findall(r"`(\w+)", f"{old} {new}")
        for name in names:
            tyro.cli(
                rloo.Args, args=[f"--{name}", *([] if name.startswith("normalize") else ["1"])], use_underscores=True
            )
        assert not default or getattr(rloo.Args(), names[0]) == float(default), names[0]


def test_the_smoke_test_runs_to_the_end_with_a_causal_model_as_the_reward_model(run, capsys):
    """For ten updates instead of 157."""
    rows = []
    for i in range(40):
        user = {"role": "user", "content": text(i)}
        chats = {
            name: [user, {"role": "assistant", "content": text(i + n)}] for n, name in enumerate(("chosen", "rejected"))
        }
        rows.append({"prompt": text(i), **chats})
    write_splits("trl-internal-testing/descriptiveness-sentiment-trl-style", descriptiveness=rows, sentiment=rows[:2])
    save_model("EleutherAI/pythia-14m")
    save_tokenizer("EleutherAI/pythia-14m", pad=False)
    run(SMOKE_TEST, "--total_episodes", "600")
    shown = capsys.readouterr().out
    assert (
        "EleutherAI/pythia-14m: has no `score` head and gets a random one, as a reward model good for a trial" in shown
    )
    assert "the last 4 rows of its split descriptiveness are held out to evaluate on" in shown
    metrics = read_metrics(Path("models/minimal/rloo"), "metrics")
    assert len(metrics) == 10 and metrics[-1]["episode"] == 640 and metrics[-1]["objective/scores_std"] > 0
    assert [x["update"] for x in read_metrics(Path("models/minimal/rloo"), "evaluations")] == [0, 2, 4, 6, 8, 10]
    transformers.AutoModelForCausalLM.from_pretrained("models/minimal/rloo")


def test_the_tldr_command_trains_and_evaluates(run):
    """Without `accelerate launch`, and for one update."""
    rows = []
    for i in range(200):
        messages = [{"role": "user", "content": text(i)}, {"role": "assistant", "content": text(i + 1)}]
        row = {"prompt": text(i), "messages": messages, "id": f"t3_{i}", "subreddit": "tifu", "title": "", "post": ""}
        rows.append(row | {"summary": text(i + 1)})
    data = "trl-internal-testing/tldr-preference-sft-trl-style"
    write_splits(data, train=rows[:160], validation=rows[160:180], test=rows[180:])
    names = dict(re.findall(r"--(\w+_path) (\S+)", TLDR))
    save_tokenizer(names["model_name_or_path"], pad=False)
    save_model(names["sft_model_path"])
    save_model(names["reward_model_path"], transformers.AutoModelForSequenceClassification)
    for name in ("sft_model_path", "reward_model_path"):
        save_tokenizer(names[name], pad=True)
    run(TLDR, "--total_episodes", "512")
    (metrics,) = read_metrics(Path("models/minimal/rloo_tldr"), "metrics")
    assert metrics["episode"] == 512 and metrics["objective/scores_std"] > 0 and metrics["policy/approxkl_avg"] > 0
    samples = read_metrics(Path("models/minimal/rloo_tldr"), "completions")
    assert {x["columns"]["id"] for x in samples} == {row["id"] for row in rows[160:180]}
    evaluations = read_metrics(Path("models/minimal/rloo_tldr"), "evaluations")
    assert [x["update"] for x in evaluations] == [0, 1] and "greedy/score" in evaluations[-1]
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (names["sft_model_path"], "models/minimal/rloo_tldr")
    )
    assert any(not torch.equal(x, after[name]) for name, x in before.items())
