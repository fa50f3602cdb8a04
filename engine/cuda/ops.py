"""The operations of models on a GPU; engine/ops/ops.py describes them and their shapes. cuBLAS computes most matrix
multiplications, Triton kernels everything else. In tests the same kernels run interpreted on CPU tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cuda.batch import DeviceBatch
from engine.cuda.kernels import entry
from engine.ops import reference
from engine.ops.ops import (
    AdaptedProduct,
    DeltaRule,
    ExpertMatrices,
    Fp8Matrix,
    HeadNorms,
    Int4Matrix,
    Int8Matrix,
    LatentHeads,
    Matrix,
    Nvfp4Matrix,
    PackedMatrix,
)
from loader.sizes.gpu_sizing import LATENT_HEADS, LATENT_TOKENS

Told = TypeVar("Told", Tensor, npt.NDArray[Any])


class CudaOps:
    """The operations of engine.ops.ops.Ops on a GPU, for steps whose inputs are a DeviceBatch (engine.cuda.batch). cache_dir: the
    folder in whose subfolder `triton` Triton keeps compiled kernels; "": ~/.cache/hearthd."""

    def __init__(self, cache_dir: str) -> None:
        entry.configure(str(Path(cache_dir or Path.home() / ".cache" / "hearthd") / "triton"))

    def embedding(self, ids: Tensor, weight: Tensor | PackedMatrix, scale: float = 1.0, first: int | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix):
            raise TypeError("there is no kernel for a PackedMatrix on a GPU")
        return reference.gather_rows(weight, ids, scale, first)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """Returns x [T, K] times the transpose of weight [N, K], plus bias [N], for weights in every format that GPUs support.
        Raises TypeError for a PackedMatrix, a format of cpu devices."""
        if isinstance(weight, Fp8Matrix | Int8Matrix):
            return entry.byte_linear(x, weight, bias)
        if isinstance(weight, Int4Matrix):
            return entry.four_bits_linear(x if weight.order is None else self._ordered(x, weight.order), weight, bias)
        if isinstance(weight, Nvfp4Matrix):
            return entry.four_bits_linear(x, weight, bias)
        if isinstance(weight, PackedMatrix):
            raise TypeError("there is no kernel for a PackedMatrix on a GPU")
        return entry.linear(x, weight, bias)

    def _ordered(self, x: Tensor, order: Tensor) -> Tensor:
        """Returns x [T, K] with its columns permuted: column k of the result is column order[k] of x."""
        return x.index_select(1, order)

    def add_adapters(self, x: Tensor, out: Tensor, product: AdaptedProduct, batch: DeviceBatch) -> None:
        assert batch.adapters is not None
        entry.add_adapters(x, out, product, batch.adapters, batch.adapters.bound, batch.tiles is None)

    def linear_float32(self, x: Tensor, weight: Tensor) -> Tensor:
        return reference.linear_float32(x, weight)

    def add(self, update: Tensor, residual: Tensor, scale: float = 1.0) -> None:
        residual.add_(update, alpha=scale)

    def copy(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def add_and_scale(self, update: Tensor, residual: Tensor, factor: Tensor) -> None:
        reference.add_and_scale(update, residual, factor)

    def multiply(self, x: Tensor, other: Tensor) -> None:
        x.mul_(other)

    def columns_twice(self, x: Tensor, first: int) -> Tensor:
        out = x.new_empty(len(x), 2 * x.shape[1] - first)
        reference.columns_twice(x, first, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, around_one: bool = False) -> Tensor:
        return entry.rms_norm(x, weight, eps, around_one)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, around_one: bool = False, scale: float = 1.0
    ) -> Tensor:
        return entry.add_rms_norm(x, residual, weight, eps, around_one, scale)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return entry.layer_norm(x, None, weight, bias, eps, 1.0)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: float = 1.0
    ) -> Tensor:
        return entry.layer_norm(x, residual, weight, bias, eps, scale)

    def norm_columns(self, x: Tensor, first: int, weight: Tensor, eps: float, around_one: bool) -> None:
        columns = x[:, first : first + len(weight)]
        columns.copy_(entry.rms_norm(columns.contiguous(), weight, eps, around_one))  # kernels take contiguous rows

    def column_squares(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        out = x.new_empty(len(x), len(widths), dtype=torch.float32)
        reference.column_squares(x, widths, out)
        return out

    def norm_columns_by(self, x: Tensor, weights: tuple[Tensor, ...], squares: Tensor, parts: int, eps: float) -> None:
        reference.norm_columns_by(x, weights, squares, parts, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return entry.gate_and_mul(gate_up, gelu=False)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return entry.gate_and_mul(gate_up, gelu=True)

    def gated_linear(self, x: Tensor, weight: Matrix, bias: Tensor | None, gelu: bool) -> Tensor:
        made = entry.gated_linear(x, weight, bias, gelu) if isinstance(weight, Tensor) else None
        return entry.gate_and_mul(self.linear(x, weight, bias), gelu) if made is None else made

    def gelu(self, x: Tensor) -> Tensor:
        return entry.gelu(x)

    def experts(self, x: Tensor, scores: Tensor, experts: ExpertMatrices, shared: Tensor | None, batch: DeviceBatch) -> Tensor:
        return entry.experts(x, scores, experts, shared, batch)

    def rope_and_store(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        layer: int,
        heads: int,
        batch: DeviceBatch,
        interleaved: bool = False,
        num_turned: int | None = None,
    ) -> None:
        how = (layer, heads, batch, interleaved, num_turned)
        if norms is None:
            entry.rope_and_store(qkv, None, None, None, False, 0.0, *how)
        else:
            entry.rope_and_store(qkv, norms.query, norms.key, norms.value, norms.around_one, norms.eps, *how)

    def rope(
        self, queries: Tensor, norms: HeadNorms | None, layer: int, heads: int, batch: DeviceBatch, interleaved: bool = False
    ) -> None:
        norm, around_one, eps = (None, False, 0.0) if norms is None else (norms.query, norms.around_one, norms.eps)
        entry.rope(queries, norm, around_one, eps, layer, heads, batch, interleaved)

    def attention(
        self,
        qkv: Tensor,
        layer: int,
        heads: int,
        scale: float,
        softcap: float,
        batch: DeviceBatch,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return entry.attention(qkv, layer, heads, scale, softcap, batch, sinks)

    def normed_columns(self, x: Tensor, first: int, weight: Tensor, eps: float) -> Tensor:
        return entry.rms_norm(x[:, first : first + len(weight)].contiguous(), weight, eps, False)

    def rope_and_store_latents(
        self,
        queries: Tensor,
        down: Tensor,
        norm: Tensor,
        eps: float,
        layer: int,
        heads: LatentHeads,
        batch: DeviceBatch,
        interleaved: bool,
    ) -> None:
        entry.rope_and_store_latents(queries, down, norm, eps, layer, heads, batch, interleaved)

    def latent_attention(self, queries: Tensor, layer: int, heads: LatentHeads, scale: float, batch: DeviceBatch) -> Tensor:
        return entry.latent_attention(queries, layer, heads, scale, batch, LATENT_TOKENS, LATENT_HEADS, self._product_by_head)

    def _product_by_head(self, x: Tensor, weights: Tensor, out: Tensor) -> None:
        torch.bmm(x, weights, out=out)

    def without_gates(self, x: Tensor, heads: int, head_dim: int) -> Tensor:
        out = x.new_empty(len(x), x.shape[1] - heads * head_dim)
        reference.without_gates(x, heads, head_dim, out)
        return out

    def gate_heads(self, attended: Tensor, x: Tensor, head_dim: int) -> None:
        reference.gate_heads(attended, x, head_dim)

    def gated_delta(self, x: Tensor, gates: Tensor, rule: DeltaRule, layer: int, batch: DeviceBatch) -> Tensor:
        return entry.gated_delta(x, gates, rule, layer, batch)

    def scaled(self, x: Tensor, scale: float) -> Tensor:
        return x if scale == 1.0 else x.mul_(scale)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if cap:
            reference.capped(x, cap)
        return x

    def top_logprobs(self, logits: Tensor, rows: Any, chosen: Any, num_top: int) -> tuple[Any, Any, Any]:
        num, num_top = len(rows), min(num_top, logits.shape[1])
        of_rows = np.zeros(len(logits), np.int32)
        of_rows[rows] = chosen
        nums = np.full(num, num_top, np.int32)
        sent = torch.from_numpy(np.concatenate((of_rows, rows, nums))).to(logits.device)
        chosen_ids, asked, wanted = sent.split((len(logits), num, num))
        told = torch.empty(num * (1 + 2 * num_top), dtype=torch.int32, device=logits.device)
        entry.top_logprobs(logits, 0, asked, wanted, chosen_ids, *logprobs_in(told, num, num_top))
        return tuple(part.numpy() for part in logprobs_in(told.cpu(), num, num_top))  # type: ignore[return-value]

    def ranks(self, logits: Tensor, chosen: Any) -> Any:
        sent = torch.from_numpy(chosen).to(logits.device)
        told = torch.empty_like(sent)
        entry.ranks(logits, sent, told)
        return told.cpu().numpy()


def logprobs_in(told: Tensor, num: int, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of `told`, [num (1 + 2 num_top)] int32, in which the log-probabilities of num rows are copied to the host: the
    log-probabilities of the chosen tokens [num] float32, the ids [num, num_top] int32 of the most likely tokens, and the
    log-probabilities [num, num_top] float32 of these."""
    picked, top_ids, top = logprob_parts(told, num, num_top)
    shape = (num, num_top)
    return picked.view(torch.float32), top_ids.view(shape), top.view(torch.float32).view(shape)


def logprob_parts(told: Told, num: int, num_top: int) -> tuple[Told, Told, Told]:
    """Divides memory with log-probabilities of num rows into three parts, flat and as int32: the log-probabilities of the chosen
    tokens, the ids of the num_top most likely tokens of each row, and the log-probabilities of these. told: the memory, [num (1 + 2
    num_top)], as a tensor or an array."""
    end = num * (1 + num_top)
    return told[:num], told[num:end], told[end:]
