"""Rollouts of several turns with a tool for rloo.py: the policy writes a mark, the tool's answer follows, and so on.

    python benchmark/extensions/turns.py --tool file.py:function --tool_mark "?" FLAGS OF rloo.py

The tool is a function that takes the text of a completion so far, special tokens included, and returns the text to put
behind it. The rules:

- A turn ends at a stop token, at the mark, or after T tokens in all. In the last of --max_turns turns the mark has no
  effect, so a completion ends like any other: by a stop token, or cut off.
- If the tool returns "", nothing is put behind the mark, and the policy continues.
- The mark may be a stop token, for chat models that call tools in messages. Then "" ends the completion, and an answer
  holds the rest of the chat template, up to the beginning of the policy's next message.
- An answer is tokenized on its own and cut to what is left of the T tokens. Stop tokens and marks in it have no effect.

A completion is the whole exchange, for reward functions, in `response_mask` and in lengths. The tool's tokens are not
in `policy_mask`: they are not learned from, and have no ratio, KL or entropy. Each further turn is a rollout with one
completion per exchange, whose prompt is the exchange so far: it is read again, once per completion.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

tool = None  # the function, the mark's token and the tokenizer, set by load_models


@dataclass(kw_only=True)
class Args(rloo.Args):
    tool: str  # file.py:function or module:function that takes the text so far and returns the text to put behind it
    tool_mark: str  # text of the one token after which the tool is asked
    max_turns: int = 4  # turns of the policy; the tool is asked at most once less


def load_models(original, args, resumed):
    """Also loads the tool."""
    global tool
    tokenizer = rloo.load_tokenizer(args, args.model_name_or_path)
    mark = tokenizer(args.tool_mark, add_special_tokens=False)["input_ids"]
    rloo.require(len(mark) == 1, f"--tool_mark {args.tool_mark!r}: must be one token, is {len(mark)}")
    tool = rloo.load_function(args.tool), mark[0], tokenizer
    return original(args, resumed)


def check_policy(original, args, model, pair):
    """`check_policy` with rows of 2 T tokens. All exchanges of a turn get as many tokens as the shortest one needs to
    have T, so one that has T may be continued by as many more, which are dropped. It also calls the tool."""
    original(replace(args, response_length=2 * args.response_length), model, pair)


@torch.no_grad()
def rollout(original, args, model, examples, k, temperature, stop_ids):
    """`rollout` with up to --max_turns turns of the policy."""
    function, mark, tokenizer = tool
    T = args.response_length
    B = len(examples)
    exchanges = [[] for _ in range(k * B)]  # tokens of lane j of prompt b, at j·B + b
    written = [[] for _ in range(k * B)]  # of each token its log-prob, and whether the policy wrote it
    ended = [False] * k * B
    active = list(range(k * B))
    for turn in range(args.max_turns):
        # 1. What the policy writes in this turn: of each prompt k completions, later one of each exchange.
        last = turn == args.max_turns - 1
        ends = stop_ids if last else [*stop_ids, mark]
        if turn == 0:
            batch, logprobs = original(args, model, examples, k, temperature, ends)
        else:
            room = max(T - len(exchanges[i]) for i in active)
            prompts = [examples[i % B] | {"prompt_ids": examples[i % B]["prompt_ids"] + exchanges[i]} for i in active]
            batch, logprobs = original(replace(args, response_length=room), model, prompts, 1, temperature, ends)

        # 2. The tool's answers to those that wrote the mark and have room for more; the others stop here.
        turns = zip(active, batch.completion_ids(), logprobs.flatten(0, 1).tolist(), strict=True)
        active = []
        for i, ids, of_ids in turns:
            exchange = exchanges[i]
            ids = ids[: T - len(exchange)]
            exchange += ids
            written[i] += [(logprob, True) for logprob in of_ids[: len(ids)]]
            room = T - len(exchange)
            answer = []
            asks = ids[-1] == mark and room > 0 and not last
            if asks:
                text = function(tokenizer.decode(exchange, clean_up_tokenization_spaces=False))
                answer = tokenizer(text, add_special_tokens=False)["input_ids"][:room]
                exchange += answer
                written[i] += [(0.0, False)] * len(answer)
            ended[i] = ids[-1] in stop_ids and not answer
            if asks and not ended[i] and len(answer) < room:
                active.append(i)
        if not active:
            break

    # 3. The whole exchanges as a Batch of T slots, so that under fsdp.py all ranks read as often.
    padded = pad_sequence([torch.tensor(pairs) for pairs in written], batch_first=True).to(model.device)
    padded = F.pad(padded, (0, 0, 0, T - padded.shape[1]))
    logprobs, by_policy = padded.movedim(-1, 0).unflatten(1, (k, B)).contiguous()  # (k, B, T)
    tokens, real = rloo.pad(exchanges, device=model.device)
    tokens, real = (F.pad(x, (0, T - x.shape[1])).unflatten(0, (k, B)) for x in (tokens, real))
    batch = rloo.make_batch(examples, tokens, stop_ids=[])  # of the stop tokens only the policy's last one counts
    ended = torch.tensor(ended, device=model.device).view(k, B)
    return batch._replace(response_mask=real, policy_mask=by_policy.bool(), ended=ended), logprobs


rloo.Args = Args
rloo.wrap(load_models=load_models, check_policy=check_policy, rollout=rollout)

if __name__ == "__main__":
    rloo.command_line()
