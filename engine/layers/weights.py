"""Looks up a model's parameters, as views of its weight range (the address range with all its weights). Tensors that one matrix
multiplication reads together lie end to end there (loader/sizes/layout.py), so the matrix that is fused from them is a view as
well. Shapes: V vocabulary, N outputs and K inputs of a matrix."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine.layers.expert_counts import ExpertCounts
from engine.memory.weight_range import WeightRange
from engine.ops.ops import AdaptedProduct, Fp8Matrix, Int4Matrix, Int8Matrix, Matrix, Mxfp4Matrix, Nvfp4Matrix, PackedMatrix
from loader.configs.adapter_matrices import adapted_matrices, numbers_of
from loader.formats import mxfp4, nvfp4_settings, stored_nvfp4
from loader.formats.int4_layout import BY_INPUT, COMPRESSED, IN_WORD, Names
from loader.formats.packed_place import CODE_BYTES, START_BYTES, PackedPlace
from loader.formats.plain import PLAIN
from loader.formats.relayout import INPUT_ORDER
from loader.formats.weight_format import WeightFormat, WeightSlot
from loader.shapes.dtypes import FLOAT_OF
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import weight_layout


@cache
def _ones(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(width, dtype=dtype, device=device)


class Weights:
    """Looks up a model's parameters by their names in the checkpoint, and returns them as views of the weight range `memory`.
    Methods raise KeyError for a name that the model does not have, unless they say otherwise. counts: the counters of the tokens
    that pass through the model's experts; None: nothing is counted."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: str,
        memory: WeightRange,
        weight_format: WeightFormat = PLAIN,
        counts: ExpertCounts | None = None,
    ) -> None:
        self._slots = {slot.name: slot for slot in weight_layout(shape, dtype, weight_format)}
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._memory, self._counts = memory, counts
        matrices = adapted_matrices(shape)
        self._adapted = {of: AdaptedProduct(number, matrices[number].outputs) for of, number in numbers_of(shape).items()}

    def get(self, name: str) -> Tensor:
        slot = self._slots[name]
        return self._memory.tensor(slot.offset_bytes, slot.shape, self._dtype_of(slot))

    def _dtype_of(self, slot: WeightSlot) -> torch.dtype:
        """Returns the dtype in memory of a parameter that is not quantised. slot: the parameter's place in the weight range."""
        dtype: torch.dtype = getattr(torch, slot.held_as) if slot.held_as else self._dtype
        return dtype

    def table(self, name: str) -> Tensor | PackedMatrix:
        """Returns the table of an embedding or a head, which may be packed in memory: all its rows [V, K], or in a split model
        those that this device has."""
        packed = self._slots[name].packed
        return self.get(name) if packed is None else self._packed(packed)

    def ones(self, width: int) -> Tensor:
        """Returns a tensor of `width` ones, for norms that have no weight. It is always the same tensor, even after the model was
        evicted and loaded again, because CUDA graphs that were captured earlier still read it."""
        return _ones(width, self._dtype, self._memory.tensor(0, (0,), torch.uint8).device)

    def expert_counts(self, layer: int) -> Tensor | None:
        """Returns the counters of a layer's experts, int64 on the device (ExpertMatrices.counts); None if nothing is counted. Each
        step adds to an expert's counter the number of tokens that passed through the expert."""
        return None if self._counts is None else self._counts.row(layer)

    def find(self, name: str) -> Tensor | None:
        """Returns the parameter with the given name; None if the model has no such parameter, for example no bias."""
        return self.get(name) if name in self._slots else None

    def fused(self, prefix: str, names: tuple[str, ...], suffix: str) -> Tensor:
        """Returns the tensors with the names prefix + name + suffix, for each name in `names`, as one tensor, joined along the
        first axis. The tensors must lie end to end in memory."""
        slots = [self._slots[f"{prefix}{name}{suffix}"] for name in names]
        shape = (sum(slot.shape[0] for slot in slots), *slots[0].shape[1:])
        return self._memory.tensor(slots[0].offset_bytes, shape, self._dtype_of(slots[0]))

    def matrix(self, prefix: str, names: tuple[str, ...]) -> Matrix:
        """Returns the weights of one projection, or of several that are fused into one matrix: a plain tensor, or a quantised or
        packed matrix if the model's weight format holds them in that way."""
        weights = [f"{prefix}{name}.weight" for name in names]
        for names_of in (nvfp4_settings.MODELOPT, nvfp4_settings.COMPRESSED):
            first = self._slots.get(names_of.of(weights[0], names_of.numbers))
            if first is not None and first.held_as == stored_nvfp4.HELD_AS:
                return self._nvfp4(names_of, weights)
        for stored in (COMPRESSED, BY_INPUT):
            if stored.of(weights[0], stored.words) in self._slots:
                return self._int4(stored, weights)
        slots = [self._slots[name] for name in weights]
        if slots[0].packed is not None:
            return self._packed(slots[0].packed)
        if slots[0].scales_at_bytes < 0:
            return self.fused(prefix, names, ".weight")
        num_outputs, num_inputs = sum(slot.shape[0] for slot in slots), slots[0].shape[1]
        place, scales_at, group_inputs = slots[0].offset_bytes, slots[0].scales_at_bytes, slots[0].group_inputs
        if not group_inputs:
            values = self._memory.tensor(place, (num_outputs, num_inputs), torch.int8)
            return Int8Matrix(values, self._memory.tensor(scales_at, (num_outputs,), torch.float32))
        codes = self._memory.tensor(place, (num_outputs, num_inputs), torch.uint8)
        scales = self._memory.tensor(scales_at, (num_outputs, -(-num_inputs // group_inputs)), torch.float32)
        return Fp8Matrix(codes, scales, group_inputs)

    def adapted(self, prefix: str, names: tuple[str, ...]) -> AdaptedProduct | None:
        """Returns a description of the matrix multiplication with these matrices if LoRA adapters may change its result; None if
        they may not."""
        return self._adapted.get((prefix, names))

    def _int4(self, stored: Names, weights: list[str]) -> Int4Matrix:
        """Returns several INT4 matrices, which lie end to end in memory, as one matrix. stored: gives the names of the tensors in
        which the checkpoint stores a matrix. weights: names of the matrices."""
        slots = [self._slots[stored.of(name, stored.words)] for name in weights]
        first, scale = slots[0], self._slots[stored.of(weights[0], stored.scales)]
        num_outputs, num_inputs = sum(slot.held_shape[0] for slot in slots), first.held_shape[1] * IN_WORD
        num_groups = num_inputs // first.group_inputs
        packed = self._memory.tensor(first.offset_bytes, (num_outputs, num_inputs // 2), torch.uint8)
        scales = self._memory.tensor(scale.offset_bytes, (num_outputs, num_groups), getattr(torch, FLOAT_OF[scale.held_as]))
        zeros = order = None
        if (zero := self._slots.get(stored.of(weights[0], stored.zeros))) is not None and zero.num_bytes:
            zeros = self._memory.tensor(zero.offset_bytes, (num_outputs, num_groups), torch.uint8)
        if (place := self._slots.get(stored.of(weights[0], stored.order))) is not None and place.relayout == INPUT_ORDER:
            order = self._memory.tensor(place.offset_bytes, (num_inputs,), torch.int32)  # one order for all of them
        return Int4Matrix(packed, scales, first.group_inputs, zeros, order)

    def _packed(self, place: PackedPlace) -> PackedMatrix:
        (body, codes, bases, starts), tensor = place.ranges(0, place.num_panels), self._memory.tensor
        return PackedMatrix(
            place.num_outputs,
            place.num_inputs,
            tensor(body[0], (body[1] - body[0],), torch.uint8),
            tensor(codes[0], ((codes[1] - codes[0]) // CODE_BYTES,), torch.uint64),
            tensor(bases[0], (bases[1] - bases[0],), torch.uint8),
            tensor(starts[0], ((starts[1] - starts[0]) // START_BYTES,), torch.uint32),
            tensor(place.escapes_at_bytes, (place.end_bytes - place.escapes_at_bytes,), torch.uint8),
        )

    def _nvfp4(self, names: nvfp4_settings.Nvfp4, weights: list[str]) -> Nvfp4Matrix:
        """Returns several NVFP4 matrices, which lie end to end in memory, as one matrix. names: gives the names of the tensors in
        which the checkpoint stores a matrix. weights: names of the matrices."""
        slots = [self._slots[names.of(name, names.numbers)] for name in weights]
        numbers, scales, whole = (self._slots[names.of(weights[0], part)] for part in (names.numbers, names.scales, names.whole))
        num_outputs = sum(slot.shape[0] for slot in slots)
        return Nvfp4Matrix(
            self._memory.tensor(numbers.offset_bytes, (num_outputs, numbers.shape[1]), torch.uint8),
            self._memory.tensor(scales.offset_bytes, (num_outputs, scales.shape[1]), torch.uint8),
            self._memory.tensor(whole.offset_bytes, (num_outputs,), torch.float32),
        )

    def stacked(self, prefix: str, names: tuple[str, ...], num: int) -> Tensor | Fp8Matrix | Int4Matrix | Int8Matrix | Nvfp4Matrix:
        """Returns the matrices of all experts of a layer, [num, N, K], for a checkpoint that stores them one by one. num: number of
        experts. names: prefix + name, for each of them, is the name of a matrix. The matrices lie end to end in memory and are
        viewed as one, which is divided into `num` equal parts."""
        joined = self.matrix(prefix, names)
        assert not isinstance(joined, PackedMatrix)  # loader/formats keeps it from mixtures of experts
        if isinstance(joined, Tensor):
            return joined.view(num, len(joined) // num, joined.shape[1])

        def parts(whole: Tensor) -> Tensor:
            return whole.view(num, len(whole) // num, *whole.shape[1:])

        if isinstance(joined, Fp8Matrix):
            return Fp8Matrix(parts(joined.values), parts(joined.scales), joined.group_inputs)
        if isinstance(joined, Int8Matrix):
            return Int8Matrix(parts(joined.values), joined.scales.view(num, -1))
        if isinstance(joined, Nvfp4Matrix):
            return Nvfp4Matrix(parts(joined.packed), parts(joined.scales), parts(joined.factors))
        zeros = None if joined.zeros is None else parts(joined.zeros)
        return Int4Matrix(parts(joined.packed), parts(joined.scales), joined.group_inputs, zeros)

    def stack(self, name: str) -> Tensor | Mxfp4Matrix:
        """Returns the matrices of all experts of a layer, [num, N, K], for a checkpoint that stores them in one tensor, which is
        plain or in MXFP4. name: name of that tensor."""
        if name in self._slots:
            return self.get(name)
        blocks, scales = (self._slots[name + part] for part in (mxfp4.BLOCKS, mxfp4.SCALES))
        return Mxfp4Matrix(*(self._memory.tensor(slot.offset_bytes, slot.shape, torch.uint8) for slot in (blocks, scales)))

    def find_fused(self, prefix: str, names: tuple[str, ...], suffix: str) -> Tensor | None:
        """Returns the tensors with the names prefix + name + suffix, for each name in `names`, as one tensor, joined along the
        first axis; None if the model has no such parameters."""
        return self.fused(prefix, names, suffix) if f"{prefix}{names[0]}{suffix}" in self._slots else None
