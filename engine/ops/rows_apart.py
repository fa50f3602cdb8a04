"""Keeps the rows of torch's products of half precision apart from each other on CPUs.

On processors with AMX, torch (2.13, by oneDNN) reads the rows of such a product in pieces of 32 inputs. Where the number of inputs
is no multiple of 32, the last piece takes in the beginning of the next row, times weights of zero: a NaN or an infinity there makes
a NaN of the row before it, which belongs to another request. Behind the last row lies memory of anybody's.

Whoever has torch compute such products on a CPU calls these functions: the cpu device and the reference implementation. They do not
ask where x is.
"""

from __future__ import annotations

from torch import Tensor

PIECE = 32  # inputs


def touch_each_other(x: Tensor) -> bool:
    """Returns whether a product of T rows x [T, K] with K inputs each may read across the rows' ends."""
    return x.shape[-1] % PIECE != 0 and x.element_size() == 2


def rows_apart(x: Tensor) -> Tensor:
    """Returns the rows x [T, K] for a product with weights [N, K]: x itself, or a view of a copy with zeros behind each row."""
    if not touch_each_other(x):
        return x
    num_inputs = x.shape[1]
    held = x.new_zeros(len(x), -(-num_inputs // PIECE) * PIECE)
    held[:, :num_inputs] = x
    return held[:, :num_inputs]
