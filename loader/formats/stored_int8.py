"""Defines the weight format of checkpoints that compressed-tensors wrote as `int-quantized`: int8 matrices with one scale for each
output.

The form in memory is that of `quantize = "int8"`, but nothing is rounded: the checkpoint holds the int8 values, and the scales as
NAME_scale of shape [N, 1], which become float32. Settings for activations are ignored: the activations that are multiplied with the
matrices have the model's dtype. Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader.architectures.architecture import TensorGroup
from loader.formats import int8
from loader.formats.stored_part import EACH_OUTPUT, stored_part
from loader.formats.weight_format import FLOATS, SCALE_BYTES, Space, StoredTensor, WeightFormat, WeightSlot

_SCALE = "_scale"
_INT8 = ("I8",)
# tensors for activations and KV that a checkpoint may hold
_UNUSED = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale")
_SUPPORTED = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def _recognises(config: Mapping[str, Any]) -> bool:
    if config.get("quant_method") != "compressed-tensors":
        return False
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return False
    return all(_is_supported(group, config.get("format")) for group in groups.values())


def _is_supported(group: object, outer_format: object) -> bool:
    if not isinstance(group, dict) or (group.get("format") or outer_format) != "int-quantized":
        return False
    weights = group.get("weights")
    return isinstance(weights, dict) and all(weights.get(key) == value for key, value in _SUPPORTED.items())


def _stored(group: TensorGroup) -> list[StoredTensor]:
    found = []
    for name, dims in group.tensors:
        found += [StoredTensor(name, dims, _INT8), StoredTensor(name + _SCALE, (dims[0], 1), FLOATS, is_scale=True)]
    return found


def _place(group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    placed, end = int8.place(group, space)
    slots = []
    for slot in placed:
        slots.append(slot._replace(held_as="int8"))
        name = slot.name + _SCALE
        stored = (slot.stored_shape[0], 1)
        num_bytes = slot.shape[0] * SCALE_BYTES
        scales = WeightSlot(name, stored, slot.scales_at_bytes, num_bytes, -1, slot.stage, "float32", 0, repeats=1)
        slots.append(scales._replace(kept=stored_part(name, stored, EACH_OUTPUT, slot.cut).cut))
    return slots, end


STORED_INT8 = WeightFormat(
    "compressed-tensors int8",
    (),
    _place,
    stored=_stored,
    recognises=_recognises,
    title="compressed-tensors' int-quantized with 8 bits and one symmetric scale an output",
    ignores=lambda name: name.endswith(_UNUSED),
    kernels=int8.INT8.kernels,
    expert_kernels=int8.INT8.expert_kernels,
    widened_bytes=int8.WIDENED_BYTES,
    runs_encoders=False,
)
