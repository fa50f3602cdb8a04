"""The indices of the words (int64) with which ranks, the devices of a split model, exchange their parts of a tensor. The compiled
kernels (engine/cpu/kernels/ranks.py) and the code that does the same without Numba (engine/cpu/ranks.py) both use them."""

from __future__ import annotations

from engine.host.rank_memory import LINE_BYTES

# Words of a rank's own array `own`, which recorded calls read each time: pieces exchanged so far, and the rows of the next `sum`
# and `gather` that are not padding.
PIECES, SUM_ROWS, GATHER_ROWS, OWN_WORDS = 0, 1, 2, 3
# Words of a rank's line of counters; engine/host/step_begins.py has a further one.
PUBLISHED, SLEEPERS, LINE_WORDS = 0, 1, LINE_BYTES // 8
