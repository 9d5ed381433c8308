"""A reward model with a tokenizer of its own, as a reward function. Not an extension: rloo.py calls it as it is.

    TEXT_REWARD_MODEL=path/or/hub-id python rloo.py --reward_fns benchmark/extensions/text_reward.py:text_reward FLAGS

--reward_model_path needs a model that reads the policy's tokens. This function takes texts, and any model that
`AutoModelForSequenceClassification` loads with one label and a `score` head. A chat goes through the reward model's own
template. Otherwise prompt and completion are joined as they are and end in eos, whether or not the completion has
ended: add --missing_eos_penalty. A text with more tokens than the model has positions is cut from the left.
"""

import os
from functools import cache

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rloo


@cache
def load():
    """Returns the reward model and its tokenizer, loaded once per process, on the process's own GPU if there is one."""
    path = os.environ["TEXT_REWARD_MODEL"]
    options = {"num_labels": 1, "dtype": "auto", "output_loading_info": True}
    model, info = AutoModelForSequenceClassification.from_pretrained(path, **options)
    rloo.require(not info["missing_keys"], f"TEXT_REWARD_MODEL {path}: lacks weights, {info['missing_keys']}")
    model.score.float()  # bfloat16 would round the scores of siblings to equal ones
    model.score.register_forward_pre_hook(lambda head, inputs: (inputs[0].float(),))
    model.layout = "plain"
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    return model.eval().to(device), AutoTokenizer.from_pretrained(path)


def text_reward(prompts, completions, completion_ids, **columns) -> list[float]:
    """Returns the scores of the reward model for prompts with their completions, both texts or both chats."""
    model, tokenizer = load()
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**20
    pairs = zip(prompts, completions, strict=True)
    rows = [tokens(prompt, completion, tokenizer)[-longest:] for prompt, completion in pairs]
    # As rloo.py sees them: the last token is the completion, at which the score is read.
    last = torch.tensor([[ids[-1:] for ids in rows]], device=model.device)  # (1, n, 1)
    batch = rloo.make_batch([{"prompt_ids": ids[:-1]} for ids in rows], last, stop_ids=[])
    return rloo.reward_of_model(model, 16, batch)[0].tolist()


def tokens(prompt, completion, tokenizer) -> list[int]:
    """Returns the token ids of a prompt and its completion for the reward model."""
    if isinstance(prompt, list) and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(prompt + completion, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if isinstance(prompt, list):
        prompt, completion = ("\n".join(message["content"] for message in chat) for chat in (prompt, completion))
    ids = tokenizer(prompt + completion)["input_ids"]
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
