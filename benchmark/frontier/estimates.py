"""The arithmetic of the study: arrays in, numbers out."""

import math

import numpy as np


def best_of_n_weights(scores: np.ndarray, n: int) -> np.ndarray:
    """The probability of each of N samples (..., N) to have the highest score among n of them, drawn at random.

    The mean of a measure with these weights is the unbiased estimate of its mean over best-of-n. Equal scores share
    their probability."""
    total = scores.shape[-1]
    below = (scores[..., None, :] < scores[..., :, None]).sum(-1)  # samples with a lower score
    equal = (scores[..., None, :] == scores[..., :, None]).sum(-1)  # with the same, its own among them
    ways = np.array([math.comb(m, n) / math.comb(total, n) for m in range(total + 1)])
    return (ways[below + equal] - ways[below]) / equal


def kl_bound(n: int) -> float:
    """KL of best-of-n from what it samples from, in nats, if no completion is ever drawn twice; else less."""
    return math.log(n) - (n - 1) / n


def kl_below_bound(probability: np.ndarray, quantile: np.ndarray, n: int) -> np.ndarray:
    """By how much completions of a certain `probability` lower the KL of best-of-n below its bound.

    Completions are points on [0, 1] in the order of their scores, each an interval [a, b] as long as it is probable; b
    is its quantile. Best-of-n has the density n u^(n-1) there, and the bound is its KL from the uniform density. A
    completion is one outcome, whatever point of its interval was drawn, so that what the density does within the
    interval does not count: E[log n u^(n-1)] - log((b^n - a^n) / (b - a)), the mean over the interval."""
    b = np.clip(np.maximum(quantile, probability), 1e-12, 1.0)
    a = np.maximum(b - probability, 0.0)
    r = a / b
    mass = -np.expm1(n * np.log(np.maximum(r, 1e-300)))  # 1 - r^n
    edge = np.where(r > 0, r**n * np.log(np.maximum(r, 1e-300)), 0.0)
    mean_log = np.log(b) - edge / np.maximum(mass, 1e-300) - 1 / n
    inside = math.log(n) + (n - 1) * mean_log
    atom = n * np.log(b) + np.log(np.maximum(mass, 1e-300)) - np.log(np.maximum(b - a, 1e-300))
    return np.where(probability < 1e-6, 0.0, np.maximum(inside - atom, 0.0))


def best_of_n(grades: dict[str, np.ndarray], n: int, choose_by: str = "score") -> dict[str, dict[str, float]]:
    """Measures of best-of-n from N samples of each post: name -> mean over posts and its standard error.

    "kl" is that from the SFT policy: the log-ratio, policy to SFT policy, of the completions chosen, plus "own_kl",
    that of best-of-n from the policy that it samples."""
    weights = best_of_n_weights(grades[choose_by], n)
    probability = np.exp(grades["logprob"])
    scores = grades[choose_by]
    quantile = (scores[..., None, :] <= scores[..., :, None]).mean(-1)
    own = kl_bound(n) - kl_below_bound(probability, quantile, n) if n > 1 else np.zeros_like(probability)
    values = {name: x for name, x in grades.items() if name not in ("kl", "logprob")}
    values |= {"kl": grades["kl"] + own, "own_kl": own}
    return {name: mean_over_posts((weights * x).sum(-1)) for name, x in values.items()}


def mean_over_posts(per_post: np.ndarray) -> dict[str, float]:
    """Mean and standard error, rounded for the records."""
    error = per_post.std(ddof=1) / math.sqrt(len(per_post)) if len(per_post) > 1 else math.nan
    return {"mean": round(float(per_post.mean()), 5), "stderr": round(float(error), 5)}


def mean_and_error(values) -> tuple[float, float]:
    """Mean over seeds and its standard error, NaN for one seed."""
    values = np.asarray(values, float)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


# 97.5% quantiles of Student's t for 1, 2, 3, ... degrees of freedom; for more than 24 that of 24, a little too large.
T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
T_QUANTILES += (2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064)
# The same for 95%: those of a 90% interval.
T_QUANTILES_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782)
T_QUANTILES_90 += (1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711)


def interval_over_seeds(values) -> tuple[float, float]:
    """The 95% interval (Student's t) of the mean of values that are one for each seed."""
    mean, error = mean_and_error(values)
    half = T_QUANTILES[len(values) - 2] * error
    return mean - half, mean + half


def interval_over_seeds_and_posts(differences: np.ndarray) -> tuple[float, float]:
    """The 95% interval of the mean of `differences` (seeds, posts), of other seeds and other posts.

    Both parts of the variance are added, with Student's t of the seeds. What a seed does to a post is in both, so that
    the interval is a little too wide. A bootstrap of so few seeds would be too narrow: it never draws a seed that is
    worse than the worst it has."""
    mean, seed_error = mean_and_error(differences.mean(1))
    _, post_error = mean_and_error(differences.mean(0))
    half = T_QUANTILES[len(differences) - 2] * math.hypot(seed_error, post_error)
    return mean - half, mean + half


def interval_of_difference(ours: np.ndarray, theirs: np.ndarray, quantiles=T_QUANTILES) -> tuple[float, float]:
    """The interval of the difference of two means, each over (seeds, posts): other seeds, the same posts. It is the 95%
    interval, or with T_QUANTILES_90 the 90% interval, which two one-sided tests of equivalence at 5% look at.

    Welch's t for the seeds. What differs between posts, apart from chance within each run, is added to the variance."""
    variances, freedom, chance = [], 0.0, 0.0
    for values in (ours, theirs):
        seeds, posts = values.shape
        variance = values.mean(1).var(ddof=1) / seeds
        variances.append(variance)
        freedom += variance**2 / (seeds - 1)
        rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
        chance += (rest**2).sum() / ((seeds - 1) * (posts - 1)) / (seeds * posts)
    of_posts = (ours.mean(0) - theirs.mean(0)).var(ddof=1) / ours.shape[1] - chance  # chance is in the seeds' already
    total = sum(variances)
    freedom = int(total**2 / freedom) if freedom else 1
    half = quantiles[min(freedom, len(quantiles)) - 1] * math.sqrt(total + max(0.0, of_posts))
    mean = ours.mean() - theirs.mean()
    return mean - half, mean + half
