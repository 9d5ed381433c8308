"""Rollouts of several turns with a tool for rloo.py: the policy writes a mark, the tool's answer follows, and so on.

    python benchmark/extensions/turns.py --tool benchmark/mini_gsm8k/calculator.py:calculate --tool_mark "?" FLAGS

The tool is a function that takes the text of a completion so far, special tokens included, and returns the text to put
behind it. The rules:

- A turn ends at a stop token, at the mark, or after T tokens in all. In the last of --max_turns turns the mark has no
  effect, so a completion ends as any other does: by a stop token, or cut off.
- After "" nothing is put behind the mark, and the policy goes on. Anything but text is refused.
- The mark may be a stop token, for chat models that call tools in messages: then "" ends the completion, and an answer
  holds the rest of the chat template, up to the beginning of the policy's next message.
- An answer is tokenized on its own and cut to what is left of the T tokens. Stop tokens and marks in it have no effect.
- An error in the tool ends the run. A tool that should not do that returns the error's text.

A completion is the whole exchange: for reward functions, in `response_mask`, in lengths. The tool's tokens are not in
`policy_mask`: they are not learned from, and have no ratio, KL or entropy. Each further turn is a rollout with one
completion for each exchange that goes on, whose prompt is all that is there: that is read again, once per completion.

Wraps `Args`, `load_models`, `rollout` and `metrics_of`; import an engine for `rollout` before it.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

load_all, rollout, metrics_of = rloo.load_models, rloo.rollout, rloo.metrics_of
tool = None  # the function, the mark's token and the tokenizer, by load_models


@dataclass(kw_only=True)
class Args(rloo.Args):
    tool: str  # file.py:function or module:function that takes the text so far and returns the text to put behind it
    tool_mark: str  # text of the one token after which the tool is asked
    max_turns: int = 4  # of the policy; the tool is asked at most once less


def load_models(args, longest, resumed):
    """Loads the tool too. A turn goes on until each of its exchanges has ended or has T tokens: those that have T first
    may go on for as many more, which are dropped, but need positions."""
    global tool
    rloo.require(args.max_turns >= 1, f"--max_turns {args.max_turns}: must be at least 1")
    tokenizer = rloo.load_tokenizer(args, args.model_name_or_path)
    mark = tokenizer(args.tool_mark, add_special_tokens=False)["input_ids"]
    rloo.require(len(mark) == 1, f"--tool_mark {args.tool_mark!r}: must be one token, is {len(mark)}")
    tool = rloo.load_function(args.tool), mark[0], tokenizer
    return load_all(args, longest + args.response_length, resumed)


def so_far(example, exchange) -> dict:
    return example | {"prompt_ids": example["prompt_ids"] + [token for token, *_ in exchange]}


@torch.no_grad()
def rollout_turns(args, model, examples, k, temperature, stop_ids):
    """`rollout` with up to --max_turns turns of the policy."""
    function, mark, tokenizer = tool
    T = args.response_length
    exchanges = [[] for _ in range(k * len(examples))]  # j·B + b: a list of (token, its log-prob, was it the policy, 1)
    ended = [False] * len(exchanges)
    going_on = list(range(len(exchanges)))
    for turn in range(args.max_turns):
        # 1. What the policy writes in this turn: of each prompt k completions, later one of each exchange.
        last = turn == args.max_turns - 1
        ends = stop_ids if last else [*stop_ids, mark]
        if turn == 0:
            batch, logprobs = rollout(args, model, examples, k, temperature, ends)
        else:
            room = max(T - len(exchanges[i]) for i in going_on)
            prompts = [so_far(examples[i % len(examples)], exchanges[i]) for i in going_on]
            batch, logprobs = rollout(replace(args, response_length=room), model, prompts, 1, temperature, ends)

        # 2. The tool's answers to those that wrote the mark and have room for more; the others stop here.
        written = zip(going_on, batch.completion_ids(), logprobs.flatten(0, 1).tolist(), strict=True)
        going_on = []
        for i, ids, of_ids in written:
            exchange = exchanges[i]
            exchange += [(token, logprob, True, True) for token, logprob in zip(ids, of_ids)][: T - len(exchange)]
            token, room, answer = exchange[-1][0], T - len(exchange), []
            asks = token == mark and room and not last
            if asks:
                text = function(tokenizer.decode([x[0] for x in exchange], clean_up_tokenization_spaces=False))
                rloo.require(isinstance(text, str), f"--tool {args.tool}: must return text, not {text!r:.60}")
                answer = tokenizer(text, add_special_tokens=False)["input_ids"][:room]
                exchange += [(token, 0.0, False, True) for token in answer]
            ended[i] = token in stop_ids and not answer
            if asks and not ended[i] and len(answer) < room:
                going_on.append(i)
        if not going_on:
            break

    # 3. The whole exchanges as a Batch.
    padded = pad_sequence([torch.tensor(exchange, dtype=torch.float64) for exchange in exchanges], batch_first=True)
    tokens, sampled, by_policy, real = padded.unflatten(0, (k, -1)).unbind(-1)  # (k, B, n), n ≤ T
    tokens = tokens.where(real > 0, tokens[..., :1]).long().to(model.device)  # padding as that of rloo.pad
    batch = rloo.make_batch(examples, tokens, stop_ids=[])  # of the stop tokens only the policy's last one counts
    real, by_policy, ended = (x.bool().to(model.device) for x in (real, by_policy, torch.tensor(ended).view(k, -1)))
    batch = batch._replace(response_mask=real, policy_mask=by_policy, ended=ended)
    return batch, sampled.float().to(model.device)


def metrics_with_tool(args, experience, improved):
    """Adds means over completions: how often the tool answered, and the number of its tokens."""
    batch = experience.batch
    by_tool = batch.response_mask & ~batch.policy_mask  # (k, B, n)
    answers = by_tool[..., 1:] & batch.policy_mask[..., :-1]
    return metrics_of(args, experience, improved | {"tool/answers": answers.sum(-1), "tool/tokens": by_tool.sum(-1)})


rloo.Args, rloo.load_models, rloo.rollout, rloo.metrics_of = Args, load_models, rollout_turns, metrics_with_tool

if __name__ == "__main__":
    rloo.command_line()
