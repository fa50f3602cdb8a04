"""Defines the weight formats of checkpoints that GPTQ wrote (loader/formats/gptq_settings.py).

A matrix NAME.weight [N, K] is stored as four tensors: NAME.qweight [K / 8, N] int32, eight inputs in each word with the first in
the lowest four bits; NAME.scales [G, N]; NAME.qzeros [G, N / 8] int32, eight outputs in each word in their order; and NAME.g_idx
[K] int32, for each input the index of its group, which shares a scale. Words, scales and zero points are transposed as they are
read (relayout.py); scales are held as float16.

If the inputs of a group are scattered over the matrix, the weights are reordered once the matrix has been read, and each matrix
multiplication reorders its inputs in the same way. In symmetric checkpoints all zero points must be 8; they are checked and not
held.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from loader.architectures.architecture import TensorGroup
from loader.formats.by_input import WORDS, format_by_input, parts_by_input
from loader.formats.gptq_settings import GROUPS, Gptq, group_of, read
from loader.formats.int4_layout import BY_INPUT, IN_WORD, Int4Tensors, rearranged
from loader.formats.relayout import (
    GPTQ_V1_ZEROS,
    GPTQ_V2_ZEROS,
    GPTQ_WORDS,
    GROUPS_IN_ORDER,
    INPUT_ORDER,
    V1_EIGHTS,
    V2_EIGHTS,
)
from loader.formats.stored_part import Along
from loader.formats.weight_format import StoredTensor, WeightFormat


def _parts(settings: Gptq, group: TensorGroup, name: str, dims: tuple[int, ...]) -> Int4Tensors:
    num_outputs, num_inputs = dims
    stored = StoredTensor(BY_INPUT.of(name, BY_INPUT.words), (-(-num_inputs // IN_WORD), num_outputs), WORDS)
    words = rearranged(stored, "int32", (Along(1), Along(0, IN_WORD)), GPTQ_WORDS)
    if settings.symmetric:
        zeros = V2_EIGHTS if settings.is_v2 else V1_EIGHTS
    else:
        zeros = GPTQ_V2_ZEROS if settings.is_v2 else GPTQ_V1_ZEROS
    parts = parts_by_input(settings, name, dims, words, zeros)
    of_inputs = StoredTensor(BY_INPUT.of(name, BY_INPUT.order), (num_inputs,), WORDS)
    order = INPUT_ORDER if settings.ordered and group.may_be_reordered else GROUPS_IN_ORDER
    return parts._replace(order=rearranged(of_inputs, "int32", (None, Along(0)), order))


def _format(settings: Gptq) -> WeightFormat:
    name = f"gptq by {settings.group_inputs or 'output'}"
    told = ((settings.is_v2, "v2"), (not settings.symmetric, "zero points"), (settings.ordered, "desc_act"))
    name = ", ".join([name, *(word for applies, word in told if applies)])
    return format_by_input(settings, name, "GPTQ with 4 bits", read, partial(_parts, settings), settings.ordered)


STORED_GPTQ = tuple(
    _format(Gptq(group_of({"group_size": size}), symmetric, is_v2, ordered))
    for size, symmetric, is_v2, ordered in product(GROUPS, (True, False), (False, True), (False, True))
    if not (ordered and size == -1)
)
