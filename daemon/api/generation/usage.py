"""Makes the `usage` object of an answer: the counts of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from daemon.contracts import Generation


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(generations: Sequence[Generation], completion_tokens: int) -> dict[str, object]:
    """Returns the `usage` object of a request. The tokens of a prompt with n sequences count once, and its n - 1 other sequences do
    not count as cache hits. completion_tokens: the tokens of all sequences."""
    prompts = [each for each in generations if not each.is_copy]
    told = usage(sum(len(each.prompt) for each in prompts), completion_tokens, sum(each.num_cached for each in prompts))
    if any(each.prediction for each in generations):  # others may or may not get drafts, which must not change the answer's form
        accepted = sum(each.num_accepted for each in generations)
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(each.num_drafted for each in generations) - accepted,
        }
    if num_pauses := sum(each.num_pauses for each in generations):
        told["hearth"] = {
            "preemptions": num_pauses,
            "restored_tokens": sum(each.restored_tokens for each in generations),
            "recomputed_tokens": sum(each.recomputed_tokens for each in generations),
        }
    return told
