"""Describes weight formats: which setting asks for a format, how a checkpoint in it is recognised and what tensors it holds, how
matrices are laid out in memory, which kernels they need, and where the format is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from loader.architectures.architecture import Cut, TensorGroup
from loader.files.direct_io import BLOCK_BYTES
from loader.formats.alignment import aligned
from loader.formats.packed_place import PackedPlace
from loader.formats.relayout import Relayout
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import ALTERNATING, ModelShape

MIN_BLOCK_ALIGNED_BYTES = 64 << 10  # smaller groups are copied into place instead of costing up to a block of padding
SCALE_BYTES = 4  # of a float32 scale
FLOATS = ("F32", "BF16", "F16")  # safetensors' names


class StoredTensor(NamedTuple):
    """A tensor that a checkpoint must hold. dtypes: the dtypes that it may have, by their names in safetensors. is_scale: whether
    dimensions of 1 at the end of its shape may be missing in the file, because producers differ in that."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    is_scale: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        return shape == self.shape or (self.is_scale and without_ones(shape) == without_ones(self.shape))


class WeightSlot(NamedTuple):
    """The location of one parameter in a model's weight range (the memory for all its weights), and what is held there.

    name, shape: as in the checkpoint. offset_bytes, num_bytes: where it begins, and how long it is. stage: the part of a forward
    pass that first needs it: 0 before the layers, n + 1 for layer n, the highest number after the layers. held_as: the dtype in
    memory; "": the model's dtype, or int8 if the load quantises.

    Of quantised matrices: scales_at_bytes: where the matrix's scales begin in the weight range (for NVFP4, those of its whole
    tensor group); -1: the parameter has no such scales. group_inputs: for an FP8, INT4 or NVFP4 matrix, and for the tensor with the
    groups of its inputs, how many inputs of a row share a scale; 0: the parameter is none of these. relayout: how its numbers are
    rearranged; None: they are held in the stored order.

    joint: a name that parameters have in common if they can be used only when all of them have been read, because their inputs are
    reordered together, or because they are packed as one matrix; "": the parameter depends on no other.

    repeats, inverse and kept are about scales that are converted to float32 and have a row in memory for each row of the matrix:
    those of FP8 matrices and of stored int8 matrices, and the factors of NVFP4 matrices. repeats: how many rows of memory each
    stored row fills (the last one may fill fewer); 0: the parameter is no scales of this kind. inverse: whether the inverses of the
    stored numbers are held. kept: the part of these scales that a device holds, as a cut of [outputs, groups of inputs], while
    `shape` is the whole tensor's; None: all.

    cut: for a split model, which part of the stored tensor the parameter is; `shape` is then the part's; None: the whole tensor.

    packed: the location of the packed matrix that the parameter is a part of; None: it is not packed in memory. In a packed matrix,
    offset_bytes and num_bytes are counted as though the rows of the array `body` lay end to end, and all parameters of the matrix
    have the same `joint`."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    scales_at_bytes: int = -1
    stage: int = 0
    held_as: str = ""
    group_inputs: int = 0
    repeats: int = 0
    relayout: Relayout | None = None
    joint: str = ""
    inverse: bool = False
    cut: Cut | None = None
    kept: Cut | None = None
    packed: PackedPlace | None = None

    @property
    def places(self) -> list[tuple[int, int]]:
        """The ranges [begin, end) of the weight range, in bytes, that are complete once this parameter and all others with the same
        `joint` have been read. If several parameters make up a packed matrix, the first of them has the range of the whole matrix,
        and the others have none."""
        if (packed := self.packed) is not None:
            return [(packed.begin_bytes, packed.end_bytes)] if self.offset_bytes == packed.begin_bytes else []
        places = [(self.offset_bytes, self.offset_bytes + self.num_bytes)]
        if self.scales_at_bytes >= 0 and not self.held_as:
            places.append((self.scales_at_bytes, self.scales_at_bytes + self.shape[0] * SCALE_BYTES))
        return places

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in the checkpoint, even if the parameter is only a part of it."""
        return self.shape if self.cut is None else self.cut.whole_of(self.shape)

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The parameter's shape in memory."""
        return self.shape if self.relayout is None else self.relayout.held_shape(self.shape)


class Space(NamedTuple):
    """The free space of a model's weight range (the memory for all its weights), in which a format lays out the next group of
    tensors. offset_bytes: the offset of the first free byte. item_bytes: bytes of an element of the model's dtype. block_offset:
    the offset within a 4 KiB block at which the group begins in its file; -1: it does not matter. stage: the part of a forward pass
    that first needs the group (WeightSlot.stage). stored_dtype: the dtype in config.json."""

    offset_bytes: int
    item_bytes: int
    block_offset: int
    stage: int
    stored_dtype: str

    @property
    def begin_bytes(self) -> int:
        """The offset in the model's weight range (the memory for all its weights) at which the tensor group begins that is laid out
        in this space. It is the first offset from offset_bytes on that is equal, modulo 4096, to the group's offset in its file, so
        that the group can be read without a copy. If block_offset is -1, it is the first multiple of 64 instead."""
        offset = self.offset_bytes
        return aligned(offset) if self.block_offset < 0 else offset + (self.block_offset - offset) % BLOCK_BYTES


def _as_they_are(group: TensorGroup) -> list[StoredTensor]:
    dtypes = ("I64",) if group.held_as == "int64" else FLOATS
    return [StoredTensor(name, dims, dtypes) for name, dims in group.tensors]


def refuse_stacked_experts(fields: Fields, shape: ModelShape) -> None:
    """Raises UnsupportedModel for a model whose family stacks all experts of a layer in one tensor with alternating rows of gate
    and up. Such experts are served in MXFP4 only."""
    if shape.experts is not None and shape.experts.stack == ALTERNATING:
        message = f"{shape.architecture} is served with experts in MXFP4 only, as quant_method mxfp4 says"
        raise fields.unsupported("quantization_config", message)


@dataclass(slots=True, frozen=True)
class WeightFormat:
    """A way to hold the matrices of layers in memory; a lossless format (`resident`) holds embeddings and heads, too. All other
    parameters of a model are plain.

    name: used in messages and logs. settings: values of the setting `quantize` that ask for the format. resident: the value of the
    setting `resident` that asks for it; "": there is none.

    place: lays out one group of tensors, or a device's share of it (with cuts). It returns the group's slots and the offset of the
    first free byte after them, and raises CheckpointError for numbers of rows or columns that the format does not allow. stored:
    returns the tensors that a checkpoint in the format holds for one group.

    recognises: returns whether a `quantization_config` is that of a checkpoint in the format; None: no checkpoints have this
    format. title: the format's name for such checkpoints in messages. refuses: returns (key, reason) for a setting in a
    `quantization_config` of this format that is not served, else None. scale_suffix, otherwise: if a checkpoint that is recognised
    holds no tensor whose name ends with scale_suffix, its format is the one named `otherwise`; "": there is no such format.
    ignores: returns whether a checkpoint in the format may hold a given tensor in addition.

    kernels: the set of kernels (engine/cpu/kernel_units.py) that the format needs besides those of the dtype; "": none.
    expert_kernels: the further set that mixtures of experts in this format need; "": none. widened_bytes: bytes of a matrix that a
    step converts to the model's dtype at a time.

    device_kinds: the kinds of devices (cuda, cpu) that have kernels for the format; (): all. runs_encoders, runs_experts: whether
    the format is supported for encoders, and for mixtures of experts. runs_stacks: whether it is supported for experts of which the
    checkpoint holds all of a layer in one tensor; only if runs_experts. check: raises UnsupportedModel for a model that is not
    served in the format; its arguments are config.json and the shape.

    reorders: whether a step copies the inputs of such matrices into another order before it multiplies. waits_for_kernels: whether
    loads to a cpu device wait until the format's kernels are compiled, because the reference implementation is too slow to serve a
    model. load_bytes: bytes of a GPU's memory that a load takes besides the weights. held_as: for a group of tensors, returns the
    dtype that its first tensor must have in the file to be read directly to its offset in memory; "": the model's dtype."""

    name: str
    settings: tuple[str | None, ...]
    place: Callable[[TensorGroup, Space], tuple[list[WeightSlot], int]]
    stored: Callable[[TensorGroup], list[StoredTensor]] = _as_they_are
    recognises: Callable[[Mapping[str, Any]], bool] | None = None
    title: str = ""
    refuses: Callable[[Mapping[str, Any]], tuple[str, str] | None] = lambda config: None
    scale_suffix: str = ""
    otherwise: str = ""
    ignores: Callable[[str], bool] = lambda name: False
    kernels: str = ""
    expert_kernels: str = ""
    widened_bytes: int = 0
    device_kinds: tuple[str, ...] = ()
    runs_encoders: bool = True
    runs_experts: bool = True
    runs_stacks: bool = True
    check: Callable[[Fields, ModelShape], None] = refuse_stacked_experts
    resident: str = ""
    reorders: bool = False
    waits_for_kernels: bool = False
    load_bytes: int = 0
    held_as: Callable[[TensorGroup], str] = lambda group: ""

    @property
    def setting(self) -> str:
        """The name of the setting that asks for the format in a configuration file: "resident" or "quantize"."""
        return "resident" if self.resident else "quantize"

    def runs_on(self, kind: str) -> bool:
        """Returns whether devices of the given kind (cuda, cpu) have kernels for the format."""
        return not self.device_kinds or kind in self.device_kinds

    def unbuilt_experts(self, shape: ModelShape) -> str:
        """Returns words for a message that name the model's kind of experts, if the format does not support that kind; "" if it
        does, or if the model has no experts."""
        if shape.experts is not None and not self.runs_experts:
            return "mixtures of experts"
        if shape.experts is not None and shape.experts.stacked and not self.runs_stacks:
            return "experts that the checkpoint holds in one tensor"
        return ""


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a tensor's shape without the dimensions of 1 at its end."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
