"""RLOO (REINFORCE Leave-One-Out) for language models in one file of PyTorch.

    python rloo.py                                  # trains the bundled mini TL;DR task, a few minutes on 2 cores
    python rloo.py --rloo_k 8 --kl_coef 0.03        # the same with other settings; --help lists them all

For each prompt the policy samples k completions. The reward of a completion is its score minus β times its KL
divergence from the reference model; its baseline is the mean reward of the other k - 1 completions of the prompt:

    R_j = score_j - β Σ_t kl_jt      A_j = R_j - Σ_{i≠j} R_i / (k - 1)      loss = mean_j max(-A_j ρ_j, -A_j clip(ρ_j))
    kl_jt = log π_old(y_jt) - log π_ref(y_jt) for token t; π_old is the policy before the update, which sampled y_j
    ρ_j = π(y_j) / π_old(y_j), so ρ_j = 1 in the first step; clip(ρ_j) limits it to [1 - ε, 1 + ε]

Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
in LLMs", arXiv:2402.14740. Flags and metrics keep the names of TRL's RLOOTrainer, up to its version 0.19.

Order of the file: flags, the maths, one update, the run. If you only want RLOO, stop after these. The functions they
call follow: rows and attention, log-probs, rollout, rewards, data, models, LoRA, processes, checkpoints, command line.
Tested on Linux with transformers 4.57 to 5.24 and torch 2.9 to 2.13.

Shapes: k completions per prompt, B prompts per update, P prompt slots (left-padded), R response slots (right-padded).
Tensors with a value per completion begin with the axes (k, B); flattened, completion (j, b) has index j·B + b.
Masks are boolean; true marks kept positions. They come from lengths and stop tokens, never from the pad token.
"""

import fcntl
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import multiprocessing.util
import os
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
import tyro
from torch import distributed as dist
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Cache, StaticLayer

MINI_TLDR = Path(__file__).resolve().parent / "benchmark" / "mini_tldr"  # the bundled task, used if none is given
say_once = lru_cache(maxsize=None)(tqdm.write)  # prints above the progress bar, each text only once


# ---- Flags: the comment at a flag, and the docstring of its group, is what --help shows ------------------------------


@dataclass
class Models:
    """save_pretrained folders or Hub ids; without --dataset_name those of the bundled mini TL;DR task"""

    sft_model_path: str | None = None  # policy to train, also the reference; None: model_name_or_path
    model_name_or_path: str | None = None  # where the tokenizer comes from; None: sft_model_path
    reward_model_path: str | None = None  # sequence classifier with one label that scores prompt + completion
    # dtype of forward passes; weights being trained, log-probs and losses stay in float32; None: bfloat16 on a GPU
    # that supports it, float32 on other devices and for the bundled task
    dtype: Literal["float32", "bfloat16"] | None = None
    attn_implementation: str | None = None  # attention kernel; --layout group needs sdpa
    trust_remote_code: bool = False  # run code that comes with a Hub model or tokenizer


@dataclass
class Data:
    """each row has `prompt` (text or chat messages) or `messages`, and optionally `completion`, the reference"""

    dataset_name: str | None = None  # .jsonl file, folder of <split>.jsonl files, or Hub id; None: mini TL;DR
    dataset_config: str | None = None  # configuration of a Hub dataset that has several
    dataset_train_split: str = "train"  # split to train on
    # split to evaluate on; None: test, else the last tenth of dataset_train_split, at most 100 rows
    dataset_test_split: str | None = None
    max_prompt_length: int = 512  # in tokens; rows with longer prompts are dropped


@dataclass
class Rollout:
    """how completions are sampled"""

    response_length: int = 53  # R: maximum number of tokens per completion
    temperature: float = 0.7  # for sampling; log-probs also use softmax(logits / temperature)
    stop_token: str | None = None  # text of the one token that ends a completion; None or "eos": any eos token
    stop_token_id: int | None = None  # id of that token, instead of --stop_token
    # Rollout engine. group: this file's decoder (with plain rows, hf is used instead); hf: `generate` of
    # transformers; file.py:function: your own, see `own_engine`
    rollout_engine: str = "group"
    # weight of the policy loss if completions come from a sampler μ other than π_old, with w = π_old / μ; off: 1;
    # truncate: min(w, cap); mask: w if 1/cap ≤ w ≤ cap, else 0
    rollout_correction: Literal["off", "truncate", "mask"] = "off"
    rollout_correction_cap: float = 2.0  # cap in --rollout_correction, at least 1
    local_rollout_forward_batch_size: int = 64  # completions per forward pass without gradients


@dataclass
class RLOO:
    """the algorithm"""

    rloo_k: int = 4  # k: completions per prompt, at least 2 (TRL: 2)
    kl_coef: float = 0.02  # β: weight of the KL divergence from the reference; at 0 no reference is loaded (TRL: 0.05)
    kl_level: Literal["sequence", "token"] = "sequence"  # one reward per completion, or a reward-to-go per token
    kl_in_reward: bool = True  # subtract β·kl from the reward; if false, add β·(k3 estimator) to the loss
    # baseline of a completion: the mean reward of its siblings (rloo), of its whole group (drgrpo; grpo also divides by
    # the group's standard deviation), or of the update (reinforce)
    advantage_estimator: Literal["rloo", "grpo", "drgrpo", "reinforce"] = "rloo"
    # loss of a batch: mean over completions of the sum over their tokens (sequence), mean over all tokens (token), or
    # mean over completions of the mean over their tokens (sequence-mean)
    loss_aggregation: Literal["sequence", "token", "sequence-mean"] = "sequence"
    # one ratio ρ per completion or per token; None: sequence if both kl_level and loss_aggregation are, else token
    ratio_level: Literal["sequence", "token"] | None = None
    missing_eos_penalty: float | None = None  # subtracted from the score of a completion without a stop token
    normalize_reward: bool = False  # after the penalty, scale scores to mean 0 and standard deviation 1 per update
    reward_clip_range: float | None = None  # clamp scores to ± this value (applied last); None: off (TRL: 10)
    normalize_advantage: bool = False  # scale advantages to mean 0 and standard deviation 1 per update
    # completions without a stop token are used in baselines but left out of the loss
    mask_truncated_completions: bool = False
    cliprange: float = 0.2  # ε: the ratio is clipped to [1 - ε, 1 + ε]
    cliprange_high: float | None = None  # ε of the upper side; None: cliprange
    num_ppo_epochs: int = 1  # passes over the completions of an update (TRL: 4)
    num_mini_batches: int = 1  # optimizer steps per pass


@dataclass
class Rewards:
    """a function is file.py:function or module:function; it takes (prompts, completions, completion_ids, **columns) and
    returns a list with one number, or None, per completion"""

    reward_fns: tuple[str, ...] = ()  # reward functions, in addition to a reward model or instead of one
    reward_weights: tuple[float, ...] | None = None  # one per reward, reward model first; 0: log only; None: all 1
    judge_fn: str | None = None  # function that grades evaluations only; None: none, but mini TL;DR's gold judge


@dataclass
class BatchSize:
    """completions per update and process: the product of these two and num_mini_batches"""

    per_device_train_batch_size: int = 32  # completions per forward and backward pass, a multiple of rloo_k (TRL: 8)
    gradient_accumulation_steps: int = 1  # forward and backward passes per optimizer step
    # completions in the whole run, rounded up to whole updates; 0: only evaluate; None: one pass over the training
    # prompts, with k completions each; 6,400 if neither a data set nor a model is given
    total_episodes: int | None = None


@dataclass
class Optimizer:
    """AdamW"""

    # peak value; None: 1e-6, but 2.5e-4 for mini TL;DR's tiny model; ten times that with --lora_rank
    learning_rate: float | None = None
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"  # decay after the warmup
    warmup_ratio: float = 0.0  # share of the updates in which the learning rate rises to its peak
    adam_eps: float = 1e-8  # added to the denominator
    weight_decay: float = 0.0  # decoupled; 0: off
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm; 0: off


@dataclass
class Run:
    """what a run writes and shows"""

    exp_name: str = "rloo"  # name of the run
    seed: int = 1  # for sampling and shuffling; on one machine's CPU, the same seed gives the same run
    output_dir: str | None = None  # folder for everything the run writes; None: runs/<exp_name>__<seed>__<time>
    save_steps: int = 100  # updates between checkpoints; 0: only at the end and when the run is interrupted
    save_total_limit: int = 2  # number of newest checkpoints to keep
    resume: bool = False  # continue from the newest checkpoint in output_dir, or start a new run if there is none
    num_sample_generations: int = 4  # maximum number of evaluations between the first and the last
    num_eval_prompts: int = 500  # maximum number of held-out prompts to evaluate on
    track: bool = False  # log to Weights & Biases
    wandb_project_name: str = "rloo"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases entity (user or team)
    device: str | None = None  # cpu, cuda, cuda:1, ...; None: cuda if available


@dataclass
class Scale:
    """memory and devices; `torchrun --nproc_per_node N rloo.py ...` runs N processes"""

    # rank of LoRA adapters, which are trained in place of the policy's own weights; those are frozen in --dtype and are
    # the reference too; 0: all weights are trained
    lora_rank: int = 0
    lora_alpha: int = 32  # adapters' outputs are multiplied by lora_alpha / lora_rank
    # group: one row per prompt with its k completions; plain: one row per completion; auto: group if the model can
    layout: Literal["auto", "group", "plain"] = "auto"
    # each process holds all weights (ddp) or a shard (fsdp, FSDP2); in rollouts fsdp adds a full copy in --dtype
    sharding: Literal["ddp", "fsdp"] = "ddp"
    gradient_checkpointing: bool = False  # recompute the layers' activations in backward instead of keeping them


@dataclass
class Args(Models, Data, Rollout, RLOO, Rewards, BatchSize, Optimizer, Run, Scale):
    """All flags. Without flags, mini TL;DR is trained. Flags that TRL also has keep TRL's names."""


# ---- The maths: tensors in, tensors out ------------------------------------------------------------------------------


def shape_scores(scores, ended, missing_eos_penalty, normalize: bool, clip_range):
    """Scores (k, B) after penalty, normalisation and clipping, in this order. ended (k, B): has a stop token. NaN
    (no score) stays NaN, without influence on the others."""
    if missing_eos_penalty is not None:
        scores = scores - missing_eos_penalty * ~ended
    if normalize:
        scores = standardize(scores, ~scores.isnan())
    if clip_range is not None:
        scores = scores.clamp(-clip_range, clip_range)
    return scores


def rlhf_reward(scores, kl, kl_coef: float, kl_level: str = "sequence"):
    """Rewards of scores (k, B) and kl (k, B, R). At sequence level score - β Σ_t kl_t, (k, B); at token level the
    reward-to-go G_t = score - β Σ_{s≥t} kl_s, (k, B, R) (Hu 2025, arXiv:2501.03262)."""
    if kl_level == "sequence":
        return scores - kl_coef * kl.sum(-1)
    kl_to_go = kl.flip(-1).cumsum(-1).flip(-1)
    return scores[..., None] - kl_coef * kl_to_go


def advantage(rewards, estimator: str = "rloo"):
    """Advantages A = r - baseline for rewards r (k, B), or (k, B, R) with one baseline per token. The baseline is

    rloo: the mean of the other k - 1 completions of the prompt; the default, unbiased
    drgrpo: the mean of all k, its own included: A is (k - 1) / k of rloo's (Liu et al. 2025, arXiv:2503.20783)
    grpo: as drgrpo, with A divided by the group's standard deviation + 1e-4 (Shao et al. 2024, arXiv:2402.03300)
    reinforce: the mean over the whole update and all ranks

    A reward is NaN if the completion has no score; it is left out of all baselines. An advantage is NaN if there is no
    reward, or no other one to compare it with.
    """
    r = rewards.double()  # sums of equal rewards are exact, so their advantages are 0
    n = (~r.isnan()).sum(0)
    if estimator == "rloo":
        baseline = (r.nansum(0) - r) / (n - 1)
    elif estimator in ("drgrpo", "grpo"):
        baseline = r.nansum(0) / n
    elif estimator == "reinforce":
        n = sum_over_ranks(n.sum(0))
        baseline = sum_over_ranks(r.nansum(0).sum(0)) / n
    else:
        raise ValueError(f"advantage estimator {estimator!r}: must be rloo, drgrpo, grpo or reinforce")
    advantages = r - baseline
    if estimator == "grpo":
        std = (advantages.square().nansum(0) / (n - 1)).sqrt()
        advantages = advantages / (std + 1e-4)
    return advantages.masked_fill(n < 2, math.nan).to(rewards.dtype)


def policy_loss(
    new, old, advantages, mask, clip_low: float, clip_high: float, ratio_level: str = "sequence", weight=1.0
):
    """Σ_t w max(-A ρ, -A clip(ρ, 1 - ε_low, 1 + ε_high)) of each completion, (k, B) (Schulman et al. 2017, eq. 7).

    new, old (k, B, R): log-probs under the policy now and before the update. Advantages (k, B, 1 or R): one per
    completion or per token. A ratio is per completion, exp(Σ_t new_t - old_t), or per token, exp(new_t - old_t).
    `weight` w is 1 or of the ratios' shape, see rollout_weight. Padding (mask false) is ignored. Also returns
    log ρ and whether the clip was active, both (n,), for the n ratios that are not padding.
    """
    log_ratio = (new - old) * mask  # (k, B, R)
    if ratio_level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)  # (k, B, 1)
        mask = mask.any(-1, keepdim=True)
    elif ratio_level != "token":
        raise ValueError(f"ratio level {ratio_level!r}: must be sequence or token; resolve_args fills in the default")
    ratio = log_ratio.clamp(max=80.0).exp()  # an infinite ratio would have a NaN gradient even where it is clipped
    loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    per_completion = (torch.max(loss, clipped_loss) * weight * mask).sum(-1)
    return per_completion, log_ratio.detach()[mask], (clipped_loss > loss)[mask]


def rollout_weight(old, sampled, mask, correction: str, cap: float, ratio_level: str = "sequence"):
    """Loss weights (k, B, 1 or R) that correct for sampling from μ instead of the trained policy π_old. The two differ
    if the sampler uses other kernels or bfloat16. old, sampled (k, B, R): log-probs under π_old and μ. The ratio w is
    exp(Σ_t old_t - sampled_t) per completion, or exp(old_t - sampled_t) per token; it is returned too.

    off: 1
    truncate: min(w, cap) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training")
    mask: w where 1 / cap ≤ w ≤ cap, else 0 (IcePop, Zhao et al. 2025, ringtech.notion.site/icepop)
    """
    log_w = (old - sampled) * mask  # (k, B, R)
    if ratio_level == "sequence":
        log_w = log_w.sum(-1, keepdim=True)  # (k, B, 1)
    w = log_w.clamp(max=80.0).exp()
    if correction == "truncate":
        return w.clamp(max=cap), w
    if correction == "mask":
        return w * ((w >= 1 / cap) & (w <= cap)), w
    return torch.ones_like(w), w


def kl_penalty(new, ref_logprobs, mask):
    """Σ_t e^{-kl_t} - 1 + kl_t of each completion, (k, B): the k3 estimator of the KL, as a term of the loss
    (Schulman 2020, "Approximating KL Divergence"). In expectation its gradient is, per token, that of KL(π_ref ‖ π)."""
    kl = (new - ref_logprobs) * mask
    return (torch.expm1(-kl) + kl).sum(-1)


def loss_weight(lengths, in_loss, aggregation: str):
    """Weights (k, B) such that mean(weight · Σ_t loss_t) over all ranks is the loss of an optimizer step. `lengths`
    (k, B): tokens per completion. Completions that in_loss (k, B) leaves out of the loss have weight 0.

    sequence: mean over all completions of the sum over their tokens; those outside the loss count as 0, as in TRL
    token: sum over the tokens in the loss / their number, as in DAPO's overlong filtering (arXiv:2503.14476)
    sequence-mean: mean over all completions of the mean over their tokens
    """
    weight = in_loss.double()
    if aggregation == "token":
        weight = weight / mean_and_std(weight * lengths)[0].clamp(min=1e-9)  # 0 if nothing is in the loss
    elif aggregation == "sequence-mean":
        weight = weight / lengths
    elif aggregation != "sequence":
        raise ValueError(f"loss aggregation {aggregation!r}: must be sequence, token or sequence-mean")
    return weight.float()


def mean_and_std(values):
    """Mean and standard deviation, in float64, of the values on all ranks that are not NaN; NaN if too few."""
    values = values[~values.isnan()].double()
    count = sum_over_ranks(values.new_tensor(len(values)))
    mean = sum_over_ranks(values.sum()) / count
    variance = sum_over_ranks((values - mean).square().sum()) / (count - 1).clamp(min=0)
    return mean, variance.sqrt()


def standardize(x, usable):
    """(x - mean) / (std + 1e-8), with mean and std of the entries of all ranks where `usable` is true. If there is only
    one of them, x stays as it is."""
    mean, std = mean_and_std(x[usable])
    return torch.where(std.isfinite(), (x - mean) / (std + 1e-8), x)


# ---- One update ------------------------------------------------------------------------------------------------------


def update(args, policy, reference, rewards: dict, optimizer, rows: list[dict], sampling: dict, layout: str):
    """Updates the policy on k completions for each of B prompts (`rows`, see prepare_row); returns metrics. The weights
    being trained are in float32. The reference may be None; with LoRA it is the policy. `rewards` maps names to
    functions of a Batch that return scores (k, B), NaN for a completion without a score. `sampling` holds the remaining
    arguments of `rollout`. `args`: as returned by resolve_args."""
    device = policy.device
    temperature = args.temperature
    chunk_size = args.local_rollout_forward_batch_size
    times = [clock(device)]
    cpu_time = time.process_time()

    # 1. Rollout: k completions of each prompt, and the log-probs with which they were sampled. Prompts are sorted by
    # length, so that those that share a forward pass need little padding.
    rows = sorted(rows, key=lambda row: len(row["prompt_ids"]))
    batch, sampled = rollout(sampling_model(policy, forward_dtype(args)), rows, args.rloo_k, temperature, **sampling)
    mask = batch.response_mask
    times.append(clock(device))

    # 2. Log-probs `old` of the policy before this update. The rollout's are used, except where differences in rounding
    # would matter: with a correction or several mini-batches, a forward pass as in training computes them. Then the KL
    # of each token from the reference (the k1 estimator), (k, B, R) in nats; 0 without a reference.
    old = sampled
    if args.rollout_correction != "off" or args.num_mini_batches > 1:
        with training_dtype(args, device):
            old = chunked_logprobs(policy, batch, temperature, layout, chunk_size)
    ref = old
    if reference is not None:
        with without_adapters(reference):  # with LoRA it is the policy itself
            ref = chunked_logprobs(reference, batch, temperature, layout, chunk_size)
    kl = (old - ref) * mask
    require_finite("a log-prob of the policy or of the reference", kl)
    correction, w = rollout_weight(
        old, sampled, mask, args.rollout_correction, args.rollout_correction_cap, args.ratio_level
    )
    times.append(clock(device))

    # 3. Scores (k, B): raw, then after penalty, normalisation and clipping. NaN: no reward function returned a score.
    raw_scores, by_reward = score(rewards, args.reward_weights, batch)
    scores = shape_scores(
        raw_scores, batch.ended, args.missing_eos_penalty, args.normalize_reward, args.reward_clip_range
    )
    scored = ~raw_scores.isnan()
    comparable = scored & (scored.sum(0) > 1)  # has a score, and so has a sibling
    times.append(clock(device))

    # 4. Advantages (k, B, 1), or (k, B, R) at token level. NaN: the completion has no score, or nothing to be compared
    # with. Such completions have no influence on the normalisation, and advantage 0, like padding.
    kl_coef = args.kl_coef if args.kl_in_reward else 0.0
    reward = rlhf_reward(scores, kl, kl_coef, args.kl_level)
    advantages = advantage(reward, args.advantage_estimator)
    require(advantages.shape == reward.shape, "advantage: must return a tensor of the same shape as its rewards")
    advantages = advantages.reshape(*scores.shape, -1)
    require(advantages[comparable].isfinite().all(), "advantage: is not finite, though the completion has a score")
    usable = mask[..., : advantages.shape[-1]] & ~advantages.isnan()
    if args.normalize_advantage:
        advantages = standardize(advantages, usable)
    advantages = advantages.masked_fill(~usable, 0.0)

    # 5. The optimizer steps, on the completions in the loss. To leave out groups with equal scores, as DAPO's dynamic
    # sampling does (which also samples others in their place), add in_loss = in_loss & ~equal_groups(scores) below.
    # They then count as 0 in means over completions, and not at all in means over tokens.
    in_loss = scored & batch.ended if args.mask_truncated_completions else scored
    logged = improve(args, policy, optimizer, layout, batch, sampled, old, ref, advantages, in_loss, correction)
    times.append(clock(device))

    # 6. Metrics, by TRL's names: the mean of all entries of a tensor on all ranks. Scores are logged raw.
    logged |= {
        "objective/scores": raw_scores,
        "objective/rlhf_reward": rlhf_reward(scores, kl, kl_coef),
        "objective/non_score_reward": -kl_coef * kl.sum(-1),
        "objective/entropy": -(sampled * mask).sum(-1),
        "frac_reward_zero_std": equal_groups(raw_scores)[comparable.any(0)],
        "completions/mean_length": mask.sum(-1),
        "completions/clipped_ratio": ~batch.ended,
        "completions/in_loss": in_loss,
    }
    if reference is not None:
        logged["objective/kl"] = kl.sum(-1)
    for name, values in by_reward.items():
        logged[f"rewards/{name}/mean"] = values
        logged[f"rewards/{name}/applied"] = ~values.isnan()
    stats = {name: mean_and_std(values) for name, values in logged.items()}
    metrics = {name: float(mean) for name, (mean, _) in stats.items()}
    for name in by_reward:
        metrics[f"rewards/{name}/std"] = float(stats[f"rewards/{name}/mean"][1])
    if args.rollout_correction != "off":
        metrics |= weight_metrics(w[mask[..., : w.shape[-1]]].double())
    metrics |= {
        "objective/scores_std": float(stats["objective/scores"][1]),
        "val/ratio_var": float(stats["val/ratio"][1]) ** 2,
        "val/num_eos_tokens": int(sum_over_ranks(batch.ended.sum())),
        "lr": optimizer.param_groups[0]["lr"],
        "tokens_per_second": int(sum_over_ranks(mask.sum())) / (times[-1] - times[0]),
        "memory/peak_gb": peak_memory(device),
        "cpu_time": time.process_time() - cpu_time,
    }
    for name, seconds in zip(("rollout", "reference", "reward", "train"), np.diff(times), strict=True):
        metrics[f"time/{name}"] = float(seconds)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}  # NaN: no values


def improve(args, policy, optimizer, layout, batch, sampled, old, ref, advantages, in_loss, correction):
    """PPO epochs x mini-batches x micro-batches of whole groups, on a Batch with advantages from anywhere. With one
    epoch of one mini-batch this is REINFORCE. Returns {metric: tensor of its values on this rank}.

    sampled, old, ref (k, B, R): log-probs under what sampled, under the policy before its first step, and under the
    reference (read with --no_kl_in_reward only). Rollout and training round differently, which would look like a change
    of the policy; so the first mini-batch takes `old` from its own forward pass, and ρ is exactly 1 there.
    advantages, correction (k, B, 1 or R): the latter are weights of the policy loss, see rollout_weight.
    in_loss (k, B) bool: completions in the loss.

    A function in its place must make its steps by `optimizer`, since what is saved after an error depends on the first
    of them, and return at least val/ratio and grad_norm.
    """
    mask = batch.response_mask
    k, B = mask.shape[:2]
    micro_batch = args.per_device_train_batch_size // k  # in prompts
    mini_batch = micro_batch * args.gradient_accumulation_steps
    old = old.clone()
    logged = defaultdict(list)
    for epoch in range(args.num_ppo_epochs):
        for step, mini in enumerate(torch.randperm(B).to(mask.device).split(mini_batch)):
            first_step = epoch == 0 and step == 0
            mini = mini.sort().values  # by length again, for the micro-batches
            weights = loss_weight(mask[:, mini].sum(-1), in_loss[:, mini], args.loss_aggregation)
            mini_batch_loss = 0.0
            for micro, weight in zip(mini.split(micro_batch), weights.split(micro_batch, dim=1), strict=True):
                real = mask[:, micro]
                with training_dtype(args, mask.device):
                    new, entropy = completion_logprobs(policy, batch.select(micro), args.temperature, layout)
                if first_step:
                    old[:, micro] = new.detach()  # so ρ is exactly 1, however the sampler rounds
                    logged["val/rollout_logprob_gap"].append((new.detach() - sampled[:, micro]).abs()[real])

                losses, log_ratio, clipped = policy_loss(
                    new,
                    old[:, micro],
                    advantages[:, micro],
                    real,
                    args.cliprange,
                    args.cliprange_high,
                    args.ratio_level,
                    correction[:, micro],
                )
                if args.kl_coef and not args.kl_in_reward:
                    losses = losses + args.kl_coef * kl_penalty(new, ref[:, micro], real)
                # An entropy bonus would be, here: losses = losses - coefficient * entropy.sum(-1)
                logged["policy/entropy_avg"].append(entropy.detach()[real])
                losses = losses * weight
                del entropy  # frees its (block, vocabulary) tensors, unless the loss has it
                loss = losses.sum() / (k * len(mini))  # summed over micro-batches: the mini-batch's mean
                loss.backward()
                mini_batch_loss += loss.detach()

                logged["loss/policy_avg"].append(losses.detach())
                logged["policy/approxkl_avg"].append(0.5 * log_ratio.square())
                logged["policy/clipfrac_avg"].append(clipped)
                # Per token, regardless of --ratio_level, as in TRL.
                logged["val/ratio"].append((new.detach() - old[:, micro])[real].double().exp())

            if args.sharding == "ddp":
                average_gradients(policy)  # FSDP does it in backward
            norm = whole(torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm or math.inf))
            logged["grad_norm"].append(norm)
            require_finite("the loss or its gradient", norm + mini_batch_loss)
            optimizer.step()
            optimizer.zero_grad()
            weights_norm = torch.nn.utils.get_total_norm(trained_weights(policy).values())
            require_finite("a weight", whole(weights_norm))
    return {name: torch.cat([values.flatten() for values in parts]) for name, parts in logged.items()}


def training_dtype(args, device):
    """Context in which the trained policy's forward passes run in --dtype. Without autocast's cache, since with it all
    blocks of log-probs would share one bfloat16 copy of the head, and its gradient would be summed in bfloat16. FSDP
    does sum it so, since it gathers the head in --dtype."""
    dtype = forward_dtype(args)
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)


def forward_dtype(args) -> torch.dtype:
    return torch.bfloat16 if args.dtype == "bfloat16" else torch.float32


def equal_groups(scores):
    """Whether all scores (k, B) of a group are equal up to rounding, (B,). NaN is ignored."""
    close = torch.isclose(scores, scores.nanmean(0), rtol=1e-6, atol=1e-6)
    return (close | scores.isnan()).all(0)


def weight_metrics(w) -> dict[str, float]:
    """Mean and largest of the weights w (n,) of --rollout_correction, and (Σ w)² / (n Σ w²), NaN if all are 0."""
    mean, _ = mean_and_std(w)
    mean_of_squares, _ = mean_and_std(w.square())
    return {
        "val/rollout_weight": float(mean),
        "val/rollout_weight_max": max(gather([float(w.max())])),
        "val/rollout_weight_share": float(mean**2 / mean_of_squares),
    }


def average_gradients(model):
    """Replaces each gradient by its mean over the ranks. Missing gradients (an expert that received no tokens) count
    as 0."""
    if dist.is_initialized():
        for parameter in trained_weights(model).values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sum_over_ranks(parameter.grad).div_(dist.get_world_size())


def require_finite(what: str, values):
    """Ends the run on all ranks, which can then save together, if a value on one of them is not finite."""
    if sum_over_ranks((~values.isfinite()).sum()):
        raise known_to_all(InputError(f"{what} is not finite: lower --learning_rate, or look for extreme rewards"))


def peak_memory(device: torch.device) -> float:
    """Peak memory in GiB: of the GPU, including CUDA graphs, or else of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# ---- The run ---------------------------------------------------------------------------------------------------------


def main(args: Args, signals: Sequence[int] = ()) -> dict[str, dict[str, float]]:
    """Trains; returns the evaluations before and after. Saves and exits once a signal is in the list `signals`."""
    args = resolve_args(args)
    check_args(args)

    # 1. Processes, data and functions, first because they load fast and are the most likely to be wrong.
    print(f"loading {args.dataset_name} and {args.sft_model_path}", flush=True)
    device = torch.device(args.device)
    rank, world = start_processes(device)
    output = Path(on_first_rank(lambda: args.output_dir)).absolute()  # ranks may differ: the default has a time in it
    tokenizer = load_tokenizer(args, "--model_name_or_path or --sft_model_path", args.model_name_or_path)
    train_rows, test_rows = load_data(args, tokenizer)
    all_rows = train_rows + test_rows
    test_rows = test_rows[: len(test_rows) // world * world]  # the same number for each rank
    functions = load_functions(args.reward_fns, "reward_fns", tokenizer, train_rows[0])
    judges = load_functions([args.judge_fn] if args.judge_fn else [], "judge_fn", tokenizer, train_rows[0])
    engine = args.rollout_engine
    if engine not in ("group", "hf"):
        engine = load_function(engine, f"--rollout_engine {engine}")

    # 2. Where the run begins: at update 0, or at a checkpoint. `state` is what a checkpoint holds besides weights.
    B = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches // args.rloo_k
    batch_size = args.rloo_k * B * world
    if args.total_episodes is None:
        args.total_episodes = args.rloo_k * len(train_rows)  # each prompt once
    flags = vars(args) | {"completions per update": batch_size} | hashes(args, train_rows, test_rows)
    resumed = on_first_rank(lambda: newest_checkpoint(output)) if args.resume else None
    state = load_state(resumed, flags) if resumed else new_state(output, flags)
    first = state["update"]
    num_updates = max(first, math.ceil(args.total_episodes / batch_size))
    modes = evaluation_modes(num_updates, args.num_sample_generations, first, state["modes"]) if test_rows else {}

    # 3. Models, rewards and the optimizer.
    policy = load_policy(args, resumed)
    layout = choose_layout(policy, args, all_rows)
    if layout == "plain" and engine == "group":
        engine = args.rollout_engine = "hf"
    sampling = sampling_options(args, engine, policy, tokenizer, all_rows)
    reference = load_reference(args, policy)
    rewards = load_reward_model(args, tokenizer, all_rows, policy.config.get_text_config().vocab_size) | functions
    optimizer, learning_rate = make_optimizer(args, policy, num_updates)
    if resumed:
        load_moments(resumed, policy, optimizer)

    save = partial(save_checkpoint, output, state, policy, optimizer, tokenizer, args.save_total_limit)

    # 4. The evaluation before training. A resumed run repeats the evaluation that followed its checkpoint, since files
    # are cut to just before it.
    def evaluate_after(done) -> dict[str, float]:
        sampling["version"] = done
        samples = []
        for mode in modes[done]:
            samples += evaluate(args, policy, rewards, judges, test_rows[rank::world], sampling, tokenizer, mode)
            stop_if_told(signals)  # before it is written: a signal may have ended workers of a reward function
        return write_evaluation(args, output, done, done * batch_size, samples)

    print(f"updates {first} to {num_updates} of {B * world} prompts, {num_updates * batch_size:,} episodes", flush=True)
    print(settings(args, layout, world, output, len(train_rows), len(test_rows)), flush=True)
    if 0 < num_updates < 20:
        print(
            "these are few updates: raise --total_episodes or make the batch smaller; 50 or more are usual", flush=True
        )
    start = clock(device)
    watched = is_first_rank() and sys.stderr.isatty()  # otherwise progress is a plain line per update
    bar = tqdm(total=num_updates, initial=first, unit="update", dynamic_ncols=True, disable=not watched)
    with open_output(args, output, state, resumed), bar, saved_at_end(output, state, save):
        evaluation = evaluate_after(first) if first in modes else {}
        if first == 0:
            state["before"] = evaluation

        # 5. The updates. All random numbers of an update depend on the seed, its number and the rank alone. Since it
        # writes, then saves, then evaluates, a run can be killed anywhere and resumed.
        for done in range(first + 1, num_updates + 1):
            # Train.
            set_seed(args.seed, done - 1, rank)
            optimizer.param_groups[0]["lr"] = learning_rate(done - 1)
            rows = rows_of_update(train_rows, args.seed, ((done - 1) * world + rank) * B, B)
            sampling["version"] = done - 1
            with optimizer.register_step_pre_hook(partial(before_step, state, signals)):
                metrics = update(args, policy, reference, rewards, optimizer, rows, sampling, layout)
            eps = (done - first) * batch_size / (clock(device) - start)
            metrics |= {"update": done, "episode": done * batch_size, "eps": eps}
            # Write, show.
            append(output, "metrics.jsonl", [metrics])
            state |= {"update": done, "files": file_lengths(output), "modes": modes.get(done, [])}
            track(args, metrics, done)
            warn_about(metrics, args)
            show_progress(bar, metrics, evaluation)
            # Save, stop if told, evaluate.
            if done == num_updates or args.save_steps and done % args.save_steps == 0:
                save()
            stop_if_told(signals)
            if done in modes:
                evaluation = evaluate_after(done)

    # 6. The trained policy, and what training has changed.
    if num_updates:
        with explained(f"{output}: the policy cannot be saved; free disk space and continue with --resume"):
            save_policy(output, policy, tokenizer)
    evaluations = {"before": state["before"], "after": evaluation if num_updates else {}}
    if test_rows:
        print_evaluations(**evaluations, prompts=len(test_rows))
    print(f"\n{(num_updates - first) * batch_size:,} episodes in {clock(device) - start:.0f} s. Results: {output}")
    return evaluations


def settings(args, layout, world, output, train_prompts, test_prompts) -> str:
    """What was chosen by default, or is worth seeing."""
    names = replaced_names()
    replaced = f", replaced by {running_script().name}: {', '.join(names)}" if names else ""
    return (
        f"{train_prompts:,} prompts to train on, {test_prompts} to evaluate on, {args.rloo_k} completions each, of up "
        f"to {args.response_length} tokens, by {world} x {args.device}, into {output}\nlearning rate "
        f"{args.learning_rate:g}, one ratio per {args.ratio_level}, forward passes in {args.dtype}, layout {layout}, "
        f"rollout engine {args.rollout_engine}{replaced}"
    )


def sampling_options(args, engine, policy, tokenizer, rows) -> dict:
    """The arguments of `rollout` that stay the same in a run; main adds `version`, the number of updates done."""
    return {
        "response_length": args.response_length,
        "stop_ids": on_first_rank(lambda: stop_token_ids(args, policy, tokenizer)),
        "engine": engine,
        "chunk_size": args.local_rollout_forward_batch_size,
        "max_length": max(len(row["prompt_ids"]) for row in rows) + args.response_length,
    }


def make_optimizer(args, policy, num_updates):
    """AdamW, and the learning rate as a function of the number of updates done."""
    weights = trained_weights(policy).values()
    optimizer = torch.optim.AdamW(
        weights, args.learning_rate, eps=args.adam_eps, weight_decay=args.weight_decay, fused=True
    )
    warmup = math.ceil(args.warmup_ratio * num_updates)

    def learning_rate(done):
        if done < warmup:
            return args.learning_rate * (done + 1) / (warmup + 1)
        left = (num_updates - done) / (num_updates - warmup)  # of the decay, from 1 to 0
        decay = {"linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left), "constant": 1.0}
        return args.learning_rate * decay[args.lr_scheduler_type]

    return optimizer, learning_rate


def evaluation_modes(num_updates, between, first, of_first) -> dict[int, list[str]]:
    """The updates after which the policy is evaluated, and how: 0 and the last, also greedily, and up to `between`
    others, 5 or more apart. A resumed run repeats the evaluation after its `first` update, in the modes `of_first`."""
    apart = max(5, math.ceil(num_updates / (between + 1)))
    modes = dict.fromkeys(range(apart, num_updates - 4, apart), ["sampled"])
    modes |= dict.fromkeys([0, num_updates], ["sampled", "greedy"])
    if len(of_first) > len(modes.get(first, [])):
        modes[first] = of_first
    return modes


def set_seed(*numbers: int):
    """Seeds Python, NumPy and PyTorch by all of the numbers together."""
    transformers.set_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def rows_of_update(rows, seed, begin, count) -> list[dict]:
    """Rows number `begin` to begin + count - 1 of an endless sequence: all rows in one order, then in another, ..."""
    chosen = []
    for number in range(begin, begin + count):
        epoch, place = divmod(number, len(rows))
        chosen.append(rows[shuffled(len(rows), seed, epoch)[place]])
    return chosen


@lru_cache(maxsize=2)
def shuffled(n, seed, epoch) -> np.ndarray:
    """The order of n rows in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n)


@contextmanager
def open_output(args, output: Path, state, resumed: Path | None):
    """Keeps the output folder locked for this run. Cuts its files to the lengths they had at the checkpoint (0 for a
    new run), so that a resumed run continues them. The first rank does this for all."""
    if not is_first_rank():
        yield
        return
    with explained(f"--output_dir {output}: cannot be written to, or another run is using it"):
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / "metrics.jsonl").open("a")  # opened first, since this file marks the folder of a run
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.register_at_fork(after_in_child=lock.close)  # so that a forked worker that outlives the run has no lock
    with lock:
        require(
            newest_checkpoint(output) == resumed,
            f"--output_dir {output}: another run has saved a checkpoint since this one began to load; start it again",
        )
        made_by = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rloo.py": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            "script": running_script().name,
            "git": os.popen("git rev-parse HEAD 2>/dev/null").read().strip(),  # "" outside of a repository
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        (output / "args.json").write_text(json.dumps(vars(args) | {"made_by": made_by}, indent=2) + "\n")
        for name in RUN_FILES:
            with (output / name).open("ab") as file:
                file.truncate(min(file.tell(), state["files"].get(name, 0)))
        if args.track:
            with explained("--track: Weights & Biases cannot start"):
                import wandb

                names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": output.name}
                wandb.init(**names, dir=output, id=state["run_id"], resume="allow", config=vars(args))
        yield


@contextmanager
def saved_at_end(output: Path, state, save: Callable):
    """Saves a checkpoint of the last complete update if an error or a signal ends the run. It does not save before the
    first update, nor if the next one has begun to change the weights, nor, since saving needs all processes, after an
    error that others may not have."""
    try:
        yield
    except BaseException as error:
        complete = state["update"] not in (None, 0)  # see before_step
        if complete and (not dist.is_initialized() or getattr(error, "on_all_ranks", False)):
            save()
        reason = "a signal" if isinstance(error, SystemExit) else type(error).__name__
        newest = newest_checkpoint(output) or "none"
        tqdm.write(
            f"ended by {reason}; newest checkpoint: {newest}; to go on, repeat the command with --resume "
            f"--output_dir {output}"
        )
        raise


def before_step(state, signals, *_):
    """Before an update's first optimizer step, stops if told: a signal may have ended processes that computed rewards,
    which are then wrong. From this step until the update is complete, the weights must not be saved."""
    if state["update"] is not None:
        stop_if_told(signals)
    state["update"] = None


def stop_if_told(signals):
    """Ends the run if any process has received a signal."""
    if on_any_rank(len(signals) > 0):
        raise known_to_all(SystemExit(128 + (signals[0] if signals else signal.SIGTERM)))


def file_lengths(output: Path) -> dict[str, int]:
    """The lengths in bytes of the files to which a run appends."""
    return {path.name: path.stat().st_size for path in output.glob("*.jsonl")}


def append(output: Path, name, objects: list[dict]):
    """Appends objects to a file of the run, each as a line of JSON. Only the first rank writes."""
    if is_first_rank():
        with open(output / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(item, default=str) + "\n" for item in objects)


def track(args, metrics: dict, update):
    """Logs metrics to Weights & Biases with --track."""
    if args.track and is_first_rank():
        import wandb

        wandb.log(metrics, step=update)


def warn_about(metrics: dict, args):
    """Warns once about metrics of an update that are most likely due to a mistake."""
    in_groups = args.advantage_estimator != "reinforce" and args.missing_eos_penalty is None
    if metrics["grad_norm"] == 0 or in_groups and metrics.get("frac_reward_zero_std", 0) > 0.9:
        say_once(
            "the scores of an update gave hardly any learning signal: in over 90% of the groups all are equal, or none "
            "is used (None, reward weight 0, or completion outside the loss)"
        )
    if metrics.get("objective/kl", 0) > metrics["completions/mean_length"]:
        say_once(
            "the KL divergence from the reference is above 1 nat per token: training may be destroying the policy; "
            "lower --learning_rate"
        )
    waits = metrics["time/train"] > metrics["cpu_time"] and torch.get_num_threads() > 1  # threads wait by spinning
    if args.device == "cpu" and waits:
        say_once(
            "updates take much longer than their CPU time, since other processes use the cores: try "
            "OMP_WAIT_POLICY=PASSIVE or OMP_NUM_THREADS=1"
        )
    if metrics.get("val/rollout_logprob_gap", 0) > 0.1:
        say_once("sampling and training disagree about log-probs, see val/rollout_logprob_gap: try --dtype float32")
    if metrics["completions/clipped_ratio"] > 0.5:
        say_once(
            f"most completions are cut at --response_length {args.response_length}: raise it, or set "
            "--stop_token to the token that ends them; if they ended before, lower --learning_rate"
        )


def evaluate(args, policy, rewards, judges, rows, sampling, tokenizer, mode: str) -> list[dict]:
    """Samples a completion of each row ("greedy": at temperature 0) and grades it: weighted score, judge, and whether
    it beats the row's reference. Returns the samples of all ranks. All calls of a rank begin with the same random
    numbers, which are not those of other ranks."""
    # 1. Completions.
    rank, _ = rank_and_world()
    transformers.set_seed((args.seed + 100_000 * rank) % 2**32)
    temperature = args.temperature if mode == "sampled" else 0.0
    batch, logprobs = rollout(sampling_model(policy, forward_dtype(args)), rows, 1, temperature, **sampling)
    require_finite("a log-prob of the policy", logprobs)

    # 2. Grades by name, each a list: those of the completions, then those of the references that there are.
    graded = with_references(batch, sampling["stop_ids"])
    grades = {}
    grades["score"], by_reward = score(rewards, args.reward_weights, graded)
    if judges:
        grades["judge_score"], _ = score(judges, None, graded)
    if len(by_reward) > 1:
        grades |= {f"rewards/{name}": scores for name, scores in by_reward.items()}
    grades = {name: scores[0].tolist() for name, scores in grades.items()}

    # 3. A sample of each row.
    references = itertools.count(len(rows))
    texts = completion_texts(batch, tokenizer)
    lengths = batch.response_mask[0].sum(-1).tolist()
    samples = []
    for b, row in enumerate(rows):
        reference = next(references) if row["reference_ids"] else None  # its number in `graded`
        sample = {
            "mode": mode,
            "prompt": tokenizer.decode(row["prompt_ids"]),  # as the model reads it
            "completion": texts[b].strip(),
            "reference": (row["reference"] or "").strip(),
            "length": lengths[b],
            "columns": row["columns"],
        }
        for name, scores in grades.items():
            sample[name] = None if math.isnan(scores[b]) else scores[b]
            if name in ("score", "judge_score"):
                compared = None if reference is None else win(scores[b], scores[reference])
                sample[name.replace("score", "win_rate")] = compared
        samples.append(sample)
    return gather(samples)


def with_references(batch: "Batch", stop_ids) -> "Batch":
    """What an evaluation grades, as a Batch with k = 1: the completions (1, B, R), then the references of the rows that
    have one, cut to R - 1 tokens and ended by a stop token."""
    R = batch.responses.shape[-1]
    referenced = [row for row in batch.rows if row["reference_ids"]]
    # Filled up with stop tokens, of which the first counts.
    references = [(row["reference_ids"][: R - 1] + stop_ids[:1] * R)[:R] for row in referenced]
    responses = [batch.responses[0], batch.responses.new_tensor(references).view(-1, R)]
    return make_batch(batch.rows + referenced, torch.cat(responses)[None], stop_ids)


def win(score: float, reference_score: float) -> float | None:
    """1 if a score is above the reference's, 0.5 if both are equal up to rounding, else 0; None if one is NaN."""
    if math.isnan(score - reference_score):
        return None
    return 0.5 if math.isclose(score, reference_score, rel_tol=1e-6, abs_tol=1e-6) else float(score > reference_score)


def means_of(samples: list[dict]) -> dict[str, float]:
    """Mean and standard error of each number of the samples, by mode and name."""
    values = defaultdict(list)
    for sample in samples:
        for name, value in sample.items():
            if isinstance(value, int | float):
                values[f"{sample['mode']}/{name}"].append(value)
    means = {}
    for name, x in values.items():
        means[name] = float(np.mean(x))
        means[f"{name}_stderr"] = float(np.std(x) / max(1, len(x) - 1) ** 0.5)
    return means


def show_progress(bar: tqdm, metrics: dict, evaluation: dict[str, float]):
    """Advances the progress bar by an update, or prints a line if stderr is not a terminal."""
    shown = {
        "score": metrics.get("objective/scores"),
        "kl": metrics.get("objective/kl"),
        "eval_win": evaluation.get("sampled/judge_win_rate"),
        "eval_score": None if "sampled/judge_win_rate" in evaluation else evaluation.get("sampled/score"),
    }
    bar.set_postfix({name: value for name, value in shown.items() if value is not None}, refresh=False)
    if bar.disable and is_first_rank():
        tqdm.write(f"update {metrics['update']} of {bar.total}: {bar.postfix}", sys.stderr)
    bar.update()


def show(samples: list[dict], title):
    """Prints samples, with the end of their prompts."""
    tqdm.write(f"\n{title}")
    for sample in samples:
        columns = {name: f"{value!s:.100}" for name, value in sample["columns"].items() if name not in sample}
        shown = sample | columns | {"prompt": " ".join(sample["prompt"].split())[-100:], "columns": None}
        shown = {name: f"{value:.2f}" if isinstance(value, float) else value for name, value in shown.items()}
        tqdm.write("\n" + "\n".join(f"{name:15} {value}" for name, value in shown.items() if value is not None))


def write_evaluation(args, output: Path, update, episode, samples: list[dict]) -> dict[str, float]:
    """Shows three samples of an evaluation, and appends it and its completions to the files of the run. Returns means
    and standard errors by name."""
    means = means_of(samples)
    show(samples[:3], f"Held-out completions after {update} updates, sampled:")
    append(output, "completions.jsonl", [{"update": update, **sample} for sample in samples])
    append(output, "evaluations.jsonl", [{"update": update, "episode": episode, **means}])
    track(args, {f"eval/{name}": value for name, value in means.items()}, update)
    return means


def print_evaluations(before: dict[str, float], after: dict[str, float], prompts):
    """The closing table: the evaluations before and after training."""
    columns = {title: means for title, means in (("before", before), ("after", after)) if means}
    print(f"\n{prompts} held-out prompts, mean ± standard error. score: by the rewards; judge: by --judge_fn, which is")
    print("not trained on; win_rate: graded above the reference, ties count half; length: in tokens.")
    print(f"{'':36}", *(f"{title:>18}" for title in columns))
    for name in before | after:
        if not name.endswith("_stderr"):
            cells = [(x.get(name, math.nan), x.get(f"{name}_stderr", math.nan)) for x in columns.values()]
            print(f"{name:36}", *(f"{mean:10.3f} ± {stderr:.3f}" for mean, stderr in cells))


# ---- Rows: how prompts and completions become rows of a model, and which slots attend to which -----------------------
# plain: a row per completion: its prompt, then the completion.
# group: a row per prompt: the prompt, then its k completions, the lanes, interleaved by time: first token 0 of each
# lane, then token 1, and so on. So the prompt is read once. A lane attends to the prompt and to itself, never to its
# siblings, so results are those of plain rows. With P = 2 (one of them padding), k = 2 and R = 2 (x: attends to):
#     slot:      0    1     2     3     4     5        slot   0 1 2 3 4 5
#     holds:     pad  p     a0    b0    a1    b1       pad    x
#     position:  0    0     1     1     2     2        p      . x
#                                                      a0     . x x
#                                                      b0     . x . x
#                                                      a1     . x x . x
#                                                      b1     . x . x . x
# Call path of a forward pass in group rows: completion_hidden writes (P, k) onto the mask as `mask.lanes` and calls the
# model; `transformers` hands the mask to the attention of each layer, which is `attention` below; that sees `lanes` and
# calls group_attention. Everything else in a model works token by token and need not know.


class Batch(NamedTuple):
    """B prompts and k completions of each."""

    rows: list[dict]  # B rows of the dataset, see prepare_row
    prompt_ids: torch.Tensor  # (B, P) left-padded
    prompt_mask: torch.Tensor  # (B, P) bool
    responses: torch.Tensor  # (k, B, R) right-padded
    response_mask: torch.Tensor  # (k, B, R) bool, true up to and including the first stop token
    ended: torch.Tensor  # (k, B) bool: a stop token came within R

    def select(self, index: torch.Tensor) -> "Batch":
        """The part of the batch with the prompts at `index` (b,)."""
        rows = [self.rows[i] for i in index.tolist()]
        return Batch(rows, self.prompt_ids[index], self.prompt_mask[index], *(x[:, index] for x in self[3:]))

    def chunks(self, size) -> Iterator["Batch"]:
        """Parts of up to `size` completions each, in whole groups; at least one group each."""
        return map(self.select, torch.arange(len(self.rows)).split(max(1, size // len(self.responses))))

    def without_padding(self) -> "Batch":
        """The batch without the slots that are padding in all rows."""
        P, R = int(self.prompt_mask.sum(-1).max()), int(self.response_mask.sum(-1).max())
        prompt_ids, prompt_mask = self.prompt_ids[:, -P:], self.prompt_mask[:, -P:]
        return Batch(
            self.rows, prompt_ids, prompt_mask, self.responses[..., :R], self.response_mask[..., :R], self.ended
        )

    def completion_ids(self) -> list[list[int]]:
        """Real tokens of the k·B completions, the stop token included, in the order j·B + b."""
        lengths = self.response_mask.sum(-1).flatten().tolist()
        return [ids[:n] for ids, n in zip(self.responses.flatten(0, 1).tolist(), lengths, strict=True)]


def pad(sequences: Sequence[list[int]], left: bool = False):
    """Token lists to ids and mask, both (len(sequences), longest). Padding has id 0; masked, it has no effect."""
    rows = [torch.tensor(ids, dtype=torch.long) for ids in sequences]
    fill = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left" if left else "right")
    return fill(rows), fill([torch.ones_like(row, dtype=torch.bool) for row in rows])


def make_batch(rows, responses, stop_ids, real=True) -> Batch:
    """A Batch of prompts and their completions (k, B, R). What follows a completion's first stop token, or is not
    `real` (k, B, R), does not count."""
    prompt_ids, prompt_mask = pad([row["prompt_ids"] for row in rows], left=True)
    is_stop = torch.isin(responses, torch.tensor(stop_ids, device=responses.device))
    stops_before = is_stop.cumsum(-1) - is_stop.long()
    mask = (stops_before == 0) & real
    prompts = prompt_ids.to(responses.device), prompt_mask.to(responses.device)
    return Batch(rows, *prompts, responses.masked_fill(~mask, 0), mask, (is_stop & mask).any(-1))


def positions_of(mask):
    """Positions (B, S) of the real tokens of rows (B, S), counted from 0; 0 for padding before them."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def causal_mask(real):
    """Attention mask of rows whose slots are `real` (B, S), bool (B, 1, S, S): each slot attends to the real ones up to
    it, and to itself even if it is padding, so that no row of the softmax is empty."""
    slot = torch.arange(real.shape[1], device=real.device)
    return (real[:, None, None] & (slot <= slot[:, None])) | (slot == slot[:, None])


def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention as `transformers` calls it, in place of its sdpa function: query (B, H, n, D), key and value
    (B, h, n, D); returns (B, n, H, D) and None. Two kinds of calls are made by this file only, and handled here."""
    if isinstance(key, tuple):  # a step of the decoder, see LaneCache
        return step_attention(query, key, value, attention_mask, scaling or query.shape[-1] ** -0.5), None
    sdpa = partial(sdpa_attention, module, scaling=scaling, **kwargs)
    if hasattr(attention_mask, "lanes"):  # group rows, see completion_hidden
        return group_attention(sdpa, query, key, value, attention_mask), None
    return sdpa(query, key, value, attention_mask)


def group_attention(sdpa, query, key, value, mask):
    """Attention of group rows, n = P + k·R: query (B, H, n, D), key and value (B, h, n, D); returns (B, n, H, D). A
    prompt attends to itself; a lane, to its prompt and itself. The mask is that of a prompt and one completion, bool
    (B, 1, P + R, P + R), with `mask.lanes` = (P, k). That costs P² + k·R·(P + R) products; one mask over the row would
    cost (P + k·R)². `sdpa` takes query, key, value and mask."""
    P, k = mask.lanes
    prompts, _ = sdpa(query[:, :, :P], key[:, :, :P], value[:, :, :P], mask[:, :, :P, :P])

    def attend(query, key, value):
        out, _ = sdpa(
            lanes_as_heads(query, P, k), prompt_and_own(key, P, k), prompt_and_own(value, P, k), mask[:, :, P:]
        )
        return out.reshape(len(out), -1, *prompts.shape[2:])  # (B, R, k·H, D) as (B, R·k, H, D)

    # Each lane gets a copy of its prompt's keys and values. Backward makes the copies again instead of keeping them.
    lanes = checkpoint(attend, query, key, value, use_reentrant=False)
    return torch.cat([prompts, lanes], dim=1)


def lanes_as_heads(x, P, k):
    """The lanes of x (B, H, P + k·R, D) as heads, (B, k·H, R, D): two reshapes, since lanes are interleaved. They copy
    nothing where a token's heads are side by side in memory."""
    x = x.transpose(1, 2)[:, P:]  # (B, R·k, H, D)
    x = x.reshape(len(x), -1, k * x.shape[2], x.shape[3])  # (B, R, k·H, D)
    return x.transpose(1, 2)


def prompt_and_own(x, P, k):
    """The keys or values that lanes attend to, (B, k·h, P + R, D), from those of group rows, (B, h, P + k·R, D)."""
    return torch.cat([x[:, :, :P].repeat(1, k, 1, 1), lanes_as_heads(x, P, k)], dim=2)


def step_attention(query, key, value, mask, scaling):
    """Attention of the newest token of b·k lanes (prompt-major: row b·k + j), query (b·k, H, 1, D); returns
    (b·k, 1, H, D). key and value are pairs: of the prompts, (b, h, P, D), and of the lanes' own n tokens,
    (b·k, h, n, D). mask (b·k, 1, 1, P + n), bool. A prompt's keys are read once for its k lanes (Juravsky et al. 2024,
    "Hydragen", arXiv:2402.05099)."""
    prompt_key, own_key = key
    prompt_value, own_value = value
    b, h, P, D = prompt_key.shape
    b_k = (b, len(query) // b)

    # Axes: b prompts, k lanes of each, h key heads, g query heads that share one, p prompt slots, n own slots, d.
    q = (query * scaling).reshape(*b_k, h, -1, D)  # (b, k, h, g, D)
    of_prompt = torch.einsum("bkhgd,bhpd->bkhgp", q, prompt_key)
    of_own = torch.einsum("bkhgd,bkhnd->bkhgn", q, own_key.unflatten(0, b_k))
    scores = torch.cat([of_prompt, of_own], dim=-1)
    scores = torch.where(mask.view(*b_k, 1, 1, -1), scores, -math.inf)

    weights = scores.softmax(-1)  # in bfloat16 scores and weights are rounded; sums are always in float32
    out = torch.einsum("bkhgn,bkhnd->bkhgd", weights[..., P:], own_value.unflatten(0, b_k))
    out = out + torch.einsum("bkhgp,bhpd->bkhgd", weights[..., :P], prompt_value)
    return out.reshape(len(query), 1, -1, out.shape[-1])


# Replaces sdpa for the whole process, so that every model with that kernel can run group rows.
sdpa_attention = transformers.AttentionInterface()["sdpa"]
transformers.AttentionInterface.register("sdpa", attention)


# ---- Log-probs -------------------------------------------------------------------------------------------------------


def completion_hidden(model, batch: Batch, layout):
    """Hidden states (k, B, r + 1, H), r ≤ R the longest length: slot t predicts token t, slot t + 1 has read it."""
    batch = batch.without_padding()
    k, B, R = batch.responses.shape
    P = batch.prompt_ids.shape[1]
    real = F.pad(batch.prompt_mask, (0, R), value=True)  # slots of a prompt and one completion, (B, P + R)
    positions = positions_of(real)

    if layout == "plain":
        ids = torch.cat([batch.prompt_ids.repeat(k, 1), batch.responses.flatten(0, 1)], dim=1)  # (k·B, P + R)
        mask = torch.cat([batch.prompt_mask.repeat(k, 1), batch.response_mask.flatten(0, 1)], dim=1).long()
        hidden = body_of(model)(ids, attention_mask=mask, position_ids=positions.repeat(k, 1), use_cache=False)[0]
        return hidden[:, P - 1 :].unflatten(0, (k, B))

    ids = torch.cat([batch.prompt_ids, batch.responses.permute(1, 2, 0).flatten(1)], dim=1)  # (B, P + R·k)
    positions = torch.cat([positions[:, :P], positions[:, P:].repeat_interleave(k, dim=1)], dim=1)
    mask = causal_mask(real)
    mask.lanes = P, k  # see group_attention; `transformers` hands a 4-D mask to every layer as it is
    hidden = body_of(model)(ids, attention_mask=mask, position_ids=positions, use_cache=False)[0]
    last_of_prompt = hidden[:, P - 1 : P].expand(k, -1, -1, -1)  # predicts token 0 of every completion
    lanes = hidden[:, P:].unflatten(1, (R, k)).permute(2, 0, 1, 3)  # (k, B, R, H)
    return torch.cat([last_of_prompt, lanes], dim=2)


def body_of(model):
    """The model without its head. Some models are their own `base_model` by mistake."""
    return model.model if model.base_model is model and hasattr(model, "model") else model.base_model


def final_logits(model, hidden):
    """Logits (..., vocabulary) in float32 of hidden states (..., H), scaled and capped where the model does that."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden).float()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits if scale == 1.0 else logits * scale
    return cap * torch.tanh(logits / cap) if cap else logits


def block_logprobs(model, hidden, tokens, temperature):
    """log_softmax(logits / temperature) of tokens (n,), and the entropy of that softmax in nats, (n,)."""
    logprobs = F.log_softmax(final_logits(model, hidden).div_(temperature), dim=-1)  # (n, vocabulary)
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)  # a token of probability 0 adds 0
    return logprobs.gather(1, tokens[:, None]).squeeze(1), entropy


def fsdp_forward(function: Callable) -> Callable:
    """Decorator for functions that call parts of a model. FSDP gathers a sharded model's embedding, norm and head only
    while the model itself is called, so the function is run as the model's forward pass, see `shard`."""

    @wraps(function)
    def forward(model, *args, **options):
        sharded = isinstance(model, fsdp.FSDPModule)
        return model(function, *args, **options) if sharded else function(model, *args, **options)

    return forward


@fsdp_forward
def completion_logprobs(model, batch: Batch, temperature, layout="group"):
    """Log-probs of the completions' tokens and entropies of their distributions, (k, B, R), 0 where masked. Logits are
    computed for real completion tokens only, a block of tokens at a time, and again in backward."""
    mask = batch.response_mask
    hidden = completion_hidden(model, batch, layout)[:, :, :-1]  # (k, B, r, H)
    hidden = hidden[mask[..., : hidden.shape[2]]]  # (n, H), the n real tokens in the order of the mask
    tokens = batch.responses[mask]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    size = max(128, (2**23 if hidden.is_cpu else 2**27) // vocabulary)
    blocks = [
        checkpoint(block_logprobs, model, *block, temperature, use_reentrant=False)
        for block in zip(hidden.split(size), tokens.split(size), strict=True)
    ]
    logprobs, entropies = map(torch.cat, zip(*blocks, strict=True))
    zeros = torch.zeros(mask.shape, device=mask.device)
    return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropies)


@torch.no_grad()
def chunked_logprobs(model, batch: Batch, temperature, layout, chunk_size):
    """Log-probs (k, B, R) without gradient, of at most `chunk_size` completions at a time."""
    parts = [completion_logprobs(model, part, temperature, layout)[0] for part in batch.chunks(chunk_size)]
    return torch.cat(parts, dim=1)


@fsdp_forward
def model_scores(model, batch: Batch, layout="group"):
    """Scores (k, B) of a sequence classifier: its head at the last real token of each completion."""
    hidden = completion_hidden(model, batch, layout)
    last = batch.response_mask.sum(-1)[..., None, None].expand(-1, -1, 1, hidden.shape[-1])
    return model.score(hidden.gather(2, last).squeeze(2)).squeeze(-1).float()


# ---- Rollout ---------------------------------------------------------------------------------------------------------
# Call path of the decoder in this file: rollout, decode, Decoder.generate. That calls read_prompts once, which fills
# prompt_cache, and then step by step the model on the newest token of each lane. In each layer `transformers` calls
# LaneCache.update, which stores the token's key and value and returns pairs (prompts', lanes' own); `attention` above
# finds pairs and calls step_attention.


@torch.no_grad()
def rollout(
    model,
    rows: list[dict],
    k: int,
    temperature: float,
    response_length: int,
    stop_ids: list[int],
    engine: str | Callable = "group",
    chunk_size: int = 64,
    version: int = 0,
    max_length: int | None = None,
):
    """Samples k completions of each row's prompt. Returns a Batch, and the log-probs (k, B, R) of its tokens under the
    sampling distribution softmax(logits / temperature), 0 where masked. Evaluations use k = 1, and temperature 0 for
    greedy completions. Engine: "group", "hf" or a function (see own_engine) that gets version and max_length.
    version: the number of updates done, which reward functions may ask for."""
    if callable(engine):
        tokens, logprobs = own_engine(
            engine, model, rows, k, temperature, response_length, stop_ids, version, max_length
        )
    else:
        prompt_ids, prompt_mask = pad([row["prompt_ids"] for row in rows], left=True)
        size = max(1, chunk_size // k)
        chunks = zip(prompt_ids.to(model.device).split(size), prompt_mask.to(model.device).split(size), strict=True)
        sample_chunks = decode if engine == "group" else generate
        tokens, logprobs = sample_chunks(model, chunks, k, temperature, response_length, stop_ids)
    batch = make_batch([row | {"updates_done": version} for row in rows], tokens, stop_ids)
    if logprobs is None:
        logprobs = chunked_logprobs(model, batch, temperature or 1.0, "plain", chunk_size)
    return batch, logprobs.masked_fill(~batch.response_mask, 0.0)


def decode(model, chunks, k, temperature, R, stop_ids):
    """Tokens and their log-probs (k, B, R) by the Decoder, for chunks of prompts: ids and mask (b, P)."""
    decoder = None
    tokens, logprobs = [], []
    for ids, mask in chunks:
        if ids.is_cpu:
            longest = int(mask.sum(1).max())
            ids, mask = ids[:, -longest:], mask[:, -longest:]
            decoder = None  # the lanes of the last one have left
        # On a GPU all chunks but the last have one shape, and share one decoder and its graph.
        if decoder is None or mask.shape != decoder.prompt_mask.shape:
            decoder = None  # frees the old cache before the new one is allocated
            decoder = Decoder(model, *mask.shape, k, R, temperature, stop_ids)
        decoder.generate(ids, mask)
        tokens.append(decoder.tokens.clone())
        logprobs.append(decoder.logprobs.clone())
    prompt_major = (torch.cat(tokens), torch.cat(logprobs))  # (B·k, R)
    return [x.unflatten(0, (-1, k)).transpose(0, 1) for x in prompt_major]


def generate(model, chunks, k, temperature, R, stop_ids):
    """Tokens (k, B, R) by `generate` of transformers, in plain rows, from the full softmax; and None."""
    parts = []
    config = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=R,
        eos_token_id=stop_ids,
        pad_token_id=0,
        do_sample=temperature > 0,
        temperature=temperature or 1.0,
        top_k=0,
        top_p=1.0,
    )
    try:
        for ids, mask in chunks:
            tokens = model.generate(ids.repeat(k, 1), attention_mask=mask.repeat(k, 1).long())[:, ids.shape[1] :]
            parts.append(F.pad(tokens, (0, R - tokens.shape[1])).unflatten(0, (k, len(ids))))
    finally:
        model.generation_config = config  # checkpoints must save it as it was loaded, even after an error
    return torch.cat(parts, dim=1), None


def own_engine(engine: Callable, model, rows, k, temperature, R, stop_ids, version, max_length):
    """Tokens (k, B, R) and their log-probs by a function of the user's, for vLLM, SGLang or any server:

        generate(model, prompt_ids, *, k, temperature, response_length, stop_ids, seed, version, max_length)

    model: the whole policy in --dtype, on its device; its weights have changed if `version` has. prompt_ids: B lists of
    token ids. Returns tokens [B][k], lists of ids that end with their first stop token or have response_length ids, and
    their log-probs under softmax(logits / temperature), [B][k] lists of floats, or None: then they are computed here,
    so --rollout_correction cannot see the engine's own rounding. max_length: upper bound of a prompt's and a
    completion's tokens together. The first rank samples for all ranks.
    """
    prompts = gather([row["prompt_ids"] for row in rows])
    options = {"k": k, "temperature": temperature, "response_length": R, "stop_ids": stop_ids, "version": version}
    options |= {"seed": int(torch.randint(2**31, ())), "max_length": max_length}
    with raised_on_all_ranks():
        if is_first_rank():
            sampled = engine(model, prompts, **options)
            check_completions(*sampled, len(prompts), k, R, stop_ids, model.config.get_text_config().vocab_size)
    tokens, logprobs = on_first_rank(lambda: sampled)
    rank, world = rank_and_world()

    def of_this_rank(values, dtype):
        """Its part of the values [B][k], each a list of up to R numbers, as a tensor (k, B, R)."""
        padded = [[[*numbers, *[0] * (R - len(numbers))] for numbers in group] for group in values[rank::world]]
        return torch.tensor(padded, dtype=dtype, device=model.device).transpose(0, 1)

    return of_this_rank(tokens, torch.long), None if logprobs is None else of_this_rank(logprobs, torch.float32)


def check_completions(tokens, logprobs, B, k, R, stop_ids, vocabulary):
    """Refuses what a rollout engine may not return."""
    counts = [len(group) for group in tokens]
    require(counts == [k] * B, f"--rollout_engine: must return {k} completions for each of {B} prompts, not {counts}")
    for b, j in np.ndindex(B, k):
        ids = tokens[b][j]
        numbers = [0.0] * len(ids) if logprobs is None else logprobs[b][j]
        expected_length = next((t + 1 for t, token in enumerate(ids[:R]) if token in stop_ids), R)
        tokens_exist = all(0 <= token < vocabulary and token == int(token) for token in ids)
        require(
            len(ids) == len(numbers) == expected_length and tokens_exist and all(-math.inf < x < 0.01 for x in numbers),
            f"--rollout_engine: completion {j} of prompt {b} must have {R} tokens of the model or end with its first "
            f"stop token, and one finite log-prob for each token; it has {len(ids)} tokens, {len(numbers)} log-probs",
        )


class LaneCache(Cache):
    """Keys and values of the lanes' own tokens, (b·k, h, R, D) in each layer. `update` writes those of token `t` and
    returns pairs for step_attention: (prompts' keys, own keys), (prompts' values, own values), of which own ones end at
    `length`. Sizes and addresses are static."""

    def __init__(self, prompts: Cache, R, t: torch.Tensor):
        super().__init__(layers=[])
        self.prompts = prompts  # (b, h, P, D) in each layer
        self.own = {}  # layer -> keys and values
        self.R = self.length = R
        self.t = t  # (1,), on the device

    def update(self, key, value, layer_idx, *args, **kwargs):
        if layer_idx not in self.own:
            self.own[layer_idx] = [x.new_zeros(*x.shape[:2], self.R, x.shape[3]) for x in (key, value)]
        own_keys, own_values = self.own[layer_idx]
        own_keys.index_copy_(2, self.t, key)
        own_values.index_copy_(2, self.t, value)
        prompt = self.prompts.layers[layer_idx]
        return (prompt.keys, own_keys[:, :, : self.length]), (prompt.values, own_values[:, :, : self.length])

    def reorder_cache(self, index):
        self.own = {layer: [x[index] for x in pair] for layer, pair in self.own.items()}


class Decoder:
    """Samples k completions of up to R tokens for each of B prompts of P slots. It reads the prompts once, then one
    token of each lane per step, until all lanes have ended. `tokens` and `logprobs` (B·k, R) are prompt-major: row
    b·k + j is lane j of prompt b. What they hold after a stop token is arbitrary.

    Between steps: t is the index of the newest token; own keys are those of tokens 0 to t - 1; `lanes` is a rectangle
    (b, m) of rows of `tokens`, to which the caches and the prompt's mask belong.
    On a CPU lanes that have ended leave, so a decoder cannot be reused. On a GPU they stay, and what they sample is
    ignored: shapes and addresses are static and no step synchronizes with the host, so a step is captured as a CUDA
    graph once in a decoder and replayed."""

    def __init__(self, model, B, P, k, R, temperature, stop_ids):
        device = model.device
        self.model = model
        self.temperature = temperature
        self.stop_ids = torch.tensor(stop_ids, device=device)
        self.tokens = torch.zeros(B * k, R, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(B * k, R, device=device)
        self.lanes = torch.arange(B * k, device=device).view(B, k)  # the rows of `tokens` that a step continues
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # index of the newest token
        self.prompt_mask = torch.zeros(B, P, dtype=torch.bool, device=device)
        self.prompt_cache = Cache(layer_class_to_replicate=partial(StaticLayer, max_cache_len=P))
        self.lane_cache = LaneCache(self.prompt_cache, R, self.t)
        self.graph = self.capture() if device.type == "cuda" and R > 2 else None  # capture uses tokens 0 to 2

    def generate(self, prompt_ids, prompt_mask):
        """Fills `tokens` and `logprobs` for prompts (B, P)."""
        self.read_prompts(prompt_ids, prompt_mask)
        R = self.tokens.shape[1]
        for t in range(R - 1):
            if t % 4 == 3:  # not each time, since it synchronizes with the device
                alive = ~torch.isin(self.tokens[self.lanes, : t + 1], self.stop_ids).any(-1)  # (b, k)
                if not alive.any():
                    break
                if prompt_ids.is_cpu:
                    self.drop_ended(alive)
            if prompt_ids.is_cpu:
                self.lane_cache.length = t + 1
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()

    def read_prompts(self, prompt_ids, prompt_mask):
        """Starts again: reads the prompts (B, P), or a single slot for `capture`, and samples token 0 of each lane."""
        self.prompt_mask.copy_(prompt_mask)
        self.t.zero_()
        self.prompt_cache.reset()
        hidden = body_of(self.model)(
            prompt_ids,
            # One column per slot of the cache, even for a single query: CUDA cannot broadcast a mask over keys.
            attention_mask=causal_mask(self.prompt_mask)[:, :, -prompt_ids.shape[1] :],
            position_ids=positions_of(prompt_mask),
            use_cache=True,
            past_key_values=self.prompt_cache,
        )[0]
        self.append(hidden[:, -1].repeat_interleave(self.lanes.shape[1], dim=0))

    def step(self):
        """Reads token t of each lane, which attends to the prompt and the lane up to it, and samples token t + 1."""
        b, k = self.lanes.shape
        own = torch.arange(self.lane_cache.length, device=self.t.device) <= self.t  # the others are still empty
        mask = torch.cat([self.prompt_mask.repeat_interleave(k, dim=0), own.expand(b * k, -1)], dim=1)
        hidden = body_of(self.model)(
            self.tokens[self.lanes.flatten(), self.t][:, None],
            attention_mask=mask[:, None, None],
            position_ids=mask.sum(1, keepdim=True) - 1,
            use_cache=True,
            past_key_values=self.lane_cache,
        )[0]
        self.t.add_(1)
        self.append(hidden[:, 0])

    def append(self, hidden):
        """Samples token t of each lane from hidden states (b·k, H)."""
        lanes = self.lanes.flatten()
        # Drawn for all rows, so that random numbers do not depend on which lanes have left.
        uniform = torch.rand(len(self.tokens), 1, device=hidden.device)[lanes]
        tokens, logprobs = sample(final_logits(self.model, hidden), self.temperature, uniform)
        self.tokens[lanes, self.t] = tokens
        self.logprobs[lanes, self.t] = logprobs

    def drop_ended(self, alive):
        """Drops prompts without a lane `alive` (b, k). Each other prompt keeps m lanes, those alive first, where m is
        the largest number alive in any prompt: lanes remain a rectangle, as step_attention needs. Does nothing if this
        would drop less than a fifth."""
        prompts = alive.any(1).nonzero().squeeze(1)
        k = int(alive.sum(1).max())
        if len(prompts) * k > 0.8 * alive.numel():
            return
        kept = alive[prompts].byte().argsort(dim=1, descending=True, stable=True)[:, :k]  # indices of lanes
        self.lane_cache.reorder_cache((prompts[:, None] * alive.shape[1] + kept).flatten())
        self.prompt_cache.reorder_cache(prompts)
        self.prompt_mask = self.prompt_mask[prompts]
        self.lanes = self.lanes[prompts[:, None], kept]

    def capture(self):
        """A step as a CUDA graph; None if a step synchronizes with the host, which a graph cannot record."""
        device = self.t.device
        prompt_ids = torch.zeros(len(self.prompt_mask), 1, dtype=torch.long, device=device)
        with torch.random.fork_rng([device], device_type="cuda"):  # leaves the run's random state unchanged
            self.read_prompts(prompt_ids, prompt_ids == 0)
            self.step()  # initializes libraries and allocates the caches
            warnings.filterwarnings("ignore", "Synchronization debug mode")  # says that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
            try:
                self.step()
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except RuntimeError as error:
                say_once(f"decoding runs without a CUDA graph, which costs speed: a step synchronizes ({error})")
                return None
            finally:
                torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()  # records the step, does not run it
        return graph


def sample(logits, temperature, uniform):
    """A token of each softmax(logits / temperature), the most likely one at temperature 0, and its log-prob, both (n,),
    for logits (n, vocabulary) and random numbers `uniform` (n, 1) in [0, 1). In float32, so tokens of probability below
    about 1e-7 may never be drawn. Nothing here synchronizes, unlike torch.multinomial."""
    logprobs = F.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cumulative = logprobs.exp().cumsum(-1)
        point = uniform * cumulative[..., -1:]  # the token is the first above it
        tokens = torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[..., None]).squeeze(-1)


def sampling_model(policy, dtype):
    """The model to sample from: the policy, or a full copy in `dtype` if it is sharded, has another dtype or adapters.
    Those are merged into the copy's weights."""
    if policy.dtype == dtype and not isinstance(policy, fsdp.FSDPModule) and not adapted_layers(policy):
        return policy
    with torch.device("meta"):
        model = type(policy)._from_config(policy.config, dtype=dtype).eval().requires_grad_(False)
    model.to_empty(device=policy.device).tie_weights()
    weights = {name: x for name, x in named_tensors(policy).items() if not name.endswith(ADAPTERS)}
    copies = named_tensors(model)
    require(weights.keys() == copies.keys(), "the policy has other weights than a model of its config: change that too")
    for name, copy in copies.items():
        copy.data = whole(weights[name].detach().to(copy.dtype))  # cast first, so that fewer bytes are gathered
    merge_adapters(policy, model)
    return model


def named_tensors(model) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


# ---- Rewards: each is a function of a Batch that returns scores (k, B) float32, NaN where it has no score ------------


def score(rewards: dict[str, Callable], weights: Sequence[float] | None, batch: Batch):
    """Σ_i weight_i · score_i (k, B) over the rewards that have a score for a completion, NaN where none has; a reward
    of weight 0 never counts. Also the scores of each reward by name. Weights: in the order of the rewards, or all 1."""
    with raised_on_all_ranks():
        by_name = {name: reward(batch) for name, reward in rewards.items()}
    weights = weights or [1.0] * len(rewards)
    weighted = [weight * scores for weight, scores in zip(weights, by_name.values(), strict=True) if weight]
    weighted = torch.stack(weighted)
    return weighted.nansum(0).masked_fill(weighted.isnan().all(0), math.nan), by_name


def completion_texts(batch: Batch, tokenizer) -> list[str]:
    """Texts of the k·B completions without the stop token and other special tokens, in the order j·B + b. Each is
    decoded after another text, since some tokenizers drop a space at the beginning."""
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    ended = batch.ended.flatten().tolist()
    ids = [before + (ids[:-1] if end else ids) for ids, end in zip(batch.completion_ids(), ended, strict=True)]
    texts = tokenizer.batch_decode([before, *ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [text[len(texts[0]) :] for text in texts[1:]]


def load_reward_model(args, tokenizer, rows, vocabulary) -> dict[str, Callable]:
    """{"reward_model": reward}, or {} without --reward_model_path. The model must read the policy's tokens: its
    tokenizer is the policy's, apart from the token for padding, and it has an embedding for each of the policy's
    tokens."""
    flag = "--reward_model_path"
    path = args.reward_model_path
    if path is None:
        return {}
    reward_tokenizer = load_tokenizer(args, flag, path)
    model = load_model(args, f"{flag} (with one label)", path, False, AutoModelForSequenceClassification, num_labels=1)
    embeddings = model.config.get_text_config().vocab_size
    require(hasattr(model, "score"), f"{flag} {path}: has no `score` head")
    others = {token for token, _ in reward_tokenizer.get_vocab().items() ^ tokenizer.get_vocab().items()}
    require(
        others <= {reward_tokenizer.pad_token, tokenizer.pad_token} and vocabulary <= embeddings,
        f"{flag} {path}: cannot read the policy's tokens, since it has another tokenizer or too few embeddings; "
        "benchmark/tldr/text_reward.py is a reward function for such models (--reward_fns)",
    )
    layout = choose_layout(model, args, rows)
    return {"reward_model": partial(token_reward, model, layout, args.local_rollout_forward_batch_size)}


@torch.no_grad()
def token_reward(model, layout, chunk_size, batch: Batch):
    """The scores (k, B) of a reward model."""
    parts = [*batch.chunks(chunk_size)]
    most = max(gather([len(parts)]))  # FSDP needs as many passes on each rank; numbers of references may differ
    padded = parts + parts[:1] * (most - len(parts))
    scores = [model_scores(model, part, layout) for part in padded]
    scores = torch.cat(scores[: len(parts)], dim=1)
    require(scores.isfinite().all(), "a score of the reward model is not finite")
    return scores


def load_functions(specs: Sequence[str], flag, tokenizer, row) -> dict[str, Callable]:
    """name -> reward, for functions `file.py:function` or `module:function`. They may import modules from their folder,
    and must accept the columns of a dataset's row, see function_reward."""
    rewards = {}
    columns = [name for name in row["columns"] if name != "prompt"]
    given = ["prompts", "completions", "completion_ids", *columns]
    for spec in specs:
        label = f"--{flag} {spec}"
        function = load_function(spec, label)
        with explained(
            f"{label}: does not take what it is given, {', '.join(given)}; add **columns for what it ignores"
        ):
            signature = inspect.signature(function, follow_wrapped=False)
            optional = {"updates_done"} & signature.parameters.keys()
            signature.bind(**dict.fromkeys([*given, *optional]))
        name = spec.rpartition(":")[2]
        require(name not in {*rewards, "reward_model"}, f"{label}: another reward is called {name}; rename one of them")
        rewards[name] = partial(function_reward, label, function, tokenizer)
    return rewards


def load_function(spec, label) -> Callable:
    """The function of `file.py:function` or `module:function`. An error in its file is raised as it is."""
    source, _, name = spec.rpartition(":")
    path = Path(source)
    is_file = path.suffix == ".py"
    require(source, f"{label}: must be file.py:function or module:function; add :function")
    require(path.is_file() or not is_file, f"{label}: there is no file {source}")
    sys.path.append(str(path.resolve().parent))
    module_name = path.stem if is_file else source
    require(importlib.util.find_spec(module_name.partition(".")[0]), f"{label}: there is no module {module_name}")
    if path.with_suffix(".py").resolve() == running_script():
        module_name = "__main__"  # to import the script that runs would run it again
    module = importlib.import_module(module_name)
    origin = getattr(module, "__file__", None) or "Python itself"
    require(
        not is_file or Path(origin).resolve() == path.resolve(),
        f"{label}: {origin} is loaded under the same name; rename the file",
    )
    require(hasattr(module, name), f"{label}: there is no {name} in {origin}")
    return getattr(module, name)


def running_script() -> Path:
    """The file that Python was started with, such as rloo.py or mine.py; no file if it was started without one."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()


def replaced_names() -> list[str]:
    """Names in this file to which a script like mine.py has given other functions. Refuses names that are not here."""
    names = [name for name, value in globals().items() if callable(value) and value is not ORIGINALS.get(name)]
    unknown = set(names) - ORIGINALS.keys()
    require(not unknown, f"{running_script()}: replaces {', '.join(unknown)}, but rloo.py has nothing of this name")
    return names


def function_reward(label, function: Callable, tokenizer, batch: Batch):
    """Scores (k, B) of a reward function, NaN where it returned None. It gets prompts (as the dataset has them),
    completions (texts), completion_ids (with the stop token) and the other columns by name: lists in order j·B + b. If
    it has an argument `updates_done`, that is the number of updates before this one."""
    rows = [deepcopy(row) for row in batch.rows * len(batch.responses)]  # the function may change what it gets
    given = {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"] if name != "prompt"}
    if "updates_done" in inspect.signature(function, follow_wrapped=False).parameters:
        given["updates_done"] = rows[0]["updates_done"]
    given["prompts"] = [row["prompt"] for row in rows]
    given["completions"] = completion_texts(batch, tokenizer)
    given["completion_ids"] = batch.completion_ids()
    values = function(**given)
    must = f"{label} must return a list of {len(rows)} finite numbers or Nones, not {values!r:.60}"
    with explained(must):  # [:] refuses what has no order, a set or dict, and what was not computed, a generator
        scores = torch.tensor([math.nan if value is None else value for value in values[:]], dtype=torch.float32)
        scores = scores.view(batch.ended.shape)
    require(scores.isfinite().flatten().tolist() == [value is not None for value in values], must)
    return scores.to(batch.ended.device)


# ---- Data ------------------------------------------------------------------------------------------------------------


def load_rows(name, split, config=None) -> list[dict] | None:
    """Rows of a split, None if it does not exist. `name`: a .jsonl file (its split: train), a folder, or a Hub id, for
    which `config` is a configuration or None."""
    with explained(f"--dataset_name {name}: no .jsonl file, folder of them or (pip install datasets) Hub id"):
        files = {"train": Path(name)} if name.endswith(".jsonl") else {x.stem: x for x in Path(name).glob("*.jsonl")}
        if not files:
            from datasets import load_dataset

            return list(load_dataset(name, config).get(split, ())) or None
        if split not in files:
            return None
        lines = files[split].read_bytes().splitlines()
    require(config is None, f"--dataset_config {config}: {name} is not a Hub dataset")
    rows = []
    for number, line in enumerate(lines, 1):
        with explained(f'{files[split]}: line {number} must be a JSON object like {{"prompt": "..."}}'):
            if line.strip():
                rows.append(dict(**json.loads(line)))
    return rows


def load_data(args: Args, tokenizer) -> tuple[list[dict], list[dict]]:
    """Rows to train and to evaluate on, as `prepare_row` makes them; there may be none to evaluate on."""
    # 1. The two splits. Without one to evaluate on, the end of the other is held out.
    name = args.dataset_name
    split = args.dataset_train_split
    train = load_rows(name, split, args.dataset_config)
    require(train, f"--dataset_name {name}: its split {split} has no rows; choose one with --dataset_train_split")
    test = None
    if args.dataset_test_split or split != "test":
        test = load_rows(name, args.dataset_test_split or "test", args.dataset_config)
    require(
        test or not args.dataset_test_split, f"--dataset_test_split: {name} has no rows in {args.dataset_test_split}"
    )
    if test is None:
        n = min(100, len(train) // 10, args.num_eval_prompts)
        train, test = train[: len(train) - n], train[len(train) - n :]
        print(f"{name}: the last {n} rows of its split {split} are held out to evaluate on")

    # 2. Each row gets all columns, since reward functions get them as lists: None where a row lacks one.
    columns = dict.fromkeys(column for row in train + test for column in row)
    for column in ("prompts", "completions", "completion_ids", "updates_done"):
        require(column not in columns, f"--dataset_name {name}: rename its column `{column}`, an argument of rewards")
    train = [columns | row for row in train]
    test = [columns | row for row in test[: args.num_eval_prompts]]

    # 3. Tokens.
    train = prepare_rows(train, tokenizer, args.max_prompt_length, f"{name}, {split}")
    test = prepare_rows(test, tokenizer, args.max_prompt_length, f"{name}, held out")
    cut = sum(len(row["reference_ids"]) >= args.response_length for row in test)
    if cut:
        print(f"{cut} of {len(test)} references are cut to --response_length {args.response_length} for grading")
    return train, test


def prepare_rows(rows, tokenizer, max_prompt_length, name) -> list[dict]:
    """All rows of a split through `prepare_row`, without those longer than `max_prompt_length` tokens."""
    prepared = []
    for number, row in enumerate(rows, 1):
        with explained(
            f"{name}, row {number}: needs `prompt` (text or messages) or `messages`; `completion` is a text"
        ):
            prepared.append(prepare_row(row, tokenizer))
    kept = [row for row in prepared if len(row["prompt_ids"]) <= max_prompt_length]
    print(f"{name}: {len(kept):,} of {len(rows):,} prompts are within --max_prompt_length {max_prompt_length} tokens")
    require(kept or not rows, f"{name}: no prompt is within --max_prompt_length {max_prompt_length} tokens")
    return kept


def hashes(args, train_rows, test_rows) -> dict[str, str]:
    """Hashes of the data (values that JSON cannot hold count as null), of the .py files of reward functions and judge,
    and of a script that has imported this file and may have replaced functions."""
    script = running_script()
    sources = [Path(spec.rpartition(":")[0]) for spec in (*args.reward_fns, args.judge_fn or "")]
    hashed = {
        "training data": [row["columns"] for row in train_rows],
        "held-out data": [row["columns"] for row in test_rows],
        "functions": [str(path.read_bytes()) for path in sources if path.suffix == ".py"],
        "script": str(script.read_bytes()) if script.is_file() and __name__ != "__main__" else "",
    }
    for name, content in hashed.items():
        data = json.dumps(content, default=lambda value: None)
        hashed[name] = hashlib.sha256(data.encode()).hexdigest()[:16]
    return hashed


def prepare_row(row, tokenizer) -> dict:
    """A dataset row as the dict returned below. If `prompt` is missing, it is the `messages` up to the user's first; if
    `completion` is missing, the reference is the assistant's first message after the prompt. The chat template also
    gets the row's `tools` and, as arguments, its `chat_template_kwargs`."""
    # 1. Prompt and reference, as the dataset has them.
    prompt, messages, reference = row.get("prompt"), row.get("messages"), row.get("completion")
    if prompt is None:
        require(messages, f"the row has {', '.join(x for x in row if row[x] is not None)}")
        roles = [message["role"] for message in messages]
        prompt = messages[: roles.index("user") + 1]
    if reference is None and isinstance(messages, list):
        after = messages[len(prompt) :] if isinstance(prompt, list) else messages
        reference = next((message["content"] for message in after if message["role"] == "assistant"), None)
    if isinstance(reference, list):
        reference = reference[-1]["content"]

    # 2. The text that the model reads.
    if isinstance(prompt, list):
        require(all(isinstance(x["content"], str) for x in prompt), "the content of a message must be a text")
    if isinstance(prompt, str):
        text, add_special_tokens = prompt, True
        if tokenizer.chat_template:
            say_once("text prompts are read as they are, without the chat template: write chats as messages")
    elif len(prompt) == 1 and tokenizer.chat_template is None:
        text, add_special_tokens = prompt[0]["content"], True  # without a template, one message is read as text
    else:
        begun = prompt[-1]["role"] == "assistant"  # the policy continues that message
        options = {"add_generation_prompt": not begun, "continue_final_message": begun}
        options |= row.get("chat_template_kwargs") or {}
        text = tokenizer.apply_chat_template(prompt, row.get("tools"), tokenize=False, **options)
        add_special_tokens = False  # the template has them
    require(isinstance(text, str) and isinstance(reference, str | None), "prompt and completion must be texts")

    # 3. Its tokens.
    if text.startswith(tokenizer.bos_token or "\0"):
        add_special_tokens = False  # the text has them too
    ids = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    ends = [tokenizer.eos_token_id, tokenizer.sep_token_id]  # some tokenizers put one of them after each text
    if ids and ids[-1] in ends and not text.endswith(tokenizer.convert_ids_to_tokens(ids[-1])):
        ids = ids[:-1]
    require(ids, "the prompt is empty")
    return {
        "prompt": prompt,  # as the dataset has it
        "prompt_text": text,  # as the model reads it
        "prompt_ids": ids,
        "reference": reference,  # text or None
        "reference_ids": continuation_ids(reference, tokenizer) if reference else [],
        "columns": row,
    }


def continuation_ids(text, tokenizer) -> list[int]:
    """The tokens of a text that follows another one. Some tokenizers put a space before the first word of a text; so
    this one is read after a line break, unless the tokenizer drops that or merges it with the text."""
    before, ids = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in ("\n", "\n" + text))
    n = len(before)
    if 0 < n < len(ids) and ids[:n] == before:
        return ids[n:]
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ---- Models ----------------------------------------------------------------------------------------------------------


def load_tokenizer(args, flag, path):
    """The tokenizer of a model. It needs no pad token: padding is masked, so any id will do."""
    with explained(f"{flag} {path}: cannot be loaded as a folder or Hub model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    require(len(tokenizer) > len(tokenizer.all_special_ids), f"{flag} {path}: has no usable tokenizer; save one there")
    return tokenizer


def stop_token_ids(args, model, tokenizer) -> list[int]:
    """Ids of the tokens that end a completion: the one asked for, or the tokenizer's and generation config's eos."""
    if args.stop_token_id is not None:
        ids = [args.stop_token_id]
    elif args.stop_token not in (None, "eos"):
        ids = continuation_ids(args.stop_token, tokenizer)
        text = tokenizer.decode(ids)
        same_but_for_spaces = text.strip() != "" and text.strip() == args.stop_token.strip()
        if len(ids) != 1 or not (text == args.stop_token or same_but_for_spaces):
            ids = []  # not one token, or an unknown one
    else:
        configured = model.generation_config.eos_token_id
        ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
        ids = [number for number in dict.fromkeys(ids) if number is not None]
    size = model.config.get_text_config().vocab_size
    require(
        ids and max(ids) < size,
        f"--stop_token {args.stop_token} --stop_token_id {args.stop_token_id}: must name one of the model's {size} "
        "tokens; without these flags the tokenizer needs an eos token",
    )
    return ids


def load_policy(args, resumed: Path | None = None):
    """The policy to train: that of a checkpoint, or of --sft_model_path."""
    if resumed and not args.lora_rank:
        return load_model(args, DAMAGED, resumed, trained=True)
    policy = load_model(args, "--sft_model_path", args.sft_model_path, trained=True)
    if resumed:
        load_adapters(resumed, policy)
    return policy


def load_reference(args, policy):
    """The model to stay close to, None with --kl_coef 0. With LoRA it is the policy, see without_adapters."""
    if not args.kl_coef:
        return None
    return policy if args.lora_rank else load_model(args, "--sft_model_path", args.sft_model_path, trained=False)


def load_model(args, flag, path, trained, auto_class=AutoModelForCausalLM, **options):
    """Loads a model on its device, in eval mode; sharded if --sharding fsdp. Only a trained model has gradients."""
    device = torch.device(args.device)
    model = read_model(args, f"{flag} {path}", path, trained, auto_class, **options)
    model.eval().requires_grad_(trained)
    if trained and args.lora_rank:
        add_adapters(model, args.lora_rank, args.lora_alpha, args.seed)
    if trained and args.gradient_checkpointing:
        for layer in layers_of(model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    if args.sharding == "fsdp":
        return shard(model, device, forward_dtype(args))
    return model.to(device)


def read_model(args, label, path, trained, auto_class, **options):
    """A model on the CPU; with --sharding fsdp only the first rank reads the weights."""
    trust = {"trust_remote_code": args.trust_remote_code}
    dtype = torch.float32 if trained and not args.lora_rank else forward_dtype(args)
    missing = []
    adapters = Path(path) / "adapter_config.json"  # with peft, transformers would add them, and save nothing else
    require(not adapters.is_file(), f"{label}: has adapters; merge them into the model by PEFT first")
    with explained(f"{label}: cannot be loaded as a folder or Hub model"):
        config = transformers.AutoConfig.from_pretrained(path, **trust, **options)
        options = {"config": config, "attn_implementation": args.attn_implementation, "dtype": dtype, **trust}
        if args.sharding == "ddp" or dist.get_rank() == 0:
            model, info = auto_class.from_pretrained(path, output_loading_info=True, **options)
            missing = sorted(info["missing_keys"])
        else:
            with torch.device("meta"):
                model = auto_class.from_config(**options)
    missing = on_first_rank(lambda: missing)
    require(not missing, f"{label}: is not a trained model of this kind, it lacks {missing[:1]}")
    return model


def layers_of(model) -> list:
    """The layers of a model: its largest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()), default=[])


def shard(model, device, dtype):
    """Shards a model by FSDP2: each rank keeps a part of its weights. A layer is gathered in `dtype` when it is needed.
    So embeddings and the residual stream are in `dtype` too; without sharding, in float32. The first rank, which has
    read the weights and buffers, sends them to the others."""
    # 1. The first rank keeps weights and buffers aside; the model itself becomes empty on all ranks. Moving a model
    # unties a head that is also the embedding; tie_weights ties it again.
    weights = model.state_dict() if is_first_rank() else {}
    buffers = [*model.buffers()]
    model.to("meta").tie_weights()

    # 2. Each layer is gathered and freed on its own, and so is all the rest together: embedding, norm and head.
    options = {
        "mesh": dist.init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": fsdp.MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32),
    }
    for module in [*layers_of(model), model]:
        fsdp.fully_shard(module, reshard_after_forward=True, **options)
    model.set_reduce_scatter_unused_params(True)  # such as an expert without tokens on this rank
    # FSDP gathers the rest when the model is called, so a call takes what is to run: see fsdp_forward.
    model.forward = lambda function, *args, **options: function(model, *args, **options)

    # 3. The shards get their memory, then their part of the first rank's weights.
    model.to_empty(device=device).tie_weights()
    state_dict.set_model_state_dict(model, weights, options=FROM_FIRST)
    for mine, theirs in zip(model.buffers(), on_first_rank(lambda: buffers), strict=True):
        mine.data = theirs.to(device)  # no state dict has rotary frequencies
    return model


def choose_layout(model, args, rows) -> str:
    """The layout for a model and the prompts of `rows`: --layout, or with auto group rows if a trial shows that the
    model can run them."""
    check_sizes(model, args, rows)
    with torch.no_grad(), training_dtype(args, model.device):
        if model.get_output_embeddings() is not None:
            check_logits(model)
        if args.layout == "plain":
            return "plain"
        reason = why_not_group(model, args, longest=max(len(row["prompt_ids"]) for row in rows))
    if reason is None:
        return "group"
    name = type(model).__name__
    require(args.layout == "auto", f"--layout group: {name} cannot: {reason}")
    print(f"{name}: falls back to --layout plain (a policy also to --rollout_engine hf), because {reason}")
    return "plain"


def check_sizes(model, args, rows):
    """Refuses a model with too few positions or embeddings for the prompts of `rows`."""
    config = model.config.get_text_config()
    name = type(model).__name__
    longest = max(len(row["prompt_ids"]) for row in rows)
    highest = max(max(row["prompt_ids"] + row.get("reference_ids", [])) for row in rows)
    # Beyond its original positions a model with long-RoPE gives a row other numbers, depending on the other rows.
    limits = [getattr(config, f"{kind}max_position_embeddings", None) for kind in ("", "original_")]
    positions = min(limit or sys.maxsize for limit in limits)
    require(
        longest + args.response_length <= positions,
        f"{name}: has {positions} positions; the longest prompt, {longest} tokens, and --response_length "
        f"{args.response_length} need more: lower --max_prompt_length or --response_length",
    )
    require(
        highest < config.vocab_size,
        f"{name}: has no embedding for token {highest} of a prompt or reference, only {config.vocab_size}: is "
        "--model_name_or_path the tokenizer of another model?",
    )


@fsdp_forward
def check_logits(model):
    """Refuses a policy whose own logits are not those of `final_logits`, or depend on padding."""
    name = type(model).__name__
    with explained(f"{name}: cannot be run"):
        tokens = torch.tensor([[0, 1]], device=model.device)
        ours = final_logits(model, body_of(model)(tokens, use_cache=False)[0])
        theirs = type(model).forward(model, tokens).logits.float()
        mask = torch.tensor([[0, 1, 1]], device=model.device)
        positions = {"position_ids": positions_of(mask), "use_cache": False}
        padded = final_logits(model, body_of(model)(F.pad(tokens, (1, 0)), attention_mask=mask, **positions)[0][:, 1:])
    require(ours.isfinite().all(), f"{name}: its logits are not finite; is the file damaged?")
    require((theirs - ours).norm() <= 0.01 * ours.norm(), f"{name}: final_logits does not reproduce its logits")
    require(close(padded, ours, model), f"{name}: cannot be used, since padding changes its results")


def why_not_group(model, args, longest) -> str | None:
    """None if a model can run group rows, as a trial with prompts of up to `longest` tokens shows; else why not."""
    kernel = model.config._attn_implementation
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if kernel != "sdpa":
        return f"its attention kernel is {kernel}, not sdpa"
    if window and longest + args.response_length > window:  # the trial's tolerance could hide a few tokens
        return f"its attention sees {window} tokens, fewer than prompt and completion have"
    try:
        if not same_in_both_layouts(model, longest, args.rloo_k, args.response_length):
            return "group rows give other results, as with linear attention or ALiBi"
        if args.rollout_engine == "group" and model.get_output_embeddings() is not None:
            sampler = sampling_model(model, forward_dtype(args))
            ids = torch.tensor([[0, 1]], device=model.device)
            tokens, sampled = decode(sampler, [(ids, ids >= 0)], args.rloo_k, 1.0, 3, stop_ids=[-1])
            batch = make_batch([{"prompt_ids": [0, 1]}], tokens, stop_ids=[-1])
            if not close(sampled, completion_logprobs(sampler, batch, 1.0, "plain")[0], sampler):
                return "this file's decoder gives different log-probs for it"
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        if args.layout == "group" or isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            raise
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()  # an error leaves modules unsharded
        said = f"{type(error).__name__}: {error}"
        return f"its layers do not accept them ({said}; --layout group shows the trace)"


@fsdp_forward
def same_in_both_layouts(model, longest, k, R) -> bool:
    """Whether group rows give the hidden states of plain rows, for two trial prompts of full and half length."""
    tokens = torch.arange(longest + 2 * k * R, device=model.device) * 7919 % model.config.get_text_config().vocab_size
    rows = [{"prompt_ids": tokens[:n].tolist()} for n in (longest, longest - longest // 2)]
    batch = make_batch(rows, tokens[longest:].view(k, 2, R), stop_ids=[-1])
    return close(completion_hidden(model, batch, "group"), completion_hidden(model, batch, "plain"), model)


def close(x, expected, model) -> bool:
    """Whether two results of a model differ by rounding only: by 0.1% in float32, by 10% in bfloat16."""
    in_bfloat16 = torch.is_autocast_enabled(model.device.type) or model.dtype != torch.float32
    return bool((x - expected).float().norm() < (0.1 if in_bfloat16 else 1e-3) * expected.float().norm())


# ---- LoRA ------------------------------------------------------------------------------------------------------------
# With --lora_rank r the policy's own weights W stay as they are, in --dtype. Each linear layer of its layers gets an
# adapter, A (r, in) and B (out, r) in float32, and computes W x + s B A x with s = --lora_alpha / r (Hu et al. 2021,
# arXiv:2106.09685). The reference is the policy with its adapters off. The model to sample from has the weights
# W + s B A, computed anew for each version of the policy, see sampling_model. In bfloat16 that rounds away changes of a
# weight below 0.2 to 0.4%, as wherever merged adapters are sampled from: val/rollout_logprob_gap shows it, and
# --rollout_correction corrects for it. Names and files are those of PEFT.

ADAPTERS = (".lora_A.weight", ".lora_B.weight")  # ends of the names of adapters' weights


def add_adapters(model, rank, alpha, seed):
    """Freezes a model and gives it adapters that change nothing yet: A is random, the same on all ranks, and B is 0."""
    linears = [x for x in torch.nn.ModuleList(layers_of(model)).modules() if isinstance(x, torch.nn.Linear)]
    require(linears, f"--lora_rank {rank}: {type(model).__name__} has no torch.nn.Linear in its layers")
    model.requires_grad_(False)
    model.lora_alpha = alpha
    torch.manual_seed(seed % 2**32)
    for linear in linears:
        new = partial(torch.nn.Linear, bias=False, device=linear.weight.device, dtype=torch.float32)
        linear.lora_A = new(linear.in_features, rank)
        linear.lora_B = new(rank, linear.out_features)
        torch.nn.init.zeros_(linear.lora_B.weight)
        linear.lora_scale = alpha / rank
        linear.lora_on = True
        linear.register_forward_hook(add_adapter_output)
    count = sum(weight.numel() for weight in trained_weights(model).values())
    print(f"--lora_rank {rank}: {count:,} weights are trained, the adapters of {len(linears)} linear layers")


def add_adapter_output(linear, inputs, output):
    """The forward hook of a linear layer with an adapter."""
    if linear.lora_on:
        output = output + linear.lora_scale * linear.lora_B(linear.lora_A(*inputs))
    return output


def adapted_layers(model) -> dict[str, torch.nn.Linear]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_on")}


def trained_weights(model) -> dict[str, torch.Tensor]:
    """The weights of a policy that are trained: all, or with LoRA those of its adapters."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@contextmanager
def without_adapters(model):
    """Switches the adapters of a model off, if it has any."""
    linears = adapted_layers(model).values()
    for linear in linears:
        linear.lora_on = False
    try:
        yield
    finally:
        for linear in linears:
            linear.lora_on = True


@torch.no_grad()
def merge_adapters(policy, copy):
    """Gives a copy of the policy the weights W + s B A, computed in float32 and rounded once."""
    for name, linear in adapted_layers(policy).items():
        W, A, B = (whole(x.weight).float() for x in (linear, linear.lora_A, linear.lora_B))
        copy.get_submodule(name).weight.data = (W + linear.lora_scale * (B @ A)).to(copy.dtype)


def save_adapters(folder: Path, policy):
    """Writes the adapters in PEFT's format. All ranks call it."""
    linears = adapted_layers(policy)
    weights = {f"base_model.model.{name}": whole(x.detach()).cpu() for name, x in trained_weights(policy).items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": policy.name_or_path,
        "target_modules": sorted({name.rpartition(".")[2] for name in linears}),
        "r": next(iter(linears.values())).lora_A.out_features,
        "lora_alpha": policy.lora_alpha,
    }
    if is_first_rank():
        folder.mkdir(exist_ok=True)
        safetensors.torch.save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_adapters(folder: Path, policy):
    """Loads the adapters of a checkpoint."""
    with explained(f"{DAMAGED} {folder}: cannot be loaded"):
        weights = {}
        if is_first_rank():  # it sends them to the others
            saved = safetensors.torch.load_file(folder / "adapter_model.safetensors")
            weights = {name: saved[f"base_model.model.{name}"] for name in trained_weights(policy)}
    state_dict.set_model_state_dict(policy, weights, options=loading_options())  # W is not among them


# ---- Processes: one, or as many as torchrun starts, each with prompts of its own -------------------------------------
# Functions that talk to other ranks must be called by all ranks, equally often: sum_over_ranks, gather, on_first_rank,
# on_any_rank, raised_on_all_ranks and whole, and what calls them. With --sharding fsdp that is also each forward pass
# of a model. All places of FSDP: load_model and `shard` (loading), fsdp_forward (calls of parts of a model),
# model_scores in token_reward (equally often), sampling_model (a full copy to sample from), average_gradients in
# `improve` (not needed), why_not_group (after an error), and `state_dict` with FULL and FROM_FIRST (checkpoints).

FULL = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathers from all ranks to the first
FROM_FIRST = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def loading_options():
    """For a checkpoint that the first rank has read, and that need not have a value for every weight."""
    return replace(FROM_FIRST if dist.is_initialized() else FULL, strict=False)


def start_processes(device) -> tuple[int, int]:
    """Joins the processes that torchrun has started; returns rank_and_world. Makes `device` the current CUDA device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # with a mask its backward gives NaN at times (pytorch#196678)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=2))  # saving may take an hour
    return rank_and_world()


def rank_and_world() -> tuple[int, int]:
    """The number of this process, from 0, and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(x):
    """Sums x over all processes, in place; each of them gets the sum."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def gather(items: list) -> list:
    """Joins the lists of all processes, of equal length, into one: all first items, then all second items, ..."""
    parts = [items]
    if dist.is_initialized():
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, items)
    return [item for group in zip(*parts, strict=True) for item in group]


def is_first_rank() -> bool:
    return rank_and_world()[0] == 0


def on_first_rank(function: Callable):
    """Calls the function on the first rank only, and returns its result on all ranks."""
    return gather([function() if is_first_rank() else None])[0]


def on_any_rank(condition: bool) -> bool:
    """Whether the condition holds on at least one rank."""
    return any(gather([condition]))


@contextmanager
def raised_on_all_ranks():
    """If the body fails on one rank, raises on every rank."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    except BaseException as raised:  # such as exit() in a user's function, which would end the run without a word
        error = RuntimeError(f"ended by {raised!r}")
        error.__cause__ = raised
    if on_any_rank(error is not None):
        raise known_to_all(error or RuntimeError("another process raised an error, which it prints"))


def known_to_all(error: BaseException) -> BaseException:
    """Marks an error that all ranks raise at the same place, so that they can save together: see saved_at_end."""
    error.on_all_ranks = True
    return error


def whole(x):
    """A tensor, gathered if it is sharded."""
    return x.full_tensor() if isinstance(x, dist.tensor.DTensor) else x


def clock(device) -> float:
    """Time in seconds, after all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- Checkpoints -----------------------------------------------------------------------------------------------------
# On one machine's CPU a resumed run equals an uninterrupted one with the same flags, files and number of processes:
# weights and moments are loaded; the random numbers and rows of an update depend on the seed and its number alone
# (set_seed, rows_of_update); the files of the run are cut to their lengths after the checkpoint's update (open_output);
# and the evaluation after that update is made again (evaluation_modes).
# checkpoint-<update>/ holds policy and tokenizer as save_pretrained leaves them, or with LoRA only the adapters, see
# save_adapters; optimizer.pt; and in state.json:
#   update   None from an update's first optimizer step until the update is complete (never written to a file)
#   flags    resolved, with the number of completions per update and hashes of the data
#   run_id   for Weights & Biases
#   before   the evaluation before training
#   modes    those of the evaluation after this update, [] if there is none
#   files    lengths in bytes, after the update and before its evaluation, of the files that the run appends to

RUN_FILES = ("metrics.jsonl", "evaluations.jsonl", "completions.jsonl")
DAMAGED = "checkpoint (if it is damaged, move it away; --resume then uses the one before)"
FIXED_ON_RESUME = {
    "sft_model_path",
    "model_name_or_path",
    "reward_model_path",
    "reward_fns",
    "dataset_name",
    "dataset_train_split",
    "max_prompt_length",
    "seed",
    "rloo_k",
    "lora_rank",
    "lora_alpha",
    "completions per update",
    "training data",
}


def checkpoints(output: Path) -> list[Path]:
    """The checkpoints in `output`, the newest first."""
    folders = [path for path in output.glob("checkpoint-*") if path.name[11:].isdecimal()]
    return sorted(folders, key=lambda path: -int(path.name[11:]))


def newest_checkpoint(output: Path) -> Path | None:
    return next(iter(checkpoints(output)), None)


def save_policy(folder: Path, policy, tokenizer):
    """Writes the policy and its tokenizer in save_pretrained form; with LoRA the adapters are merged into it, and are
    also in adapter/. All ranks call it."""
    model = sampling_model(policy, policy.dtype) if adapted_layers(policy) else policy
    weights = state_dict.get_model_state_dict(model, options=FULL)
    if is_first_rank():
        policy.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
    if adapted_layers(policy):
        save_adapters(folder / "adapter", policy)


def save_checkpoint(output: Path, state, policy, optimizer, tokenizer, limit):
    """Writes a checkpoint to a temporary folder and renames it when complete. All ranks must call it, and wait."""
    target = output / f"checkpoint-{state['update']}"
    unfinished = output / "unfinished-checkpoint"
    if on_first_rank(target.exists):
        return
    with explained(f"{target} cannot be saved; free disk space and continue with --resume"):
        if is_first_rank():
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed, or of a full disk
        if adapted_layers(policy):
            save_adapters(unfinished, policy)
        else:
            save_policy(unfinished, policy, tokenizer)
        moments = state_dict.get_optimizer_state_dict(policy, optimizer, options=FULL)
        if is_first_rank():
            torch.save(moments, unfinished / "optimizer.pt")
            (unfinished / "state.json").write_text(json.dumps(state))
            os.sync()
            unfinished.rename(target)
            for old in checkpoints(output)[limit:]:
                shutil.rmtree(old.rename(unfinished))
    gather([None])


def new_state(output: Path, flags: dict) -> dict:
    """The state of a new run."""
    run_id = f"{output.name}-{time.time_ns()}"
    return {"update": 0, "flags": flags, "run_id": run_id, "before": {}, "files": {}, "modes": []}


def load_state(folder: Path, flags: dict) -> dict:
    """The state of a checkpoint, with the new `flags`. Prints which of them changed, and refuses changes to
    FIXED_ON_RESUME. Unless the changes are harmless, evaluations before and after training may not be comparable: the
    one before is dropped from the state."""
    with explained(f"{DAMAGED} {folder}: cannot be loaded"):
        state = json.loads((folder / "state.json").read_text())
        old = state["flags"]
    new = json.loads(json.dumps(flags))  # with lists instead of tuples
    changed = {name: f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]}
    for name in ("resume", "output_dir", "device"):
        changed.pop(name, None)
    fixed = [text for name, text in changed.items() if name in FIXED_ON_RESUME]
    require(not fixed, f"--resume: {folder.parent} is a run with other flags: {', '.join(fixed)}")
    print(f"resumed from {folder}; changed: {', '.join(changed.values()) or 'nothing'}")
    harmless = {"total_episodes", "num_sample_generations", "save_steps", "save_total_limit", "exp_name", "track"}
    if changed.keys() - harmless:
        print("the closing table is without the evaluation before training, which had other flags")
        state["before"] = {}
    return state | {"flags": flags}


def load_moments(folder: Path, policy, optimizer):
    """Loads the optimizer's moments from a checkpoint; its settings remain those of the flags."""
    with explained(f"{DAMAGED} {folder}: cannot be loaded"):
        moments = {}
        if is_first_rank():  # it sends them to the others
            moments = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    state_dict.set_optimizer_state_dict(policy, optimizer, moments, options=loading_options())  # not of all weights
    optimizer.param_groups[0].update(optimizer.defaults)


# ---- Command line ----------------------------------------------------------------------------------------------------


class InputError(ValueError):
    """A mistake in what the user gave: the command line prints it as one line, without a stack trace."""


def require(condition: object, message: str):
    if not condition:
        raise InputError(message)


@contextmanager
def explained(message: str):
    """Turns an error inside, unless out of memory, into an InputError: `message` and the error's first line."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(f"{message} ({type(error).__name__}: {first_line:.300})") from error


ALIASES = {  # flags' names in TRL 1.x, and others that are often tried; dashes are written as underscores
    "__num_generations": "--rloo_k",
    "__max_completion_length": "--response_length",
    "__max_new_tokens": "--response_length",
    "__beta": "--kl_coef",
    "__num_iterations": "--num_ppo_epochs",
    "__epsilon": "--cliprange",
    "__epsilon_high": "--cliprange_high",
    "__token_level_kl": "--kl_level=token",
    "__lr": "--learning_rate",
    "__run_name": "--exp_name",
}


EPISODES = "give --total_episodes, completions in all; default: each prompt once"
HINTS = {  # flags of other trainers that have no counterpart here, and values that switches do not take
    "__max_steps": EPISODES,
    "__num_train_epochs": EPISODES,
    "__num_epochs": EPISODES,
    "__epochs": EPISODES,
    "__bf16": "give --dtype bfloat16, the default on a GPU that has it",
    "__use_peft": "give --lora_rank, such as --lora_rank 32",
    "__report_to": "give --track for Weights & Biases",
    "__use_vllm": "give --rollout_engine benchmark/speed/vllm_engine.py:generate",
    "__resume_from_checkpoint": "give --resume and --output_dir",
    "true": "a switch takes no value: --flag switches on, --no_flag off",
    "false": "a switch takes no value: --flag switches on, --no_flag off",
}


def by_own_name(word: str) -> str:
    """A word of the command line, --flag or --flag=value, with an alias replaced."""
    flag, equals, value = word.partition("=")
    name = flag.replace("-", "_")
    hint = HINTS.get(name.lower()) or HINTS.get(value.lower())
    require(hint is None, f"{word}: {hint}")
    return ALIASES.get(name, flag) + equals + value


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line (default: sys.argv) as Args. At --help, and at a flag that is unknown or does not parse, tyro
    exits."""
    argv = [by_own_name(word) for word in (sys.argv[1:] if argv is None else argv)]
    lists = [word for word in argv if word.partition("=")[0].replace("-", "_") == "__reward_fns"]
    require(len(lists) < 2, "--reward_fns: name all functions after one: --reward_fns a.py:f b.py:g")
    groups = {kind.__name__: kind() for kind in Args.__bases__}  # with their titles in --help
    groups = tyro.cli(
        dict,
        default=groups,
        args=argv,
        description=Args.__doc__,
        use_underscores=True,
        config=[tyro.conf.OmitArgPrefixes],
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    return Args(**{name: value for group in groups.values() for name, value in vars(group).items()})


def resolve_args(args: Args) -> Args:
    """A copy with the defaults filled in that depend on other flags or on the machine. Refuses nothing."""
    args = replace(args)
    bundled = not (args.dataset_name or args.sft_model_path or args.model_name_or_path)
    if args.dataset_name is None:
        if not bundled:
            print("--dataset_name is not given: the data, judge and, without --reward_fns, rewards of the bundled task")
        args.dataset_name = str(MINI_TLDR)
        args.sft_model_path = args.sft_model_path or args.model_name_or_path or str(MINI_TLDR / "sft")
        args.judge_fn = args.judge_fn or f"{MINI_TLDR}/mini_tldr.py:gold_judge"
        if not args.reward_fns:
            args.reward_model_path = args.reward_model_path or str(MINI_TLDR / "reward")
    args.sft_model_path = args.sft_model_path or args.model_name_or_path
    args.model_name_or_path = args.model_name_or_path or args.sft_model_path
    if args.ratio_level is None:
        per_completion = args.kl_level == args.loss_aggregation == "sequence"
        args.ratio_level = "sequence" if per_completion else "token"
    if args.cliprange_high is None:
        args.cliprange_high = args.cliprange
    if args.learning_rate is None:
        args.learning_rate = 2.5e-4 if bundled else 1e-6
        if args.lora_rank:
            args.learning_rate *= 10  # Schulman et al. 2025, "LoRA Without Regret"
    if args.total_episodes is None and bundled:
        args.total_episodes = 6_400  # else `main` counts the training prompts
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda":
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if args.dtype is None:
        on_gpu = args.device.startswith("cuda") and not bundled
        half = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 or V100 only emulates it
        args.dtype = "bfloat16" if half else "float32"
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 and args.sharding == "fsdp":
        print("--sharding fsdp: there is one process, which holds all weights")
        args.sharding = "ddp"
    if args.output_dir is None and not args.resume:
        args.output_dir = f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    return args


def check_args(args: Args):
    """Refuses flags, as returned by resolve_args, that cannot run, before anything is loaded."""
    for name, value in vars(args).items():
        if isinstance(value, int | float):
            least = LEAST.get(name, 0)
            require(math.isfinite(value) and value >= least, f"--{name} {value}: must be finite and at least {least}")
    k = args.rloo_k
    size = args.per_device_train_batch_size
    num_rewards = (args.reward_model_path is not None) + len(args.reward_fns)
    weights = args.reward_weights or (1.0,) * num_rewards
    bundled = args.dataset_name == str(MINI_TLDR)
    require(not bundled or MINI_TLDR.is_dir(), f"--dataset_name is needed: the bundled task is not at {MINI_TLDR}")
    require(args.sft_model_path, "--sft_model_path is needed with --dataset_name: which model should be trained?")
    require(num_rewards, "no reward: give --reward_model_path, --reward_fns or both")
    require(
        len(weights) == num_rewards and all(map(math.isfinite, weights)) and any(weights),
        f"--reward_weights {weights}: must be {num_rewards} finite numbers, not all 0, the reward model's first, then "
        "those of --reward_fns",
    )
    require(size % k == 0, f"--per_device_train_batch_size {size}: must be a multiple of --rloo_k {k}, whole groups")
    require(
        args.ratio_level == "token" or args.kl_level == "sequence",
        "--ratio_level sequence: a reward per token (--kl_level token) needs a ratio per token",
    )
    require(args.warmup_ratio < 1, f"--warmup_ratio {args.warmup_ratio}: must be below 1")
    require(args.stop_token is None or args.stop_token_id is None, "give --stop_token or --stop_token_id, not both")
    require(args.output_dir, "--resume needs --output_dir: which run should continue?")
    require(
        args.sharding == "ddp" or hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"),
        f"--sharding fsdp: the FSDP of torch {torch.__version__} is too old, 2.13 is tested",
    )
    replaced_names()
    check_output(Path(args.output_dir), args.resume, trains=args.total_episodes != 0)
    with explained(f"--device {args.device}: cannot be used"):
        torch.zeros(1, device=args.device).item()


def check_output(output: Path, resume: bool, trains: bool):
    """Refuses an output folder in which a run would overwrite something. What a run that failed before its first
    evaluation has left may be overwritten: args.json and empty files."""
    left = [path for path in output.glob("*") if path.name != "args.json" and path.lstat().st_size]
    require(
        trains or not resume or not left or checkpoints(output),
        f"--total_episodes 0 --resume: {output} has no checkpoint to evaluate; choose a new folder",
    )
    require(
        not left or resume and (output / "metrics.jsonl").is_file(),
        f"--output_dir {output}: is not empty; choose a new folder, or continue with --resume if it holds a run "
        "(a metrics.jsonl)",
    )
    require(
        checkpoints(output) or not (output / "config.json").is_file(),
        f"--resume: {output} has a trained policy and no checkpoint to continue from; choose a new --output_dir",
    )


LEAST = {  # minimum of numeric flags; 0 for those not listed
    "rloo_k": 2,
    "rollout_correction_cap": 1,
    "temperature": 1e-6,
    "adam_eps": 1e-12,
    "reward_clip_range": 1e-6,
    "max_prompt_length": 1,
    "response_length": 1,
    "lora_alpha": 1,
    "local_rollout_forward_batch_size": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_ppo_epochs": 1,
    "num_mini_batches": 1,
    "save_total_limit": 1,
}


def command_line(argv: list[str] | None = None):
    """Runs `python rloo.py argv`. A mistake ends it with one line and status 1; SIGTERM, Ctrl-C or the end
    of the terminal, with a checkpoint."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return  # this process was spawned by a reward function, and imports the script that runs
    rank = int(os.environ.get("RANK", 0))
    signals = []  # those received
    newest = -math.inf  # when the newest of them came
    if rank > 0:  # only the first process prints
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stdout.reconfigure(errors="replace")  # completions may have characters that it cannot print
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def note(number: int, frame):
        nonlocal newest
        if time.monotonic() < newest + 1:
            return  # torchrun and `timeout` send each signal twice
        newest = time.monotonic()
        signals.append(number)
        # The first one is noted, the second interrupts a function of the user, the third ends this process.
        if len(signals) == 1 and rank == 0:
            with suppress(OSError):  # nobody reads this if Ctrl-C has also ended `| tee log`
                os.write(2, b"\nrloo.py will save and stop: after this update, or before it changes weights\n")
        if len(signals) == 2 and in_function_of_user(frame):
            raise KeyboardInterrupt("a second signal")  # it may wait for processes that the first signal has ended
        if len(signals) > 2:
            os._exit(128 + number)  # sys.exit could be caught by a reward function, or wait for its processes

    # Ctrl-C goes to the run's whole process group. Workers of a reward function's pool leave the group, since the run
    # waits for their results. Children of subprocess stay: they may call setsid, which a leader of a group cannot.
    multiprocessing.util.register_after_fork(note, lambda _: os.setpgid(0, 0))
    hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else []  # not under nohup
    handlers = {}  # those before this run
    for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
        handlers[number] = signal.signal(number, note)
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
    try:
        main(parse_args(argv), signals)
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        sys.exit(f"rloo.py: {line}")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if dist.is_initialized():
        dist.barrier()  # none leaves while another still needs it
        dist.destroy_process_group()


def in_function_of_user(frame) -> bool:
    """Whether a stack frame is that of a reward function, judge or engine, or of what one of them calls."""
    while frame and frame.f_code not in (function_reward.__code__, own_engine.__code__):
        frame = frame.f_back
    return frame is not None


def one_line(error: Exception) -> str | None:
    """The message for an error that needs no stack trace; None for one that needs it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return (
            "out of memory: lower --local_rollout_forward_batch_size, or --per_device_train_batch_size and raise "
            "--gradient_accumulation_steps by the same factor"
        )
    return " ".join(str(error).split()) if isinstance(error, InputError) else None  # the repr of an array has lines


ORIGINALS = globals().copy()  # see replaced_names

if __name__ == "__main__":
    command_line()
