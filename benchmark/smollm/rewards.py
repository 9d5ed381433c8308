"""Rewards of this folder's tasks, for --reward_fns; their packages are imported when first used."""

from functools import lru_cache


@lru_cache(maxsize=1)
def vader():
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def sentiment(prompts, completions, completion_ids, **columns) -> list[float]:
    """VADER's compound score, from -1 (negative) to 1 (positive)."""
    return [vader().polarity_scores(completion)["compound"] for completion in completions]


@lru_cache(maxsize=1)
def verifier():
    import reasoning_gym

    return reasoning_gym.create_dataset("word_sequence_reversal", size=1)


def reversal(prompts, completions, completion_ids, answer, **columns) -> list[float]:
    """reasoning-gym's own score: 1 if exact; less the more stands around the right answer; else 0."""
    return [
        verifier().score_answer(completion.strip(), {"answer": right})
        for completion, right in zip(completions, answer, strict=True)
    ]
