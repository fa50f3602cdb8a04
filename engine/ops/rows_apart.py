"""Separates the rows of a matrix for torch's matrix multiplications of half precision on CPUs, in which a NaN of one row may
otherwise reach another row.

On processors with AMX, torch (2.13, by oneDNN) reads the rows of such a multiplication in pieces of 32 inputs. If the number of
inputs is not a multiple of 32, a row's last piece contains the beginning of the next row, which is multiplied by weights of zero.
If there is a NaN or an infinity in it, the result of the first row becomes NaN, although the two rows may belong to different
requests. After the last row, memory with any content is read.

All code that computes such multiplications by torch on a CPU calls these functions: the cpu device and the reference
implementation. The functions do not check on which device x is."""

from __future__ import annotations

from torch import Tensor

PIECE = 32  # inputs


def touch_each_other(x: Tensor) -> bool:
    """Returns whether a matrix multiplication of T rows x [T, K] with K inputs each may read beyond the ends of rows."""
    return x.shape[-1] % PIECE != 0 and x.element_size() == 2


def rows_apart(x: Tensor) -> Tensor:
    """Returns x [T, K] in memory in which a multiplication by weights [N, K] reads no other row with a row: x itself if it is safe,
    else a view of a copy with zeros after each row."""
    if not touch_each_other(x):
        return x
    num_inputs = x.shape[1]
    held = x.new_zeros(len(x), -(-num_inputs // PIECE) * PIECE)
    held[:, :num_inputs] = x
    return held[:, :num_inputs]
