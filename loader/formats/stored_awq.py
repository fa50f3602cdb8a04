"""The weight formats of checkpoints that AWQ wrote in the order `gemm` (loader/formats/awq_settings.py).

A matrix NAME.weight [N, K] is stored as NAME.qweight [K, N / 8] int32, eight outputs a word: 0, 2, 4, 6, 1, 3, 5, 7 of them from
the lowest four bits on; NAME.scales [G, N]; and NAME.qzeros [G, N / 8] int32, in the same order. They are rearranged as they are
read (relayout.py); scales are held as float16.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from loader.architectures.architecture import TensorGroup
from loader.formats import int4_layout
from loader.formats.awq_settings import Awq, read
from loader.formats.gptq_settings import GROUPS, group_of
from loader.formats.int4_layout import BY_INPUT, IN_WORD, REARRANGED, Parts, rearranged
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.refused import is_read_as, refusal_of
from loader.formats.relayout import AWQ_WORDS, AWQ_ZEROS, REARRANGING_BYTES, V2_EIGHTS
from loader.formats.stored_gptq import WORDS, parts_by_input
from loader.formats.weight_format import Space, StoredTensor, WeightFormat, WeightSlot


def _parts(settings: Awq, name: str, dims: tuple[int, ...]) -> Parts:
    num_outputs, num_inputs = dims
    stored = StoredTensor(BY_INPUT.of(name, BY_INPUT.words), (num_inputs, -(-num_outputs // IN_WORD)), WORDS)
    groups = -(-num_inputs // (settings.group_inputs or num_inputs))
    words = rearranged(stored, "int32", AWQ_WORDS)
    return parts_by_input(name, groups, num_outputs, words, V2_EIGHTS if settings.symmetric else AWQ_ZEROS)


def _stored(settings: Awq, group: TensorGroup) -> list[StoredTensor]:
    found = [_parts(settings, name, dims) for name, dims in group.tensors]
    return [part.tensor for parts in found for part in parts if part is not None]


def _place(settings: Awq, group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    return int4_layout.place(partial(_parts, settings), settings.group_inputs, False, group, space)


def _format(settings: Awq) -> WeightFormat:
    return WeightFormat(
        f"awq by {settings.group_inputs or 'output'}{', symmetric' if settings.symmetric else ''}",
        (),
        partial(_place, settings),
        stored=partial(_stored, settings),
        recognises=partial(is_read_as, read, settings),
        title="AWQ with 4 bits (gemm)",
        refuses=partial(refusal_of, read),
        kernels="int4" if settings.symmetric else "int4_zeros",
        widened_bytes=WIDENED_BYTES,
        runs_encoders=False,
        check=partial(int4_layout.check, settings.group_inputs),
        load_bytes=REARRANGING_BYTES,
        held_as=lambda group: REARRANGED,
    )


STORED_AWQ = tuple(_format(Awq(group_of({"group_size": size}), symmetric)) for size, symmetric in product(GROUPS, (True, False)))
