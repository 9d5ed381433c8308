"""RLOO (REINFORCE Leave-One-Out) for language models in one file of PyTorch.

    python rloo.py                                  # trains the embedded mini TL;DR task, a few minutes on 2 cores
    python rloo.py --rloo_k 4 --kl_coef 0.03        # the same with other settings; --help lists them all

For each prompt the policy samples k completions. The reward of a completion is its score minus β times its KL
divergence from the reference model; its baseline is the mean reward of the k - 1 other completions of its prompt:

    R_j = score_j - β Σ_t kl_jt      A_j = R_j - Σ_{i≠j} R_i / (k - 1)      loss = mean_j max(-A_j ρ_j, -A_j clip(ρ_j))
    ρ_j = π(y_j) / π_old(y_j); π_old sampled y_j, so ρ_j = 1 in the first step; clip: to [1 - ε, 1 + ε]

Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
in LLMs", arXiv:2402.14740. Flags and metrics keep the names of TRL's RLOOTrainer. Order of the file: flags, the maths,
one update, the run; who stops there knows RLOO. What they call comes after.

Shapes: k completions per prompt, B prompts per update, P prompt slots (left-padded), R response slots (right-padded).
Everything per completion leads with the axes (k, B); flattened, completion (j, b) is number j·B + b.
Masks are boolean, true on what is kept; they come from lengths and stop tokens, never from the pad token.
"""

import ctypes
import fcntl
import importlib
import inspect
import itertools
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
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

MINI_TLDR = Path(__file__).resolve().parent / "benchmark" / "mini_tldr"  # the embedded task, used where none is named
say_once = lru_cache(maxsize=None)(tqdm.write)  # above the progress bar


# ---- Flags -----------------------------------------------------------------------------------------------------------
@dataclass
class Models:
    """save_pretrained folders or Hub ids. Where no dataset is given, they are those of the embedded mini TL;DR"""

    sft_model_path: str | None = None  # policy to train, also the reference; if not given, model_name_or_path
    model_name_or_path: str | None = None  # where the tokenizer comes from; if not given, sft_model_path
    reward_model_path: str | None = None  # sequence classifier with one label that scores prompt + completion
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the forwards; trained weights, log-probs, losses: float32
    attn_implementation: str | None = None  # any other kernel than sdpa, e.g. eager, also sets --layout plain
    trust_remote_code: bool = False  # run code that comes with a Hub model or tokenizer


@dataclass
class Data:
    """rows have `prompt` (text or chat messages) or `messages` (up to the first user turn); `completion`: reference"""

    dataset_name: str | None = None  # .jsonl file, folder of <split>.jsonl, or Hub id; if not given, mini TL;DR
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str | None = None  # to evaluate on; else test, or the last tenth of train (at most 100)
    max_prompt_length: int = 512  # tokens; longer prompts are left out


@dataclass
class Rollout:
    """how completions are sampled"""

    response_length: int = 53  # R: tokens sampled per completion at most
    temperature: float = 0.7  # of sampling; log-probs are of the same softmax(logits / temperature)
    stop_token: str | None = None  # text of the token that ends a completion; if not given, or "eos": all eos tokens
    stop_token_id: int | None = None  # the same by its id
    rollout_engine: Literal["group", "hf"] = "group"  # Decoder of this file, or `generate`, always so in plain rows
    local_rollout_forward_batch_size: int = 64  # completions per forward where no gradient is needed


@dataclass
class RLOO:
    """the algorithm"""

    rloo_k: int = 4  # k: completions per prompt, at least 2 (TRL: 2)
    kl_coef: float = 0.05  # β: weight of the KL divergence from the reference; at 0 no reference is loaded
    kl_level: Literal["sequence", "token"] = "sequence"  # reward and ratio per completion, or reward-to-go per token
    token_level_kl: bool = False  # TRL's flag: the same as kl_level=token
    kl_in_reward: bool = True  # subtract β·kl from the reward; if not, add k3 to the loss, see kl_penalty
    advantage_estimator: Literal["rloo", "grpo", "drgrpo", "reinforce"] = "rloo"  # the baseline, see `advantage`
    loss_aggregation: Literal["sequence", "token", "sequence-mean"] = "sequence"  # see loss_weight
    missing_eos_penalty: float | None = None  # subtracted from the score of a completion that did not end in time
    normalize_reward: bool = False  # after the penalty: scores to mean 0 and standard deviation 1 over the update
    reward_clip_range: float | None = None  # last: clamp scores to ± this; None: off (TRL: 10)
    normalize_advantage: bool = False  # advantages to mean 0 and standard deviation 1 over the update
    mask_truncated_completions: bool = False  # unfinished completions: weight 0 in the loss, kept in the baselines
    cliprange: float = 0.2  # ε: the ratio is clipped to [1 - ε, 1 + ε]
    cliprange_high: float | None = None  # another ε for the upper side; if not given, cliprange
    num_ppo_epochs: int = 1  # passes over the completions of an update (TRL: 4)
    num_mini_batches: int = 1  # optimizer steps per pass


@dataclass
class Rewards:
    """file.py:function or module:function; (prompts, completions, completion_ids, **columns) -> list of float, None"""

    reward_fns: tuple[str, ...] = ()  # reward functions, beside or instead of a reward model
    reward_weights: tuple[float, ...] | None = None  # one each, the reward model's first; 0: only log it; else all 1
    judge_fn: str | None = None  # only evaluates: its win rate is reported; on mini TL;DR its gold judge


@dataclass
class BatchSize:
    """completions per update and process: the product of the first two flags and num_mini_batches"""

    per_device_train_batch_size: int = 64  # completions per forward and backward, a multiple of rloo_k (TRL: 8)
    gradient_accumulation_steps: int = 2  # forwards and backwards per optimizer step (TRL: 1)
    total_episodes: int = 6_400  # completions in the whole run, rounded up to whole updates; 0: only evaluate


@dataclass
class Optimizer:
    """AdamW"""

    learning_rate: float = 5e-4  # at its peak, for mini TL;DR's tiny model (TRL: 5e-5; 3e-6 for pythia-1b)
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"  # its course over the run
    warmup_ratio: float = 0.0  # part of the run over which it rises from 0
    adam_eps: float = 1e-8  # added to the denominator
    weight_decay: float = 0.0  # decoupled; 0: off
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm; 0: off


@dataclass
class Run:
    """what a run leaves and shows"""

    exp_name: str = "rloo"  # name of the run
    seed: int = 1  # of sampling and shuffling; on the CPU the same seed on the same machine repeats a run exactly
    output_dir: str | None = None  # folder for all that the run leaves; else runs/<exp_name>__<seed>__<time>
    save_steps: int = 100  # updates between checkpoints; 0: only at the end and when the run is told to stop
    save_total_limit: int = 2  # newest checkpoints to keep
    resume: bool = False  # continue from the newest checkpoint in output_dir; without one begin a new run
    num_sample_generations: int = 4  # evaluations, with completions shown, between the first and the last, at most
    num_eval_prompts: int = 500  # held-out prompts to evaluate on, at most; where train is split, no more are held out
    track: bool = False  # log to Weights & Biases
    wandb_project_name: str = "rloo"  # its project
    wandb_entity: str | None = None  # its entity (team)
    device: str | None = None  # cpu, cuda, cuda:1, ...; if not given, cuda if there is one


@dataclass
class Scale:
    """memory and devices: torchrun --nproc_per_node N rloo.py ... runs N processes"""

    layout: Literal["group", "plain"] = "group"  # a row per prompt with its k completions, or a row per completion
    sharding: Literal["ddp", "fsdp"] = "ddp"  # each process holds all weights, or its part of them (FSDP2)
    gradient_checkpointing: bool = False  # compute the layers' activations again in backward instead of keeping them
    offload_reference: bool = False  # reference and reward model lie in the CPU's memory while they are not used


@dataclass
class Args(Models, Data, Rollout, RLOO, Rewards, BatchSize, Optimizer, Run, Scale):
    """All flags; without any, mini TL;DR is trained. Where a flag is TRL's, so is its name."""


# ---- The maths: tensors in, tensors out ------------------------------------------------------------------------------
def shape_scores(scores, ended, missing_eos_penalty, normalize: bool, clip_range):
    """Scores (k, B) after penalty, normalisation and clipping, in this order; ended (k, B): a stop token came."""
    scores = scores - (missing_eos_penalty or 0.0) * ~ended
    if normalize:
        scores = standardize(scores)
    return scores if clip_range is None else scores.clamp(-clip_range, clip_range)


def rlhf_reward(scores, kl, kl_coef: float, kl_level: str = "sequence"):
    """score - β Σ_t kl_t, (k, B); at token level what is still to come from each token on, the reward-to-go
    G_t = score - β Σ_{s≥t} kl_s, (k, B, R) (Hu 2025, arXiv:2501.03262)."""
    if kl_level == "sequence":
        return scores - kl_coef * kl.sum(-1)
    return scores[..., None] - kl_coef * kl.flip(-1).cumsum(-1).flip(-1)


def advantage(rewards, estimator: str = "rloo"):
    """A = r - baseline, for rewards (k, B) or, at each t on its own, (k, B, R). The baseline is
    rloo: the mean of the k - 1 siblings' r, (Σ_i r_i - r_j) / (k - 1): the default, unbiased;
    drgrpo: the mean of all k, its own among them: (k - 1) / k of rloo's A (Liu et al. 2025, arXiv:2503.20783);
    grpo: as drgrpo, then divided by the group's standard deviation + 1e-4 (Shao et al. 2024, arXiv:2402.03300);
    reinforce: the mean over the update, all ranks.
    A NaN reward (unscorable) counts in no baseline. A is NaN there, and where a reward has no baseline."""
    scorable, r = ~rewards.isnan(), rewards.double().nan_to_num(0.0)  # equal rewards: A is exactly 0 in float64
    total, n = r.sum(0), scorable.sum(0)
    if estimator == "reinforce":
        total, n = sum_over_ranks(total.sum(0)), sum_over_ranks(n.sum(0))
    if estimator == "rloo":
        found = r - (total - r) / (n - 1).clamp(min=1)
    else:  # drgrpo, grpo, reinforce
        found = r - total / n.clamp(min=1)
    if estimator == "grpo":
        found = found / (((found * scorable).square().sum(0) / (n - 1).clamp(min=1)).sqrt() + 1e-4)
    return torch.where(scorable & (n > 1), found, math.nan).to(rewards.dtype)


def policy_loss(new, old, advantages, mask, clip_low: float, clip_high: float):
    """max(-A ρ, -A clip(ρ, 1 - ε_low, 1 + ε_high)) of each completion, (k, B) (Schulman et al. 2017, eq. 7); log ρ, and
    whether the clip decided, both in the shape of the advantages. new, old (k, B, R): log-probs now and before.
    Advantages (k, B): one ρ = exp(Σ_t new_t - old_t) per completion; (k, B, R): one per token, whose losses add up."""
    log_ratio = (new - old) * mask
    if advantages.dim() == 2:
        log_ratio = log_ratio.sum(-1)
    ratio = log_ratio.clamp(max=80.0).exp()  # finite in float32, also where the clip decides
    loss, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    per_completion = torch.max(loss, clipped)
    if advantages.dim() == 3:
        per_completion = (per_completion * mask).sum(-1)
    return per_completion, log_ratio.detach(), clipped > loss


def kl_penalty(new, ref_logprobs, mask):
    """Σ_t e^{-kl_t} - 1 + kl_t of each completion, (k, B): the k3 estimator of the KL, with gradient, for the loss
    (Schulman 2020, "Approximating KL Divergence"). In expectation its gradient is, per token, that of KL(π_ref ‖ π)."""
    kl = (new - ref_logprobs) * mask
    return (torch.expm1(-kl) + kl).sum(-1)


def loss_weight(lengths, aggregation: str):
    """Weights (k, B) such that mean(weight · Σ_t loss_t) is the loss of an optimizer step on completions of `lengths`
    (k, B) tokens. sequence: 1; token: 1 / mean length over all ranks, so that every token counts the same;
    sequence-mean: 1 / length. For the last two `update` gives every token a ρ of its own."""
    if aggregation == "token":
        lengths = mean_and_std(lengths)[0].expand_as(lengths)
    return torch.ones_like(lengths, dtype=torch.float32) if aggregation == "sequence" else (1 / lengths).float()


def mean_and_std(values):
    """Mean and standard deviation, in float64, of all ranks' values that are not NaN; NaN where there are none."""
    kept = values[~values.isnan()].double()
    count = sum_over_ranks(kept.new_tensor(len(kept)))
    mean = sum_over_ranks(kept.sum()) / count
    return mean, (sum_over_ranks((kept - mean).square().sum()) / (count - 1).clamp(min=0)).sqrt()


def standardize(x):
    """(x - mean) / (std + 1e-8), both over all ranks' numbers; NaN stays NaN, and a lone number what it is."""
    mean, std = mean_and_std(x)
    return torch.where(std.isfinite(), ((x - mean) / (std + 1e-8)).to(x.dtype), x)


# ---- One update ------------------------------------------------------------------------------------------------------
def update(args, policy, reference, rewards: dict, optimizer, rows: list[dict], sampling: dict, layout: str):
    """One update of the policy (float32) on k completions of each of B prompts (`rows`, see prepare_row); its metrics.
    The reference may be None; `rewards`: name -> function of a Batch, see score; `sampling`: what rollout needs."""
    device, k, B, times = policy.device, args.rloo_k, len(rows), [clock(policy.device)]
    size, temperature, dtype = args.local_rollout_forward_batch_size, args.temperature, getattr(torch, args.dtype)
    noted = defaultdict(list)  # metric -> tensors of any shape; the mean of all their entries, of all ranks, is logged

    # 1. Rollout: k completions of each prompt, and their log-probs when they were sampled.
    batch, rollout_logprobs = rollout(sampling_model(policy, dtype), rows, k, temperature, **sampling)
    mask, ended = batch.response_mask, batch.ended
    times.append(clock(device))

    # 2. KL of each token from the reference (the k1 estimator), in nats and 0 where masked; without a reference 0.
    ref_logprobs = chunked_logprobs(reference, batch, temperature, layout, size) if reference else rollout_logprobs
    kl = finite("a log-prob of the rollout, or under the reference,", rollout_logprobs - ref_logprobs)
    times.append(clock(device))

    # 3. Scores, as they come and as they count.
    raw_scores, by_reward = score(rewards, args.reward_weights, batch)
    scores = shape_scores(raw_scores, ended, args.missing_eos_penalty, args.normalize_reward, args.reward_clip_range)
    times.append(clock(device))

    # 4. Advantages: (k, B) with one ratio per completion, (k, B, R) with one per token; 0 where there is no baseline.
    kl_coef = args.kl_coef if args.kl_in_reward else 0.0  # of the KL in the reward
    advantages = advantage(rlhf_reward(scores, kl, kl_coef, args.kl_level), args.advantage_estimator)
    if args.kl_level == "token":
        advantages = advantages.masked_fill(~mask, math.nan)  # in no mean; below it becomes 0
    advantages = (standardize(advantages) if args.normalize_advantage else advantages).nan_to_num(0.0)
    if args.loss_aggregation != "sequence" and args.kl_level == "sequence":
        advantages = advantages[..., None].expand(mask.shape)
    counted = mask if advantages.dim() == 3 else torch.ones_like(ended)  # the ρ that count in metrics
    in_loss = ~raw_scores.isnan() & (ended | (not args.mask_truncated_completions))  # completions with a loss

    # 5. PPO epochs x mini-batches x micro-batches of whole groups. With one epoch and mini-batch this is REINFORCE.
    # Old log-probs are not those of generation, whose rounding would look like a step of the policy. In the first
    # mini-batch the policy is still the one that sampled: training's own forward gives them, and ρ is exactly 1.
    micro_batch = args.per_device_train_batch_size // k  # prompts
    mini_batch = micro_batch * args.gradient_accumulation_steps
    autocast = torch.autocast(device.type, dtype, args.dtype != "float32")  # makes a function one that runs in `dtype`
    old_logprobs = torch.empty_like(rollout_logprobs)
    if args.num_mini_batches > 1:
        old_logprobs = autocast(chunked_logprobs)(policy, batch, temperature, layout, size)
    for epoch in range(args.num_ppo_epochs):
        for step, mini in enumerate(torch.randperm(B).to(device).split(mini_batch)):
            weights = loss_weight(mask[:, mini].sum(-1), args.loss_aggregation) * in_loss[:, mini]
            for micro, weight in zip(mini.split(micro_batch), weights.split(micro_batch, dim=1)):
                part, real = batch.prompts(micro), mask[:, micro]
                new, entropy = autocast(completion_logprobs)(policy, part, temperature, layout)
                if epoch == step == 0:
                    old_logprobs[:, micro] = new.detach()
                    noted["val/rollout_logprob_gap"].append((new.detach() - rollout_logprobs[:, micro]).abs()[real])
                old = old_logprobs[:, micro]
                losses, log_ratio, clipped = policy_loss(
                    new, old, advantages[:, micro], real, args.cliprange, args.cliprange_high
                )
                if not args.kl_in_reward:
                    losses = losses + args.kl_coef * kl_penalty(new, ref_logprobs[:, micro], real)
                losses = finite("the loss", losses * weight)
                (losses.sum() / (k * mini_batch)).backward()  # adds up to the mean over the mini-batch

                noted["loss/policy_avg"].append(losses.detach())
                noted["policy/approxkl_avg"].append(0.5 * log_ratio[counted[:, micro]] ** 2)
                noted["policy/clipfrac_avg"].append(clipped[counted[:, micro]])
                noted["policy/entropy_avg"].append(entropy[real])
                noted["val/ratio"].append((new.detach() - old)[real].double().exp())
            for parameter in policy.parameters() if dist.is_initialized() and args.sharding == "ddp" else ():
                # None: an expert that no token of this rank went to. FSDP takes this mean in backward.
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = sum_over_ranks(grad).div_(dist.get_world_size())
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm or math.inf)
            norm = norm.full_tensor() if isinstance(norm, dist.tensor.DTensor) else norm
            noted["grad_norm"].append(finite("the gradient", norm))
            optimizer.step()
            optimizer.zero_grad()
    times.append(clock(device))

    # 6. Metrics, by TRL's names. Scores are logged as they came: before penalty, normalisation and clipping.
    # Equal completions' scores differ by rounding: they are the same where none is far from their mean.
    far = ~torch.isclose(raw_scores, raw_scores.nanmean(0), rtol=1e-6, atol=1e-6) & ~raw_scores.isnan()
    noted |= {
        "frac_reward_zero_std": [~far.any(0)[(~raw_scores.isnan()).sum(0) > 1]],
        "objective/kl": [kl.sum(-1) if reference else torch.full_like(scores, math.nan)],  # NaN is not logged
        "objective/entropy": [-rollout_logprobs.sum(-1)],
        "objective/non_score_reward": [-kl_coef * kl.sum(-1)],
        "objective/rlhf_reward": [rlhf_reward(scores, kl, kl_coef)],
        "objective/scores": [raw_scores],
        "completions/mean_length": [mask.sum(-1)],
        "completions/clipped_ratio": [~ended],
    }
    noted |= {f"rewards/{name}/mean": [values] for name, values in by_reward.items()}
    stats = {name: mean_and_std(torch.cat([x.flatten() for x in parts])) for name, parts in noted.items()}
    metrics = {name: float(mean) for name, (mean, _) in stats.items()} | {
        "lr": optimizer.param_groups[0]["lr"],
        "objective/scores_std": float(stats["objective/scores"][1]),
        "val/ratio_var": float(stats["val/ratio"][1]) ** 2,
        "val/num_eos_tokens": int(sum_over_ranks(ended.sum())),
        "tokens_per_second": int(sum_over_ranks(mask.sum())) / (times[-1] - times[0]),
        "memory/peak_gb": torch.cuda.max_memory_allocated(device) / 2**30
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20),
    }
    metrics |= {f"rewards/{name}/std": float(stats[f"rewards/{name}/mean"][1]) for name in by_reward}
    metrics |= dict(zip(["time/rollout", "time/reference", "time/reward", "time/train"], np.diff(times).tolist()))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def finite(what: str, values):
    """The values, if all of them are finite."""
    require(values.isfinite().all(), f"{what} is not finite: lower --learning_rate, or look for extreme rewards")
    return values


# ---- The run ---------------------------------------------------------------------------------------------------------
def main(args: Args, signals: Sequence[int] = ()) -> dict[str, dict[str, float]]:
    """Trains; returns the evaluations before and after. When `signals` grows it saves after the update and ends."""
    args = resolve_args(args)
    print(f"loading {args.dataset_name} and {args.sft_model_path}", flush=True)
    device, k = torch.device(args.device), args.rloo_k
    rank, world = start_processes(device)
    output = Path(gather([args.output_dir])[0]).absolute()  # with a time in it ranks may differ
    B = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches // k
    batch_size = k * B * world

    # Data and functions first: they are quick to load and the likeliest to be wrong.
    tokenizer = load_tokenizer(args, "--model_name_or_path or --sft_model_path", args.model_name_or_path)
    train_rows, test_rows = load_data(args, tokenizer)
    functions = load_functions(args.reward_fns, "reward_fns", tokenizer, train_rows[0])
    judges = load_functions([args.judge_fn] if args.judge_fn else [], "judge_fn", tokenizer, train_rows[0])
    all_rows = train_rows + test_rows
    test_rows = test_rows[: len(test_rows) // world * world]  # ranks evaluate on equally many

    # Where the run begins: at a checkpoint, or at update 0. What outlives an update is in state, optimizer or policy.
    flags = vars(args) | {"completions per update": batch_size, "training prompts": len(train_rows)}
    state = {
        "update": 0,
        "flags": json.loads(json.dumps(flags)),
        "metrics": {},
        "before": {},
        "run_id": f"{output.name}-{time.time_ns()}",
        "files": {"metrics.jsonl": 0, "completions.jsonl": 0},
    }
    resumed = gather([checkpoints(output)[:1] if args.resume else []])[0]  # the first rank knows
    if resumed:
        state |= load_state(resumed[0], state["flags"], rank)
    first, num_updates = state["update"], max(state["update"], math.ceil(args.total_episodes / batch_size))
    apart = max(5, math.ceil(num_updates / min(args.num_sample_generations + 1, 10)))  # updates between two
    evaluations = {0, num_updates, *range(apart, num_updates - 4, apart)}
    begin = (DAMAGED, resumed[0]) if resumed else ("--sft_model_path", args.sft_model_path)
    policy = load_model(args, *begin, trained=True)
    layout = fit(policy, args, all_rows)
    stop_ids = gather([rank or stop_token_ids(args, policy, tokenizer)])[0]  # the first rank has read all configs
    sampling = {
        "response_length": args.response_length,
        "chunk_size": args.local_rollout_forward_batch_size,
        "engine": args.rollout_engine if layout == "group" else "hf",
        "stop_ids": stop_ids,
    }
    reference = load_model(args, "--sft_model_path", args.sft_model_path, trained=False) if args.kl_coef else None
    rewards = (load_reward_model(args, tokenizer, all_rows) if args.reward_model_path else {}) | functions
    optimizer = torch.optim.AdamW(
        policy.parameters(), args.learning_rate, eps=args.adam_eps, weight_decay=args.weight_decay, fused=True
    )
    course = args.lr_scheduler_type + "_with_warmup" * (args.lr_scheduler_type == "constant")
    schedule = transformers.get_scheduler(course, optimizer, math.ceil(args.warmup_ratio * num_updates), num_updates)
    if resumed:
        options = replace(FROM_FIRST if dist.is_initialized() else FULL, strict=False)  # no gradient, no moments
        state_dict.set_optimizer_state_dict(policy, optimizer, state.pop("optimizer"), options=options)
        optimizer.param_groups[0].update(optimizer.defaults)  # its settings stay those of the flags

    # What the run leaves: the first rank writes it. A resumed run goes on where its checkpoint was.
    output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as at_the_end:
        files = {
            name: at_the_end.enter_context(open(os.devnull if rank else output / name, "a", 1, encoding="utf-8"))
            for name in state["files"]
        }  # 1: each line is written at once
        if rank == 0:
            with explained(f"--output_dir {output}: cannot be locked, is another run writing there?"):
                fcntl.flock(files["metrics.jsonl"], fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
            require(checkpoints(output)[:1] == resumed, f"--output_dir {output}: another run has just ended there")
            for name, file in files.items():
                file.seek(file.truncate(min(state["files"][name], file.tell())))
            (output / "args.json").write_text(json.dumps(vars(args), indent=2) + "\n")
        if args.track and rank == 0:
            with explained("--track: Weights & Biases cannot start"):
                import wandb

                wandb.init(
                    project=args.wandb_project_name,
                    entity=args.wandb_entity,
                    name=output.name,
                    dir=output,
                    id=state["run_id"],
                    resume="allow",
                    config=vars(args),
                )
        print(
            f"updates {first} to {num_updates} of {B * world} prompts x {k} completions, of {len(train_rows):,} "
            f"prompts, evaluated on {len(test_rows)}, by {world} x {device.type}, into {output}",
            flush=True,
        )
        epochs = (np.random.default_rng([args.seed, epoch]).permutation(train_rows) for epoch in itertools.count())
        order = itertools.islice(itertools.chain.from_iterable(epochs), first * B * world, None)
        found, start = {}, clock(device)
        bar = tqdm(total=num_updates, initial=first, unit="update", dynamic_ncols=True, disable=rank > 0)
        while True:
            # Evaluate. A run that was told to stop ends here, and the resumed one begins here: it evaluates again.
            done, samples = state["update"], []
            if test_rows and done in evaluations:
                bar.write(f"\nHeld-out completions after {done} of {num_updates} updates, sampled:")
                samples, found = evaluate(
                    args,
                    policy,
                    rewards,
                    judges,
                    test_rows[rank::world],
                    sampling,
                    tokenizer,
                    signals,
                    greedy=done in (0, num_updates),
                )
            if sum_over_ranks(torch.tensor(len(signals), device=device)):
                if done:
                    save_checkpoint(output, state, policy, optimizer, tokenizer, args.save_total_limit, rank)
                gather([None])  # nobody leaves before it is saved: torchrun would end the others
                bar.write(f"told to stop after update {done} of {num_updates}; go on by --resume --output_dir {output}")
                sys.exit(128 + (signals[0] if signals else signal.SIGTERM))

            # Write what it found, and the metrics of the update before, if there is one.
            if samples:
                files["completions.jsonl"].writelines(json.dumps({"update": done} | x) + "\n" for x in samples)
                state["metrics"] |= {f"{'eval' if done else 'eval_before'}/{name}": x for name, x in found.items()}
                state["before"] = state["before"] if done else found
            if done or found and not num_updates:
                files["metrics.jsonl"].write(json.dumps(state["metrics"]) + "\n")
            if args.track and rank == 0:
                table = {"completions": wandb.Table([*samples[0]], [[*x.values()] for x in samples])} if samples else {}
                wandb.log(state["metrics"] | table, step=done)
            if done == num_updates:
                break

            # Train. What is drawn in an update depends on the seed, the update and the rank alone.
            transformers.set_seed(int(np.random.SeedSequence([args.seed, done, rank]).generate_state(1)[0]))
            optimizer.param_groups[0]["lr"] = args.learning_rate * schedule.lr_lambdas[0](done)
            rows = list(itertools.islice(order, B * world))[rank * B : (rank + 1) * B]
            metrics = update(args, policy, reference, rewards, optimizer, rows, sampling, layout)
            if metrics["grad_norm"] == 0:
                say_once("an update had no gradient: in each group all rewards are equal, None, or masked in the loss")
            metrics |= {
                "update": done + 1,
                "episode": (done + 1) * batch_size,
                "eps": (done + 1 - first) * batch_size / (clock(device) - start),
            }
            state |= {"update": done + 1, "metrics": metrics if done else state["metrics"] | metrics}  # + eval_before
            win = found.get("sampled/judge_win_rate", found.get("sampled/win_rate", "-"))
            reward, kl = metrics.get("objective/rlhf_reward", "-"), metrics.get("objective/kl", "-")
            bar.set_postfix(reward=reward, kl=kl, win=win, refresh=False)
            bar.update()

            # Checkpoint: now and then, and at the end.
            state["files"] = {name: file.tell() for name, file in files.items()}
            if done + 1 == num_updates or args.save_steps and (done + 1) % args.save_steps == 0:
                save_checkpoint(output, state, policy, optimizer, tokenizer, args.save_total_limit, rank)
        if rank == 0 and num_updates:
            with explained(f"{output}: the policy cannot be saved; make room and go on by --resume"):
                shutil.copytree(
                    checkpoints(output)[0],
                    output,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("optimizer.pt", "state.json"),
                )
    bar.close()
    gains = {"before": state["before"], "after": found if num_updates else {}}
    if test_rows:
        print_gains(**gains, prompts=len(test_rows))
    print(
        f"\n{(num_updates - first) * batch_size:,} episodes in {clock(device) - start:.0f} s. "
        + (f"The policy and its tokenizer: {output}" if num_updates else f"Nothing was trained. Completions: {output}")
    )
    return gains


def print_gains(before: dict[str, float], after: dict[str, float], prompts: int):
    """The closing table: evaluations before and after."""
    print(
        f"\n{prompts} held-out prompts{', before and after' * bool(after)}, mean ± standard error. win_rate: "
        "above the reference, ties half;\njudge: by --judge_fn, which only evaluates; length: in tokens."
    )
    for name in (name for name in after or before if not name.endswith("_stderr")):
        print(f"{name:24}", *(f"{x[name]:10.3f} ± {x[name + '_stderr']:.3f}" for x in (before, after) if name in x))


def evaluate(args, policy, rewards: dict, judges: dict, rows: list[dict], sampling: dict, tokenizer, signals, greedy):
    """A sampled and, if `greedy`, a greedy completion of each row of all ranks, with its grades (weighted score, judge)
    and whether they are above its reference's (1; 0.5 where equal; 0); by name means and standard errors. Three are
    shown. Nothing if the run is told to stop. Always draws the same random numbers."""
    model, samples, size = sampling_model(policy, getattr(torch, args.dtype)), [], args.local_rollout_forward_batch_size
    R, stop_ids = sampling["response_length"], sampling["stop_ids"]
    graders = [("score", rewards, args.reward_weights)] + [("judge_score", judges, (1.0,))] * bool(judges)
    for mode, temperature in [("sampled", args.temperature), ("greedy", 0.0)][: 1 + greedy]:
        transformers.set_seed(args.seed % 2**32)
        for part in (rows[i : i + size] for i in range(0, len(rows), size)):
            if sum_over_ranks(torch.tensor(len(signals), device=model.device)):
                return [], {}
            batch, _ = rollout(model, part, 1, temperature, **sampling)
            # Graded together, as k = 2: a completion and its reference; where it has none, itself, not compared.
            ids = [row["reference_ids"] or own for row, own in zip(part, batch.responses[0].tolist())]
            ids = batch.responses.new_tensor([[(reference[: R - 1] + stop_ids[:1] * R)[:R] for reference in ids]])
            pair = make_batch(part, torch.cat([batch.responses, ids]), stop_ids)
            grades = {name: score(functions, weights, pair)[0] for name, functions, weights in graders}
            for b, (row, text, own) in enumerate(zip(part, completion_texts(batch, tokenizer), batch.completion_ids())):
                samples.append(
                    {
                        "mode": mode,
                        "prompt": row["prompt_text"],
                        "completion": text.strip(),
                        "reference": (row["reference"] or "").strip(),
                        "length": len(own),
                    }
                )
                for name, values in grades.items():
                    ours, theirs = values[:, b].tolist()
                    win = 0.5 if math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-6) else float(ours > theirs)
                    compared = row["reference_ids"] and not math.isnan(ours - theirs)
                    samples[-1] |= {
                        name: None if math.isnan(ours) else ours,
                        name.replace("score", "win_rate"): win if compared else None,
                    }
    samples, means = gather(samples), {}
    for sample in samples[: min(3, len(rows))]:
        shown = sample | {"prompt": " ".join(sample["prompt"].split())[-100:]}
        shown = {name: f"{value:.2f}" if isinstance(value, float) else value for name, value in shown.items()}
        tqdm.write("\n" + "\n".join(f"{name:16}{value}" for name, value in shown.items()))
    for mode, name in itertools.product(["sampled", "greedy"], samples[0]):
        x = [sample[name] for sample in samples if sample["mode"] == mode and isinstance(sample[name], (int, float))]
        if x:
            means |= {f"{mode}/{name}": np.mean(x), f"{mode}/{name}_stderr": np.std(x) / max(1, len(x) - 1) ** 0.5}
    return samples, means


# ---- Rows: how prompts and completions become rows of a model, and who attends to whom -------------------------------
# plain: every completion is a row of its own, its prompt before it.
# group: the same numbers from one row per prompt; its k completions, the lanes, follow it, interleaved by time. So the
# prompt is read once. A lane sees it and itself, never its siblings. P = 2 (one of them padding), k = 2, R = 2:
#     slot:      0    1     2     3     4     5        sees   . p a b a b
#     holds:     pad  p     a0    b0    a1    b1       pad    x
#     position:  0    0     1     1     2     2        p      . x
#                                                      a0     . x x
#                                                      b0     . x . x
#                                                      a1     . x x . x
#                                                      b1     . x . x . x


class Batch(NamedTuple):
    """B prompts and k completions of each."""

    rows: list[dict]  # B rows of the dataset, see prepare_row
    prompt_ids: torch.Tensor  # (B, P) left-padded
    prompt_mask: torch.Tensor  # (B, P) bool
    responses: torch.Tensor  # (k, B, R) right-padded
    response_mask: torch.Tensor  # (k, B, R) bool, true up to and including the first stop token
    ended: torch.Tensor  # (k, B) bool: a stop token came within R

    def prompts(self, index: torch.Tensor) -> "Batch":
        """The groups of the prompts `index` (b,)."""
        rows = [self.rows[i] for i in index.tolist()]
        return Batch(rows, self.prompt_ids[index], self.prompt_mask[index], *(x[:, index] for x in self[3:]))

    def chunks(self, size: int) -> Iterator["Batch"]:
        """Whole groups: at least one, else up to `size` completions at a time."""
        return map(self.prompts, torch.arange(len(self.rows)).split(max(1, size // len(self.responses))))

    def completion_ids(self) -> list[list[int]]:
        """Real tokens of the k·B completions, the stop token included, in the order j·B + b."""
        rows, lengths = self.responses.flatten(0, 1).tolist(), self.response_mask.sum(-1).flatten().tolist()
        return [row[:n] for row, n in zip(rows, lengths)]


def pad(sequences: Sequence[list[int]], left: bool = False):
    """Token lists to ids and mask, both (len(sequences), longest). Padding is masked, so any token will do: 0."""
    rows = [torch.tensor(ids, dtype=torch.long) for ids in sequences]
    fill = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left" if left else "right")
    return fill(rows), fill([torch.ones_like(row, dtype=torch.bool) for row in rows])


def make_batch(rows: list[dict], responses, stop_ids: list[int], real=True) -> Batch:
    """Prompts and their completions (k, B, R). What follows the first stop token, or is not `real`, does not count."""
    prompts = (x.to(responses.device) for x in pad([row["prompt_ids"] for row in rows], left=True))
    is_stop = torch.isin(responses, torch.tensor(stop_ids, device=responses.device))
    mask = (is_stop.cumsum(-1) - is_stop.long() == 0) & real
    return Batch(rows, *prompts, responses.masked_fill(~mask, 0), mask, (is_stop & mask).any(-1))


def sequence_mask(prompt_mask, R: int):
    """Who sees whom in a prompt (B, P) and one completion of R slots, (B, 1, P + R, P + R) bool, and the positions,
    (B, P + R). A slot sees the real slots before it and itself, also if it is padding: softmax must see something."""
    real = F.pad(prompt_mask, (0, R), value=True)
    slot = torch.arange(real.shape[1], device=real.device)
    mask = (real[:, None, None] & (slot <= slot[:, None])) | (slot == slot[:, None])
    return mask, (real.cumsum(1) - 1).clamp(min=0)


@lru_cache(maxsize=2)  # all layers of a forward share what is made of its mask
def attention_bias(mask, begin: int, end: int, slots: int, repeats: int, dtype: torch.dtype):
    """A bool mask of queries begin … end-1 over the first `slots` keys as a bias of the scores, all queries `repeats`
    times: (B, 1, repeats · queries, slots). In memory each query's begins at a multiple of 8, as kernels want."""
    bias = (~mask[:, :1, begin:end, :slots]).to(dtype) * torch.finfo(dtype).min
    return F.pad(bias, (0, -slots % 8)).repeat(1, 1, repeats, 1)[..., :slots]


def folded_attention(query, key, value, bias, scaling):
    """Attention of queries (B, H, n, D) over keys and values (B, h, m, D). The H / h query heads that share a key head
    become that many times as many queries of it, since a mask would make the kernel copy keys and values otherwise."""
    folded = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    return F.scaled_dot_product_attention(folded, key, value, bias, scale=scaling).reshape(*query.shape[:3], -1)


def completions_attention(query, key, value, bias, scaling, P: int, k: int):
    """Attention of the lanes alone, (B, k·R, H, D): k times as many heads over the prompt's keys and their own."""
    (B, H, _, D), h = query.shape, key.shape[1]
    queries = query[:, :, P:].reshape(B, h, H // h, -1, k, D).permute(0, 1, 4, 2, 3, 5).reshape(B, H * k, -1, D)
    keys, values = (
        torch.cat(
            [x[:, :, None, :P].expand(-1, -1, k, -1, -1), x[:, :, P:].unflatten(2, (-1, k)).transpose(2, 3)], dim=3
        ).flatten(1, 2)
        for x in (key, value)
    )
    lanes = folded_attention(queries, keys, values, bias, scaling)
    return lanes.unflatten(1, (h, k, -1)).permute(0, 4, 2, 1, 3, 5).reshape(B, -1, H, lanes.shape[-1])


def lane_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """The attention of group rows, as `transformers` calls it: query (B, H, n, D), key and value (B, h, m, D); returns
    (B, n, H, D) and None. In rollouts, or for k = 1, a mask (B, 1, n, m) says who sees whom. In rows of n = P + k·R the
    mask (B, k, S, S), expanded over k, is that of a prompt and one completion, S = P + R: prompts attend to themselves,
    each lane to its prompt and itself. That costs P² + k·R·(P + R), not (P + k·R)², and all layers share one mask."""
    if attention_mask is None:
        return transformers.AttentionInterface()["sdpa"](module, query, key, value, None, scaling=scaling, **kwargs)
    n, g, (_, k, lines, S) = query.shape[2], query.shape[1] // key.shape[1], attention_mask.shape
    P, slots = (n, S) if n == lines else (S - (n - S) // (k - 1),) * 2  # group rows: n = P + k·R, S = P + R
    bias = attention_bias(attention_mask, 0, P, slots, g, value.dtype)  # autocast makes queries and keys of it as well
    out = folded_attention(query[:, :, :P], key[:, :, :slots], value[:, :, :slots], bias, scaling).transpose(1, 2)
    if n > lines:  # backward copies keys and values to the lanes again, instead of keeping them
        bias = attention_bias(attention_mask, P, S, S, g, value.dtype)
        lanes = checkpoint(completions_attention, query, key, value, bias, scaling, P, k, use_reentrant=False)
        out = torch.cat([out, lanes], dim=1)
    return out.contiguous(), None


transformers.AttentionInterface.register("lanes", lane_attention)
transformers.AttentionMaskInterface.register("lanes", transformers.AttentionMaskInterface()["sdpa"])


def completion_hidden(model, batch: Batch, layout: str):
    """Hidden states (k, B, r + 1, H), r ≤ R the longest completion: slot t predicts token t, slot t + 1 has read it."""
    k, P, R = len(batch.responses), int(batch.prompt_mask.sum(-1).max()), int(batch.response_mask.sum(-1).max())
    prompt_ids, prompt_mask, responses = batch.prompt_ids[:, -P:], batch.prompt_mask[:, -P:], batch.responses[..., :R]
    mask, positions = sequence_mask(prompt_mask, R)
    if layout == "plain":
        ids = torch.cat([prompt_ids.repeat(k, 1), responses.flatten(0, 1)], dim=1)
        mask = torch.cat([prompt_mask.repeat(k, 1), batch.response_mask[..., :R].flatten(0, 1)], dim=1).long()
        hidden = model.base_model(ids, attention_mask=mask, position_ids=positions.repeat(k, 1), use_cache=False)[0]
        return hidden[:, P - 1 :].unflatten(0, (k, -1))
    model.set_attn_implementation("lanes")
    mask, ids = mask.expand(-1, k, -1, -1), torch.cat([prompt_ids, responses.permute(1, 2, 0).flatten(1)], dim=1)
    positions = torch.cat([positions[:, :P], positions[:, P:].repeat_interleave(k, dim=1)], dim=1)
    hidden = model.base_model(ids, attention_mask=mask, position_ids=positions, use_cache=False)[0]
    last_of_prompt = hidden[:, P - 1 : P].expand(k, -1, -1, -1)  # predicts token 0 of every completion
    return torch.cat([last_of_prompt, hidden[:, P:].unflatten(1, (R, k)).permute(2, 0, 1, 3)], dim=2)


def final_logits(model, hidden):
    """Logits (..., vocabulary) in float32 of hidden states (..., H), scaled and capped where the model does that."""
    config, logits = model.config.get_text_config(), model.get_output_embeddings()(hidden).float()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits if scale == 1.0 else logits * scale
    return cap * torch.tanh(logits / cap) if cap else logits


def block_logprobs(model, hidden, tokens, temperature: float):
    """log_softmax(logits / temperature) of tokens (n,), and the entropy (nats, no gradient) of that softmax, (n,)."""
    logprobs = F.log_softmax(final_logits(model, hidden).div_(temperature), dim=-1)
    found = logprobs.gather(1, tokens[:, None]).squeeze(1)  # recomputation in backward stops here
    logprobs = logprobs.detach()  # there is no entropy bonus
    return found, -(logprobs.exp() * logprobs).nansum(-1)  # 0 · -inf, of an impossible token, is no part of it


def fsdp_forward(function: Callable) -> Callable:
    """Runs `function(model, ...)` as a forward of a sharded model: FSDP gathers embedding, norm and head for those."""

    @wraps(function)
    def forward(model, *args, **options):
        sharded = isinstance(model, fsdp.FSDPModule)
        return model(function, *args, **options) if sharded else function(model, *args, **options)

    return forward


@fsdp_forward
def completion_logprobs(model, batch: Batch, temperature: float, layout: str = "group"):
    """Log-probs of the completions' tokens, entropies (no gradient) of their distributions, (k, B, R), 0 where masked.
    Logits are made for real completion tokens only, a block of tokens at a time, and once more in backward."""
    mask, hidden = batch.response_mask, completion_hidden(model, batch, layout)[:, :, :-1]
    hidden = hidden[mask[..., : hidden.shape[2]]]
    size = max(128, (2**23 if hidden.is_cpu else 2**27) // model.get_output_embeddings().weight.shape[0])
    blocks = zip(hidden.split(size), batch.responses[mask].split(size))
    parts = zip(*(checkpoint(block_logprobs, model, *block, temperature, use_reentrant=False) for block in blocks))
    return tuple(torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, torch.cat(part)) for part in parts)


@torch.no_grad()
def chunked_logprobs(model, batch: Batch, temperature: float, layout: str, chunk_size: int):
    """Log-probs (k, B, R) without gradient, of at most `chunk_size` completions at a time."""
    with on_device(model, batch.responses.device):
        parts = [completion_logprobs(model, part, temperature, layout)[0] for part in batch.chunks(chunk_size)]
    return torch.cat(parts, dim=1)


@fsdp_forward
def model_scores(model, batch: Batch, layout: str = "group"):
    """Scores (k, B) of a sequence classifier: its head at the last real token of each completion."""
    hidden = completion_hidden(model, batch, layout)
    last = batch.response_mask.sum(-1)[..., None, None].expand(-1, -1, 1, hidden.shape[-1])
    return model.score(hidden.gather(2, last).squeeze(2)).squeeze(-1).float()


# ---- Rollout ---------------------------------------------------------------------------------------------------------
def sample(logits, temperature: float):
    """A token of each softmax(logits / temperature), at 0 the likeliest, and its log-prob, both (...), from logits
    (..., vocabulary). Nothing here waits for the device, unlike torch.multinomial."""
    logprobs = F.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cumulative = logprobs.exp().cumsum(-1)
        point = torch.rand_like(cumulative[..., :1]) * cumulative[..., -1:]  # falls into one token's part of it
        tokens = torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[..., None]).squeeze(-1)


class Decoder:
    """Samples k completions of up to R tokens for B prompts of P slots, in group rows: reads the prompts, then at each
    step a token per completion. Shapes and addresses are static and no step waits: CUDA replays steps as graphs."""

    capture = True  # until a step waits for the device

    def __init__(self, model, B: int, P: int, k: int, R: int, temperature: float, stop_ids: list[int]):
        zeros = partial(torch.zeros, device=model.device)
        model.set_attn_implementation("lanes")
        self.model, self.k, self.R, self.temperature = model, k, R, temperature
        self.stop_ids = torch.tensor(stop_ids, device=model.device)
        self.prompt_mask = zeros(B, P, dtype=torch.bool)
        self.step = zeros(1, dtype=torch.long)  # t, the index of the newest token
        self.tokens, self.logprobs = zeros(B, k, R, dtype=torch.long), zeros(B, k, R)
        # The cache appends what is read and counts its slots on the device, so that replaying a graph does so too.
        self.cache = Cache(layer_class_to_replicate=partial(StaticLayer, max_cache_len=P + k * R))
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # visible slots -> a captured step

    def read(self, ids, mask, positions, last: int):
        """Reads tokens (B, n) into the next n slots of the cache; samples, as token `step`, what follows the `last`."""
        hidden = self.model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, past_key_values=self.cache
        )[0][:, -last:].expand(-1, self.k, -1)
        for kept, new in zip((self.tokens, self.logprobs), sample(final_logits(self.model, hidden), self.temperature)):
            kept.index_copy_(2, self.step, new[..., None])

    def decode(self, visible: int):
        """Reads token t of each completion, which sees the first `visible` slots of the cache; samples token t + 1."""
        (B, P), k = self.prompt_mask.shape, self.k
        slot = torch.arange(visible - P, device=self.step.device)  # after the prompts: of lane slot % k, step slot // k
        own = (slot % k == slot[:k, None]) & (slot // k <= self.step)  # (k, visible - P)
        mask = torch.cat([self.prompt_mask[:, None].expand(B, k, P), own.expand(B, -1, -1)], dim=2)[:, None]
        positions = (self.prompt_mask.sum(1, keepdim=True) + self.step).expand(B, k)
        ids = self.tokens.index_select(2, self.step).squeeze(2)
        self.step.add_(1)
        self.read(ids, mask, positions, last=k)

    def generate(self, prompt_ids, prompt_mask):
        """Tokens and their log-probs (k, B, R) of prompts (B, P); what follows a stop token means nothing."""
        P, cuda = prompt_ids.shape[1], prompt_ids.is_cuda
        if cuda and not self.graphs and self.R > 1 and Decoder.capture:
            with torch.random.fork_rng([prompt_ids.device], device_type="cuda"):  # the trial draws nothing from the run
                self.read(prompt_ids[:, :1], *sequence_mask(prompt_mask[:, :1], 0), last=1)  # the cache gets its memory
                torch.cuda.set_sync_debug_mode("error")
                try:  # a step without a graph: libraries set themselves up, and a wait raises
                    self.decode(P + self.k * self.R)
                except RuntimeError as error:
                    Decoder.capture = False
                    say_once(f"decoding runs without CUDA graphs, which costs speed ({error})")
                torch.cuda.set_sync_debug_mode("default")
        self.prompt_mask.copy_(prompt_mask)
        self.step.zero_()
        self.cache.reset()
        self.read(prompt_ids, *sequence_mask(prompt_mask, 0), last=1)
        # A graph for each quarter of the steps (at least 128): early ones read less of the cache.
        span = max(128, -(-self.R // 4)) if cuda and Decoder.capture else 1
        for t in range(self.R - 1):
            if t % 4 == 3 and torch.isin(self.tokens[..., : t + 1], self.stop_ids).any(-1).all():
                break  # asking waits for the device, so it asks seldom
            visible = P + self.k * min(self.R, (t // span + 1) * span)
            if span > 1 and visible not in self.graphs:
                self.graphs[visible] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[visible]):
                    self.decode(visible)
            self.graphs[visible].replay() if span > 1 else self.decode(visible)
        return self.tokens.transpose(0, 1).clone(), self.logprobs.transpose(0, 1).clone()


@torch.no_grad()
def rollout(
    model,
    rows: list[dict],
    k: int,
    temperature: float,
    response_length: int,
    stop_ids: list[int],
    engine: str = "group",
    chunk_size: int = 64,
):
    """k completions of each row's prompt, at most `chunk_size` at a time: the Batch, and the log-probs (k, B, R) that
    its tokens had when they were sampled, 0 where masked. Engine "hf" is `generate` of transformers in plain rows, by
    the full softmax(logits / temperature) as well (no top-k of the model's); one more forward gives its log-probs."""
    prompts = pad([row["prompt_ids"] for row in rows], left=True)
    # Chunks of one shape share a decoder. One lives at a time: a new one's cache gets its memory when it first reads.
    decoder = lru_cache(maxsize=1)(lambda B, P: Decoder(model, B, P, k, response_length, temperature, stop_ids))
    own_config, found = model.generation_config, []
    for ids, mask in zip(*(x.to(model.device).split(max(1, chunk_size // k)) for x in prompts)):
        if engine == "hf":
            model.generation_config = transformers.GenerationConfig(
                max_new_tokens=response_length,
                eos_token_id=stop_ids,
                pad_token_id=0,
                do_sample=temperature > 0,
                temperature=temperature or 1.0,
                top_k=0,
                top_p=1.0,
            )
            out = model.generate(ids.repeat(k, 1), attention_mask=mask.repeat(k, 1).long())[:, ids.shape[1] :]
            model.generation_config = own_config  # saved later as it was loaded
            found.append([F.pad(out, (0, response_length - out.shape[1])).unflatten(0, (k, len(ids)))])
            continue
        if model.device.type == "cpu":  # elsewhere chunks of one shape can use the same graphs
            ids, mask = (x[:, -int(mask.sum(1).max()) :] for x in (ids, mask))
        found.append(decoder(*ids.shape).generate(ids, mask))
    attention_bias.cache_clear()  # its masks may lie in the memory of a graph
    tokens, *logprobs = (torch.cat(parts, dim=1) for parts in zip(*found))
    batch = make_batch(rows, tokens, stop_ids)
    logprobs = logprobs or [chunked_logprobs(model, batch, temperature or 1.0, "plain", chunk_size)]
    return batch, logprobs[0].masked_fill(~batch.response_mask, 0.0)


def sampling_model(policy, dtype: torch.dtype):
    """The policy, or where its weights are sharded or in another dtype a whole copy in `dtype`; the caller drops it."""
    if policy.dtype == dtype and not isinstance(policy, fsdp.FSDPModule):
        return policy
    with torch.device("meta"):
        model = type(policy)._from_config(policy.config, dtype=dtype).eval().requires_grad_(False)
    model.to_empty(device=policy.device).tie_weights()
    for mine, theirs in zip([*model.parameters(), *model.buffers()], [*policy.parameters(), *policy.buffers()]):
        mine.data = (theirs.full_tensor() if isinstance(theirs, dist.tensor.DTensor) else theirs).detach().to(mine)
    return model


# ---- Rewards: each is a function of a Batch that returns {name: scores (k, B) float32, NaN where it does not apply} --
def score(rewards: dict[str, Callable], weights: Sequence[float], batch: Batch):
    """Σ_i weight_i · score_i (k, B) over the rewards that apply and weigh not 0, else NaN; and all by name."""
    found = {name: values for reward in rewards.values() for name, values in reward(batch).items()}
    terms = torch.stack([(weight or math.nan) * found[name] for weight, name in zip(weights, rewards)])
    return terms.nansum(0).masked_fill(terms.isnan().all(0), math.nan), found


def completion_texts(batch: Batch, tokenizer) -> list[str]:
    """Texts of the k·B completions without the stop token and other special tokens, in the order j·B + b."""
    kept = [ids[:-1] if end else ids for ids, end in zip(batch.completion_ids(), batch.ended.flatten().tolist())]
    return tokenizer.batch_decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@torch.no_grad()
def model_reward(model, layout: str, chunk_size: int, batch: Batch) -> dict:
    """The reward model's scores where it reads the policy's tokens."""
    with on_device(model, batch.responses.device):
        scores = torch.cat([model_scores(model, part, layout) for part in batch.chunks(chunk_size)], dim=1)
    return {"reward_model": finite("a score of the reward model", scores)}


def text_reward(model, own, chunk_size: int, tokenizer, batch: Batch) -> dict:
    """The same where it has a tokenizer, `own`, that reads the text: a chat by its template; else eos ends what ended.
    Text beyond its positions is cut from the left, which reward_model/cut counts."""
    sequences, k, bos, eos, device = [], len(batch.responses), own.bos_token_id, own.eos_token_id, batch.ended.device
    for row, text, ended in zip(batch.rows * k, completion_texts(batch, tokenizer), batch.ended.flatten().tolist()):
        chat = isinstance(row["prompt"], list) and own.chat_template is not None
        turns = [*row["prompt"], {"role": "assistant", "content": text}] if chat else None
        text = own.apply_chat_template(turns, tokenize=False) if chat else row["prompt_text"] + text
        ids = own(text, add_special_tokens=not chat)["input_ids"]
        ids = ids[1:] if ids[:2] == [bos, bos] else ids  # the policy's chat template may have added one
        sequences.append(ids + [eos] * (ended and not chat and eos not in (None, *ids[-1:])))
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    ids, mask = (x.to(device) for x in pad([ids[-most:] for ids in sequences]))
    again = Batch(batch.rows * k, ids[:, :1], mask[:, :1], ids[None, :, 1:], mask[None, :, 1:], batch.ended.view(1, -1))
    cut = torch.tensor([float(len(ids) > most) for ids in sequences], device=device)
    found = model_reward(model, "plain", chunk_size, again) | {"reward_model/cut": cut}
    return {name: values.view(k, -1) for name, values in found.items()}


def load_reward_model(args, tokenizer, rows: list[dict]) -> dict[str, Callable]:
    """{"reward_model": reward}. It reads the policy's tokens if its tokenizer, but for [PAD], is the policy's."""
    flag, path, size = "--reward_model_path", args.reward_model_path, args.local_rollout_forward_batch_size
    own = load_tokenizer(args, flag, path)
    model = load_model(args, f"{flag} (with one label)", path, False, AutoModelForSequenceClassification, num_labels=1)
    embeddings = model.config.get_text_config().vocab_size
    require(
        hasattr(model, "score") and own.vocab_size <= embeddings,
        f"{flag} {path}: has no `score` head, or fewer embeddings than its tokenizer has words",
    )
    other_words = {word for word, _ in own.get_vocab().items() ^ tokenizer.get_vocab().items()}
    if not other_words or other_words <= {own.pad_token, tokenizer.pad_token} and len(tokenizer) <= embeddings:
        return {"reward_model": partial(model_reward, model, fit(model, args, rows), size)}
    return {"reward_model": partial(text_reward, model, own, size, tokenizer)}


def load_functions(specs: Sequence[str], flag: str, tokenizer, row: dict) -> dict[str, Callable]:
    """name -> reward, for functions `file.py:function` or `module:function`; they may import what lies beside them,
    and must take the columns of a dataset's row, see prepare_row."""
    rewards, given = {}, {**row["columns"], "prompts": [], "completions": [], "completion_ids": []}
    given.pop("prompt", None)
    for spec in specs:
        (source, _, name), label = spec.rpartition(":"), f"--{flag} {spec}"
        path = Path(source).resolve()
        sys.path.append(str(path.parent))
        with explained(f"{label}: must be file.py:function or module:function, with arguments {', '.join(given)}"):
            module = importlib.import_module(path.stem if path.suffix == ".py" else source)
            require(path.suffix != ".py" or path.samefile(module.__file__), f"rename it: {module} has the same name")
            function = getattr(module, name)
            inspect.signature(function, follow_wrapped=False).bind(**given)
        require(specs.count(spec) == 1, f"{label}: is named twice")
        name = spec if name in {*rewards, "reward_model"} else name
        rewards[name] = partial(function_reward, label, function, name, tokenizer)
    return rewards


def function_reward(label: str, function: Callable, name: str, tokenizer, batch: Batch) -> dict:
    """Scores of a reward function by its `name`, NaN where it returned None. It gets prompts (as the dataset has them),
    completions (texts), completion_ids (with the stop token) and the other columns by their names: lists, j·B + b."""
    rows = batch.rows * len(batch.responses)
    given = {column: [row["columns"][column] for row in rows] for column in rows[0]["columns"] if column != "prompt"}
    given |= {
        "prompts": [row["prompt"] for row in rows],
        "completions": completion_texts(batch, tokenizer),
        "completion_ids": batch.completion_ids(),
    }
    with explained(f"{label} raised an error", place=True):
        scores = function(**given)
    with explained(f"{label} must return {len(rows)} finite numbers or None, not {' '.join(repr(scores).split()):.50}"):
        scores = [value if value is None else float(value) for value in scores]
        numbers = torch.tensor([math.nan if value is None else value for value in scores])
        require(numbers.isfinite().sum() == len(scores) - scores.count(None), "one is not finite")
        return {name: numbers.to(batch.ended.device).view(batch.ended.shape)}


# ---- Data ------------------------------------------------------------------------------------------------------------
def load_rows(name: str, split: str) -> list[dict] | None:
    """Rows of a split, None where there is none. `name`: a .jsonl file (of train), a folder, or of package datasets."""
    with explained(f"--dataset_name {name[:99]}: no .jsonl file or folder of them; for others: pip install datasets"):
        files = {"train": Path(name)} if name.endswith(".jsonl") else {x.stem: x for x in Path(name).glob("*.jsonl")}
        if not files:
            from datasets import load_dataset

            return list(load_dataset(name).get(split, ())) or None
        lines = files[split].read_bytes().splitlines() if split in files else []
    rows = []
    for number, line in enumerate(lines, 1):
        with explained(f'{files[split]}: line {number} must be a JSON object like {{"prompt": "..."}}'):
            rows += [dict(**json.loads(line))] if line.strip() else []
    return rows if split in files else None


def prepare_row(row: dict, tokenizer) -> dict:
    """A dataset row as the dict returned below. A missing `prompt` is the turns of `messages` up to the user's first, a
    missing `completion` the assistant's next turn. A single message is taken as it is where no chat template is set."""
    prompt, messages, reference = row.get("prompt"), row.get("messages"), row.get("completion")
    if prompt is None:
        prompt = messages[: [message["role"] for message in messages].index("user") + 1]
    chat = isinstance(prompt, list)
    templated = chat and (tokenizer.chat_template is not None or len(prompt) > 1)  # several need a template, or raise
    if reference is None and isinstance(messages, list):
        reference = [turn for turn in messages[len(prompt) * chat :] if turn["role"] == "assistant"][:1] or None
    text, reference = (value[-1]["content"] if isinstance(value, list) else value for value in (prompt, reference))
    require(isinstance(text, str) and isinstance(reference, (str, type(None))), "prompt and completion must be texts")
    if templated:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=not templated)["input_ids"]
    require(ids, "the prompt is empty")
    return {
        "prompt": prompt,
        "prompt_text": text,
        "prompt_ids": ids,
        "reference": reference,
        "columns": row,
        "reference_ids": tokenizer(reference or "", add_special_tokens=False)["input_ids"],
    }


def prepare_rows(rows: list[dict], tokenizer, max_prompt_length: int, name: str) -> list[dict]:
    """All rows of a split through `prepare_row`, without those longer than `max_prompt_length` tokens."""
    prepared = []
    for number, row in enumerate(rows, 1):
        with explained(f"{name}, row {number}: needs `prompt` (text or messages) or `messages`; `completion`: a text"):
            prepared.append(prepare_row(row, tokenizer))
    kept = [row for row in prepared if len(row["prompt_ids"]) <= max_prompt_length]
    print(f"{name}: {len(kept):,} of {len(rows):,} prompts are within --max_prompt_length {max_prompt_length} tokens")
    require(kept or not rows, f"{name}: no prompt is within --max_prompt_length {max_prompt_length} tokens")
    return kept


def load_data(args: Args, tokenizer) -> list[list[dict]]:
    """Rows to train and to evaluate on, as `prepare_row` makes them; the latter may be none."""
    name, split, wanted = args.dataset_name, args.dataset_train_split, args.dataset_test_split
    train = load_rows(name, split)
    test = load_rows(name, wanted or "test") if wanted or split != "test" else None
    require(train, f"--dataset_name {name}: has no row in its split {split}; name one by --dataset_train_split")
    require(test is not None or wanted is None, f"--dataset_test_split {wanted}: {name} has no such split")
    if test is None:
        n = min(100, len(train) // 10, args.num_eval_prompts)
        train, test = train[: len(train) - n], train[len(train) - n :]
        print(f"{name}: the last {n} rows of its split {split} are held out to evaluate on")
    columns = dict.fromkeys(column for row in train + test for column in row)  # None where a row lacks one
    return [
        prepare_rows([columns | row for row in rows], tokenizer, args.max_prompt_length, f"{name}, {part}")
        for part, rows in ((split, train), ("held out", test[: args.num_eval_prompts]))
    ]


# ---- Models ----------------------------------------------------------------------------------------------------------
def load_tokenizer(args, flag: str, path: str):
    """The tokenizer of a model. It needs no pad token: padding is masked, so any id will do."""
    with explained(f"{flag} {path}: cannot be loaded as a folder or Hub model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    require(len(tokenizer) > len(tokenizer.all_special_ids), f"{flag} {path}: no tokenizer with words; save it there")
    return tokenizer


def stop_token_ids(args, model, tokenizer) -> list[int]:
    """Ids of the tokens that end a completion: the one asked for, or the tokenizer's and generation config's eos."""
    size, configured = model.config.get_text_config().vocab_size, model.generation_config.eos_token_id
    ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    if args.stop_token not in (None, "eos"):
        ids = tokenizer(args.stop_token, add_special_tokens=False)["input_ids"]
        known = ids != [tokenizer.unk_token_id] or args.stop_token == tokenizer.unk_token  # one text for unk and eos
        ids = ids if len(ids) == 1 and known else []
    ids = ids if args.stop_token_id is None else [args.stop_token_id]
    ids = [number for number in dict.fromkeys(ids) if number is not None]
    require(
        ids and max(ids) < size,
        f"--stop_token {args.stop_token} --stop_token_id {args.stop_token_id}: must name "
        f"one token, of the model's {size}; without them the tokenizer needs an eos token",
    )
    return ids


def load_model(args, flag: str, path: str, trained: bool, auto_class=AutoModelForCausalLM, **options):
    """A model without dropout, on its device or, with --sharding fsdp, a part of each of its layers."""
    label, device, trust = f"{flag} {path}", torch.device(args.device), {"trust_remote_code": args.trust_remote_code}
    dtype = torch.float32 if trained else getattr(torch, args.dtype)
    with explained(f"{label}: cannot be loaded as a folder or Hub model"):
        config = transformers.AutoConfig.from_pretrained(path, **trust, **options)
        options = {"config": config, "attn_implementation": args.attn_implementation, "dtype": dtype} | trust
        if args.sharding == "ddp" or dist.get_rank() == 0:
            model, info = auto_class.from_pretrained(path, output_loading_info=True, **options)
        else:
            with torch.device("meta"):
                model, info = auto_class.from_config(**options), {}
    missing = gather([sorted(info.get("missing_keys", ()))])[0]
    require(not missing, f"{label}: is no trained model of this kind, it has no {missing[:1]}")
    head, tied = model.get_output_embeddings(), getattr(config.get_text_config(), "tie_word_embeddings", False)
    require(
        not (head and tied) or head.weight is model.get_input_embeddings().weight,
        f"{label}: its head is not its embedding; set tie_word_embeddings to false in its config.json",
    )
    model.eval().requires_grad_(trained)
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    layers = max(lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()), default=[])
    for layer in layers if trained and args.gradient_checkpointing else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    home = torch.device("cpu") if args.offload_reference and not trained else device
    if args.sharding == "ddp":
        return model.to(home)
    # FSDP2 gathers a layer in --dtype when it is needed. The first rank sends weights and buffers where they belong.
    weights, buffers = (model.state_dict(), [*model.buffers()]) if dist.get_rank() == 0 else ({}, None)
    model.to("meta").tie_weights()
    options = {
        "mesh": dist.init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": fsdp.MixedPrecisionPolicy(getattr(torch, args.dtype), reduce_dtype=torch.float32),
        "offload_policy": fsdp.CPUOffloadPolicy() if home != device else fsdp.OffloadPolicy(),
    }
    for module in [*layers, model]:
        fsdp.fully_shard(module, reshard_after_forward=True, **options)
    model.set_reduce_scatter_unused_params(True)  # an expert that no token of a rank went to
    model.forward = lambda function, *args, **options: function(model, *args, **options)  # see fsdp_forward
    model.to_empty(device=home).tie_weights()
    state_dict.set_model_state_dict(model, weights, options=FROM_FIRST)
    for mine, theirs in zip(model.buffers(), gather([buffers])[0]):  # some are in no state dict: rotary frequencies
        mine.data = theirs.to(device)
    return model


@torch.no_grad()
@fsdp_forward
def fit(model, args, rows: list[dict]) -> str:
    """The layout that a model takes for the prompts of `rows`: --layout, or plain where a sliding window is shorter
    than prompt and completion, or where a trial, prompts of full and half length, gives other numbers in group rows, as
    with linear attention or ALiBi. Refuses a policy that does more to its logits than `final_logits`, and a model with
    too few positions or embeddings."""
    config, name, k, R = model.config.get_text_config(), type(model).__name__, args.rloo_k, args.response_length
    longest, highest = (max(of(row["prompt_ids"]) for row in rows) for of in (len, max))
    positions, window = (getattr(config, n, None) or sys.maxsize for n in ("max_position_embeddings", "sliding_window"))
    require(
        longest + R <= positions,
        f"{name}: has {positions} positions; the longest prompt, {longest} tokens, and "
        f"--response_length {R} need more: lower --max_prompt_length or --response_length",
    )
    require(
        highest < config.vocab_size,
        f"{name}: has no embedding for token {highest} of a prompt, only "
        f"{config.vocab_size}: is --model_name_or_path the tokenizer of another model?",
    )
    device, dtype, layout = torch.device(args.device), getattr(torch, args.dtype), "plain"
    tokens = torch.arange(longest + 2 * k * R, device=device) * 7919 % config.vocab_size
    trial = [{"prompt_ids": tokens[:n].tolist()} for n in (longest, longest - longest // 2)]
    batch = make_batch(trial, tokens[longest:].view(k, 2, R), stop_ids=[-1])
    with on_device(model, device), torch.autocast(device.type, dtype, dtype != torch.float32):
        if model.get_output_embeddings() is not None:  # a policy
            with explained(f"{name}: cannot be run"):
                ours = final_logits(model, model.base_model(tokens[None, :2])[0])
                theirs = type(model).forward(model, tokens[None, :2]).logits.float()
            require(ours.isfinite().all(), f"{name}: its logits are not finite; is the file damaged?")
            require((theirs - ours).norm() <= 0.01 * ours.norm(), f"{name}: does more to its logits than final_logits")
        if args.layout == "group" and longest + R <= window and model.config._attn_implementation in ("sdpa", "lanes"):
            try:
                with explained(f"{name}: group rows do not run"):  # a kernel that takes no such mask
                    plain, group = (completion_hidden(model, batch, layout).float() for layout in ("plain", "group"))
                    if (plain - group).norm() < (1e-3 if dtype == torch.float32 else 0.1) * plain.norm():
                        layout = "group"
            except InputError as error:
                print(error)
            for layer in (x for x in model.modules() if isinstance(x, fsdp.FSDPModule) and x is not model):
                layer.reshard()  # one that failed is still gathered
            model.set_attn_implementation("sdpa")
    if layout != args.layout:
        print(f"{name}: its attention is not plain sdpa over the whole row, so it runs with --layout plain")
    return layout


# ---- Processes: one, or as many as torchrun starts, each with prompts of its own -------------------------------------
def start_processes(device: torch.device) -> tuple[int, int]:
    """Rank of this process and how many there are, by torchrun's environment variables; `device` becomes CUDA's own. On
    the CPU freed tensors stay its memory: to get that anew from the system can take a tenth of an update."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if device.type == "cpu":
        with suppress(AttributeError):  # glibc has mallopt
            for option, value in ((-4, 0), (-1, -1)):  # M_MMAP_MAX: from the heap alone; M_TRIM_THRESHOLD: never
                ctypes.CDLL(None).mallopt(option, value)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # with a mask its backward gives NaN at times (pytorch#196678)
    if world > 1 and not dist.is_initialized():
        with explained(f"WORLD_SIZE {world}: the processes do not meet"):  # timeout: saving may take an hour
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=2))
    return dist.get_rank() if world > 1 else 0, world


def sum_over_ranks(x):
    """Σ of x over the processes, in place and on each of them."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def gather(items: list) -> list:
    """The lists of all processes, which are of one length, as one on each of them: first items, second items, ..."""
    parts = [items]
    if dist.is_initialized():
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, items)
    return [item for group in zip(*parts) for item in group]


@contextmanager
def on_device(model, device: torch.device):
    """Within it a model is on the device; after it, back where it was. FSDP moves its models itself."""
    home = device if isinstance(model, fsdp.FSDPModule) else model.device
    if home != device:
        model.to(device)
    yield
    if home != device:
        model.to(home)


def clock(device: torch.device) -> float:
    """Seconds, read once everything that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- Checkpoints -----------------------------------------------------------------------------------------------------
# checkpoint-<update>/ holds policy and tokenizer as save_pretrained leaves them, optimizer.pt, and state.json:
# counters, flags, how long the run's files were, and the update's metrics, which are written after its evaluation.

FULL = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathered from all ranks, for the first one
FROM_FIRST = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
DAMAGED = "checkpoint (if it is damaged, move it away, and --resume takes the one before)"
MAKES_ANOTHER_RUN = {
    "sft_model_path",
    "model_name_or_path",
    "reward_model_path",
    "reward_fns",
    "dataset_name",
    "seed",
    "dataset_train_split",
    "max_prompt_length",
    "rloo_k",
    "completions per update",
    "training prompts",
}


def checkpoints(output: Path) -> list[Path]:
    """The checkpoints in `output`, the newest first."""
    found = (path for path in output.glob("checkpoint-*") if path.name[11:].isdecimal())
    return sorted(found, key=lambda path: -int(path.name[11:]))


def save_checkpoint(output: Path, state: dict, policy, optimizer, tokenizer, limit: int, rank: int):
    """Writes under another name, flushes, then renames: a checkpoint that exists is whole. All ranks call it."""
    weights, moments = state_dict.get_state_dict(policy, optimizer, options=FULL)
    target, unfinished = output / f"checkpoint-{state['update']}", output / "unfinished-checkpoint"
    if rank > 0 or target.exists():
        return
    with explained(f"{target} cannot be saved; make room and go on by --resume"), ExitStack() as at_the_end:
        at_the_end.callback(shutil.rmtree, unfinished, ignore_errors=True)
        policy.save_pretrained(unfinished, state_dict=weights)
        tokenizer.save_pretrained(unfinished)
        torch.save(moments, unfinished / "optimizer.pt")
        (unfinished / "state.json").write_text(json.dumps(state))
        os.sync()
        unfinished.rename(target)
        for old in checkpoints(output)[limit:]:
            shutil.rmtree(old.rename(unfinished))


def load_state(folder: Path, flags: dict, rank: int) -> dict:
    """The state of a checkpoint with a new run's `flags`, and its optimizer's state, which the first rank sends to the
    others. Says which flags are changed; refuses those of another run."""
    with explained(f"{DAMAGED} {folder}: cannot be loaded"):
        state = json.loads((folder / "state.json").read_text())
        moments = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True) if rank == 0 else {}
        changed = {
            name: f"{name} {state['flags'].get(name)} -> {value}"
            for name, value in flags.items()
            if state["flags"].get(name) != value and name not in ("resume", "output_dir", "device")
        }
    another = [text for name, text in changed.items() if name in MAKES_ANOTHER_RUN]
    require(not another, f"--resume: {folder.parent} is a run with other flags: {', '.join(another)}")
    print(f"resumed from {folder}" + f"; changed: {', '.join(changed.values())}" * bool(changed))
    return state | {"flags": flags, "optimizer": moments}


# ---- Command line ----------------------------------------------------------------------------------------------------
class InputError(ValueError):
    """A mistake in what the user gave: the command line prints it as one line, without a stack trace."""


def require(condition: object, message: str):
    if not condition:
        raise InputError(message)


@contextmanager
def explained(message: str, place: bool = False):
    """An error within, unless of memory, becomes an InputError: `message`, what it said and, if wanted, its `place`."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # libraries and users' files raise what they like
        said = (str(error).strip().splitlines() or [""])[0][:200]
        frame = inspect.getinnerframes(error.__traceback__, context=0)[:3][-1]  # the user's, not what that called
        said += f"; {frame.filename}, line {frame.lineno}" * place
        raise InputError(f"{message} ({type(error).__name__}: {said})") from error


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line (default: sys.argv) as Args. At --help and at a flag that does not exist or parse tyro exits."""
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
    """Fills in the defaults that depend on other flags and refuses what cannot run, before anything is loaded."""
    args = replace(args, kl_level="token" if args.token_level_kl else args.kl_level)
    if args.dataset_name is None:
        require(MINI_TLDR.is_dir(), f"--dataset_name is needed: the embedded task is not at {MINI_TLDR}")
        args.dataset_name = str(MINI_TLDR)
        args.sft_model_path = args.sft_model_path or args.model_name_or_path or str(MINI_TLDR / "sft")
        args.judge_fn = args.judge_fn or f"{MINI_TLDR}/mini_tldr.py:gold_judge"
        args.reward_model_path = args.reward_model_path or (None if args.reward_fns else str(MINI_TLDR / "reward"))
    args.sft_model_path = args.sft_model_path or args.model_name_or_path
    args.model_name_or_path = args.model_name_or_path or args.sft_model_path
    args.cliprange_high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if args.device == "cuda" else args.device
    args.sharding = args.sharding if int(os.environ.get("WORLD_SIZE", 1)) > 1 else "ddp"  # one process holds everything
    num_rewards = (args.reward_model_path is not None) + len(args.reward_fns)
    args.reward_weights = weights = args.reward_weights or (1.0,) * num_rewards
    require(args.output_dir or not args.resume, "--resume needs --output_dir: which run shall go on?")
    args.output_dir = args.output_dir or f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    least = dict.fromkeys(
        [
            "max_prompt_length",
            "response_length",
            "local_rollout_forward_batch_size",
            "num_ppo_epochs",
            "num_mini_batches",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "save_total_limit",
        ],
        1,
    ) | {"rloo_k": 2, "temperature": 1e-6}
    for name, value in vars(args).items():
        fine = not isinstance(value, (int, float)) or math.isfinite(value) and value >= least.get(name, 0)
        require(fine, f"--{name} {value}: must be finite and at least {least.get(name, 0)}")
    k, size, output = args.rloo_k, args.per_device_train_batch_size, Path(args.output_dir)
    require(size % k == 0, f"--per_device_train_batch_size {size}: must be a multiple of --rloo_k {k}, whole groups")
    require(args.sft_model_path, "--sft_model_path is needed with --dataset_name: what shall be trained?")
    require(num_rewards, "no reward: give --reward_model_path, --reward_fns or both")
    require(
        len(weights) == num_rewards and all(map(math.isfinite, weights)),
        f"--reward_weights {weights}: must be "
        f"{num_rewards} finite numbers, the reward model's first, then those of --reward_fns",
    )
    require(args.warmup_ratio < 1, f"--warmup_ratio {args.warmup_ratio}: must be below 1")
    require(args.stop_token is None or args.stop_token_id is None, "give --stop_token or --stop_token_id, not both")
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    require(existing.is_dir() and os.access(existing, os.W_OK), f"--output_dir {output}: cannot write to {existing}")
    require(
        not any(output.glob("*")) or args.resume and (output / "metrics.jsonl").is_file(),
        "--output_dir "
        f"{output}: is not empty; name a new folder, or go on by --resume if it holds a run (metrics.jsonl)",
    )
    with explained(f"--device {args.device}: cannot be used"):
        torch.zeros(1, device=args.device).item()
    return args


class Unread(ContextDecorator, suppress):
    """Around what writes to the screen: a run goes on when nobody reads it, as when Ctrl-C has ended `| tee log`."""


def command_line(argv: list[str] | None = None):
    """`python rloo.py argv`: a mistake ends it with one line and status 1, SIGTERM and Ctrl-C after this update."""
    rank, signals = int(os.environ.get("RANK", 0)), []
    if rank > 0:  # one process speaks for all
        sys.stdout = open(os.devnull, "w")
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    for stream in (sys.stdout, sys.stderr):
        stream.write, stream.flush = map(Unread(OSError), (stream.write, stream.flush))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def note(number: int, frame):
        if rank == 0 and not signals:
            with Unread(OSError):
                os.write(2, b"\nrloo.py stops: it finishes and saves this update. Ctrl-C again ends it now.\n")
        signal.signal(signal.SIGINT, note if "RANK" in os.environ else signal.SIG_DFL)  # torchrun may send each twice
        signals.append(number)

    for number, in_child in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.SIG_IGN)):
        signal.signal(number, note)
        os.register_at_fork(after_in_child=partial(signal.signal, number, in_child))  # processes of reward functions
    try:
        main(parse_args(argv), signals)
        if dist.is_initialized():
            dist.destroy_process_group()
    except (InputError, OSError, MemoryError, RuntimeError, SystemExit) as error:
        text = str(error) + "; make room and go on by --resume" * (getattr(error, "filename", "") is None)
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text:
            text = (
                "out of memory: lower --local_rollout_forward_batch_size, or --per_device_train_batch_size and "
                "raise --gradient_accumulation_steps by the same factor"
            )
        elif isinstance(error, RuntimeError) and not (dist.is_initialized() and "closed by peer" in text):
            raise
        if rank > 0:  # the first rank most likely says the same, and torchrun then ends this one: wait for that
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        sys.exit(error.code if isinstance(error, SystemExit) else f"rloo.py: {text}")


if __name__ == "__main__":
    command_line()
