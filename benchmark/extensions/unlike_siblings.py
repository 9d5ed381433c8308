"""A reward that compares a prompt's completions: a bonus for being unlike the other ones.

    python rloo.py --reward_model_path benchmark/mini_tldr/reward \
        --reward_fns benchmark/extensions/unlike_siblings.py:unlike_siblings --reward_weights 1 0.5

Not an extension: rloo.py calls it as it is. The lists that a reward function gets have a prompt's k completions one
after the other. In evaluations a prompt has one completion, which gets the whole bonus. Two copies
of a prompt in one update count as one.
"""

from itertools import groupby


def unlike_siblings(prompts, completions, completion_ids, **columns):
    """From 0, a sibling has the same words, to 1, no sibling shares a word: 1 minus the largest Jaccard index."""
    bonuses = []
    for _, group in groupby(zip(prompts, completions, strict=True), key=lambda pair: pair[0]):
        words = [set(text.split()) for _, text in group]
        for j, own in enumerate(words):
            siblings = words[:j] + words[j + 1 :]
            likeness = [len(own & other) / max(1, len(own | other)) for other in siblings]
            bonuses.append(1.0 - max(likeness, default=0.0))
    return bonuses
