"""Names the entries of the array in which a recorded step (kernel calls that are kept and made again) counts its own rows and
tokens. reference_inputs.py does the counting; the names are not there, because that file imports torch, and processes that compile
kernels import these names and do without torch.
"""

from __future__ import annotations

# Indices in `counts`. ROWS, TOKENS: the step's rows and tokens (given). SAMPLING: rows that sample. GREEDY: those of them that take
# their most likely token. APART: rows that ask for more than a token sampled by its settings, such as edited logits or reported
# log-probabilities. ATTENDED: positions that all tokens together attend to.
ROWS, TOKENS, SAMPLING, GREEDY, APART, ATTENDED = 0, 1, 2, 3, 4, 5
NUM_COUNTS = 6
