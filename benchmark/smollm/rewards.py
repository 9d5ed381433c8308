"""Rewards of this folder's tasks, for --reward_fns; each needs a package of its own."""


def sentiment(prompts, completions, completion_ids, **columns) -> list[float]:
    """VADER's compound score, from -1 (negative) to 1 (positive)."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    vader = SentimentIntensityAnalyzer()
    return [vader.polarity_scores(completion)["compound"] for completion in completions]


def reversal(prompts, completions, completion_ids, answer, **columns) -> list[float]:
    """reasoning-gym's own score: 1 if exact; less the more stands around the right answer; else 0."""
    import reasoning_gym

    verifier = reasoning_gym.create_dataset("word_sequence_reversal", size=1)
    return [
        verifier.score_answer(completion.strip(), {"answer": right})
        for completion, right in zip(completions, answer, strict=True)
    ]
