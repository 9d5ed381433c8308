"""RLOO (REINFORCE Leave-One-Out) for language models in one file of PyTorch.

    python rloo.py                                  # trains the embedded mini TL;DR task, a few minutes on 2 cores
    python rloo.py --rloo_k 4 --kl_coef 0.03        # the same with other settings; --help lists them all

For each prompt the policy samples k completions. The reward of a completion is its score minus β times its KL
divergence from the reference model; its baseline is the mean reward of the k - 1 other completions of its prompt:

    R_j = score_j - β Σ_t kl_jt      A_j = R_j - Σ_{i≠j} R_i / (k - 1)      loss = mean_j max(-A_j ρ_j, -A_j clip(ρ_j))
    ρ_j = π(y_j) / π_old(y_j), π_old being the policy that sampled y_j: 1 in the first step; clip: to [1 - ε, 1 + ε]

Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
in LLMs", arXiv:2402.14740. Flags and metrics keep the names of TRL's RLOOTrainer.

The file is read from top to bottom: flags, data, layout, log-probs, rewards, rollout, processes, RLOO maths,
evaluation, loading, checkpoints, main. Who trains in one process may skip `processes`.
Shapes: k completions per prompt, B prompts per update, P prompt slots (left-padded), R response slots (right-padded).
Everything per completion leads with the axes (k, B); flattened, completion (j, b) is row j·B + b.
Masks are boolean, true on what is kept, and are made from positions, never by comparing tokens with the pad token.
"""

import dataclasses
import hashlib
import importlib.util
import io
import itertools
import json
import logging
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import textwrap
import time
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field, make_dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterable, Iterator, Literal, NamedTuple, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
import transformers
import tyro
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard,
                                    register_fsdp_forward_method)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

MINI_TLDR = Path(__file__).resolve().parent / "benchmark" / "mini_tldr"  # the embedded task, used where none is named


class InputError(ValueError):
    """A mistake in what the user gave: main prints it as one line, without a stack trace."""


def first_line(error: BaseException) -> str:
    """What an error says, short enough to stand in a line of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# ---- Flags -----------------------------------------------------------------------------------------------------------

FLAGS_HELP = "RLOO (REINFORCE Leave-One-Out) for language models. Without flags it trains the embedded mini TL;DR task."


@dataclass
class Models:
    """save_pretrained folders or Hub ids. Where no dataset is given, they are those of the embedded mini TL;DR"""

    sft_model_path: Optional[str] = None  # policy to train, also the reference; if not given, model_name_or_path
    model_name_or_path: Optional[str] = None  # where the tokenizer comes from; if not given, sft_model_path
    reward_model_path: Optional[str] = None  # sequence classifier with one label that scores prompt + completion
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the forwards; trained weights, log-probs, losses: float32
    attn_implementation: str = "sdpa"  # attention kernel of transformers: sdpa, eager, flash_attention_2, ...
    trust_remote_code: bool = False  # run code that comes with a Hub model or tokenizer


@dataclass
class Data:
    """rows have `prompt` (text or chat messages) or `messages`; `completion` is a reference to compare with"""

    dataset_name: Optional[str] = None  # .jsonl or .json file, folder of <split>.jsonl, or Hub id; else mini TL;DR
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str = "test"  # split to evaluate on; if there is none, the last tenth (at most 100) of train
    max_prompt_length: int = 512  # tokens; longer prompts are left out


@dataclass
class Rollout:
    """how completions are sampled"""

    response_length: int = 53  # R: tokens sampled per completion at most
    temperature: float = 0.7  # of the softmax that completions are sampled from and scored by
    stop_token: Optional[str] = None  # text of the token that ends a completion; if not given, or "eos": all eos tokens
    stop_token_id: Optional[int] = None  # the same by its id
    rollout_engine: Literal["group", "hf"] = "group"  # the group layout, or `generate` with a row per completion
    local_rollout_forward_batch_size: int = 64  # completions per forward where no gradient is needed


@dataclass
class RLOO:
    """the algorithm"""

    rloo_k: int = 4  # k: completions per prompt, at least 2 (TRL: 2)
    kl_coef: float = 0.05  # β: weight of the KL divergence from the reference; at 0 no reference is loaded
    kl_level: Literal["sequence", "token"] = "sequence"  # reward and ratio per completion, or reward-to-go per token
    token_level_kl: bool = False  # TRL's flag: the same as kl_level=token
    missing_eos_penalty: Optional[float] = None  # subtracted from the score of a completion that did not end in time
    normalize_reward: bool = False  # scores to mean 0 and standard deviation 1 over the update
    reward_clip_range: Optional[float] = 10.0  # clamp scores to ± this, after the two above; None: off
    normalize_advantage: bool = False  # advantages to mean 0 and standard deviation 1 over the update
    mask_truncated_completions: bool = False  # unfinished completions: weight 0 in the loss, kept in the baselines
    cliprange: float = 0.2  # ε: the ratio is clipped to [1 - ε, 1 + ε]
    cliprange_high: Optional[float] = None  # another ε for the upper side; if not given, cliprange
    num_ppo_epochs: int = 1  # passes over the completions of an update (TRL: 4)
    num_mini_batches: int = 1  # optimizer steps per pass


@dataclass
class Rewards:
    """functions, each file.py:function or module:function, beside or instead of a reward model:
    function(prompts, completions, completion_ids, **columns) -> list of float or None"""

    reward_fns: tuple[str, ...] = ()  # reward functions
    reward_weights: Optional[tuple[float, ...]] = None  # one per reward, the reward model's first; if not given, all 1
    judge_fn: Optional[str] = None  # only evaluates: its win rate is reported; on mini TL;DR its gold judge


@dataclass
class BatchSize:
    """an update, of each process, is per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches
    completions"""

    per_device_train_batch_size: int = 64  # completions per forward and backward, a multiple of rloo_k (TRL: 8)
    gradient_accumulation_steps: int = 2  # forwards and backwards per optimizer step (TRL: 1)
    total_episodes: int = 6_400  # completions to sample in the whole run, rounded up to whole updates


@dataclass
class Optimizer:
    """AdamW"""

    learning_rate: float = 5e-4  # at its peak, for mini TL;DR's tiny model (TRL: 5e-5; 3e-6 for pythia-1b)
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"  # its course over the run
    warmup_ratio: float = 0.0  # part of the run over which it rises from 0
    adam_eps: float = 1e-8  # ε
    weight_decay: float = 0.0  # weight decay
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm; 0: off


@dataclass
class Run:
    """what a run leaves and shows"""

    exp_name: str = "rloo"  # name of the run
    seed: int = 1  # of sampling and shuffling: the same seed on the same machine repeats a run exactly
    output_dir: Optional[str] = None  # folder for all that the run leaves; else runs/<exp_name>__<seed>__<time>
    save_steps: int = 100  # updates between checkpoints; 0: only at the end and when the run is told to stop
    save_total_limit: int = 2  # newest checkpoints to keep
    resume: bool = False  # continue from the newest whole checkpoint in output_dir, or begin where there is none
    num_sample_generations: int = 4  # evaluations, with completions shown, between the first and the last
    num_eval_prompts: int = 500  # held-out prompts to evaluate on, at most
    track: bool = False  # log to Weights & Biases
    wandb_project_name: str = "rloo"  # its project
    wandb_entity: Optional[str] = None  # its entity (team)
    device: Optional[str] = None  # cpu, cuda, cuda:1, ...; if not given, cuda if there is one


@dataclass
class Scale:
    """memory and devices: torchrun --nproc_per_node N rloo.py ... runs N processes"""

    layout: Literal["group", "plain"] = "group"  # a row per prompt with its k completions, or a row per completion
    sharding: Literal["ddp", "fsdp"] = "ddp"  # each process holds all weights, or its part of them (FSDP2)
    gradient_checkpointing: bool = False  # compute the layers' activations again in backward instead of keeping them
    offload_reference: bool = False  # reference and reward model lie in the CPU's memory while they are not used


@dataclass
class Args(Models, Data, Rollout, RLOO, Rewards, BatchSize, Optimizer, Run, Scale):
    """All flags. Names and defaults are TRL's where no other is named."""


def parse_args(argv: Optional[list[str]] = None) -> Args:
    """The command line (default: sys.argv) as Args. A flag that does not exist or parse is an InputError."""
    groups = [(group.__name__, group, field(default_factory=group)) for group in Args.__bases__]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            flags = tyro.cli(make_dataclass("Flags", groups), args=argv, description=FLAGS_HELP, use_underscores=True,
                             config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes))
    except SystemExit as end:
        if end.code in (0, None):  # --help
            raise
        text = " ".join(re.sub("╭.*╮|[─-╿]", " ", said.getvalue()).split())  # without tyro's boxes and their titles
        raise InputError(re.split(" (Argument|For full) helptext", text)[0] + "; see --help") from None
    return Args(**{name: value for group in vars(flags).values() for name, value in vars(group).items()})


def resolve_args(args: Args) -> Args:
    """Fills in the defaults that depend on other flags and refuses what cannot run, before anything is loaded."""

    def require(condition: bool, message: str):
        if not condition:
            raise InputError(message)

    args = dataclasses.replace(args)
    if args.dataset_name is None:
        require(MINI_TLDR.is_dir(), f"--dataset_name is needed: the embedded task is not at {MINI_TLDR}")
        args.dataset_name = str(MINI_TLDR)
        args.sft_model_path = args.sft_model_path or args.model_name_or_path or str(MINI_TLDR / "sft")
        args.judge_fn = args.judge_fn or f"{MINI_TLDR}.py:gold_judge"
        if args.reward_model_path is None and not args.reward_fns:
            args.reward_model_path = str(MINI_TLDR / "reward")
    args.sft_model_path = args.sft_model_path or args.model_name_or_path
    args.model_name_or_path = args.model_name_or_path or args.sft_model_path
    args.kl_level = "token" if args.token_level_kl else args.kl_level
    args.cliprange_high = args.cliprange if args.cliprange_high is None else args.cliprange_high
    require(args.output_dir is not None or not args.resume, "--resume needs --output_dir: which run shall go on?")
    args.output_dir = args.output_dir or f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda":
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    num_rewards = (args.reward_model_path is not None) + len(args.reward_fns)
    args.reward_weights = (1.0,) * num_rewards if args.reward_weights is None else args.reward_weights

    may_be_zero = ("seed", "save_steps", "num_sample_generations", "num_eval_prompts")  # as may a stop_token_id
    for flag in dataclasses.fields(args):
        name, value = flag.name, getattr(args, flag.name)
        if isinstance(value, (int, float)):
            require(math.isfinite(value) and value >= 0, f"--{name} {value}: must be finite and not negative")
            require(value > 0 or flag.type is not int or name in may_be_zero, f"--{name} {value}: must be at least 1")
    require(args.sft_model_path is not None, "--sft_model_path is needed with --dataset_name: what shall be trained?")
    require(num_rewards > 0, "no reward: give --reward_model_path, --reward_fns or both")
    require(len(args.reward_weights) == num_rewards, f"--reward_weights has {len(args.reward_weights)} numbers for "
            f"{num_rewards} rewards (the reward model first, then --reward_fns)")
    require(all(map(math.isfinite, args.reward_weights)), f"--reward_weights {args.reward_weights}: must be finite")
    require(len(set(args.reward_fns)) == len(args.reward_fns), "--reward_fns names a function twice")
    require(args.seed < 2**32, f"--seed {args.seed}: must be below 2**32")
    require(args.rloo_k >= 2, f"--rloo_k {args.rloo_k}: must be at least 2: the baseline is the mean of the others")
    require(args.per_device_train_batch_size % args.rloo_k == 0, f"--per_device_train_batch_size "
            f"{args.per_device_train_batch_size}: must be a multiple of --rloo_k {args.rloo_k}, it holds whole groups")
    require(args.warmup_ratio <= 1, f"--warmup_ratio {args.warmup_ratio}: must be at most 1")
    require(args.attn_implementation != "flex_attention", "--attn_implementation flex_attention: takes no mask of ours")
    require(args.temperature > 0, "--temperature 0: must be above 0 to sample (evaluation is greedy as well)")
    require(args.stop_token is None or args.stop_token_id is None, "give --stop_token or --stop_token_id, not both")
    output = Path(args.output_dir)
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    require(existing.is_dir() and os.access(existing, os.W_OK), f"--output_dir {output}: cannot write to {existing}")
    used = existing == output and any(path.name != "args.json.new" for path in output.iterdir())  # written first
    require(not used or args.resume, f"--output_dir {output}: exists and is not empty; name a new folder, or go on "
            "with that run by --resume: nothing is overwritten")
    require(not used or (output / "args.json").is_file(), f"--output_dir {output}: holds files, but no run to resume")
    try:
        torch.zeros(1, device=args.device).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {args.device}: cannot be used ({first_line(error)})") from error
    return args


# ---- Data ------------------------------------------------------------------------------------------------------------


def load_hub_rows(name: str, split: str) -> Optional[list[dict]]:
    """Rows of a split of a dataset on the Hub, or None where it has no such split; needs the datasets package."""
    name_flag = f"--dataset_name {name[:200]}: no such file or folder"
    try:
        import datasets
    except ImportError as error:
        raise InputError(f"{name_flag}; if it is a dataset on the Hub: pip install datasets") from error
    try:
        splits = datasets.get_dataset_split_names(name)
        return list(datasets.load_dataset(name, split=split)) if split in splits else None
    except Exception as error:  # the Hub client raises dozens of types; each of them means that the name is of no use
        raise InputError(f"{name_flag}, nor a dataset that the Hub gives ({first_line(error)})") from error


def load_rows(name: str, split: str) -> Optional[list[dict]]:
    """Rows of one split of a dataset, or None where a folder or Hub dataset has no such split.

    `name`: a .jsonl or .json file (which then is its own "train" split), a folder with <split>.jsonl or <split>.json,
    or a Hub id. Raises InputError with file and line number for what is not JSON, or row number for what is no object.
    """
    path = Path(name)
    if os.path.isdir(path):  # False for a name that cannot be a path
        files = [path / f"{split}.jsonl", path / f"{split}.json"]
    elif os.path.isfile(path):
        files = [path] if split == "train" else []
    elif path.suffix in (".json", ".jsonl") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"--dataset_name {name[:200]}: no such file or folder")
    else:
        return load_hub_rows(name, split)
    path = next(filter(os.path.isfile, files), None)
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({first_line(error)})") from error
    rows, first = [], 1
    try:
        if path.suffix == ".json":
            rows = json.loads(text)
        else:
            for first, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    rows.append(json.loads(line))
    except (ValueError, RecursionError) as error:
        line = first + getattr(error, "lineno", 1) - 1
        raise InputError(f"{path}, line {line}: not JSON ({getattr(error, 'msg', first_line(error))})") from error
    if not isinstance(rows, list):
        raise InputError(f"{path}: must be a list of rows; a .jsonl file has one row per line")
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise InputError(f"{path}, row {i}: must be a JSON object like {{\"prompt\": \"...\"}}")
    return rows


def message_text(value: object) -> Optional[str]:
    """The text of a string, or of the last of a list of chat messages; None where it is neither."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    return value if isinstance(value, str) else None


def prepare_row(row: dict, tokenizer, where: str) -> dict:
    """One dataset row as the rest of the file wants it.

    Returns {"prompt": text or messages, "prompt_text": str, "prompt_ids": list of int, "reference": str or None,
    "columns": the row}. With `messages`, the turns up to the first of the user are the prompt and the next turn of the
    assistant is the reference. Messages go through the tokenizer's chat template; a tokenizer that has none takes a
    single message as it is. `where` names the row in errors.
    """
    prompt, reference, messages = row.get("prompt"), row.get("completion"), row.get("messages")
    if prompt is None and isinstance(messages, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        if "user" not in roles:
            raise InputError(f"{where}: `messages` has no turn with role `user`")
        prompt = messages[: roles.index("user") + 1]
        if "assistant" in roles[len(prompt) :]:
            reference = [messages[roles.index("assistant", len(prompt))]]
    if prompt is None:
        raise InputError(f"{where}: needs `prompt` or a list of `messages`, has {', '.join(sorted(row)) or 'nothing'}")
    for what, value in (("`prompt`", prompt), ("the reference", reference)):
        if value is not None and message_text(value) is None:
            raise InputError(f"{where}: {what} must be text or a list of messages with role and content")
    text, templated = message_text(prompt), isinstance(prompt, list) and tokenizer.chat_template is not None
    if isinstance(prompt, list) and len(prompt) > 1 and not templated:
        raise InputError(f"{where}: several messages, but the tokenizer has no chat template to join them by")
    try:
        if templated:
            text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=not templated)["input_ids"]
    except Exception as error:  # a template may raise anything, a tokenizer refuses what is no Unicode
        raise InputError(f"{where}: the tokenizer refuses the prompt ({first_line(error)})") from error
    if not ids:
        raise InputError(f"{where}: the prompt is empty")
    reference = message_text(reference)
    return {"prompt": prompt, "prompt_text": text, "prompt_ids": ids, "reference": reference, "columns": row}


def prepare_rows(rows: list[dict], tokenizer, max_prompt_length: int, name: str) -> list[dict]:
    """All rows of a split through `prepare_row`, without those longer than `max_prompt_length` tokens."""
    if not rows:
        raise InputError(f"{name}: there are no rows")
    prepared = [prepare_row(row, tokenizer, f"{name}, row {i}") for i, row in enumerate(rows, 1)]
    kept = [row for row in prepared if len(row["prompt_ids"]) <= max_prompt_length]
    if len(kept) < len(rows):
        print(f"{name}: {len(rows) - len(kept)} of {len(rows)} prompts left out, over {max_prompt_length} tokens")
    if not kept:
        raise InputError(f"{name}: {len(rows)} rows, no prompt within --max_prompt_length {max_prompt_length} tokens")
    return kept


def prompt_order(num_rows: int, seed: int):
    """Yields row indices for ever. Every epoch is each row once, in an order that depends on (seed, epoch) alone."""
    for epoch in itertools.count():
        yield from np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()


def pad(sequences: list[list[int]], pad_id: int, left: bool = False, width: int = 0) -> tuple[torch.Tensor, ...]:
    """Token lists to ids and mask, both (len(sequences), longest), or `width` wide if that is more."""
    lengths = torch.tensor([*map(len, sequences)])[:, None]
    slots = torch.arange(max(width, int(lengths.max())))
    mask = slots >= len(slots) - lengths if left else slots < lengths
    ids = torch.full(mask.shape, pad_id)
    ids[mask] = torch.tensor([*itertools.chain(*sequences)], dtype=torch.long)
    return ids, mask


class Batch(NamedTuple):
    """B prompts and k completions of each."""

    rows: list[dict]  # B rows of prepare_rows
    prompt_ids: torch.Tensor  # (B, P) left-padded
    prompt_mask: torch.Tensor  # (B, P) bool
    responses: torch.Tensor  # (k, B, R) right-padded
    response_mask: torch.Tensor  # (k, B, R) bool, true up to and including the first stop token

    def prompts(self, index: torch.Tensor | slice) -> "Batch":
        """The groups of the prompts `index` (b,)."""
        rows = self.rows[index] if isinstance(index, slice) else [self.rows[i] for i in index.tolist()]
        return Batch(rows, self.prompt_ids[index], self.prompt_mask[index],
                     self.responses[:, index], self.response_mask[:, index])

    def trimmed(self) -> "Batch":
        """Without the slots that only padding is in."""
        p, r = int(self.prompt_mask.sum(-1).max()), int(self.response_mask.sum(-1).max())
        return Batch(self.rows, self.prompt_ids[:, -p:], self.prompt_mask[:, -p:], self.responses[..., :r],
                     self.response_mask[..., :r])


def mask_after_stop(responses: torch.Tensor, stop_ids: list[int]) -> torch.Tensor:
    """Mask (..., R) of the tokens up to and including the first stop token; all true where there is none."""
    is_stop = torch.isin(responses, torch.tensor(stop_ids, device=responses.device)).long()
    return is_stop.cumsum(-1) - is_stop == 0


def contains_stop(batch: Batch, stop_ids: list[int]) -> torch.Tensor:
    """Whether a stop token came within the response length, (k, B)."""
    stop = torch.tensor(stop_ids, device=batch.responses.device)
    return (torch.isin(batch.responses, stop) & batch.response_mask).any(-1)


# ---- Layout: how prompts and completions become rows of a model ------------------------------------------------------
#
# group: a row is one prompt and its k completions, interleaved by time. Here P = 2 (one of them padding), k = 2, R = 2:
#
#     slot:      0    1     2     3     4     5        sees   . p a b a b
#     holds:     pad  p     a0    b0    a1    b1       pad    x
#     position:  0    0     1     1     2     2        p      . x
#                                                      a0     . x x
#     Every model reads the prompt once for all of     b0     . x . x
#     its completions, and a completion sees its       a1     . x x . x
#     prompt and itself, never its siblings.           b1     . x . x . x
#
# plain: every completion is a row of its own, its prompt before it. The same numbers, more work.


def group_mask(prompt_mask: torch.Tensor, k: int, slots: int, queries: torch.Tensor) -> torch.Tensor:
    """Who sees whom in group rows: for each slot of `queries` the slots 0 … slots-1, (B, 1, len(queries), slots) bool.

    A slot sees the real prompt up to itself, the steps up to its own of its own completion, and, if it is padding,
    itself, since softmax needs something to see. prompt_mask (B, P); slot P + t·k + j is token t of completion j."""
    P = prompt_mask.shape[1]
    key, query = torch.arange(slots, device=prompt_mask.device), queries[:, None]
    prompt = F.pad(prompt_mask, (0, slots - P))[:, None, None]
    own_lane = (key >= P) & ((key - P) % k == (query - P) % k)
    return (prompt | own_lane) & (key <= query) | (key == query)


def attend(model, mask: torch.Tensor) -> torch.Tensor:
    """A boolean mask as the attention of `model` takes it: as it is, or as something to add to the scores."""
    eager = model.config._attn_implementation == "eager"
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min) if eager else mask


def folded_sdpa(module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask, **kwargs):
    """The sdpa attention of transformers, but where g query heads share a key/value head they become g times as many
    queries of that head. With a mask the stock one copies keys and values g times, in every step of decoding."""
    (B, heads, n, D), kv_heads = query.shape, key.shape[1]
    if heads == kv_heads or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    groups = heads // kv_heads
    out = F.scaled_dot_product_attention(query.reshape(B, kv_heads, groups * n, D), key, value,
                                         attn_mask=attention_mask.repeat(1, 1, groups, 1), scale=kwargs.get("scaling"))
    return out.reshape(B, heads, n, out.shape[-1]).transpose(1, 2).contiguous(), None


def plain_hidden(model, batch: Batch) -> torch.Tensor:
    """`completion_hidden` by one row per completion."""
    (k, B, _), p = batch.responses.shape, batch.prompt_ids.shape[1]
    ids = torch.cat([batch.prompt_ids.repeat(k, 1), batch.responses.flatten(0, 1)], dim=1)
    mask = torch.cat([batch.prompt_mask.repeat(k, 1), batch.response_mask.flatten(0, 1)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.base_model(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False)[0]
    return hidden[:, p - 1 :].unflatten(0, (k, B))


def group_hidden(model, parts: Sequence[Batch]) -> torch.Tensor:
    """`completion_hidden` by one row per prompt. Each of `parts` is a forward, but their embeddings are looked up
    together: the gradient of each look-up is as large as all embeddings."""
    ids = [torch.cat([part.prompt_ids, part.responses.permute(1, 2, 0).flatten(1)], dim=1) for part in parts]
    embedded = model.get_input_embeddings()(torch.cat([part.flatten() for part in ids])).split([*map(torch.numel, ids)])
    found, longest = [], max(part.responses.shape[2] for part in parts)
    for part, embeddings in zip(parts, embedded):
        (k, B, r), p, device = part.responses.shape, part.prompt_ids.shape[1], part.responses.device
        steps = torch.arange(r, device=device).repeat_interleave(k)
        in_prompt, lengths = (part.prompt_mask.cumsum(1) - 1).clamp(min=0), part.prompt_mask.sum(1, keepdim=True)
        positions = torch.cat([in_prompt, lengths + steps], dim=1)
        mask = attend(model, group_mask(part.prompt_mask, k, p + k * r, torch.arange(p + k * r, device=device)))
        hidden = model.base_model(inputs_embeds=embeddings.view(B, p + k * r, -1), attention_mask=mask,
                                  position_ids=positions, use_cache=False)[0]
        last_of_prompt = hidden[:, p - 1 : p].expand(k, B, 1, -1)  # predicts token 0 of every completion
        hidden = torch.cat([last_of_prompt, hidden[:, p:].unflatten(1, (r, k)).permute(2, 0, 1, 3)], dim=2)
        found.append(F.pad(hidden, (0, 0, 0, longest - r)))
    return torch.cat(found, dim=1)


CPU_WIDTH = 512  # a row of a model so wide keeps a CPU busy alone; the work of a row grows with the square of the width


def rows_together(model, prompt_ids: torch.Tensor) -> list[slice]:
    """Slices of the group rows, a forward each: one slice, but on a CPU short ones, which have less padding."""
    B, ratio = len(prompt_ids), CPU_WIDTH // model.config.get_text_config().hidden_size
    size = max(1, ratio**2) if prompt_ids.is_cpu else B
    return [slice(first, first + size) for first in range(0, B, size)]


def completion_hidden(model, batch: Batch, layout: str) -> torch.Tensor:
    """Last hidden states (k, B, r + 1, H) of the base model: slot t is the one that predicts token t of a completion,
    slot t + 1 the one that has just read it. r ≤ R is the longest real completion.

    The same numbers in either layout. Positions count real tokens, so padding shifts nothing."""
    if layout == "plain":
        return plain_hidden(model, batch.trimmed())
    return group_hidden(model, [batch.prompts(rows).trimmed() for rows in rows_together(model, batch.prompt_ids)])


@torch.no_grad()
def best_layout(model, P: int, k: int, R: int) -> str:
    """group if the model gives the same numbers in both layouts on a batch of this size, or else plain.

    That is so if its attention is full over the row, obeys a mask and takes positions from `position_ids` alone. Not so
    with linear attention, a sliding window shorter than prompt and completion, ALiBi, or kernels that take no mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (2, P + k * R), generator=generator).to(model.device)
    prompt_mask = torch.arange(P, device=model.device) >= torch.tensor([[0], [P // 2]], device=model.device)
    responses = ids[:, P:].unflatten(1, (k, R)).transpose(0, 1)
    probe = Batch([{}, {}], ids[:, :P], prompt_mask, responses, torch.ones_like(responses, dtype=torch.bool))
    try:
        plain, group = plain_hidden(model, probe).float(), group_hidden(model, [probe]).float()
    except (ValueError, TypeError, RuntimeError):  # a kernel that takes no such mask
        return "plain"
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    return "group" if (plain - group).norm() < tolerance * plain.norm() else "plain"


# ---- Log-probs -------------------------------------------------------------------------------------------------------

LOGITS_AT_ONCE = {"cpu": 2**20, "else": 2**26}  # entries of a (tokens, columns) block of logits, in float32
MIN_COLUMNS = 256  # of such a block, however many tokens there are: a thinner matrix product would waste time


def logit_blocks(x, weight, bias, tokens, temperature: float) -> Iterator[tuple]:
    """(x · weightᵀ + bias) / temperature (N, vocabulary) in blocks of columns, so that it never exists as a whole.

    Yields each block's slice of the vocabulary, its logits (N, columns) in float32, and where the tokens (N,) are in
    it: the column (N, 1), or any where the token is in another block, and whether it is in this one (N, 1)."""
    width = max(MIN_COLUMNS, LOGITS_AT_ONCE["cpu" if x.is_cpu else "else"] // max(1, len(x)))
    for first in range(0, len(weight), width):
        columns = slice(first, first + width)
        own_bias = None if bias is None else bias[columns].to(x.dtype)
        logits = F.linear(x, weight[columns].to(x.dtype), own_bias).float().div_(temperature)
        index = (tokens - first)[:, None]
        yield columns, logits, index % logits.shape[1], (index >= 0) & (index < logits.shape[1])


class TokenLogprobs(torch.autograd.Function):
    """log_softmax(logits / temperature) of some tokens, and the entropy (nats, no gradient) of that softmax, where
    logits = hidden · weightᵀ + bias. Both (N,) float32, from hidden (N, H), weight (vocabulary, H), bias (vocabulary,)
    or None, tokens (N,).

    z = logits / temperature is made block by block, and once more in backward, where ∂ log p(y) / ∂ z = onehot(y) - p.
    With m the largest z of a block, M the largest of all, e = exp(z - m) and S = Σ_blocks exp(m - M) Σ e:

        log Σ exp z = M + log S      entropy = log Σ exp z - Σ p z = log S - Σ_blocks exp(m - M) Σ e (z - M) / S"""

    @staticmethod
    def forward(ctx, hidden, weight, bias, tokens, temperature):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        x, chosen, blocks = hidden.to(dtype), torch.zeros(len(tokens), 1, device=hidden.device), []
        for _, z, index, inside in logit_blocks(x, weight, bias, tokens, temperature):
            chosen = torch.where(inside, z.gather(1, index), chosen)
            m = z.amax(1, keepdim=True).clamp(min=-1e30)  # not -inf, if the block is so throughout
            e = z.sub_(m).exp()
            total = e.sum(1, keepdim=True)
            blocks.append((m, total, e.mul_(z.clamp_(min=-200.0)).sum(1, keepdim=True)))  # not 0 · -inf
        m, totals, products = (torch.cat(parts, dim=1) for parts in zip(*blocks))  # (N, blocks)
        M = m.amax(1, keepdim=True)
        S = ((m - M).exp() * totals).sum(1, keepdim=True)
        log_total = M + S.log()
        entropy = S.log() - ((m - M).exp() * (products + (m - M) * totals)).sum(1, keepdim=True) / S
        ctx.temperature = temperature
        ctx.save_for_backward(x, weight, bias, tokens, log_total)
        entropy = entropy.squeeze(1)
        ctx.mark_non_differentiable(entropy)
        return (chosen - M - S.log()).squeeze(1), entropy

    @staticmethod
    def backward(ctx, gradient, _):
        x, weight, bias, tokens, log_total = ctx.saved_tensors
        to_hidden, to_weight = torch.zeros_like(x, dtype=torch.float32), torch.empty_like(weight)
        to_bias, scale = None if bias is None else torch.empty_like(bias), gradient / ctx.temperature
        scaled_x = (scale[:, None] * x).to(x.dtype)
        for columns, z, index, inside in logit_blocks(x, weight, bias, tokens, ctx.temperature):
            to_z = z.sub_(log_total).exp_().neg_().scatter_add_(1, index, inside.float())
            if bias is not None:
                to_bias[columns] = scale @ to_z
            to_z = to_z.to(x.dtype)
            to_hidden += to_z @ weight[columns].to(x.dtype)
            to_weight[columns] = to_z.t() @ scaled_x
        return to_hidden * scale[:, None], to_weight, to_bias, None, None


def completion_logprobs(model, batch: Batch, temperature: float, layout: str = "group") -> tuple[torch.Tensor, ...]:
    """Log-probs of the completions' tokens and entropies of their distributions, both (k, B, R), 0 where masked."""
    hidden = completion_hidden(model, batch, layout)[:, :, :-1]
    r, R = hidden.shape[2], batch.responses.shape[2]
    mask = batch.response_mask[..., :r]
    head, tokens = model.get_output_embeddings(), batch.responses[..., :r][mask]
    parts = TokenLogprobs.apply(hidden[mask], head.weight, getattr(head, "bias", None), tokens, temperature)
    return tuple(F.pad(part.new_zeros(mask.shape).masked_scatter(mask, part), (0, R - r)) for part in parts)


@torch.no_grad()
def in_chunks(fn: Callable[[Batch], torch.Tensor], batch: Batch, rows: int) -> torch.Tensor:
    """`fn`, which maps a batch to (k, B, ...), without gradient, on `rows` completions at a time."""
    (k, B, _), size = batch.responses.shape, max(1, rows // batch.responses.shape[0])
    return torch.cat([fn(batch.prompts(slice(first, first + size))) for first in range(0, B, size)], dim=1)


# ---- Rewards: each is a function of a Batch that returns (k, B) float32, NaN where it does not apply -----------------


def completion_tokens(batch: Batch) -> list[list[int]]:
    """Real token ids of the k·B completions, the stop token included, in row order j·B + b."""
    ids, lengths = batch.responses.flatten(0, 1).tolist(), batch.response_mask.sum(-1).flatten().tolist()
    return [row[:n] for row, n in zip(ids, lengths)]


def decode(batch: Batch, tokenizer, stop_ids: list[int]) -> list[str]:
    """Texts of the k·B completions without the stop token and other special tokens, in row order j·B + b."""
    kept = [ids[:-1] if ids and ids[-1] in stop_ids else ids for ids in completion_tokens(batch)]
    return tokenizer.batch_decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def model_reward(model, batch: Batch, layout: str = "group") -> torch.Tensor:
    """Scores (k, B) of a sequence classifier that shares the policy's tokenizer: its head at the last real token."""
    hidden = completion_hidden(model, batch, layout)
    last = batch.response_mask.sum(-1)[..., None, None].expand(-1, -1, 1, hidden.shape[-1])
    return model.score(hidden.gather(2, last).squeeze(2)).squeeze(-1).float()


def positions_of(config) -> int:
    """How many tokens a model has positions for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def text_reward(model, batch: Batch, tokenizer, decode_fn: Callable, stop_ids: list[int]) -> torch.Tensor:
    """Scores (k, B) of a sequence classifier with a tokenizer of its own: the text is tokenized again, and a
    completion that ended ends in the end-of-sequence token of the classifier."""
    ended = contains_stop(batch, stop_ids).flatten().tolist()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows, sequences = batch.rows * batch.responses.shape[0], []
    for row, text, end in zip(rows, decode_fn(batch), ended):
        ids = tokenizer(row["prompt_text"] + text)["input_ids"]
        ids = ids[1:] if ids[:2] == [bos, bos] else ids  # a chat template's text may begin with bos already
        sequences.append(ids + [eos] if end and eos is not None and ids[-1:] != [eos] else ids)
    ids, mask = (x.to(batch.responses.device) for x in pad(sequences, tokenizer.pad_token_id or 0))
    if ids.shape[1] > positions_of(model.config):
        raise InputError(f"--reward_model_path: prompt and completion, {ids.shape[1]} tokens, exceed its positions")
    hidden = model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False)[0]
    last = mask.sum(1) - 1
    hidden = hidden[torch.arange(len(last), device=last.device), last]
    return model.score(hidden).float().view(batch.responses.shape[:2])


def load_function(spec: str, flag: str) -> Callable:
    """The function named by `file.py:function` or `module:function`; it may import what lies beside it."""
    source, _, name = spec.rpartition(":")
    if not source:
        raise InputError(f"--{flag} {spec}: must be file.py:function or module:function")
    path = Path(source)
    if path.suffix == ".py" and not path.is_file():
        raise InputError(f"--{flag} {spec}: no file {source}")
    try:
        if path.suffix == ".py":
            sys.path.append(str(path.resolve().parent))
            module_spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(module_spec)
            sys.modules.setdefault(module_spec.name, module)  # dataclasses and pickle look modules up by name
            module_spec.loader.exec_module(module)
        else:
            sys.path.append(os.getcwd())
            module = importlib.import_module(source)
        function = getattr(module, name)
    except (Exception, SystemExit) as error:  # user code: whatever it raises is theirs to read, in one line
        raise InputError(f"--{flag} {spec}: cannot be loaded ({type(error).__name__}: {first_line(error)})") from error
    if not callable(function):
        raise InputError(f"--{flag} {spec}: is not a function")
    return function


def function_reward(function: Callable, name: str, decode_fn: Callable, batch: Batch) -> torch.Tensor:
    """Scores (k, B) of a reward function, NaN where it returned None.

    It is called with prompts (as the dataset has them), completions (text without the stop token), completion_ids
    (the stop token included) and every dataset column by its name, each a list of k·B in row order.
    """
    k, B, _ = batch.responses.shape
    rows = batch.rows * k
    columns = {c for row in batch.rows for c in row["columns"]} - {"prompt", "prompts", "completions", "completion_ids"}
    given = {column: [row["columns"].get(column) for row in rows] for column in sorted(columns)}
    try:
        scores = list(function(prompts=[row["prompt"] for row in rows], completions=decode_fn(batch),
                               completion_ids=completion_tokens(batch), **given))
    except Exception as error:
        raise InputError(f"reward function {name} raised {type(error).__name__}: {first_line(error)}") from error
    if len(scores) != k * B:
        raise InputError(f"reward function {name} returned {len(scores)} numbers for {k * B} completions")
    numbers = torch.full((k * B,), math.nan)
    for i, score in enumerate(scores):
        try:
            numbers[i] = math.nan if score is None else float(score)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
        if score is not None and not numbers[i].isfinite():
            raise InputError(f"reward function {name} returned {score!r:.50}, not a finite number or None, for the "
                             f"prompt {rows[i]['prompt_text'][:60]!r}")
    return numbers.to(batch.responses.device).view(k, B)


def weighted_sum(scores: list[torch.Tensor], weights: tuple[float, ...]) -> torch.Tensor:
    """Σ_i weight_i · score_i (k, B) over the rewards that apply; NaN where none does."""
    stacked = torch.stack(scores)
    total = (stacked * stacked.new_tensor(weights).view(-1, 1, 1)).nansum(0)
    return total.masked_fill(stacked.isnan().all(0), math.nan)


# ---- Rollout ---------------------------------------------------------------------------------------------------------


def stop_token_ids(model, tokenizer, stop_token: Optional[str], stop_token_id: Optional[int]) -> list[int]:
    """Ids of the tokens that end a completion: the one asked for, or else all that the model's generation config and
    the tokenizer call end of sequence."""
    if stop_token_id is not None:
        vocab_size = model.config.get_text_config().vocab_size
        if stop_token_id >= vocab_size:
            raise InputError(f"--stop_token_id {stop_token_id}: the model has only tokens 0 to {vocab_size - 1}")
        return [stop_token_id]
    if stop_token not in (None, "eos"):
        ids = tokenizer(stop_token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or ids == [tokenizer.unk_token_id]:
            raise InputError(f"--stop_token {stop_token!r} is not one token of the tokenizer, nor eos")
        return ids
    configured = model.generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    ids = sorted({i for i in [*configured, tokenizer.eos_token_id] if i is not None})
    if not ids:
        raise InputError(f"the tokenizer {tokenizer.name_or_path} has no eos token; name one by --stop_token")
    return ids


def sample(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each softmax(logits / temperature) and its log-prob, both (...), from logits (..., vocabulary).

    At temperature 0 the likeliest; else where a random number falls in the cumulative distribution. Nothing here waits
    for the device, unlike torch.multinomial."""
    logprobs = F.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cumulative = logprobs.exp().cumsum(-1)
        below = torch.rand_like(cumulative[..., :1]) * cumulative[..., -1:]
        tokens = torch.searchsorted(cumulative, below, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[..., None]).squeeze(-1)


class GroupCache:
    """Keys and values of B group rows, (B, heads, slots, D) each, in tensors that stay where they are.

    The caller says which rows and slots the next forward fills, and how many of the slots it sees."""

    def __init__(self, B: int, slots: int):
        self.shape = (B, slots)
        self.rows = slice(0)  # rows of the tokens that are read next
        self.filling: torch.Tensor = torch.empty(0, dtype=torch.long)  # their slots
        self.visible = 0  # they see the slots before this one
        self.states: dict[int, tuple[torch.Tensor, ...]] = {}  # layer -> keys and values

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args, **kwargs) -> list[torch.Tensor]:
        if layer not in self.states:
            B, slots = self.shape
            self.states[layer] = tuple(x.new_zeros(B, x.shape[1], slots, x.shape[3]) for x in (keys, values))
        for state, new in zip(self.states[layer], (keys, values)):
            state[self.rows].index_copy_(2, self.filling, new)
        return [state[self.rows, :, : self.visible] for state in self.states[layer]]

    def get_seq_length(self, *args) -> int:
        return 0  # some models ask, to make positions that they are given anyway


@contextmanager
def transposed_linear(use: bool):
    """Within it, if `use`, F.linear is one that computes x Wᵀ as (W xᵀ)ᵀ: for few rows two to three times faster on a
    CPU in float32."""

    def linear(input, weight, bias=None):
        out = (weight @ input.flatten(0, -2).t()).t().contiguous().unflatten(0, input.shape[:-1])
        return out if bias is None else out.add_(bias)

    stock, F.linear = F.linear, linear if use else F.linear
    try:
        yield
    finally:
        F.linear = stock


class Decoding(NamedTuple):
    """What a step of decoding reads and changes in place: B prompts of P slots, k completions of up to R tokens."""

    cache: GroupCache
    prompt_mask: torch.Tensor  # (B, P) bool
    step: torch.Tensor  # (1,): t, the number of the tokens sampled last
    stopped: torch.Tensor  # (B, k) bool: a stop token has come
    tokens: torch.Tensor  # (B, k, R): all tokens so far
    logprobs: torch.Tensor  # (B, k, R) float32: their log-probs


def new_decoding(B: int, P: int, k: int, R: int, device: torch.device) -> Decoding:
    zeros = partial(torch.zeros, device=device)
    return Decoding(GroupCache(B, P + k * R), zeros(B, P, dtype=torch.bool), zeros(1, dtype=torch.long),
                    zeros(B, k, dtype=torch.bool), zeros(B, k, R, dtype=torch.long), zeros(B, k, R))


def read_slots(policy, state: Decoding, rows: slice, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
               visible: int) -> torch.Tensor:
    """Hidden states (b, n, H) of the tokens `ids` (b, n), which go into some rows and slots (n,) of the cache."""
    state.cache.rows, state.cache.filling, state.cache.visible = rows, slots, visible
    mask = attend(policy, group_mask(state.prompt_mask[rows], state.stopped.shape[1], visible, slots))
    return policy.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=state.cache,
                             use_cache=True)[0]


def sample_into(policy, state: Decoding, hidden: torch.Tensor, temperature: float, stop: torch.Tensor):
    """Samples the next token of every completion from `hidden` (B, k, H) and notes it as number `step`."""
    token, logprob = sample(policy.get_output_embeddings()(hidden), temperature)
    state.tokens.index_copy_(2, state.step, token[..., None])
    state.logprobs.index_copy_(2, state.step, logprob[..., None])
    state.stopped.logical_or_((token[..., None] == stop).any(-1))


def decode_step(policy, state: Decoding, temperature: float, stop: torch.Tensor, visible: int):
    """Reads token t of every completion and samples token t + 1.

    Tensors of static shapes and addresses, nothing that waits for the device: on CUDA it is captured once as a graph
    and replayed, and stays valid while the optimizer changes the weights in place. visible: slots that may be filled by
    now; the others would be masked anyway, and cost time."""
    (B, k), P = state.stopped.shape, state.prompt_mask.shape[1]
    slots = P + state.step * k + torch.arange(k, device=state.step.device)
    positions = (state.prompt_mask.sum(1, keepdim=True) + state.step).expand(B, k)
    token = state.tokens.index_select(2, state.step).squeeze(2)
    hidden = read_slots(policy, state, slice(B), token, positions, slots, visible)
    state.step.add_(1)
    sample_into(policy, state, hidden, temperature, stop)


def random_state(device: torch.device) -> dict:
    """The state of every random number generator that a run or a reward function may draw from."""
    kind, keys, *rest = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, keys.tolist(), *rest)}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: dict, device: torch.device):
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def random_state_kept(device: torch.device):
    """What is drawn within it does not change what is drawn after it."""
    state = random_state(device)
    yield
    set_random_state(state, device)


@lru_cache(maxsize=4)  # shapes of a run: prompts of an update, the rest of a split, evaluation
def captured_decoding(policy, B: int, P: int, k: int, R: int, temperature: float, stop_ids: tuple[int, ...]):
    """State and replay() of decode_step on CUDA, for one shape."""
    state, stop = new_decoding(B, P, k, R, policy.device), torch.tensor(stop_ids, device=policy.device)
    step = partial(decode_step, policy, state, temperature, stop, P + k * R)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with random_state_kept(policy.device), torch.cuda.stream(stream):
        step()  # once without a graph: libraries set themselves up, the cache gets its memory
    torch.cuda.current_stream().wait_stream(stream)
    state.step.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return state, graph.replay


def generate_group(policy, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, k: int, response_length: int,
                   temperature: float, stop_ids: list[int], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples k completions of each prompt in the group layout: the prompts are read once, into a cache that has one
    row per prompt; then each step appends a slot per completion. Arguments and results as in `generate_hf`, which alone
    needs pad_id."""
    (B, P), device, R = prompt_ids.shape, prompt_ids.device, response_length
    if device.type == "cuda" and R > 1 and not isinstance(policy, FSDPModule):  # FSDP's weights do not stay in place
        state, replay = captured_decoding(policy, B, P, k, R, temperature, tuple(stop_ids))
    else:
        state, replay = new_decoding(B, P, k, R, device), None
    stop = torch.tensor(stop_ids, device=device)
    state.prompt_mask.copy_(prompt_mask)
    state.step.zero_()
    state.stopped.zero_()
    positions, last = (prompt_mask.cumsum(1) - 1).clamp(min=0), []
    for rows in rows_together(policy, prompt_ids):
        first = int(prompt_mask[rows].any(0).long().argmax())  # the first slot that any of these prompts uses
        slots = torch.arange(first, P, device=device)
        hidden = read_slots(policy, state, rows, prompt_ids[rows, first:], positions[rows, first:], slots, P)
        last.append(hidden[:, -1:])
    sample_into(policy, state, torch.cat(last).expand(-1, k, -1), temperature, stop)
    with transposed_linear(B * k <= 32 and device.type == "cpu" and policy.dtype == torch.float32):
        for t in range(R - 1):
            if t % 4 == 3 and state.stopped.all():  # asking makes the device wait, so ask seldom
                break
            if replay:
                replay()
            else:
                decode_step(policy, state, temperature, stop, visible=P + k * (t + 1))
    return state.tokens.transpose(0, 1).clone(), state.logprobs.transpose(0, 1).clone()


def generate_hf(policy, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, k: int, response_length: int,
                temperature: float, stop_ids: list[int], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples k completions of each prompt (B, P) by `generate` of transformers, from the full softmax(logits /
    temperature), at temperature 0 greedily: none of the model's own generation settings (top-k, penalties) apply.

    Returns tokens and their log-probs (k, B, r), r ≤ response_length; what follows a stop token means nothing."""
    config = transformers.GenerationConfig(max_new_tokens=response_length, do_sample=temperature > 0, temperature=1.0,
                                           top_k=0, top_p=1.0, eos_token_id=stop_ids, pad_token_id=pad_id)
    distributions: list[torch.Tensor] = []  # at most one: that of the token being sampled
    logprobs = []

    def temper_and_record(input_ids, scores):
        if distributions:
            logprobs.append(distributions.pop().gather(1, input_ids[:, -1:]))
        distributions.append(F.log_softmax(scores.float() / (temperature or 1.0), dim=-1))
        return distributions[0]

    own_config, policy.generation_config = policy.generation_config, transformers.GenerationConfig()
    try:
        out = policy.generate(input_ids=prompt_ids.repeat(k, 1), attention_mask=prompt_mask.repeat(k, 1).long(),
                              generation_config=config, logits_processor=[temper_and_record])
    finally:
        policy.generation_config = own_config  # saved later as it was loaded
    logprobs.append(distributions.pop().gather(1, out[:, -1:]))
    rows = (k, len(prompt_ids))
    return out[:, prompt_ids.shape[1] :].unflatten(0, rows), torch.cat(logprobs, dim=1).unflatten(0, rows)


@torch.no_grad()
def rollout(policy, engine: Callable, rows: list[dict], k: int, response_length: int, temperature: float,
            stop_ids: list[int], pad_id: int, forward_rows: int, prompt_slots: int = 0) -> tuple[Batch, torch.Tensor]:
    """k completions of each row's prompt by generate_group or generate_hf, at most `forward_rows` of them at a time.

    Returns the batch and the log-probs (k, B, R) that the tokens had when they were sampled, 0 where masked.
    On CUDA prompts are padded to `prompt_slots`, the most that any will need, so that one graph serves all."""
    width = prompt_slots if policy.device.type == "cuda" else 0
    padded = pad([row["prompt_ids"] for row in rows], pad_id, left=True, width=width)
    prompt_ids, prompt_mask = (x.to(policy.device) for x in padded)
    size = max(1, forward_rows // k)
    parts = [engine(policy, ids, mask, k, response_length, temperature, stop_ids, pad_id)
             for ids, mask in zip(prompt_ids.split(size), prompt_mask.split(size))]
    responses, logprobs = (
        torch.cat([F.pad(x, (0, response_length - x.shape[-1]), value=pad_id) for x in chunks], dim=1)
        for chunks in zip(*parts))
    mask = mask_after_stop(responses, stop_ids)
    batch = Batch(rows, prompt_ids, prompt_mask, responses.masked_fill(~mask, pad_id), mask)
    return batch, logprobs.masked_fill(~mask, 0.0)


# ---- Processes: one, or as many as torchrun starts, each with prompts of its own -------------------------------------


def start_processes(device: torch.device) -> tuple[int, int]:
    """Rank of this process and how many there are, by torchrun's environment variables; `device` becomes CUDA's own."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        except (ValueError, RuntimeError) as error:
            raise InputError(f"WORLD_SIZE {world}: the processes do not meet ({first_line(error)})") from error
    return (dist.get_rank(), world) if world > 1 else (0, 1)


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Σ of x over the processes, in place and on each of them."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def gather(items: list) -> list:
    """The lists of all processes, which are of one length, as one on each of them: first items, second items, ..."""
    if not dist.is_initialized():
        return items
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, items)
    return [item for group in zip(*parts) for item in group]


def average_gradients(parameters: Iterable[torch.Tensor]):
    """Makes the gradients of replicas their mean. FSDP has done so in backward."""
    gradients = [p.grad for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
    if not dist.is_initialized() or not gradients:
        return
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    torch._foreach_div_(gradients, dist.get_world_size())


def decoder_layers(model) -> torch.nn.ModuleList:
    """The layers of a transformer: its outermost list of modules."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


def shard(model, device: torch.device, dtype: torch.dtype, frozen: bool, offload: bool):
    """FSDP2: every process keeps its part of each layer's weights, gradients and optimizer state, and gathers a layer
    in `dtype` when it is needed. offload: the parts lie in the CPU's memory."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
               "offload_policy": CPUOffloadPolicy() if offload and device.type == "cuda" else OffloadPolicy()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for part in [*decoder_layers(model), *([] if tied else [embedding])]:
        fully_shard(part, **options)
    fully_shard(model, reshard_after_forward=frozen, **options)  # the rest is needed again at once, in backward


def with_weights(model, name: str, function: Callable) -> Callable:
    """`function(model, ...)` as a function of the rest, made a method of the model. FSDP takes it for the model's
    forward, and so gathers the weights that are in no layer; any other model has its weights anyway."""
    setattr(model, name, partial(function, model))
    register_fsdp_forward_method(model, name)
    return getattr(model, name)


def prepare_to_train(model, args: Args, device: torch.device, dtype: torch.dtype):
    """Arranges a model that is to be trained as the flags ask; before the optimizer is made."""
    model.requires_grad_(True)
    if args.gradient_checkpointing:
        for layer in decoder_layers(model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    if args.sharding == "fsdp":
        shard(model, device, dtype, frozen=False, offload=False)


def frozen_reader(model, function: Callable, args: Args, device: torch.device, dtype: torch.dtype) -> Callable:
    """`function(model, batch)` of a model that is not trained as a function of the batch: without gradient, a chunk at
    a time. With --offload_reference the model is on the device only meanwhile."""
    model.requires_grad_(False)
    if args.sharding == "fsdp":
        shard(model, device, dtype, frozen=True, offload=args.offload_reference)
    read = partial(in_chunks, with_weights(model, "read", function), rows=args.local_rollout_forward_batch_size)
    if args.sharding == "fsdp" or not args.offload_reference:
        return read
    model.to("cpu")

    def read_and_go_back(batch: Batch) -> torch.Tensor:
        model.to(device)
        out = read(batch)
        model.to("cpu")
        return out

    return read_and_go_back


@contextmanager
def gathered(model):
    """Within it the layers of an FSDP model stay gathered, once they are: for a rollout, which uses them R times."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
    yield
    for module in sharded:
        module.set_reshard_after_forward(module is not model, recurse=False)  # as `shard` set it
        module.reshard()


# ---- RLOO maths: tensors in, tensors out -----------------------------------------------------------------------------


def kl_per_token(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """kl_t = log π(y_t) - log π_ref(y_t) of the sampled token (the k1 estimator, nats), (k, B, R), 0 where masked."""
    return (logprobs - ref_logprobs) * mask


def mean_and_std(x: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the entries of all ranks that `keep` (same shape) names, in float64; NaN where they are too few."""
    kept = x[keep].double()
    count = sum_over_ranks(torch.tensor(len(kept), dtype=torch.float64, device=x.device))
    mean = sum_over_ranks(kept.sum()) / count
    variance = sum_over_ranks((kept - mean).square().sum()) / (count - 1)
    return mean, variance.sqrt()


def standardize(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """(x - mean) / (std + 1e-8), both over the entries of all ranks that `keep` names; the others stay as they are."""
    mean, std = mean_and_std(x, keep)
    return torch.where(keep & std.isfinite(), ((x - mean) / (std + 1e-8)).to(x.dtype), x)


def shape_scores(scores: torch.Tensor, ended: torch.Tensor, missing_eos_penalty: Optional[float], normalize: bool,
                 clip_range: Optional[float]) -> torch.Tensor:
    """Scores (k, B) after penalty, normalisation and clipping, in this order; ended (k, B): a stop token came."""
    if missing_eos_penalty is not None:
        scores = torch.where(ended, scores, scores - missing_eos_penalty)
    if normalize:
        scores = standardize(scores, ~scores.isnan())
    if clip_range is not None:
        scores = scores.clamp(-clip_range, clip_range)
    return scores


def sequence_reward(scores: torch.Tensor, kl: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """rlhf_reward = score - β Σ_t kl_t, (k, B)."""
    return scores - kl_coef * kl.sum(-1)


def reward_to_go(scores: torch.Tensor, kl: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """G_t = score - β Σ_{s≥t} kl_s, (k, B, R): what is still to come from token t on (Hu 2025, arXiv:2501.03262)."""
    return scores[..., None] - kl_coef * kl.flip(-1).cumsum(-1).flip(-1)


def leave_one_out_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """A_j = r_j - mean of the siblings' r, for rewards (k, B) or (k, B, R).

    baseline = (Σ_i r_i - r_j) / (k - 1). A NaN reward (unscorable) leaves its siblings' baselines and gets advantage
    0, as does one whose siblings are all unscorable.
    """
    scorable = ~rewards.isnan()
    r = rewards.nan_to_num(0.0)
    baseline = (r.sum(0) - r) / (scorable.sum(0) - 1).clamp(min=1)
    return torch.where(scorable & (scorable.sum(0) > 1), r - baseline, 0.0)


def policy_loss(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, clip_low: float,
                clip_high: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """max(-A ρ, -A clip(ρ, 1 - ε_low, 1 + ε_high)) of each completion, (k, B).

    new, old, mask (k, B, R): log-probs under the policy now and when it sampled. advantages (k, B): one ratio
    ρ = exp(Σ_t new_t - old_t) per completion; advantages (k, B, R): one per token, and the tokens' losses add up.
    Also returns log ρ and whether the clip decided, both of the shape of the advantages (Schulman et al. 2017, eq. 7).
    """
    log_ratio = (new - old) * mask
    if advantages.dim() == 2:
        log_ratio = log_ratio.sum(-1)
    ratio = log_ratio.exp()
    loss, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    per_completion = torch.max(loss, clipped)
    if advantages.dim() == 3:
        per_completion = (per_completion * mask).sum(-1)
    return per_completion, log_ratio.detach(), clipped > loss


class Means(dict):
    """Metrics as (Σ numerator, Σ denominator): the same number however a batch is split, over ranks as well."""

    def add(self, name: str, values: torch.Tensor, mask: torch.Tensor | bool = True):
        """Counts the entries of `values` where `mask` (same shape) is true; NaN is no value."""
        keep = ~values.isnan() & mask
        total, count = values.double().masked_fill(~keep, 0.0).sum(), keep.double().sum()
        self[name] = self.get(name, 0) + torch.stack([total, count])

    def means(self) -> dict[str, float]:
        """name -> mean over all ranks; a name without entries is left out, since it has none."""
        sums = sum_over_ranks(torch.stack(list(self.values()))).tolist()
        return {name: total / count for name, (total, count) in zip(self, sums) if count > 0}


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def reference_batch(rows: list[dict], tokenizer, stop_ids: list[int], positions: int, device: torch.device) -> Batch:
    """The references of `rows` as completions (1, B, R') that end in eos, or in what else stops a completion.

    A reference that would not fit into the model's `positions` after the longest prompt is cut."""
    pad_id = tokenizer.pad_token_id
    stop_id = tokenizer.eos_token_id if tokenizer.eos_token_id in stop_ids else stop_ids[0]
    prompt_ids, prompt_mask = pad([row["prompt_ids"] for row in rows], pad_id, left=True)
    ids = [tokenizer(row["reference"], add_special_tokens=False)["input_ids"] + [stop_id] for row in rows]
    responses, mask = pad([i[: positions - prompt_ids.shape[1]] for i in ids], pad_id)
    return Batch(rows, prompt_ids.to(device), prompt_mask.to(device), responses[None].to(device), mask[None].to(device))


def wins(scores: torch.Tensor, reference_scores: torch.Tensor) -> torch.Tensor:
    """1 where a completion scores above its reference, 0.5 where equal, 0 below, NaN where one has no score."""
    won = (scores > reference_scores).float() + 0.5 * (scores == reference_scores).float()
    return won.masked_fill(scores.isnan() | reference_scores.isnan(), math.nan)


def text_table(header: list[str], rows: list[list[str]], width: int) -> str:
    """A table of at most `width` characters a line: the last column is as wide as it needs, the others share the rest
    and wrap."""
    last = max(len(row[-1]) for row in [header, *rows])
    widths = [max(8, (width - last) // (len(header) - 1) - 3)] * (len(header) - 1) + [last]
    ruler = "-+-".join("-" * w for w in widths)
    lines = []
    for row in [header, *rows]:
        cells = [textwrap.wrap(" ".join(cell.split()), w) or [""] for cell, w in zip(row, widths)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            lines.append(" | ".join(part.ljust(w) for part, w in zip(line, widths)).rstrip())
        lines.append(ruler)
    return "\n".join(lines[:-1])


# ---- Loading ---------------------------------------------------------------------------------------------------------


def load(args: Args, auto_class, path: str, flag: str, **options):
    """`auto_class.from_pretrained`; what cannot be loaded is an InputError that names the flag."""
    if options.get("attn_implementation") == "sdpa":
        transformers.AttentionInterface.register("folded_sdpa", folded_sdpa)
        transformers.AttentionMaskInterface.register("folded_sdpa", sdpa_mask)
        options["attn_implementation"] = "folded_sdpa"
    if not os.path.isdir(path) and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise InputError(f"--{flag} {path}: no such folder")
    try:
        return auto_class.from_pretrained(path, trust_remote_code=args.trust_remote_code, **options)
    except Exception as error:  # transformers, safetensors and the Hub client each raise their own
        kind = "cannot be loaded" if os.path.isdir(path) else "no such folder, nor a model that the Hub gives"
        raise InputError(f"--{flag} {path}: {kind} ({auto_class.__name__}: {first_line(error)})") from error


def load_tokenizer(args: Args, vocab_size: int):
    """The policy's tokenizer. One without a pad token gets [PAD], like in TRL, where the model has a row to spare (a
    pad token is never attended to, trained on or looked for, but it needs an id)."""
    name, path = f"--model_name_or_path {args.model_name_or_path}", args.model_name_or_path
    tokenizer = load(args, AutoTokenizer, path, "model_name_or_path")
    if len(tokenizer) == 0:
        raise InputError(f"{name}: there is no tokenizer in it")
    if tokenizer.pad_token_id is None:
        if len(tokenizer) >= vocab_size:
            raise InputError(f"{name}: the tokenizer has no pad token, and the model no row to spare for one; "
                             "set tokenizer.pad_token (the eos token will do) and save the tokenizer")
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        print(f"{name}: the tokenizer has no pad token; [PAD] is added as token {tokenizer.pad_token_id}")
    if len(tokenizer) > vocab_size:
        raise InputError(f"{name}: the tokenizer has {len(tokenizer)} tokens, the model only {vocab_size}")
    return tokenizer


def load_data(args: Args, tokenizer) -> tuple[list[dict], list[dict]]:
    """Rows to train and to evaluate on, as `prepare_row` makes them; the latter may be none."""
    name, splits = args.dataset_name, (args.dataset_train_split, args.dataset_test_split)
    train, test = (load_rows(name, split) for split in splits)
    if train is None:
        raise InputError(f"--dataset_name {name}: has no split {splits[0]}; name one by --dataset_train_split")
    if test is None:
        n = min(100, len(train) // 10) if args.num_eval_prompts else 0
        if n:
            print(f"{name} has no split {splits[1]}: its last {n} rows are held out to evaluate on")
        train, test = train[: len(train) - n], train[len(train) - n :]
    prepared = partial(prepare_rows, tokenizer=tokenizer, max_prompt_length=args.max_prompt_length)
    test = test[: args.num_eval_prompts]
    return prepared(train, name=f"{name}, training"), prepared(test, name=f"{name}, held out") if test else []


def load_policy(args: Args, path: str, device: torch.device, dtype: torch.dtype):
    """A causal language model without dropout, checked to be output_embeddings(base_model(x))."""
    model, info = load(args, AutoModelForCausalLM, path, "sft_model_path", dtype=dtype, output_loading_info=True,
                       attn_implementation=args.attn_implementation)
    if info["missing_keys"]:
        raise InputError(f"--sft_model_path {path}: is no trained {type(model).__name__}, it has no "
                         f"{sorted(info['missing_keys'])[0]}")
    model.to(device).eval()  # eval mode throughout: no dropout, in training either
    with torch.no_grad():
        ids = torch.tensor([[0, 1]], device=device)
        if not torch.allclose(model(ids).logits, model.get_output_embeddings()(model.base_model(ids)[0]), atol=1e-3,
                              equal_nan=True):
            raise InputError(f"--sft_model_path {path}: {type(model).__name__} does more to its logits "
                             "than its output embedding, which is not supported")
    return model


def load_reward_model(args: Args, tokenizer, vocab_size: int, device: torch.device, dtype: torch.dtype):
    """The reward model and its own tokenizer, or None in its place where it reads the policy's tokens.

    It does if it has the policy's tokenizer or none, and embeddings for all `vocab_size` tokens of the policy."""
    path, flag = args.reward_model_path, f"--reward_model_path {args.reward_model_path}"
    config = load(args, AutoConfig, path, "reward_model_path")
    if config.num_labels != 1 and any("SequenceClassification" in name for name in config.architectures or []):
        raise InputError(f"{flag}: has {config.num_labels} labels, a reward model has one")
    model, info = load(args, AutoModelForSequenceClassification, path, "reward_model_path", num_labels=1, dtype=dtype,
                       output_loading_info=True, attn_implementation=args.attn_implementation)
    if not hasattr(model, "score"):
        raise InputError(f"{flag}: {type(model).__name__} has no `score` head on its last token")
    if info["missing_keys"]:
        print(f"{flag}: has no trained reward head; a random one scores, which is good for a smoke test only")
    rows, own = model.get_input_embeddings().num_embeddings, None
    if not os.path.isdir(path) or any(Path(path).glob("*token*")) or any(Path(path).glob("vocab*")):
        own = load(args, AutoTokenizer, path, "reward_model_path")
    words, policy_words = own.get_vocab() if own else {}, tokenizer.get_vocab()
    same = words.items() <= policy_words.items() and len(words) >= len(policy_words) - 1  # [PAD] may be new
    shared = rows >= vocab_size and (same or not words)
    if not shared and not 0 < len(words) <= rows:
        raise InputError(f"{flag}: has {rows} tokens, which do not fit its tokenizer, or the policy's if it has none")
    return model.to(device).eval(), None if shared else own


def peak_memory_gb(device: torch.device) -> float:
    """GiB: of this device's memory, or of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


# ---- Checkpoints -----------------------------------------------------------------------------------------------------
#
# checkpoint-<update>/ holds the policy as save_pretrained leaves it, optimizer.pt, rng-<rank>.pt, state.json (counters,
# evaluations, and how long the run's files were) and checksums.json


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoints(output: Path) -> list[tuple[int, Path]]:
    """(update, folder) of the checkpoints in `output`, the newest first."""
    numbered = ((path.name.removeprefix("checkpoint-"), path) for path in output.glob("checkpoint-*"))
    return sorted(((int(number), path) for number, path in numbered if number.isdecimal()), reverse=True)


def newest_checkpoint(output: Path) -> Optional[Path]:
    """The newest whole checkpoint, or None. Damaged ones are named, skipped and left in place."""
    for _, folder in checkpoints(output):
        try:
            sums = json.loads((folder / "checksums.json").read_text())
            damaged = [name for name, expected in sums.items() if checksum(folder / name) != expected]
        except (OSError, ValueError, AttributeError) as error:
            damaged = [first_line(error)]
        if not damaged:
            return folder
        print(f"{folder} is damaged ({damaged[0]}) and skipped")
    return None


def sync(path: Path):
    """Waits until a file or the entries of a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


FULL = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)  # of all ranks, on the first one


def save_checkpoint(output: Path, state: dict, policy, optimizer, limit: int, rank: int):
    """Writes checkpoint-<state["update"]> under another name, flushes it and renames it, so that a checkpoint that
    exists is whole. Then removes all but the newest `limit`. Every rank must call it; the first one writes."""
    weights = state_dict.get_model_state_dict(policy, options=FULL)
    moments = state_dict.get_optimizer_state_dict(policy, optimizer, options=FULL)
    random_states = gather([random_state(policy.device)])
    if rank > 0:
        return
    target, unfinished = output / f"checkpoint-{state['update']}", output / "unfinished-checkpoint"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        policy.save_pretrained(unfinished, state_dict=weights)
        torch.save(moments, unfinished / "optimizer.pt")
        for i, of_rank in enumerate(random_states):
            torch.save(of_rank, unfinished / f"rng-{i}.pt")
        (unfinished / "state.json").write_text(json.dumps(state))
        sums = {path.name: checksum(path) for path in unfinished.iterdir()}
        (unfinished / "checksums.json").write_text(json.dumps(sums))
        for path in [*unfinished.iterdir(), unfinished, *map(output.joinpath, state["bytes"])]:
            sync(path)
        if target.exists():  # it was damaged, or --resume would have begun after it
            target.rename(output / f"damaged-{target.name}-{time.time_ns()}")
        unfinished.rename(target)
        sync(output)
        for _, folder in [found for found in checkpoints(output) if found[0] <= state["update"]][limit:]:
            folder.rename(unfinished)  # a folder of that name is never half removed
            shutil.rmtree(unfinished)
    except Exception as error:  # OSError from Python, others from torch and safetensors
        shutil.rmtree(unfinished, ignore_errors=True)
        raise InputError(f"{target} cannot be saved ({first_line(error)}); make room and go on by --resume") from error


def load_optimizer(folder: Path, policy, optimizer):
    """The optimizer's state from a checkpoint, saved on any number of ranks. Its settings stay those of the flags."""
    saved = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    full = state_dict.StateDictOptions(full_state_dict=True)
    state_dict.set_optimizer_state_dict(policy, optimizer, saved, options=full)
    for group in optimizer.param_groups:
        group.update(optimizer.defaults)


def open_at(path: Path, length: int, rank: int):
    """The file, open for writing after its first `length` bytes; the rest of it is cut off. Only rank 0 has one."""
    if rank > 0:
        return open(os.devnull, "w")
    with open(path, "ab") as file:
        file.truncate(min(length, file.tell()))
    return open(path, "a", encoding="utf-8", buffering=1)  # every line is on its way to the disk at once


# ---- Main ------------------------------------------------------------------------------------------------------------


def learning_rate(args: Args, progress: float) -> float:
    """The learning rate at `progress` of the run, 0 … 1: it warms up linearly, then falls to 0 or stays."""
    if progress < args.warmup_ratio:
        return args.learning_rate * progress / args.warmup_ratio
    left = (1 - progress) / (1 - args.warmup_ratio)
    course = {"linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left), "constant": 1.0}
    return args.learning_rate * course[args.lr_scheduler_type]


def tracker(args: Args, run_id: str) -> Callable[..., None]:
    """A function log(step, metrics, samples=()) to Weights & Biases, if --track asks for it. If the service fails,
    that is said once, and the run goes on without."""
    alive, wandb = args.track, None

    def log(step: int, metrics: dict, samples: Sequence[dict] = ()):
        nonlocal alive, wandb
        if not alive:
            return
        try:
            if wandb is None:
                import wandb

                wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, name=Path(args.output_dir).name,
                           dir=args.output_dir, id=run_id, resume="allow", config=vars(args))
            if samples:
                table = wandb.Table(columns=list(samples[0]), data=[list(sample.values()) for sample in samples])
                metrics = metrics | {"completions": table}
            wandb.log(metrics, step=step)
        except Exception as error:  # whatever the service or its client raises
            alive = False
            tqdm.write(f"--track: the run goes on without Weights & Biases ({first_line(error)})")

    return log


def main(args: Args, signals: Sequence[int] = ()) -> dict[str, dict[str, float]]:
    """Trains; returns the evaluations before and after. Leaves the files that the README names in output_dir.

    `signals` grows by a number when the program is told to stop: it saves after the update in progress and ends."""
    args = resolve_args(args)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a name that is not on the Hub is said once, by load
    transformers.set_seed(args.seed)
    device, dtype, k = torch.device(args.device), getattr(torch, args.dtype), args.rloo_k
    rank, world = start_processes(device)
    output = Path(gather([args.output_dir])[0])  # with a time in it ranks may differ
    args.output_dir = str(output)
    if args.sharding == "fsdp" and world == 1:
        print("--sharding fsdp: one process holds everything, torchrun starts more")
        args.sharding = "ddp"

    # An update is B prompts with k completions each, on every rank: mini-batches, then micro-batches of prompts.
    micro_batch = args.per_device_train_batch_size // k
    mini_batch = micro_batch * args.gradient_accumulation_steps
    B = mini_batch * args.num_mini_batches

    # Functions and data first: they are quick to load and the likeliest to be wrong.
    functions = {spec: load_function(spec, "reward_fns") for spec in args.reward_fns}
    judge = load_function(args.judge_fn, "judge_fn") if args.judge_fn else None
    config = load(args, AutoConfig, args.sft_model_path, "sft_model_path")
    vocab_size, positions = config.get_text_config().vocab_size, positions_of(config)
    tokenizer = load_tokenizer(args, vocab_size)
    train_rows, test_rows = load_data(args, tokenizer)
    longest = max(len(row["prompt_ids"]) for row in train_rows + test_rows)
    if longest + args.response_length > positions:
        raise InputError(f"the longest prompt, {longest} tokens, and --response_length {args.response_length} exceed "
                         f"the model's {positions} positions: --max_prompt_length {positions - args.response_length} "
                         "fits")

    # Where the run begins: at a checkpoint, or at update 0.
    run = SimpleNamespace(update=0, episode=0, prompts=0, seconds=0.0, before={}, after={},
                          bytes={"metrics.jsonl": 0, "completions.jsonl": 0}, run_id=f"{output.name}-{time.time_ns()}")
    resumed = gather([newest_checkpoint(output) if args.resume and rank == 0 else None])[0]
    if resumed:
        run = SimpleNamespace(**json.loads((resumed / "state.json").read_text()))
        print(f"resumed from {resumed}")
    elif args.resume and checkpoints(output):
        raise InputError(f"--resume: no checkpoint in {output} is whole; nothing is overwritten: name a new folder")

    # The policy. Its weights stay float32: training casts them where it computes in bfloat16, rollouts use a copy.
    policy = sampler = load_policy(args, str(resumed or args.sft_model_path), device, torch.float32)
    autocast = nullcontext()
    if dtype != torch.float32 and args.sharding == "ddp":  # FSDP gathers weights in dtype
        autocast = torch.autocast(device.type, dtype)
        sampler = load_policy(args, args.sft_model_path, device, dtype)
    stop_ids = stop_token_ids(policy, tokenizer, args.stop_token, args.stop_token_id)

    def layout_of(model, path: str) -> str:
        if args.layout == "group" and best_layout(model, longest, k, args.response_length) == "plain":
            print(f"{path}: its attention is not full over the row or takes no mask, so it runs with --layout plain")
            return "plain"
        return args.layout

    layout = layout_of(policy, args.sft_model_path)
    engine = generate_group if args.rollout_engine == "group" and layout == "group" else generate_hf
    prepare_to_train(policy, args, device, dtype)
    sample_from = with_weights(sampler, "rollout", rollout)
    read_policy = with_weights(policy, "logprobs", completion_logprobs)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, eps=args.adam_eps,
                                  weight_decay=args.weight_decay, fused=True)
    if resumed:
        load_optimizer(resumed, policy, optimizer)

    def complete(rows: list[dict], k: int, temperature: float) -> tuple[Batch, torch.Tensor]:
        if sampler is not policy:
            sampler.load_state_dict(policy.state_dict())  # in place: a captured graph stays valid
        with gathered(sampler):
            return sample_from(engine, rows, k, args.response_length, temperature, stop_ids, tokenizer.pad_token_id,
                               args.local_rollout_forward_batch_size, longest)

    texts = partial(decode, tokenizer=tokenizer, stop_ids=stop_ids)

    # The reference and the rewards, each a function of a batch.
    if args.kl_coef:
        def reference_logprobs(model, batch: Batch) -> torch.Tensor:
            return completion_logprobs(model, batch, args.temperature, layout)[0]

        reference = load_policy(args, args.sft_model_path, device, dtype)
        read_reference = frozen_reader(reference, reference_logprobs, args, device, dtype)
    rewards: dict[str, Callable[[Batch], torch.Tensor]] = {}
    if args.reward_model_path:
        reward_model, reward_tokenizer = load_reward_model(args, tokenizer, vocab_size, device, dtype)
        if reward_tokenizer is None:
            positions = min(positions, positions_of(reward_model.config))
            if longest + args.response_length > positions:
                raise InputError(f"--reward_model_path {args.reward_model_path}: the longest prompt and completion, "
                                 f"{longest + args.response_length} tokens, exceed its positions")
            read = partial(model_reward, layout=layout_of(reward_model, args.reward_model_path))
        else:
            read = partial(text_reward, tokenizer=reward_tokenizer, decode_fn=texts, stop_ids=stop_ids)
        rewards["reward_model"] = frozen_reader(reward_model, read, args, device, dtype)
    for spec, function in functions.items():
        name = spec.rpartition(":")[2]
        rewards[spec if name in rewards else name] = partial(function_reward, function, spec, texts)

    def score(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Σ weight · reward (k, B), and each reward by name."""
        parts = {name: reward(batch) for name, reward in rewards.items()}
        return weighted_sum(list(parts.values()), args.reward_weights), parts

    # What the run leaves: the first rank writes it. A resumed run goes on where its checkpoint was.
    if rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        (output / "args.json.new").write_text(json.dumps(dataclasses.asdict(args), indent=2) + "\n")
        os.replace(output / "args.json.new", output / "args.json")
    metrics_file, completions_file = (open_at(output / name, length, rank) for name, length in run.bytes.items())
    log = tracker(args if rank == 0 else dataclasses.replace(args, track=False), run.run_id)

    # Evaluation on the held-out prompts, by the reward and, where there is one, by the judge. Each rank does its part.
    def grade(batch: Batch) -> dict[str, torch.Tensor]:
        """Scores (k, B) by the prefix of their metrics."""
        judged = {} if judge is None else {"judge_": function_reward(judge, args.judge_fn, texts, batch)}
        return {"": score(batch)[0], **judged}

    # Ranks take equally many rows; the surplus is cut off in evaluate.
    own_rows = (test_rows + test_rows[:1] * (-len(test_rows) % world))[rank::world]
    without, reference_grades = sum(row["reference"] is None for row in test_rows), {}
    if without:
        print(f"{without} of {len(test_rows)} held-out rows have no reference (`completion`): no win rates")
    elif test_rows:
        with random_state_kept(device):
            reference_grades = grade(reference_batch(own_rows, tokenizer, stop_ids, positions, device))

    def evaluate(greedy: bool) -> dict[str, float]:
        """Mean grades of completions, sampled and perhaps greedy ones, and their win rates against the references.

        Shows a few of the sampled ones; completions.jsonl keeps all of either kind. Training does not notice:
        the random state is put back. Every evaluation draws the same random numbers."""
        metrics = {}
        for mode, temperature in [("sampled", args.temperature), ("greedy", 0.0)][: 1 + greedy]:
            with random_state_kept(device):
                transformers.set_seed(args.seed)
                batch, _ = complete(own_rows, 1, temperature)
                grades = grade(batch)
            columns = {f"{name}score": scores for name, scores in grades.items()}
            columns |= {f"{name}win_rate": wins(grades[name], theirs) for name, theirs in reference_grades.items()}
            columns["length"] = batch.response_mask.sum(-1).double()
            found = gather(list(zip(texts(batch), *(column[0].tolist() for column in columns.values()))))
            completions, *values = zip(*found[: len(test_rows)])
            metrics |= {f"{mode}/{name}": torch.tensor(column).double().nanmean().item()
                        for name, column in zip(columns, values)}
            samples = [{"update": run.update, "mode": mode, "prompt": row["prompt_text"], "completion": text.strip(),
                        "reference": (row["reference"] or "").strip(), "score": None if math.isnan(value) else value}
                       for row, text, value in zip(test_rows, completions, values[0])]
            completions_file.writelines(json.dumps(sample) + "\n" for sample in samples)
            if mode == "sampled":
                cells = [["…" + sample["prompt"][-160:], sample["completion"], sample["reference"], f"{value:.2f}"]
                         for sample, value in zip(samples[:3], values[0])]
                table = text_table(["prompt", "completion", "reference", "score"], cells,
                                   width=shutil.get_terminal_size().columns - 1)
                tqdm.write(f"\nHeld-out completions after {run.update} of {num_updates} updates ({mode}):\n\n{table}\n")
                log(run.update, {}, samples)
        return metrics

    def require_finite(what: str, values: torch.Tensor):
        if not values.isfinite().all():
            _, newest = next(iter(checkpoints(output)), (0, "none"))
            raise InputError(f"update {run.update}: {what} is not finite, the run stops before that is saved; last "
                             f"checkpoint: {newest}. Lower --learning_rate, or look for extreme rewards before it")

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    num_updates = run.update + math.ceil(max(0, args.total_episodes - run.episode) / (k * B * world))
    print(f"{policy.num_parameters():,} parameters, {len(train_rows):,} prompts, {num_updates} updates of {B * world} "
          f"prompts x {k} completions, on {f'{world} x ' * (world > 1)}{device}, into {output}")
    if run.update == 0 and test_rows:
        run.before = run.after = evaluate(greedy=True)
    between = args.num_sample_generations + 1
    evaluations = {round(num_updates * i / between) for i in range(1, between)}
    order = itertools.islice(prompt_order(len(train_rows), args.seed), run.prompts, None)
    # Each rank draws numbers of its own, and goes on where it was if it was there.
    transformers.set_seed((args.seed + 2654435761 * rank + run.update) % 2**32)
    if resumed and (resumed / f"rng-{rank}.pt").is_file():
        set_random_state(torch.load(resumed / f"rng-{rank}.pt", weights_only=True), device)
    start, stopping = clock(), False
    with tqdm(total=num_updates, initial=run.update, unit="update", dynamic_ncols=True, disable=rank > 0) as progress:
        while run.episode < args.total_episodes and not stopping:
            run.update += 1
            optimizer.param_groups[0]["lr"] = learning_rate(args, run.episode / args.total_episodes)
            means, times = Means(), [clock()]

            # 1. Rollout: k completions of each of B prompts.
            indices = list(itertools.islice(order, B * world))[rank * B : (rank + 1) * B]
            batch, rollout_logprobs = complete([train_rows[i] for i in indices], k, args.temperature)
            require_finite("a log-prob of the rollout", rollout_logprobs)
            mask, ended = batch.response_mask, contains_stop(batch, stop_ids)
            times.append(clock())

            # 2. Log-probs under the reference; without one the KL is 0.
            ref_logprobs = read_reference(batch) if args.kl_coef else rollout_logprobs
            require_finite("a log-prob under the reference", ref_logprobs)
            times.append(clock())

            # 3. Scores.
            raw_scores, scores_by_name = score(batch)
            times.append(clock())

            # 4. Rewards and their leave-one-out advantages: (k, B), or (k, B, R) with kl_level=token.
            kl = kl_per_token(rollout_logprobs, ref_logprobs, mask)
            scores = shape_scores(raw_scores, ended, args.missing_eos_penalty, args.normalize_reward,
                                  args.reward_clip_range)
            rlhf_reward = sequence_reward(scores, kl, args.kl_coef)
            if args.kl_level == "sequence":
                returns, entries = rlhf_reward, torch.ones_like(ended)
            else:
                returns, entries = reward_to_go(scores, kl, args.kl_coef), mask
            advantages = leave_one_out_advantage(returns)
            if args.normalize_advantage:  # over those that have a baseline
                scorable = ~returns.isnan()
                advantages = standardize(advantages, entries & scorable & (scorable.sum(0) > 1))
            weight = ended.float() if args.mask_truncated_completions else torch.ones_like(scores)

            # 5. PPO epochs x mini-batches x micro-batches of prompts. With one of each this is REINFORCE.
            # ρ compares log-probs of training forwards only: those of generation differ by rounding, which would look
            # like a step of the policy. The first mini-batch meets the policy that sampled: its own forward gives them.
            old_logprobs = rollout_logprobs.clone()
            if args.num_mini_batches > 1:
                with autocast:
                    old_logprobs = in_chunks(lambda part: read_policy(part, args.temperature, layout)[0], batch,
                                             args.local_rollout_forward_batch_size)
            for epoch in range(args.num_ppo_epochs):
                for step, mini in enumerate(torch.randperm(B).to(device).split(mini_batch)):
                    for micro in mini.split(micro_batch):
                        part = batch.prompts(micro)
                        with autocast:
                            new, entropy = read_policy(part, args.temperature, layout)
                        if epoch == step == 0:
                            old_logprobs[:, micro] = new.detach()
                            gap = (new.detach() - rollout_logprobs[:, micro]).abs()
                            means.add("val/rollout_logprob_gap", gap, part.response_mask)
                        old = old_logprobs[:, micro]
                        losses, log_ratio, clipped = policy_loss(new, old, advantages[:, micro], part.response_mask,
                                                                 args.cliprange, args.cliprange_high)
                        losses = losses * weight[:, micro]
                        require_finite("a log-prob in training", new)
                        require_finite("the loss", losses)
                        (losses.sum() / (k * mini_batch)).backward()

                        ratio = (new.detach() - old).double().exp()
                        means.add("loss/policy_avg", losses.detach())
                        means.add("policy/approxkl_avg", 0.5 * log_ratio**2, entries[:, micro])
                        means.add("policy/clipfrac_avg", clipped, entries[:, micro])
                        means.add("policy/entropy_avg", entropy, part.response_mask)
                        means.add("val/ratio", ratio, part.response_mask)
                        means.add("val/ratio_squared", ratio**2, part.response_mask)
                    average_gradients(policy.parameters())
                    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm or math.inf)
                    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                    require_finite("the gradient", norm)
                    means.add("grad_norm", norm)
                    optimizer.step()
                    optimizer.zero_grad()
            times.append(clock())

            # 6. Metrics, by TRL's names. Scores are logged as they came: before penalty, normalisation and clipping.
            best, worst = raw_scores.nan_to_num(-math.inf).amax(0), raw_scores.nan_to_num(math.inf).amin(0)
            same = torch.isclose(best, worst, rtol=1e-6, atol=1e-6)  # equal completions' scores differ by rounding
            means.add("frac_reward_zero_std", same, (~raw_scores.isnan()).sum(0) > 1)
            means.add("objective/kl", kl.sum(-1))
            means.add("objective/entropy", -rollout_logprobs.sum(-1))
            means.add("objective/non_score_reward", -args.kl_coef * kl.sum(-1))
            means.add("objective/rlhf_reward", rlhf_reward)
            means.add("objective/scores", raw_scores)
            means.add("completions/mean_length", mask.sum(-1))
            means.add("completions/clipped_ratio", ~ended)
            for name, part_scores in scores_by_name.items():
                means.add(f"rewards/{name}/mean", part_scores)
            run.episode += k * B * world
            run.prompts += B * world
            run.seconds += times[-1] - times[0]
            metrics = {"update": run.update, "episode": run.episode, "lr": optimizer.param_groups[0]["lr"]}
            metrics |= means.means()
            metrics["val/ratio_var"] = max(metrics.pop("val/ratio_squared") - metrics["val/ratio"] ** 2, 0.0)  # or NaN
            metrics["val/num_eos_tokens"] = int(sum_over_ranks(ended.sum()))
            metrics["objective/scores_std"] = mean_and_std(raw_scores, ~raw_scores.isnan())[1].item()
            for name, part_scores in scores_by_name.items():
                metrics[f"rewards/{name}/std"] = mean_and_std(part_scores, ~part_scores.isnan())[1].item()
            for name, begin, end in zip(["rollout", "reference", "reward", "train"], times, times[1:]):
                metrics[f"time/{name}"] = end - begin
            metrics["eps"] = run.episode / run.seconds
            metrics["tokens_per_second"] = int(sum_over_ranks(mask.sum())) / (times[-1] - times[0])
            metrics["memory/peak_gb"] = peak_memory_gb(device)
            if run.update == 1:
                metrics |= {f"eval_before/{name}": value for name, value in run.before.items()}
            last = run.update == num_updates
            if test_rows and (last or run.update in evaluations):
                run.after = evaluate(greedy=last)
                metrics |= {f"eval/{name}": value for name, value in run.after.items()}
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}  # no scores, no mean
            metrics_file.write(json.dumps(metrics) + "\n")
            log(run.update, metrics)
            headline = {"reward": metrics.get("objective/rlhf_reward"), "kl": metrics["objective/kl"],
                        "win": run.after.get("sampled/win_rate"), "eps": metrics["eps"]}
            progress.set_postfix({name: f"{x:.2f}" for name, x in headline.items() if x is not None}, refresh=False)
            progress.update()

            # 7. Checkpoint: now and then, at the end, and where the run is told to stop.
            stopping = bool(sum_over_ranks(torch.tensor(len(signals), device=device)))
            if stopping or last or args.save_steps and run.update % args.save_steps == 0:
                run.bytes = {Path(file.name).name: file.tell() for file in (metrics_file, completions_file)}
                save_checkpoint(output, vars(run), policy, optimizer, args.save_total_limit, rank)

    if stopping and run.episode < args.total_episodes:
        print(f"told to stop after update {run.update} of {num_updates}; go on by the same command with --resume and "
              f"--output_dir {output}")
        sys.exit(128 + (signals[0] if signals else signal.SIGTERM))
    weights = state_dict.get_model_state_dict(policy, options=FULL)
    if rank == 0:
        policy.save_pretrained(output, state_dict=weights)
        tokenizer.save_pretrained(output)
    if test_rows:
        print(f"\nOn {len(test_rows)} held-out prompts (win rates are against the references):\n")
        print(f"{'':24}{'before':>9}{'after':>9}{'gained':>9}")
        for name, value in run.after.items():
            was = run.before.get(name, math.nan)  # not asked for when the run began
            print(f"{name:24}{was:9.3f}{value:9.3f}{value - was:+9.3f}")
    print(f"\n{run.episode:,} episodes in {clock() - start:.0f} s. The policy and its tokenizer: {output}")
    metrics_file.close()
    completions_file.close()
    return {"before": run.before, "after": run.after}


def command_line(argv: Optional[list[str]] = None):
    """`python rloo.py argv`: a mistake ends it with one line and status 1, SIGTERM and Ctrl-C after the next update."""
    if int(os.environ.get("RANK", 0)) > 0:  # one process speaks for all
        sys.stdout = open(os.devnull, "w")
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    signals: list[int] = []

    def note(number: int, frame):  # launchers may send a signal to each process and to all: only Ctrl-C counts again
        if number == signal.SIGINT and signals and time.monotonic() > note.again:
            raise KeyboardInterrupt
        signals.append(number)
        note.again = time.monotonic() + 2

    handlers = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        main(parse_args(argv), signals)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BrokenPipeError:  # `python rloo.py --help | head`
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except InputError as error:
        sys.exit(f"rloo.py: {error}")
    except OSError as error:
        sys.exit(f"rloo.py: {error}; checkpoints stay whole: mend that and go on by --resume")
    except (MemoryError, RuntimeError) as error:
        if dist.is_initialized() and "closed by peer" in str(error):
            sys.exit("rloo.py: another process of this run ended; its own line says why")
        if not (isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)):
            raise
        sys.exit(f"rloo.py: out of memory: lower --local_rollout_forward_batch_size, or --per_device_train_batch_size "
                 f"and raise --gradient_accumulation_steps by the same factor ({first_line(error)})")
    finally:  # a second signal while Python shuts down must not change the exit status
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_IGN if signals else handler)


if __name__ == "__main__":
    command_line()
