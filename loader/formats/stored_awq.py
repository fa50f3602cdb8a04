"""Defines the weight formats of checkpoints that AWQ wrote in the order `gemm` (loader/formats/awq_settings.py).

A matrix NAME.weight [N, K] is stored as three tensors: NAME.qweight [K, N / 8] int32, each word with eight outputs, which from the
lowest four bits on are outputs 0, 2, 4, 6, 1, 3, 5, 7 of the eight; NAME.scales [G, N]; and NAME.qzeros [G, N / 8] int32, with
outputs in the same order. All are rearranged as they are read (relayout.py); scales are held as float16.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from loader.architectures.architecture import TensorGroup
from loader.formats.awq_settings import Awq, read
from loader.formats.by_input import WORDS, format_by_input, parts_by_input
from loader.formats.gptq_settings import GROUPS, group_of
from loader.formats.int4_layout import BY_INPUT, IN_WORD, Int4Tensors, rearranged
from loader.formats.relayout import AWQ_WORDS, AWQ_ZEROS, V2_EIGHTS
from loader.formats.stored_part import Along
from loader.formats.weight_format import StoredTensor, WeightFormat


def _parts(settings: Awq, group: TensorGroup, name: str, dims: tuple[int, ...]) -> Int4Tensors:
    num_outputs, num_inputs = dims
    stored = StoredTensor(BY_INPUT.of(name, BY_INPUT.words), (num_inputs, -(-num_outputs // IN_WORD)), WORDS)
    words = rearranged(stored, "int32", (Along(1, IN_WORD), Along(0)), AWQ_WORDS)
    zeros = V2_EIGHTS if settings.symmetric else AWQ_ZEROS
    return parts_by_input(settings, name, dims, words, zeros)


def _format(settings: Awq) -> WeightFormat:
    name = f"awq by {settings.group_inputs or 'output'}{', symmetric' if settings.symmetric else ''}"
    return format_by_input(settings, name, "AWQ with 4 bits (gemm)", read, partial(_parts, settings))


STORED_AWQ = tuple(_format(Awq(group_of({"group_size": size}), symmetric)) for size, symmetric in product(GROUPS, (True, False)))
