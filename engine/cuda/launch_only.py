"""Makes a model whose weights and KV have addresses but no memory. Its steps launch the same kernels as those of the real model,
with arguments for which Triton compiles the same code, and compute nothing. engine/cuda/launches.py records the launches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cuda.kernels import linear_choice, triton_linear
from engine.cuda.model import CudaModel
from engine.cuda.ops import CudaOps
from engine.cuda.ranks import DeviceRanks
from engine.cuda.share import CudaShare, ShareLinks
from engine.cuda.stages import DeviceStages
from engine.memory import mappings
from engine.ops.ops import Matrix, PackedMatrix
from engine.protocol import LoadModel
from loader.formats.registry import FORMATS
from loader.shapes import kv_layout
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import weights_bytes

ARENA_BLOCKS = 4  # blocks of each KV group; views of the arena are never read


class AddressRange:
    """A range of addresses without memory, used in place of a WeightRange (engine.memory.weight_range) and aligned like one."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        address = mappings.reserve(-(-num_bytes // mappings.HUGE_PAGE_BYTES) * mappings.HUGE_PAGE_BYTES)
        self.all = torch.frombuffer(mappings.bytes_at(address, num_bytes), dtype=torch.uint8)

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        return self.all[offset_bytes : offset_bytes + num_bytes].view(dtype).view(shape)

    def unmap(self) -> None:
        """Does nothing, because nothing is mapped."""


class LaunchOnlyOps(CudaOps):
    """The operations of a model that launches kernels without reading weights. Multiplications of few rows launch hearthd's kernel,
    because a real step may launch it where it was measured to be faster than cuBLAS."""

    def __init__(self) -> None:
        """Does nothing; CudaOps.__init__ would set Triton's cache folder, which the caller has chosen."""

    def embedding(self, ids: Tensor, weight: Tensor | PackedMatrix, scale: float = 1.0, first: int | None = None) -> Tensor:
        assert isinstance(weight, Tensor)
        return weight.new_empty(len(ids), weight.shape[1])

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, Tensor):
            return super().linear(x, weight, bias)
        if x.shape[0] <= triton_linear.MAX_ROWS:
            linear_choice.launch_ours(x, weight, bias)
        return x.new_empty(x.shape[0], weight.shape[0])

    def gated_linear(self, x: Tensor, weight: Matrix, bias: Tensor | None, gelu: bool) -> Tensor:
        if isinstance(weight, Tensor) and x.shape[0] <= triton_linear.MAX_ROWS:
            linear_choice.launch_ours(x, weight, bias, gelu)
        return linear_choice.gate_and_mul(self.linear(x, weight, bias), gelu)

    def _ordered(self, x: Tensor, order: Tensor) -> Tensor:
        return torch.empty_like(x)

    def add_and_scale(self, update: Tensor, residual: Tensor, factor: Tensor) -> None:
        """Does nothing: torch would compute this operation, and the factor has no memory."""

    def linear_float32(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight.new_empty(x.shape[0], weight.shape[0])

    def _product_by_head(self, x: Tensor, weights: Tensor, out: Tensor) -> None:
        """Does nothing and leaves out [H, T, N] unwritten. A real model multiplies x [H, T, K] by weights [H, K, N] with cuBLAS
        here, which needs weights in memory and launches none of hearthd's kernels."""


class NoRanks(DeviceRanks):
    """The tensor-parallel connection of a share whose launches are only recorded: it exchanges nothing."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self._alone, self._has_ended = 0, size, True, False
        self._broken = np.zeros(1, np.int64)


class NoStages(DeviceStages):
    """The pipeline connection of a share whose launches are only recorded: it passes nothing on."""

    waited_s = 0.0

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype, self._device, self._alone = width, dtype, torch.device("cpu"), True


def launch_only_model(spec: LoadModel, shape: ModelShape, block_tokens: int) -> CudaModel:
    """Returns a model, or a device's share of one if the shape is split, whose steps launch the kernels of the real model's steps
    and compute nothing. spec: only its dtypes and limits are used."""
    groups = kv_layout.kv_groups(shape, spec.kv_dtype, block_tokens)
    arena = AddressRange(ARENA_BLOCKS * max(group.block_bytes for group in groups))
    weights: Any = AddressRange(weights_bytes(shape, spec.dtype, FORMATS[spec.quantize]))
    parts = (LaunchOnlyOps(), spec, shape, weights, arena.all, block_tokens)
    if (split := shape.split) is None:
        return CudaModel(*parts)
    ranks = NoRanks(split.size) if split.size > 1 else None
    stages = NoStages(shape.hidden_size, getattr(torch, spec.dtype)) if split.num_stages > 1 else None
    return CudaShare(*parts, ShareLinks(ranks, stages, np.zeros(1, np.int64)))
