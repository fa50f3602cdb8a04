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
    """Returns the `usage` object of a request. If a prompt has several sequences, its tokens and cache hits are counted for the
    first sequence only. completion_tokens: the tokens of all sequences."""
    num_prompt = num_cached = num_pauses = 0
    is_predicted = False
    for each in generations:
        if not each.is_copy:
            num_prompt += len(each.prompt)
            num_cached += each.num_cached
        num_pauses += each.num_pauses
        is_predicted = is_predicted or bool(each.prediction)
    told = usage(num_prompt, completion_tokens, num_cached)
    if is_predicted:  # others may or may not get drafts, which must not change the answer's form
        accepted = sum(each.num_accepted for each in generations)
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(each.num_drafted for each in generations) - accepted,
        }
    if num_pauses:
        told["hearth"] = {
            "preemptions": num_pauses,
            "restored_tokens": sum(each.restored_tokens for each in generations),
            "recomputed_tokens": sum(each.recomputed_tokens for each in generations),
        }
    return told
