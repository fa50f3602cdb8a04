"""Weights of attention on the CPU, which are the same wherever the kernel's work space lies."""

from __future__ import annotations

import numpy as np

from engine.cpu.kernels.attention_blocks import CHUNK_TOKENS, soften_row


def test_weights_do_not_depend_on_where_they_are_written() -> None:
    """Arrays that lay close together once went through a loop with other roundings, so a reply depended on the allocator."""
    size = CHUNK_TOKENS
    given = np.random.default_rng(0).standard_normal(size).astype(np.float32) * 2
    room = np.empty(12 * size, np.float32)
    for end in (1, 7, 8, 16, 21, 40, size):
        found = set()
        for distance in (-640, -256, -size, size, size + 8, size + 24, size + 60, 512):
            scores, weights = (room[at : at + size].reshape(1, size) for at in (5 * size, 5 * size + distance))
            scores[0] = given
            tops, totals, sums = np.full(1, -np.inf, np.float32), np.zeros(1, np.float32), np.zeros((1, 64), np.float32)
            soften_row(scores, 0, 0, end, 0.0, weights, 0, tops, totals, sums)
            found.add((weights[0, :end].tobytes(), totals.tobytes()))
            np.testing.assert_allclose(weights[0, :end], np.exp(given[:end] - given[:end].max()), rtol=1e-6)
        assert len(found) == 1, f"{end} scores have {len(found)} results"
