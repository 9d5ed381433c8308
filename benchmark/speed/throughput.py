"""How fast are group rows, beside plain rows, `generate` of transformers, and TRL?

    python benchmark/speed/throughput.py --trl trl0/bin/python --trl trl1/bin/python     # see ../requirements.txt

Writes throughput.json, and the tables and the picture of README.md. The models have the shape of pythia-70m and random
weights, the prompts TL;DR's lengths: nothing is downloaded. What is compared takes turns, A B C A B C, and a ratio is
that of two times within a round, so that a slow minute slows all of them.

decode   k completions of each prompt by rloo.py's decoder, and by `generate` with the dynamic and the static cache
length   forward + backward of one group of rows in both layouts, over the number of tokens per completion
update   whole updates, each trainer in a process of its own, without loading and without the first update; what they
         print is in runs/throughput.log

TRL has the same models, prompts, k, T, temperature, β, threads; one epoch, one mini-batch; sdpa; fused AdamW; gradient
checkpointing off (1.x: on by default); no saving and no evaluation. 1.x generates and scores a whole update at once,
with the dynamic cache, both its defaults.
"""

import argparse
import itertools
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]
import common  # noqa: E402
import gpu_memory  # noqa: E402

import rloo  # noqa: E402

COMMAND = "python benchmark/speed/throughput.py --trl trl0/bin/python --trl trl1/bin/python"
RECORDS = HERE / "throughput.json"
ROUNDS = 3
LAYOUTS = ("group", "plain")

# The shape of pythia-70m, and TL;DR's lengths
SHAPE = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
VOCABULARY = 50_304
PROMPTS = 4  # B: prompts per update
PROMPT_TOKENS = (224, 448)  # the range of their lengths
K = 4
T = 53
TEMPERATURE = 0.7
GROUPS = ((256, 8), (64, 2))  # of `length`: tokens of the prompt, completions; the second shares little
LENGTHS = (32, 128, 384)  # of `length`: tokens per completion


# ---- Inputs ----------------------------------------------------------------------------------------------------------


def random_examples(count: int, shortest: int, longest: int) -> list[dict]:
    """Examples of rloo.py with random prompts."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    words = VOCABULARY - 2  # without eos and padding
    return [{"prompt_ids": torch.randint(words, (length,), generator=generator).tolist()} for length in lengths]


def write_inputs(examples: list[dict], folder: Path):
    """Writes policy/, reward/ and data/. Word w<i> is token i, so decoded text becomes the same tokens again."""
    torch.manual_seed(1)
    eos, padding = VOCABULARY - 2, VOCABULARY - 1
    tokens = {"vocab_size": VOCABULARY, "eos_token_id": eos, "pad_token_id": padding, "bos_token_id": None}
    config = transformers.GPTNeoXConfig(**SHAPE, **tokens, num_labels=1)
    words = {f"w{i}": i for i in range(eos)} | {"<eos>": eos, "[PAD]": padding}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "[PAD]", "clean_up_tokenization_spaces": False}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    kinds = {"policy": transformers.AutoModelForCausalLM, "reward": transformers.AutoModelForSequenceClassification}
    for name, kind in kinds.items():
        kind.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    prompts = [{"prompt": " ".join(f"w{i}" for i in example["prompt_ids"])} for example in examples]
    (folder / "data").mkdir()
    for split in ("train", "test"):  # without a test split rloo.py would hold out training rows
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def flags_of(folder: Path) -> dict:
    """Flags that rloo.py and trl/run.py share, for two updates."""
    batch = PROMPTS * K
    return {
        "sft_model_path": str(folder / "policy"),
        "reward_model_path": str(folder / "reward"),
        "dataset_name": str(folder / "data"),
        "rloo_k": K,
        "response_length": T,
        "temperature": TEMPERATURE,
        "kl_coef": 0.05,
        "learning_rate": 1e-6,
        "per_device_train_batch_size": batch,
        "local_rollout_forward_batch_size": batch,
        "total_episodes": 2 * batch,
        "dtype": "float32",
    }


# ---- Measuring -------------------------------------------------------------------------------------------------------


def where() -> str:
    """The machine, the versions, and the commit of rloo.py."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else (names or [platform.machine()])[0]
    git = ["git", "-C", str(HERE), "log", "-1", "--format=%h", "--", str(HERE.parents[1] / "rloo.py")]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, rloo.py of commit {commit}"
    return f"{name}, threads: {torch.get_num_threads()}, {versions}"


def take_turns(records, part: str, lanes: dict[str, Callable[[], dict]]):
    """Adds a record of each lane in each round: what the lane returns."""
    for number, lane in itertools.product(range(1, ROUNDS + 1), lanes):
        name = f"{part}: {lane}: {number}"
        print(name, flush=True)
        records.add(name, **lanes[lane]())


def timed(device: torch.device, function: Callable, *args) -> Callable[[], dict]:
    """A lane that calls a function. The function is called once here, since a first call also allocates memory."""

    def lane():
        begin = rloo.clock(device)
        function(*args)
        return {"seconds": rloo.clock(device) - begin}

    lane()
    return lane


def decode(args, policy, examples):
    rloo.rollout(args, policy, examples, args.rloo_k, TEMPERATURE, stop_ids=[-1], version=0)


def generate(args, policy, examples, cache: str | None):
    ids, mask = (
        x.to(policy.device).repeat(args.rloo_k, 1) for x in rloo.pad([x["prompt_ids"] for x in examples], True)
    )
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": TEMPERATURE, "cache_implementation": cache}
    policy.generate(ids, attention_mask=mask.long(), max_new_tokens=args.response_length, **options)


def train(policy, batch, layout: str):
    """Forward and backward of the completions' mean log-prob."""
    policy.layout = layout
    rloo.completion_logprobs(policy, batch, TEMPERATURE)[0].mean().backward()
    policy.zero_grad()


def second_update(command: list, folder: Path) -> dict:
    """Seconds of the second update, and peak GiB, of a trainer in a process of its own."""
    threads = f"OMP_NUM_THREADS={torch.get_num_threads()}"
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    common.run_logged(["env", threads, *command, "--output_dir", out], common.ROOT / "runs" / "throughput.log")
    line = common.read_lines(out / "metrics.jsonl")[1]
    seconds = sum(value for name, value in line.items() if name.startswith("time/"))
    return {"seconds": seconds, "peak_gb": line["memory/peak_gb"]}


def trainers(flags: dict, folder: Path, pythons: list[str]) -> dict[str, Callable[[], dict]]:
    """Lanes of `update`."""
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    ours = [sys.executable, "rloo.py", *words, "--num_eval_prompts", 0, "--save_steps", 0]
    commands = {f"rloo.py, {layout} rows": [*ours, "--layout", layout] for layout in LAYOUTS}
    code = "import trl, transformers as t; print(f'TRL {trl.__version__}, transformers {t.__version__}')"
    for python in pythons:
        name = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        commands[name] = [Path(python).absolute(), "benchmark/trl/run.py", "rloo", "--reward_by", "text", *words]
    return {name: partial(second_update, command, folder) for name, command in commands.items()}


def length_part(prompt: int, k: int, length: int) -> str:
    return f"length, prompt of {prompt} tokens, {k} completions of {length}"


def measure(records, pythons: list[str]):
    records.add("about", where=where())
    examples = random_examples(PROMPTS, *PROMPT_TOKENS)
    with tempfile.TemporaryDirectory(prefix="throughput-") as temporary:
        folder = Path(temporary)
        write_inputs(examples, folder)
        flags = flags_of(folder)
        args = rloo.resolve_args(rloo.Args(**flags, output_dir="none"))
        on = torch.device(args.device)
        rloo.start_processes(on)
        policy = rloo.load_model(args, args.sft_model_path, examples, trained=True)

        lanes = {"rloo.py's decoder": timed(on, decode, args, policy, examples)}
        lanes["generate, dynamic cache"] = timed(on, generate, args, policy, examples, None)
        lanes["generate, static cache"] = timed(on, generate, args, policy, examples, "static")
        take_turns(records, "decode", lanes)

        for (prompt, k), length in itertools.product(GROUPS, LENGTHS):
            responses = torch.randint(VOCABULARY, (k, 1, length), device=on)
            batch = rloo.make_batch(random_examples(1, prompt, prompt), responses, [-1])
            lanes = {layout: timed(on, train, policy, batch, layout) for layout in LAYOUTS}
            take_turns(records, length_part(prompt, k, length), lanes)

        del policy
        take_turns(records, "update", trainers(flags, folder, pythons))


# ---- Tables and picture ----------------------------------------------------------------------------------------------


def lanes_of(records, part: str) -> dict[str, list[dict]]:
    """Lane -> its rounds; the first of rloo.py's own, then in the order of the alphabet."""
    found: dict[str, list] = {}
    for name in sorted(records.all, key=lambda name: ("rloo.py" not in name, name)):
        if name.startswith(f"{part}: "):
            found.setdefault(name.split(": ")[1], []).append(records.all[name])
    return found


def ratios(lanes: dict[str, list[dict]], lane: str) -> list[float]:
    """How many times as long a lane takes as the first one, round by round."""
    first = next(iter(lanes.values()))
    return [one["seconds"] / base["seconds"] for one, base in zip(lanes[lane], first)]


def with_range(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(records) -> str:
    rows = [["", "rounds", "seconds", "peak, GiB", "time / that of rloo.py's first line (range)"]]
    for part in ("decode", "update"):
        lanes = lanes_of(records, part)
        for lane, found in lanes.items():
            peak = f"{max(one['peak_gb'] for one in found):.1f}" if part == "update" else ""
            seconds = f"{median(one['seconds'] for one in found):.2f}"
            over = with_range(ratios(lanes, lane)) if lane != next(iter(lanes)) else "1"
            rows.append([f"{part}: {lane}", str(len(found)), seconds, peak, over])
    return common.markdown(rows)


def draw(records):
    """Over the number of tokens, a line for each kind of group: how much longer plain rows take."""
    figure, ((panel,),) = common.canvas(1, 6.5, 4)
    for prompt, k in GROUPS:
        found = [ratios(lanes_of(records, length_part(prompt, k, length)), "plain") for length in LENGTHS]
        (line,) = panel.plot(LENGTHS, [median(x) for x in found], marker="o", markersize=4)
        line.set_label(f"prompt of {prompt} tokens, {k} completions")
        low, high = ([f(x) for x in found] for f in (min, max))
        panel.fill_between(LENGTHS, low, high, color=line.get_color(), alpha=0.2)
    panel.axhline(1, color="black", linewidth=1, linestyle="--")
    panel.set_xscale("log", base=2)
    panel.set_xticks(LENGTHS, LENGTHS)
    panel.set(xlabel="T: tokens per completion", ylim=(0, None))
    panel.set_ylabel("time in plain rows / time in group rows\n(line: median of rounds; band: their range)")
    panel.set_title("Forward + backward of one prompt: above 1, group rows are faster")
    panel.legend()
    common.save(figure, HERE / "length.png")


def tables(records) -> dict[str, str]:
    """All tables of README.md."""
    found = {"about": f"On {records.value('about', 'where')}.", "speed": table(records)}
    return found | {"memory": gpu_memory.table(gpu_memory.RUNS)}


def report():
    """Writes the tables and the picture of README.md from the records."""
    records = common.Records(RECORDS)
    common.insert(HERE / "README.md", tables(records))
    draw(records)


def headline() -> list[list[str]]:
    """Rows of README.md's table."""
    lanes = lanes_of(common.Records(RECORDS), "update")
    title = "time of an update at TL;DR's lengths / rloo.py's"
    return [
        [f"{lane}: {title}", with_range(ratios(lanes, lane)), f"{len(lanes[lane])} rounds", f"`{COMMAND}`"]
        for lane in lanes
        if lane.startswith("TRL")
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", action="append", default=[], help="python of an environment with TRL; may be repeated")
    args = parser.parse_args()
    RECORDS.unlink(missing_ok=True)
    measure(common.Records(RECORDS), args.trl)
    report()


if __name__ == "__main__":
    main()
