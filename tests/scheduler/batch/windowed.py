"""A scheduler over a KV group with a sliding window."""

from __future__ import annotations

import numpy as np

from tests.scheduler.batch.fake_model import VOCAB, Harness, expected_output
from tests.scheduler.batch.params import Params

LONG = Params(ignore_eos=True, max_tokens=100)


def prompt_of(num: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, num).tolist()


def make(window: int = 8, *, full: bool = True, more: int = 13, **options: object) -> Harness:
    """A window group of `more` reserved chunks beside a full one, or alone."""
    fields: dict[str, object] = {"max_model_len": 128, "max_num_batched_tokens": 16, "reserved_chunks": 10} | options
    if full:
        return Harness(more_groups=[(window, 24, more)], **fields)  # type: ignore[arg-type]
    return Harness(window=window, **fields)  # type: ignore[arg-type]


def held(harness: Harness, group: int) -> int:
    return harness.kv.groups[group].num_held_blocks


def hit(harness: Harness, request_id: int, prompt: list[int], **options: object) -> int:
    """Runs a request to its end; prompt tokens it found."""
    harness.submit(request_id, prompt, Params(max_tokens=3, ignore_eos=True), **options)
    harness.run()
    assert harness.output[request_id] == expected_output(
        prompt, Params(max_tokens=3, ignore_eos=True), 128, windows=harness.windows
    )
    return harness.cached.get(request_id, 0)
