"""When does a higher score stop meaning a better summary, and what protects? Gao et al. 2023 (arXiv:2210.10760), small.

    python benchmark/study/overoptimise.py                                 # all that has no record yet
    python benchmark/study/overoptimise.py --names 500 --seeds 1 --again   # one run again, compared with its record

Reward models (proxies) are trained from one start by one schedule on 100, 500, 2,000 and 4,800 comparisons of two
samples of the SFT policy, a tenth of them labelled wrongly. RLOO without a KL penalty and best-of-n maximise each of
them. Then early stopping and β are to protect a policy from the proxy of 500 comparisons.
Each run is measured along the way on fresh test posts, and where it may be stopped early on validation posts too.
Records: overoptimise.json. Proxies are kept in runs/study/proxies: about 25 minutes of a core.
"""

import itertools
import random
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import measure
import mini_tldr
import numpy as np
import reach
import torch
import transformers
import tyro
from measure import Setting, common, engine, rloo

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "overoptimise.json"
PROXY_FOLDER = common.ROOT / "runs" / "study" / "proxies"
PROXIES = {"100": 100, "500": 500, "2000": 2_000, "4800": 4_800}  # name -> comparisons that it is trained on
START_POSTS, SEEN = 8_000, 4_800  # posts for the start; comparisons that training a proxy takes, most of them repeated
SETTING = Setting(lr=3.5e-4, beta=0.0, episodes=2_880)
UPDATES = (10, 20, 40, 60, 90)  # after which a run is measured
POSTS, MOST = {"test": 200, "validation": 100}, 64  # fresh posts; samples of each test post for best-of-n
COLOURS = {"500": "tab:orange", "500_beta0.1": "tab:purple", "500_beta0.3": "black"}


# ---- Proxies ---------------------------------------------------------------------------------------------------------


def sft_samples(posts: list[dict], k: int, temperature: float, size: int):
    """k samples of the SFT policy for each post, `size` posts at a time: Batches, and the judge's scores (k, B)."""
    engine()  # making it seeds too
    torch.manual_seed(1)
    for begin in range(0, len(posts), size):
        some, stop_ids = posts[begin : begin + size], [engine().tokenizer.eos_token_id]
        examples = engine().examples(some)
        batch, _ = rloo.rollout(engine().args, engine().reference, examples, k, temperature, stop_ids)
        texts = rloo.completion_texts(batch, engine().tokenizer)
        gold = mini_tldr.gold_judge(None, texts, facts=[post["facts"] for post in some] * k)
        yield batch, torch.tensor(gold).view(k, -1)


@cache
def comparisons() -> list[dict]:
    """Prompts, each with two samples between which the judge decides; labellers take some for the other."""
    rng, pairs = random.Random("labels"), []
    for batch, gold in sft_samples(measure.fresh_posts()["comparisons"], 2, 1.0, measure.CHUNK):
        ids, size = batch.completion_ids(), len(batch.examples)
        for b, (example, one, other) in enumerate(zip(batch.examples, ids[:size], ids[size:])):
            if gold[0, b] != gold[1, b]:
                one_is_better = (gold[0, b] > gold[1, b]) != (rng.random() < mini_tldr.LABEL_NOISE)
                better, worse = (one, other) if one_is_better else (other, one)
                pairs.append({"prompt_ids": example["prompt_ids"], "better": better, "worse": worse})
    return pairs


def start():
    """What all proxies begin as: the SFT policy, taught which tokens state facts of the post."""
    tokenizer, rng, taken = engine().tokenizer, random.Random("start"), set()
    torch.manual_seed(1)
    policy = transformers.AutoModelForCausalLM.from_pretrained(common.TASK / "sft", dtype=torch.float32)
    stages = (START_POSTS, 0, 0)
    return mini_tldr.train_reward_model(
        tokenizer, policy, stages, lambda n: [mini_tldr.sample_row(rng, taken) for _ in range(n)], [], rng
    )


def from_comparisons(name: str):
    """From the start with a new head."""
    pairs, folder = comparisons()[: PROXIES[name]], proxy("start")
    torch.manual_seed(1)
    model = engine().read(folder, transformers.AutoModelForSequenceClassification, num_labels=1).requires_grad_(True)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    rng, eos = random.Random(name), engine().tokenizer.eos_token_id
    return mini_tldr.train_on_comparisons(name, model, pairs, SEEN, rng, eos)


def proxy(name: str) -> Path:
    """The folder of a reward model, which is trained if it is not there."""
    folder = PROXY_FOLDER / name
    if not (folder / "model.safetensors").is_file():
        model = start() if name == "start" else from_comparisons(name)
        engine().tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


# ---- Runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    title: str
    proxy: str
    beta: float = 0.0
    seeds: int = 3

    def names(self) -> list[str]:
        """Of its records."""
        name = next(name for name, row in ROWS.items() if row == self)
        return [f"{name}__{seed}" for seed in range(1, 1 + self.seeds)]

    def command(self, seed: int) -> list[str]:
        """Without python and output folder. The learning rate is constant: a run stopped early is a shorter run."""
        folder = (PROXY_FOLDER / self.proxy).relative_to(common.ROOT)
        flags = ["--lr_scheduler_type", "constant", "--reward_model_path", str(folder)]
        return ["rloo.py", *replace(SETTING, beta=self.beta).flags(seed), *flags]


ROWS = {name: Row(f"{int(name):,} comparisons", name) for name in ("100", "500", "2000", "4800")}
ROWS |= {f"500_beta{beta:g}": Row(f"500, β = {beta:g}", "500", beta) for beta in (0.1, 0.3)}
NAMES = [name for row in ROWS.values() for name in row.names()]  # of all records
NAMES += [f"sft_{name}" for name in PROXIES]


@cache
def reward_of(name: str):
    """A proxy as measure.grade takes it."""
    args = replace(engine().args, reward_model_path=str(proxy(name)))
    return rloo.load_reward_model(args, engine().tokenizer, engine().longest)["reward_model"]


@cache
def reference_scores(name: str, kind: str) -> np.ndarray:
    """A proxy's scores of the references of posts, (posts, 1)."""
    posts, tokenizer = measure.fresh_posts()[kind][: POSTS[kind]], engine().tokenizer
    ids, _ = rloo.pad(tokenizer([post["completion"] + tokenizer.eos_token for post in posts]).input_ids)
    return reward_of(name)(rloo.make_batch(engine().examples(posts), ids[None], [tokenizer.eos_token_id])).T.numpy()


def point(name: str, folder: Path, kind: str, seed: int) -> dict:
    """A policy on fresh posts: measure -> [mean, error]. proxy_win: the proxy prefers it to the reference."""
    posts, policy = measure.fresh_posts()[kind][: POSTS[kind]], engine().read(folder)
    found = measure.grade(policy, posts, measure.SAMPLES, seed, reward=reward_of(name))
    found["proxy_win"] = (found["score"] > reference_scores(name, kind)).astype(float)
    return {measured: measure.over_posts(values) for measured, values in found.items()}


def make(records: common.Records, name: str, seed: int, runs: Path):
    """Trains and measures a run that has no record."""
    row, run = ROWS[name], f"{name}__{seed}"
    if records.needs(run, "test"):
        proxy(row.proxy)
        command = row.command(seed)
        folder = measure.train(run, [sys.executable, *command, *SETTING.own_flags(save_steps=10, kept=9)], runs)
        found = {kind: {} for kind in POSTS}
        for kind, update in itertools.product(POSTS, UPDATES):
            found[kind][str(update)] = point(row.proxy, folder / f"checkpoint-{update}", kind, seed)
        records.add(run, command=" ".join(command), seconds=measure.seconds(folder), **found)


# ---- Best of n -------------------------------------------------------------------------------------------------------


@cache
def best_of_samples() -> list[tuple]:
    return list(sft_samples(measure.fresh_posts()["test"][: POSTS["test"]], MOST, measure.TEMPERATURE, 8))


def make_sft(records: common.Records, name: str):
    """How often a proxy agrees with the judge about two samples of the SFT policy, and best-of-n by it."""
    if records.needs(f"sft_{name}"):
        posts = measure.fresh_posts()["test"][: POSTS["test"]]
        facts, references = ([post[column] for post in posts] for column in ("facts", "completion"))
        theirs = np.array(mini_tldr.gold_judge(None, references, facts=facts))[:, None]
        judge = np.concatenate([gold.T.numpy() for _, gold in best_of_samples()])  # (posts, MOST)
        scores = np.concatenate([reward_of(name)(batch).T.numpy() for batch, _ in best_of_samples()])
        grades = {"win": (judge > theirs) + 0.5 * (judge == theirs), "score": scores, "kl": np.zeros_like(scores)}
        grades["proxy_win"] = (scores > reference_scores(name, "test")).astype(float)
        gap, margin = (x[:, ::2] - x[:, 1::2] for x in (judge, scores))
        agrees = (np.sign(gap) == np.sign(margin))[gap != 0]
        best = {str(2**i): reach.best_of(grades, 2**i) for i in range(MOST.bit_length())}
        records.add(f"sft_{name}", agreement=[round(float(agrees.mean()), 4), len(agrees)], best_of_n=best)


# ---- Table and picture ----------------------------------------------------------------------------------------------


def along(records: common.Records, name: str, measured: str, kind: str = "test") -> np.ndarray:
    """A measure of each seed, (seeds, 1 + updates): first before training, where best-of-1 of the test posts is."""
    before = records.all[f"sft_{ROWS[name].proxy}"]["best_of_n"]["1"][measured][0]
    runs = [records.all[run][kind] for run in ROWS[name].names()]
    found = [[before, *(run[str(update)][measured][0] for update in UPDATES)] for run in runs]
    return np.sqrt(found) if measured == "kl" else np.array(found) * (1 if measured == "score" else 100)


def table(records: common.Records) -> str:
    rows = [["reward model trained on (seeds)", "agrees with the judge, %"]]
    rows[0] += [f"wins: {what}, %" for what in ("best of 64", "RLOO stopped early", "RLOO at the end")]
    for name, row in ROWS.items():
        sft, cells = records.all[f"sft_{row.proxy}"], ["", ""]
        if name == row.proxy:
            cells = [f"{100 * share:.1f}" for share in (sft["agreement"][0], sft["best_of_n"]["64"]["win"][0])]
        win = along(records, name, "win")
        stops = 1 + along(records, name, "win", "validation")[:, 1:].argmax(1)
        cells += map(common.plus_minus, (win[np.arange(row.seeds), stops], win[:, -1]))
        rows.append([f"{row.title} ({row.seeds})", *cells])
    return common.markdown(rows)


def lines(axis, x, y, colour: str, label: str = "", style: str = "-"):
    """Seeds thin, their mean thick."""
    axis.plot(x.T, y.T, style, lw=0.6, color=colour, alpha=0.5)
    axis.plot(x.mean(0), y.mean(0), style, lw=2, color=colour, label=label)


def draw(records: common.Records):
    """Win rates over √KL: best-of-n and RLOO for each proxy, and what protects."""
    figure, ((best_of, proxies, protected),) = common.canvas(3, 13, 4.9, sharex=True, sharey=True)
    for name, colour in (("100", "tab:red"), ("500", "tab:orange"), ("2000", "tab:green"), ("4800", "tab:blue")):
        points = records.all[f"sft_{name}"]["best_of_n"].values()
        roots = np.sqrt([[point["kl"][0] for point in points]])
        for measured, style in (("win", "-"), ("proxy_win", ":")):
            of_n = 100 * np.array([[point[measured][0] for point in points]])
            lines(best_of, roots, of_n, colour, ROWS[name].title if style == "-" else "", style)
            lines(proxies, along(records, name, "kl"), along(records, name, measured), colour, "", style)
    for name, colour in COLOURS.items():
        title = ROWS[name].title.removeprefix("500, ") if name != "500" else "β = 0"
        lines(protected, along(records, name, "kl"), along(records, name, "win"), colour, title)
    best_of.set(title="best of n, n = 1 to 64", ylabel="wins against the references, %", ylim=(0, 100))
    best_of.legend(title="reward model trained on", loc="upper right", fontsize=8)
    proxies.set(title="RLOO without a KL penalty, by the same reward models")
    protected.set(title="RLOO by the model of 500 comparisons, judge only")
    protected.legend(title="what protects", fontsize=8)
    for axis in (best_of, proxies, protected):
        axis.set(xlabel="√KL from the SFT policy, KL in nats")
    title = "Mini TL;DR: wins by the judge (solid) and by the reward model itself (dotted). Thin: seeds, thick: mean"
    figure.suptitle(title, fontsize=11)
    common.save(figure, HERE / "overoptimise.png")


def report(records: common.Records):
    if records.complete(NAMES, "README.md's table and the picture"):
        print(table(records))
        common.insert(HERE / "README.md", {"overoptimised": table(records)})
        draw(records)


def main(names: tuple[str, ...] = tuple(ROWS), seeds: int | None = None, again: bool = False):
    """Runs, measurements, table and picture: the first seed of all, then the second, ...

    Args:
        names: which rows, by their names in this file
        seeds: at most so many of each row
        again: what has a record too; it is compared with the record, and nothing is written
    """
    records, runs = common.Records(RECORDS, again), common.folder_of_runs("study", again)
    for seed, name in itertools.product(range(1, 4), names):
        if seed <= min(seeds or 3, ROWS[name].seeds):
            make(records, name, seed, runs)
        if seed == 1 and name in PROXIES:
            make_sft(records, name)
    report(records)


if __name__ == "__main__":
    tyro.cli(main)
