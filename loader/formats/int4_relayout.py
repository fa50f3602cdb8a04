"""Rearranges the four-bit numbers of AWQ and GPTQ checkpoints into the kernels' order (relayout.py), some rows and columns at a
time, on the device that holds the tensors.

AWQ (https://github.com/casper-hansen/AutoAWQ, `gemm`) and GPTQ (https://github.com/ModelCloud/GPTQModel) store four-bit numbers in
words of 32 bits. Shapes: R stored rows, C elements of a row, N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from loader.formats.int4_scales import narrow_scales
from loader.formats.relayout import (
    AWQ_WORDS,
    AWQ_ZEROS,
    GPTQ_V1_ZEROS,
    GPTQ_V2_ZEROS,
    GPTQ_WORDS,
    GROUPS_IN_ORDER,
    INPUT_ORDER,
    SCALES,
    V1_EIGHTS,
    V2_EIGHTS,
    ZEROS_BY_OUTPUT,
    Relayout,
)

IN_WORD = 8
_IN_ORDER = tuple(range(IN_WORD))
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs the n-th four bits of a word belong to
_LINE_WORDS = 16  # columns that are written together, four bytes each: a cache line
_SWAPS = ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F))


def part_of(held: Tensor, relayout: Relayout, first: int, num_rows: int) -> Tensor:
    """Returns a view of the part of a rearranged tensor's memory that some of the tensor's stored rows fill. held: the memory of
    the whole tensor (Relayout.held_shape). relayout: how its numbers are rearranged. first: index of the first of these stored
    rows. num_rows: their number."""
    if held.dim() < 2:
        return held
    if relayout.turned:
        return held[:, first // relayout.rows : (first + num_rows) // relayout.rows]
    return held[first * relayout.spread : (first + num_rows) * relayout.spread]


def rearrange(relayout: Relayout, stored: Tensor, first: int, group_inputs: int, part: Tensor, at_once: int) -> None:
    """Writes stored rows of a tensor to memory in the order in which kernels read them. Numbers that need not be held are only
    checked. relayout: what the numbers are and how they are rearranged. stored: the rows [R, C], or elements [R]. first: the index
    of the first row in the whole tensor. group_inputs: number of inputs that share a scale. part: the memory of these rows, as
    `part_of` returns it. at_once: number of elements that are rearranged at a time. Raises ValueError for numbers that are not
    valid or cannot be held."""
    if relayout == GROUPS_IN_ORDER:
        _check_order(stored, first, group_inputs)
    elif relayout == INPUT_ORDER:
        part.copy_(order_of(stored, group_inputs))
    elif relayout in (V1_EIGHTS, V2_EIGHTS):
        for rows, columns in _tiles(stored, _LINE_WORDS, at_once):
            _check_eights(stored[rows, columns], is_v1=relayout == V1_EIGHTS)
    else:
        for rows, columns in _tiles(stored, relayout.rows * _LINE_WORDS, at_once):
            own = part_of(part, relayout, rows.start, rows.stop - rows.start)
            spread = slice(columns.start * relayout.spread, columns.stop * relayout.spread)
            _WRITERS[relayout.name](stored[rows, columns], own[spread] if relayout.turned else own[:, columns])


def _tiles(stored: Tensor, most_rows: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    num_rows, num_columns = stored.shape
    width = max(1, at_once // most_rows)
    for row in range(0, num_rows, most_rows):
        for column in range(0, num_columns, width):
            yield slice(row, min(row + most_rows, num_rows)), slice(column, min(column + width, num_columns))


def _gptq_words(stored: Tensor, held: Tensor) -> None:
    held.copy_(stored.t())


def _awq_words(stored: Tensor, held: Tensor) -> None:
    """Rearranges AWQ's four-bit weights into the words that kernels read. stored: words [8 R, C], each with eight outputs of one
    input. held: words [8 C, R], which are written, each with eight inputs of one output."""
    words = stored.unflatten(0, (-1, 2, 2, 2)).clone()  # [R, 2, 2, 2, C]
    for axis, (bits, mask) in enumerate(_SWAPS, 1):  # swaps the four bits of input i, place p with those of input p, place i
        low, high = words.unbind(axis)
        other = (low >> bits).bitwise_xor_(high).bitwise_and_(mask)
        high.bitwise_xor_(other)
        low.bitwise_xor_(other.bitwise_left_shift_(bits))
    # the n-th place of a word belongs to output 0, 2, 4, 6, 1, 3, 5, 7
    held.unflatten(0, (-1, 2, 2, 2)).copy_(words.permute(4, 2, 3, 1, 0))


def _scales(stored: Tensor, held: Tensor) -> None:
    narrow_scales(stored.t(), held)


def _zeros(order: tuple[int, ...], added: int, turned: bool) -> Callable[[Tensor, Tensor], None]:
    """Returns a function write(stored, held), which unpacks the zero points in `stored` to `held`. stored: words [R, C], each with
    eight outputs. held: uint8 [8 C, R], or [8 R, C] if `turned` is False. order: for the n-th four bits of a word, the index of the
    output to which they belong. added: number that is added to each zero point. turned: whether the tensor is transposed."""

    def write(stored: Tensor, held: Tensor) -> None:
        to = held.unflatten(0, (-1, IN_WORD))
        for place, output in enumerate(order):
            zeros = (stored >> (4 * place)).bitwise_and_(15).add_(added)
            to[:, output].copy_(zeros.t() if turned else zeros)

    return write


_WRITERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    GPTQ_WORDS.name: _gptq_words,
    AWQ_WORDS.name: _awq_words,
    SCALES.name: _scales,
    GPTQ_V1_ZEROS.name: _zeros(_IN_ORDER, 1, True),
    GPTQ_V2_ZEROS.name: _zeros(_IN_ORDER, 0, True),
    AWQ_ZEROS.name: _zeros(_AWQ_ORDER, 0, True),
    ZEROS_BY_OUTPUT.name: _zeros(_IN_ORDER, 0, False),
}


def _check_eights(stored: Tensor, is_v1: bool) -> None:
    wanted = 0x77777777 if is_v1 else 0x88888888 - (1 << 32)
    if not bool((stored == wanted).all()):
        raise ValueError("holds a zero point that is not 8, although sym is true")


def _check_order(groups: Tensor, first: int, group_inputs: int) -> None:
    wanted = torch.arange(first, first + len(groups), dtype=groups.dtype) // group_inputs
    if not bool((groups == wanted).all()):
        raise ValueError(f"has inputs that are not in the order of their groups of {group_inputs}: not served for this matrix")


def order_of(groups: Tensor, group_inputs: int) -> Tensor:
    """Returns the indices of a matrix's inputs, sorted by their groups (inputs that share a scale): [K] int32. groups: [K] int32,
    for each input the index of its group. Raises ValueError unless every group has group_inputs inputs."""
    num_groups = len(groups) // group_inputs
    if not bool(((groups >= 0) & (groups < num_groups)).all()):
        raise ValueError(f"holds a group that does not exist: there are {num_groups}, from 0 on")
    if not bool((torch.bincount(groups, minlength=num_groups) == group_inputs).all()):
        raise ValueError(f"has groups that are not of {group_inputs} inputs")
    return torch.argsort(groups, stable=True).int()


def order_inputs(packed: Tensor, order: Tensor, at_once: int) -> None:
    """Reorders the inputs of four-bit weights in place. packed [N, K / 2] uint8: the weights, two a byte. order [K]: for each new
    position, the index of the input that goes there. at_once: about how many weights are reordered at a time."""
    places, step = order.long(), max(1, at_once // len(order))
    for some in packed.split(step):
        codes = torch.stack((some & 15, some >> 4), dim=-1).flatten(1)[:, places]
        torch.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=some)
