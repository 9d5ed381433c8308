"""A reward model with a tokenizer of its own, as a reward function of rloo.py.

    TEXT_REWARD_MODEL=path/or/hub-id python rloo.py --reward_fns benchmark/tldr/text_reward.py:text_reward ...

`--reward_model_path` reads the policy's tokens; this function reads texts, and so takes any reward model that
`AutoModelForSequenceClassification` loads with one label and a `score` head. A chat goes through the reward model's
own template, with the completion as the assistant's last message. Otherwise prompt and completion are joined as they
are and end in eos, whether or not the completion has ended: penalise completions that do not end by
--missing_eos_penalty. A text that has more tokens than the model has positions is cut from the left; that is said once.

Environment variables: TEXT_REWARD_MODEL, the folder or Hub id; TEXT_REWARD_BATCH (default 16), texts per forward pass.
Under torchrun each process loads the model, on its own GPU if there are any.
"""

import os
import sys
from functools import cache

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


@cache
def load():
    """The reward model and its tokenizer, once per process."""
    path = os.environ.get("TEXT_REWARD_MODEL")
    if not path:
        raise ValueError("text_reward.py: set TEXT_REWARD_MODEL to the folder or Hub id of the reward model")
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype="auto")
    return model.to(device).eval(), AutoTokenizer.from_pretrained(path)


def text_reward(prompts, completions, completion_ids, **columns) -> list[float]:
    """The scores of the reward model for prompts (texts or chats) with their completions."""
    model, tokenizer = load()
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    sequences = [tokens(prompt, text, tokenizer) for prompt, text in zip(prompts, completions)]
    if any(len(ids) > longest for ids in sequences):
        say_once(f"text_reward.py: texts of more than {longest} tokens are cut from the left")
    return scores_of(model, [ids[-longest:] for ids in sequences], int(os.environ.get("TEXT_REWARD_BATCH", 16)))


@torch.no_grad()
def scores_of(model, sequences: list[list[int]], size: int) -> list[float]:
    """The score at the last token of each sequence, `size` of them per forward pass."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))  # texts of like length need little padding
    scores = [0.0] * len(sequences)
    for begin in range(0, len(order), size):
        numbers = order[begin : begin + size]
        rows = [torch.tensor(sequences[i], device=model.device) for i in numbers]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # on the right; padding is masked
        lengths = torch.tensor([len(row) for row in rows], device=model.device)
        mask = torch.arange(ids.shape[1], device=model.device) < lengths[:, None]
        hidden = model.base_model(ids, attention_mask=mask.long())[0]
        last = hidden[torch.arange(len(rows), device=model.device), lengths - 1]
        for i, score in zip(numbers, model.score(last).squeeze(-1).float().tolist(), strict=True):
            scores[i] = score
    return scores


def tokens(prompt, completion: str, tokenizer) -> list[int]:
    """Token ids of a prompt and its completion, as the reward model reads them."""
    if isinstance(prompt, list) and tokenizer.chat_template is not None:
        messages = [*prompt, {"role": "assistant", "content": completion}]
        chat = tokenizer.apply_chat_template(messages, tokenize=False)
        return tokenizer(chat, add_special_tokens=False)["input_ids"]
    if isinstance(prompt, list):
        if len(prompt) > 1:
            raise ValueError("text_reward.py: the reward model has no chat template for prompts of several messages")
        prompt = prompt[0]["content"]
    ids = tokenizer(prompt + completion)["input_ids"]
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    return ids


@cache
def say_once(text: str):
    print(text, flush=True)
