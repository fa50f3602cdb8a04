"""Names the entries of the array in which a recorded step (kernel calls that are kept and made again) counts its own rows and
tokens. reference_inputs.py fills this array. The names are in a separate file because reference_inputs.py imports torch, and
processes that compile kernels need the names without torch."""

from __future__ import annotations

# Indices in `counts`. ROWS, TOKENS: the step's rows and tokens (given). SAMPLING: rows that sample. GREEDY: those of them that take
# their most likely token. APART: rows that ask for more than a token sampled by its settings, such as edited logits or reported
# log-probabilities. ATTENDED: an upper bound on the number of positions that all tokens together attend to.
ROWS, TOKENS, SAMPLING, GREEDY, APART, ATTENDED = 0, 1, 2, 3, 4, 5
NUM_COUNTS = 6
