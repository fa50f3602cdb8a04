"""The weight formats of checkpoints that GPTQ wrote (loader/formats/gptq_settings.py).

A matrix NAME.weight [N, K] is stored as NAME.qweight [K / 8, N] int32, eight inputs a word with the first in the lowest four bits;
NAME.scales [G, N]; NAME.qzeros [G, N / 8] int32, eight outputs a word in their order; and NAME.g_idx [K] int32, the group of each
input. Words, scales and zero points are turned as they are read (relayout.py), scales are held as float16. Where inputs of a group
lie apart, they are brought together once the matrix has been read, and products take their rows in that order. Zero points of
symmetric checkpoints are only checked.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from loader.architectures.architecture import TensorGroup
from loader.dtypes import SCALES_IN
from loader.formats import int4_layout
from loader.formats.gptq_settings import GROUPS, Gptq, group_of, read
from loader.formats.int4_layout import BY_INPUT, IN_WORD, REARRANGED, Part, Parts, rearranged
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.refused import is_read_as, refusal_of
from loader.formats.relayout import (
    GPTQ_V1_ZEROS,
    GPTQ_V2_ZEROS,
    GPTQ_WORDS,
    GROUPS_IN_ORDER,
    INPUT_ORDER,
    REARRANGING_BYTES,
    SCALES,
    V1_EIGHTS,
    V2_EIGHTS,
    Relayout,
)
from loader.formats.weight_format import Space, StoredTensor, WeightFormat, WeightSlot

WORDS = ("I32",)
SCALES_AS = SCALES_IN["float16"]


def parts_by_input(name: str, groups: int, num_outputs: int, words: Part, zeros: Relayout) -> Parts:
    """Returns the tensors of a matrix whose words are these, but for the groups of its inputs: AWQ has the same."""
    scales = rearranged(StoredTensor(BY_INPUT.of(name, BY_INPUT.scales), (groups, num_outputs)), SCALES_AS, SCALES)
    stored = StoredTensor(BY_INPUT.of(name, BY_INPUT.zeros), (groups, -(-num_outputs // IN_WORD)), WORDS)
    return Parts(words, scales, rearranged(stored, "uint8", zeros))


def _parts(settings: Gptq, may_be_ordered: bool, name: str, dims: tuple[int, ...]) -> Parts:
    num_outputs, num_inputs = dims
    stored = StoredTensor(BY_INPUT.of(name, BY_INPUT.words), (-(-num_inputs // IN_WORD), num_outputs), WORDS)
    if settings.symmetric:
        zeros = V2_EIGHTS if settings.is_v2 else V1_EIGHTS
    else:
        zeros = GPTQ_V2_ZEROS if settings.is_v2 else GPTQ_V1_ZEROS
    groups = -(-num_inputs // (settings.group_inputs or num_inputs))
    parts = parts_by_input(name, groups, num_outputs, rearranged(stored, "int32", GPTQ_WORDS), zeros)
    of_inputs = StoredTensor(BY_INPUT.of(name, BY_INPUT.order), (num_inputs,), WORDS)
    order = INPUT_ORDER if settings.ordered and may_be_ordered else GROUPS_IN_ORDER
    return parts._replace(order=rearranged(of_inputs, "int32", order))


def _stored(settings: Gptq, group: TensorGroup) -> list[StoredTensor]:
    found = [_parts(settings, group.may_be_reordered, name, dims) for name, dims in group.tensors]
    return [part.tensor for parts in found for part in parts if part is not None]


def _place(settings: Gptq, group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    parts_of = partial(_parts, settings, group.may_be_reordered)
    return int4_layout.place(parts_of, settings.group_inputs, settings.ordered and group.may_be_reordered, group, space)


def _format(settings: Gptq) -> WeightFormat:
    name = f"gptq by {settings.group_inputs or 'output'}"
    told = ((settings.is_v2, "v2"), (not settings.symmetric, "zero points"), (settings.ordered, "desc_act"))
    return WeightFormat(
        ", ".join([name, *(word for applies, word in told if applies)]),
        (),
        partial(_place, settings),
        stored=partial(_stored, settings),
        recognises=partial(is_read_as, read, settings),
        title="GPTQ with 4 bits",
        refuses=partial(refusal_of, read),
        kernels="int4" if settings.symmetric else "int4_zeros",
        widened_bytes=WIDENED_BYTES,
        runs_encoders=False,
        check=partial(int4_layout.check, settings.group_inputs),
        reorders=settings.ordered,
        load_bytes=REARRANGING_BYTES,
        held_as=lambda group: REARRANGED,
    )


STORED_GPTQ = tuple(
    _format(Gptq(group_of({"group_size": size}), symmetric, is_v2, ordered))
    for size, symmetric, is_v2, ordered in product(GROUPS, (True, False), (False, True), (False, True))
    if not (ordered and size == -1)
)
