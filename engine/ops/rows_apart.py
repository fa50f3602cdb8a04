"""Keeps rows apart from each other in torch's matrix multiplications of half precision on CPUs, where one row may spoil another.

On processors with AMX, torch (2.13, by oneDNN) reads the rows of such a multiplication in pieces of 32 inputs. Where the number of
inputs is no multiple of 32, the last piece takes in the beginning of the next row, times weights of zero. A NaN or an infinity
there makes a NaN of the row before it, which belongs to another request. Behind the last row lies memory with any content.

All code that has torch compute such multiplications on a CPU calls these functions: the cpu device and the reference
implementation. The functions do not check on which device x is.
"""

from __future__ import annotations

from torch import Tensor

PIECE = 32  # inputs


def touch_each_other(x: Tensor) -> bool:
    """Returns whether a matrix multiplication of T rows x [T, K] with K inputs each may read beyond the ends of rows."""
    return x.shape[-1] % PIECE != 0 and x.element_size() == 2


def rows_apart(x: Tensor) -> Tensor:
    """Returns the rows x [T, K] such that a multiplication by weights [N, K] reads no other row: x itself, or a view of a copy with
    zeros behind each row."""
    if not touch_each_other(x):
        return x
    num_inputs = x.shape[1]
    held = x.new_zeros(len(x), -(-num_inputs // PIECE) * PIECE)
    held[:, :num_inputs] = x
    return held[:, :num_inputs]
