"""The layers of a decode step with which an engine finds out whether kernels may overlap on its GPU (kernels/triton_overlap.py):
the kernels that a dense Llama launches, in the same order, on random numbers. Each kernel reads what the one before it has written,
so a kernel that reads or overwrites too early changes the result.

All kernels that are launched here have been compiled before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.cuda.kernels import entry, linear_choice, triton_decode, triton_rope
from engine.cuda.kernels.sizes import ceil_div
from engine.cuda.kernels.tiles import DECODE_KERNEL
from engine.cuda.tile_trials import PIECES_PER_CORE, Inputs, Row, Trial, bits_of, drawn_numbers, over_and_over

ROWS = (1, 64)  # rows of the steps: of few, which hearthd's kernel multiplies, and of many, which cuBLAS does
EPS = 1e-5
NUM_INPUTS = 2  # with only one, a kernel that reads too early would find the equal values of the launch before
MOST_DEVIATION = 0.05  # of results of other kernels for the same layers, in terms of the largest result

# Returns x [M, K] times the transpose of a weight [N, K].
Multiply = Callable[[Tensor, Tensor], Tensor]


class Sizes(NamedTuple):
    """The sizes of the layers. width: of the states. inner: of the activations. num_columns: of queries, keys and values together.
    context: number of positions of each row. The defaults are those of Llama 3.2 1B, with wider heads and fewer layers; their
    weights take 64 MiB, because all matrices are parts of the largest."""

    width: int = 2048
    inner: int = 8192
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    context: int = 100
    num_layers: int = 4
    dtype: str = "bfloat16"

    @property
    def num_columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class Layers:
    """Some layers of a decode step of num_rows rows, with memory of their own.

    num_cores: the GPU's number of multiprocessors. multiply: multiplies more rows than hearthd's kernel takes.
    results [2, M, width]: what the last launch has computed: the normed states, and the sum of all layers' outputs."""

    def __init__(
        self,
        num_rows: int,
        block_tokens: int,
        device: torch.device | str,
        num_cores: int,
        sizes: Sizes | None = None,
        multiply: Multiply = functional.linear,
    ) -> None:
        self._sizes, self._multiply = sizes or Sizes(), multiply
        width, inner, heads, kv_heads, head_dim, context, _, name = self._sizes
        dtype: torch.dtype = getattr(torch, name)
        trial = Trial(DECODE_KERNEL, heads, kv_heads, head_dim, name, name, block_tokens)
        blocks, num_pieces = ceil_div(context, block_tokens), max(1, num_cores * PIECES_PER_CORE // kv_heads)
        self._attention = Inputs(trial, device, [Row(context)] * num_rows, num_rows * blocks, num_pieces)
        drawn = drawn_numbers(device).to(dtype)
        over_and_over(drawn, self._attention.kv[0])
        weights = over_and_over(drawn, torch.empty(2 * inner * width, dtype=dtype, device=device))
        shapes = ((self._sizes.num_columns, width), (width, heads * head_dim), (2 * inner, width), (width, inner))
        self._qkv, self._output, self._gate_up, self._down = (weights[: n * k].view(n, k) for n, k in shapes)
        self._norm = weights[:width]
        last = context - 1
        first_block = torch.arange(num_rows) * blocks
        self._slots = ((first_block + last // block_tokens) * block_tokens + last % block_tokens).to(device)
        self._turns = over_and_over(drawn.float(), torch.empty(num_rows, head_dim, dtype=torch.float32, device=device))
        states = torch.empty(NUM_INPUTS, num_rows, width, dtype=dtype, device=device)
        self._inputs = over_and_over(drawn.flip(0), states).unbind()
        self._input = torch.zeros_like(self._inputs[0])
        self.results = torch.zeros(2, num_rows, width, dtype=dtype, device=device)

    def begin(self, number: int) -> None:
        """Sets the input of the next launch, one of NUM_INPUTS, and removes the results of the last."""
        self._input.copy_(self._inputs[number])
        self.results.zero_()

    def launch(self) -> None:
        """Launches the layers' kernels on the current stream, then a copy of what they computed to `results`."""
        update, residual = self._input, torch.zeros_like(self._input)
        for _ in range(self._sizes.num_layers):
            update = self._layer(update, residual)
        self.results[0].copy_(self._normed(update, residual))
        self.results[1].copy_(residual)

    def _layer(self, update: Tensor, residual: Tensor) -> Tensor:
        """Launches one layer, and returns its output. update [M, width]: the output of the layer before, which is added to residual
        [M, width]."""
        inputs, sizes = self._attention, self._sizes
        qkv = self._product(self._normed(update, residual), self._qkv)
        kv, attended = (*inputs.kv, 0, sizes.heads), inputs.out()
        triton_rope.rope_and_store(qkv, self._turns, None, None, False, EPS, *kv, self._slots)
        scale = sizes.head_dim**-0.5
        assert inputs.work is not None
        of_rows = (inputs.table, inputs.numbers, inputs.work)
        triton_decode.decode_attention(qkv, *kv, *of_rows, scale, 0.0, None, entry.INTERPRETED, attended)
        x = self._normed(self._product(attended, self._output), residual)
        return self._product(self._gated(x), self._down)

    def _normed(self, update: Tensor, residual: Tensor) -> Tensor:
        return entry.add_rms_norm(update, residual, self._norm, EPS, False)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear_choice.ours(x, weight, None) if linear_choice.few_rows(len(x)) else self._multiply(x, weight)

    def _gated(self, x: Tensor) -> Tensor:
        if linear_choice.few_rows(len(x)):
            return linear_choice.ours(x, self._gate_up, None, False)
        return linear_choice.gate_and_mul(self._multiply(x, self._gate_up), False)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return bool((bits_of(one) == bits_of(other)).all())


def are_near(found: Tensor, wanted: Tensor) -> bool:
    """Returns whether results of other kernels for the same layers are about the same. Results with NaN or infinities never are."""
    one, other = found.float(), wanted.float()
    return bool(((one - other).abs() <= MOST_DEVIATION * other.abs().amax(-1, keepdim=True)).all())
