"""Checks FP8 codes (float8_e4m3fn) as they are read, and repeats the stored scales of a matrix for each of its rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loader.architectures.architecture import Cut

_AT_ONCE = 256 << 10  # codes checked at a time, so that they and their copy stay in the second-level cache
_NAN = 0x7F  # code of NaN without the sign bit


def nan_at(codes: npt.NDArray[np.uint8]) -> int:
    """Returns the index of the first FP8 code (float8_e4m3fn) that stands for NaN, or -1 if there is none."""
    magnitudes = np.empty(min(_AT_ONCE, len(codes)), np.uint8)
    for begin in range(0, len(codes), _AT_ONCE):
        some = codes[begin : begin + _AT_ONCE]
        own = np.bitwise_and(some, _NAN, out=magnitudes[: len(some)])
        if own.max() == _NAN:
            return begin + int(own.argmax())
    return -1


def fill_scales(stored: Tensor, repeats: int, held: Tensor, inverse: bool = False, kept: Cut | None = None) -> None:
    """Writes the stored scales of a matrix to `held` as float32, with G scales for each of the matrix's N rows. Raises ValueError
    for scales that are NaN or infinite and, with `inverse`, for numbers whose inverse float32 cannot represent.

    stored: [S, G] (float32, bfloat16 or float16); each row is written for `repeats` consecutive rows of the matrix, the last one
    perhaps for fewer. held: [N * G] or, with `kept`, only the elements of that part. inverse: whether the inverses of the stored
    numbers are written. kept: the part of the elements [N, G] that a device's share of a split model holds; None: all."""
    wide = stored.float()
    if inverse:
        wide = wide.reciprocal()
        if not bool((torch.isfinite(wide) & (wide != 0)).all()):
            raise ValueError("holds a number by which scales cannot be divided: 0, NaN, or too large or small")
    if not bool(torch.isfinite(wide).all()):
        raise ValueError("holds NaN or an infinity: no scale")
    if kept is not None and kept.axis:
        wide = torch.cat([wide[:, begin:end] for begin, end in kept.ranges], dim=1)
    rows = held.view(-1, wide.shape[1])
    filled = 0
    for begin, end in kept.ranges if kept is not None and not kept.axis else ((0, len(rows)),):
        while begin < end:
            num = min(end - begin, repeats - begin % repeats)
            rows[filled : filled + num] = wide[begin // repeats]
            begin, filled = begin + num, filled + num
