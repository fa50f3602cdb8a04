"""Reads a LoRA adapter's files into host memory, in the layout that the adapter's matrices will have in device memory."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from engine.contracts.adapters import ReadAdapter
from engine.protocol import AdapterSource
from loader.adapters.layout import adapter_layout
from loader.adapters.open_adapter import OpenAdapter, open_adapter
from loader.errors import CheckpointError
from loader.files.safetensors import TensorRef
from loader.shapes.dtypes import DTYPE_OF, ITEM_BYTES
from loader.shapes.model_shape import ModelShape


def read_adapter(source: AdapterSource, shape: ModelShape, dtype: str) -> ReadAdapter:
    """Reads a LoRA adapter's files and returns its matrices in `dtype`. shape: the shape of the base model. dtype: the dtype in
    which the base model computes. Raises CheckpointError, which names the file and the tensor or key, and CheckpointChanged if the
    files' fingerprint is not source.fingerprint."""
    with open_adapter(source.path, source.fingerprint) as opened:
        layout = adapter_layout(opened.adapter, shape, ITEM_BYTES[dtype])
        data = np.zeros(layout.num_bytes, np.uint8)  # unlike torch's, it touches no page before it is written
        elements = torch.from_numpy(data).view(getattr(torch, dtype))
        for place in layout.places:
            for part, (module, outputs) in enumerate(zip(place.parts, place.outputs, strict=True)):
                if module is None:
                    continue
                down, up = _held(opened, module.down), _held(opened, module.up)
                at = place.down_at(part)
                elements[at : at + down.numel()] = down.reshape(-1)
                at = place.up_at(part)
                if module.scale != 1.0:
                    up = up.float() * module.scale
                elements[at : at + up.numel()].view(module.rank, outputs).copy_(up.t())
        opened.check_unchanged()
    return ReadAdapter(layout, data)


def _held(opened: OpenAdapter, tensor: TensorRef) -> Tensor:
    """Returns a tensor of an adapter, with the dtype and shape that it has in its file. Raises CheckpointError if a value of the
    tensor is not finite."""
    values = torch.from_numpy(opened.read(tensor)).view(getattr(torch, DTYPE_OF[tensor.dtype])).view(tensor.shape)
    if not math.isfinite(values.sum(dtype=torch.float64).item()):  # no sum of finite values in at most float32 overflows it
        raise CheckpointError(tensor.file, tensor.name, "holds values that are not finite")
    return values
