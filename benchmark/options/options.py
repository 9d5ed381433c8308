"""What does each option of rloo.py do to the result of the embedded task?

    python benchmark/options/options.py                              # all that is not there yet; hours of one core
    python benchmark/options/options.py --options default kl_token   # some of it
    python benchmark/options/options.py --quick                      # all of it in small, in runs/options-quick
    python benchmark/options/options.py --report                     # only the tables and the picture

Each option is one change of the default settings. Since an option may want another learning rate, each gets three
trials of it with seed 1, the default's, half of it and twice of it, chosen by the gold win rate on fresh validation
posts (another β takes over the default's, no clip that of 4 epochs). The best one gets the seeds 2 to 4, measured on
fresh test posts; the default gets three times as many, since everything is compared with it.

Runs are made one at a time, on one thread. What is found is written at once to options.json (a record for each run)
and posts.json (what is needed of each test post); what has its record there is not made again. Training output is in
runs/options, which may be deleted. Two processes with different --options may run side by side.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "frontier"))
import frontier  # noqa: E402
import measure  # noqa: E402
import options_tables  # noqa: E402
import peers  # noqa: E402
import torch  # noqa: E402

LR, BETA, SIZE = frontier.DEFAULT.lr, frontier.DEFAULT.beta, frontier.DEFAULT.size


@dataclass(frozen=True)
class Option(peers.Method):
    """A row of the table: one change of the default."""

    group: str = ""
    """of rows of the table"""


def option(group: str, name: str, title: str, *flags: str, beta: float = BETA, **changes) -> Option:
    return Option(name, title, group=group, flags=flags, betas=(beta,), **{"lr": LR} | changes)


REINFORCEPP = ("--kl_level", "token", "--normalize_reward", "--reward_clip_range", "1", "--normalize_advantage")
OPTIONS = [
    option("", "default", "rloo.py's default"),
    option("advantage", "std", "divided by the group's std, as GRPO's", "--advantage_estimator", "grpo"),
    option("advantage", "mean", "baseline: mean of the update", "--advantage_estimator", "reinforce"),
    option("KL", "beta_0", "β = 0", beta=0.0, like="default"),
    option("KL", "beta_005", "β = 0.05", beta=0.05, like="default"),
    option("KL", "token", "per token, in rewards to go", "--kl_level", "token"),
    option("KL", "in_loss", "in the loss (k3), not in the reward", "--no_kl_in_reward"),
    option("all of Reinforce++", "reinforcepp", "KL per token, rewards and advantages scaled", *REINFORCEPP),
    option("loss", "by_token", "mean over tokens", "--loss_aggregation", "token"),
    option("loss", "by_mean", "mean over completions of means", "--loss_aggregation", "sequence-mean"),
    option("steps per rollout", "epochs_4", "4 epochs", epochs=4, lr=LR / 2),
    option("steps per rollout", "no_clip", "4 epochs, never clipped", "--cliprange", "1000", epochs=4, like="epochs_4"),
]


@dataclass(frozen=True)
class Plan(peers.Plan):
    """How much of everything."""

    methods: tuple[Option, ...] = tuple(OPTIONS)
    first: tuple[str, ...] = ("default",)
    trials: int = 3
    """of learning rates"""
    seeds: tuple[int, ...] = tuple(range(2, 5))
    """of each option; of the default, three times as many"""
    size: int = SIZE
    test_posts: int = 2_000


def quick_plan() -> Plan:
    return Plan(seeds=(2, 3), episodes=128, size=64, validation_posts=50, test_posts=100)


class Options(peers.Peers):
    """What has been found so far. Trials, choice and records are those of the comparison with peers."""

    files = {"runs": "options.json", "posts": "posts.json"}
    kept = (("sampled", "win"),)

    def best(self, method: Option) -> peers.Trial | None:
        found = super().best(method)  # with `like`, that of another option: its learning rate is meant
        return found and replace(found, beta=method.betas[0])

    def seeds(self, method: Option) -> tuple[int, ...]:
        first, count = self.plan.seeds[0], len(self.plan.seeds) * (3 if method.name == "default" else 1)
        return tuple(range(first, first + count))


def main(options: tuple[str, ...] = (), quick: bool = False, report: bool = False):
    """The study's runs, measurements, tables and picture.

    Args:
        options: which, by the names in this file; default: all
        quick: all of it in small, in runs/options-quick, within a quarter of an hour
        report: only write the tables and the picture of what is there
    """
    torch.set_num_threads(1)  # as in the runs: a measurement is then the same to the digit
    plan = quick_plan() if quick else Plan()
    folder = measure.ROOT / "runs" / ("options-quick" if quick else "options")
    unknown = set(options) - {option.name for option in plan.methods}
    if unknown:
        sys.exit(f"--options {' '.join(sorted(unknown))}: must be of {' '.join(x.name for x in plan.methods)}")
    study = Options(plan, folder, folder / "results" if quick else HERE, {})
    if not report:
        study.run([option for option in plan.methods if not options or option.name in options])
    options_tables.write_tables(study)
    options_tables.draw_picture(study)


if __name__ == "__main__":
    tyro.cli(main)
