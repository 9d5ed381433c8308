"""Rollouts of a policy some updates old, as an asynchronous sampler would make them:

    python rloo.py --rollout_engine benchmark/gradient/stale.py:updates_4 --rollout_correction truncate

Completions are sampled by rloo.py's own decoder from the weights before the last 1, 4 or 16 updates, or from the first
ones until there are so many, with the log-probs that these weights give them. Evaluations (k = 1) use the weights of
now. Old weights are held in memory only: a resumed run begins with those of its checkpoint.
"""

from copy import deepcopy
from functools import partial

import torch

import rloo

versions: dict[int, dict] = {}  # number of updates -> the weights after so many
copies = []  # the model that holds old weights, once there is one


def generate(age, model, prompt_ids, *, k, temperature, response_length, stop_ids, seed, version, max_length):
    """A rollout engine, see `own_engine` in rloo.py, that samples from the weights `age` updates ago."""
    if k > 1:
        model = older(model, version, age)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        rows = [{"prompt_ids": ids} for ids in prompt_ids]
        batch, logprobs = rloo.rollout(model, rows, k, temperature, response_length, stop_ids)
    tokens = grouped(batch.responses, batch.response_mask)
    return tokens, grouped(logprobs, batch.response_mask)


def older(model, version: int, age: int):
    """The model as it was `age` updates before `version`, or as early as it was seen. Notes what it is now."""
    versions[version] = {name: x.detach().clone() for name, x in model.state_dict().items()}
    for passed in [number for number in versions if number < version - age]:
        del versions[passed]
    if not copies:
        copies.append(deepcopy(model))
    copies[0].load_state_dict(versions[min(versions)])
    return copies[0]


def grouped(values, mask) -> list[list[list]]:
    """The real entries of values (k, B, R) as [B][k] lists."""
    pairs = zip(values.transpose(0, 1), mask.transpose(0, 1), strict=True)
    return [[x[real].tolist() for x, real in zip(*group, strict=True)] for group in pairs]


updates_0, updates_1, updates_4, updates_16 = (partial(generate, age) for age in (0, 1, 4, 16))
