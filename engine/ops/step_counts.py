"""Names the numbers that a recorded step counts about its own rows and tokens. They are not in reference_inputs.py, which counts
them, because that file imports torch, and processes that compile kernels import these names and do without torch.
"""

from __future__ import annotations

# Indices in `counts`. ROWS, TOKENS: the step's rows and tokens (given). SAMPLING: rows that sample. GREEDY: those of them that take
# their most likely token. APART: rows that ask for more than a token sampled by its settings, such as edited logits or reported
# log-probabilities. ATTENDED: positions that all tokens together attend to.
ROWS, TOKENS, SAMPLING, GREEDY, APART, ATTENDED = 0, 1, 2, 3, 4, 5
NUM_COUNTS = 6
