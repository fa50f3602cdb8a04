"""The operations that models and layers are made of. Each kind of device implements them (engine/cpu/ops.py, engine/cuda/ops.py),
and a model is given one implementation when it is built.

Shapes: T tokens, W width, H query heads, G KV heads, D head size, P pairs of a head's dimensions that are rotated, N sampling rows,
V vocabulary, E experts, I their intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from loader.model_shape import TemperatureShape


@dataclass(slots=True, frozen=True)
class Int8Matrix:
    """A matrix of int8 weights: values [N, K] int8 times scales [N] float32, one for each output."""

    values: Tensor
    scales: Tensor


@dataclass(slots=True, frozen=True)
class Fp8Matrix:
    """A matrix of FP8 weights: values [N, K] uint8, codes of float8_e4m3fn, times scales [N, G] float32, one for each group_inputs
    inputs of an output. The last group may be shorter. No code is NaN."""

    values: Tensor
    scales: Tensor
    group_inputs: int

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int | slice) -> Fp8Matrix:
        """Returns the matrix of one expert, or some outputs of a single matrix."""
        return Fp8Matrix(self.values[number], self.scales[number], self.group_inputs)


@dataclass(slots=True, frozen=True)
class Int4Matrix:
    """A matrix of INT4 weights, or several: packed [..., N, K / 2] uint8, two weights a byte with the first in the low four bits,
    each plus its zero point; times scales [..., N, G] bfloat16 or float16, one for each group_inputs inputs of an output.
    group_inputs is a power of two from 32 on, or all of an output's inputs. zeros: zero points [..., N, G] uint8 from 0 to 16;
    None: all are 8. order: the inputs [K] int32 as the weights of a single matrix lie; None: in their order
    (loader/formats/int4_layout.py)."""

    packed: Tensor
    scales: Tensor
    group_inputs: int
    zeros: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        *outer, row_bytes = self.packed.shape
        return torch.Size((*outer, 2 * row_bytes))

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, number: int | slice) -> Int4Matrix:
        """Returns the matrix of one expert, or some outputs of a single matrix whose inputs are in their order."""
        zeros = None if self.zeros is None else self.zeros[number]
        return Int4Matrix(self.packed[number], self.scales[number], self.group_inputs, zeros)


@dataclass(slots=True, frozen=True)
class Nvfp4Matrix:
    """A matrix in NVFP4, or several: packed [..., N, K / 2] uint8, two numbers (e2m1) a byte with the first in the low four bits;
    times scales [..., N, K / 16] uint8, codes of float8_e4m3fn, of which none is NaN; times factors [..., N] float32, one for each
    output (loader/formats/stored_nvfp4.py)."""

    packed: Tensor
    scales: Tensor
    factors: Tensor

    @property
    def group_inputs(self) -> int:
        """The inputs that share a scale."""
        return 2 * self.packed.shape[-1] // self.scales.shape[-1]

    @property
    def shape(self) -> torch.Size:
        *outer, row_bytes = self.packed.shape
        return torch.Size((*outer, 2 * row_bytes))

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, number: int | slice) -> Nvfp4Matrix:
        """Returns the matrix of one expert, or some outputs of a single matrix."""
        return Nvfp4Matrix(self.packed[number], self.scales[number], self.factors[number])


@dataclass(slots=True, frozen=True)
class AdaptedProduct:
    """A matrix product that LoRA adapters may change. number: its index in loader.adapters.matrices.adapted_matrices. parts: the
    outputs of each of the matrices that the product reads together."""

    number: int
    parts: tuple[int, ...]


Matrix = Tensor | Int8Matrix | Fp8Matrix | Int4Matrix | Nvfp4Matrix  # the weights of a product


@dataclass(slots=True, frozen=True, eq=False)
class Mxfp4Matrix:
    """Matrices [E, N, K] in MXFP4: blocks [E, N, K / 32, 16] uint8, two numbers a byte, and scales [E, N, K / 32] uint8
    (loader/formats/mxfp4.py)."""

    blocks: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        num, outputs, groups, block_bytes = self.blocks.shape
        return num, outputs, groups * block_bytes * 2


ExpertMatrix = Tensor | Fp8Matrix | Int4Matrix | Mxfp4Matrix | Nvfp4Matrix  # [E, N, K]: one matrix for each expert


@dataclass(slots=True, frozen=True)
class ClampedSwiglu:
    """An activation (reference.clamped_swiglu) of gate and up whose rows alternate. limit: they are clamped to. alpha: factor of
    the gate within its sigmoid."""

    limit: float
    alpha: float


@dataclass(slots=True, frozen=True, eq=False)
class SigmoidRouting:
    """A rule by which experts are chosen (reference.route_by_sigmoid). correction [E] float32: added to a score where experts are
    chosen by it. num_groups: the parts of experts, of num_chosen_groups of which a token's experts are. factor: of the weights.
    by_softmax: scores are a softmax, and a group counts by its best expert."""

    correction: Tensor
    num_groups: int
    num_chosen_groups: int
    factor: float
    by_softmax: bool = False


@dataclass(slots=True, frozen=True, eq=False)
class ExpertMatrices:
    """The experts of one layer: gate_up [E, 2 I, W] with each expert's gate before its up, down [E, W, I]. num_chosen: how many
    of them each token passes through. normalised: the weights of a token's experts are made to add up to 1. An Fp8Matrix of experts
    has values [E, N, K] and scales [E, N, G], one of four bits packed [E, N, K / 2]. gate_up_bias [E, 2 I], down_bias [E, W]: the
    products' biases. clamped: the activation, if it is not silu(gate) * up; rows of gate_up then alternate between gate and up.
    sigmoid: how experts are chosen and weighed, if not by the softmax of their scores. weighs_inputs: an expert's weight is the
    sigmoid of its score, and what it reads is multiplied by it, not what it returns. gelu: the activation is gelu(gate) * up, gelu
    in its form with tanh. factors [E]: of the experts' weights, after these were made to add up to 1. Tensors may be contiguous
    along their outputs instead of their inputs.

    Of a model that is split over devices, whose ranks each have some of the experts: the matrices and the biases are those of the
    rank's own experts, from number first_own on, and num_routed is the number of all, to which tokens are routed. 0: the matrices
    are of all experts."""

    gate_up: ExpertMatrix
    down: ExpertMatrix
    num_chosen: int
    normalised: bool
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamped: ClampedSwiglu | None = None
    sigmoid: SigmoidRouting | None = None
    weighs_inputs: bool = False
    gelu: bool = False
    factors: Tensor | None = None
    first_own: int = 0
    num_routed: int = 0

    @property
    def num_experts(self) -> int:
        """The number of experts that tokens are routed to."""
        return self.num_routed or self.num_own

    @property
    def num_own(self) -> int:
        return self.gate_up.shape[0]


@dataclass(slots=True, frozen=True, eq=False)
class LatentHeads:
    """The heads of one layer's latent attention (loader.model_shape.LatentShape). up [H (K + V), L]: each head's matrices that make
    of a latent [L] its plain keys [K], and behind these its values [V]. rope_dim: R, the rotated dimensions of queries and keys."""

    up: Matrix
    num_heads: int
    plain_dim: int
    rope_dim: int
    value_dim: int

    @property
    def rank(self) -> int:
        """L, the numbers of a latent."""
        return int((self.up.values if isinstance(self.up, Int8Matrix) else self.up).shape[1])


@dataclass(slots=True, frozen=True)
class DeltaColumns:
    """Where the heads of a gated delta rule are among the columns that its projections make. Key head h has its queries at query +
    h key_stride and its keys at key + h key_stride. The j-th of the V / K value heads that it serves has its values at value + h
    value_stride + j D and what gates its output at gate + the same, for D dimensions of values. Its update is at update + h
    head_stride + j among the gates, and its step at step + the same."""

    query: int
    key: int
    key_stride: int
    value: int
    gate: int
    value_stride: int
    update: int
    step: int
    head_stride: int


@dataclass(slots=True, frozen=True, eq=False)
class DeltaRule:
    """The gated delta rule of one layer (loader.model_shape.DeltaShape), with K key heads of key_dim and V value heads of
    value_dim.

    convolution [C, N]: weights of the C columns of queries, keys and values, in this order and head by head; the last is a token's
    own, the others of the N - 1 tokens before it. decay, step_bias [V] float32: a head's state decays by the factor exp(-exp(decay)
    softplus(step + step_bias)). norm [value_dim]: of each head's output, with eps.

    What a sequence keeps, float32: V matrices [key_dim, value_dim], then the last N - 1 tokens' columns [N - 1, C]."""

    convolution: Tensor
    decay: Tensor
    step_bias: Tensor
    norm: Tensor
    eps: float
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    columns: DeltaColumns

    @property
    def conv_width(self) -> int:
        """C."""
        return int(self.convolution.shape[0])

    @property
    def matrix_values(self) -> int:
        """The numbers of a state that are before the convolution's."""
        return self.num_value_heads * self.key_dim * self.value_dim


@dataclass(slots=True, frozen=True)
class HeadNorms:
    """The RMS norms of each head's queries, keys and perhaps values: weights [D]. around_one: the factors are 1 + weight."""

    query: Tensor
    key: Tensor
    eps: float
    around_one: bool = False
    value: Tensor | None = None


@dataclass(slots=True, frozen=True, eq=False)
class Rotary:
    """The rotary embedding of 2 P dimensions of each head. inv_freq [P] float32: angle per position. scale: factor of cosines and
    sines. temperature: one more factor, which depends on the position; for layers that turn queries alone, by an angle of 0."""

    inv_freq: Tensor
    scale: float = 1.0
    temperature: TemperatureShape | None = None


@dataclass(slots=True)
class BatchAdapters:
    """The LoRA adapters of one step's tokens, for S resident adapters and M products that adapters may change. The arrays are of
    the kind that the device's operations read: numpy arrays on the host, tensors in a device's memory.

    numbers [T] int32: each token's adapter, -1: none, as padding has. places [M, S] int64: where the adapter's part of a product
    begins in `memory`, in elements (loader.adapters.layout), -1: the adapter leaves this product as it is. ranks [M, S] int32: the
    rank r of the part. memory: all memory that adapters are held in, the KV arena, as a flat tensor in the model's dtype."""

    numbers: Any
    places: Any
    ranks: Any
    memory: Tensor


class StepBatch(Protocol):
    """The inputs of one step. Models read the tokens, and hand the rest to the operations of the same device."""

    layer_inputs: Tensor | None  # [T L, W]: the inputs of L layers that have inputs of their own, set by the model
    kept: list[Tensor] | None  # [T, W] each: filled with what the model's predictor reads; None: there is nothing to keep

    @property
    def adapters(self) -> BatchAdapters | None:
        """The adapters of the step's tokens; None: no token of the model's steps has one."""
        ...

    @property
    def input_ids(self) -> Tensor:
        """The tokens [T], those of all rows one after the other."""
        ...


BatchT = TypeVar("BatchT", bound=StepBatch)
BatchT_contra = TypeVar("BatchT_contra", bound=StepBatch, contravariant=True)


class LogprobOps(Protocol):
    """Log-probabilities of logits. Arguments and results other than the logits are numpy arrays."""

    def top_logprobs(self, logits: Tensor, rows: Any, chosen: Any, num_top: int) -> tuple[Any, Any, Any]:
        """Returns log-softmax values of rows [M] (int32) of logits [N, V]: at chosen [M] int32 -> [M] float32; then ids and values
        [M, num_top] of the most likely tokens. The rows must be finite."""
        ...


class SamplingOps(LogprobOps, Protocol):
    """The operations on logits of a device that the host samples for (engine/sampling); a GPU does so itself."""

    def greedy(self, logits: Tensor) -> tuple[Any, Any]:
        """Returns the most likely ids [N] int32 of logits [N, V], and bad [N] bool, rows that hold NaN or an infinity."""
        ...

    def sample(self, logits: Tensor, temperature: Any, top_p: Any, top_k: Any, min_p: Any, key0: Any, key1: Any) -> tuple[Any, Any]:
        """Samples one token for each row of logits [N, V]; the other arguments are [N] (keys uint32). Rows of temperature 0 get
        their most likely token. Returns ids and bad rows as `greedy` does."""
        ...

    def penalise(self, row: Tensor, tokens: Any, num_prompt: int, presence: float, frequency: float, repetition: float) -> None:
        """Applies penalties to one row's logits [V] float32, in place. tokens: int32, num_prompt prompt tokens, then output."""
        ...


class Ops(LogprobOps, Protocol[BatchT_contra]):
    """The operations of one kind of device, whose steps have inputs of one type."""

    def embedding(self, ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
        """Returns the rows [T, W] of weight [V, W] that ids [T] name, times scale."""
        ...

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """Returns x [T, K] @ weight [N, K] transposed, plus bias [N], in their common dtype; with a quantised matrix, in x's."""
        ...

    def add_adapters(self, x: Tensor, out: Tensor, product: AdaptedProduct, batch: BatchT_contra) -> None:
        """Adds to out [T, N] in place what the tokens' adapters make of x [T, K] in this product. For each part of the product,
        with n of its outputs, that is x @ down [r, K] transposed @ up [r, n], computed in float32 and rounded once with the sum.
        Rows of tokens without an adapter, or whose adapter leaves the product as it is, stay as they are. batch.adapters is not
        None. In memory lie the parts' `down`, one after the other, and behind them their `up`."""
        ...

    def linear_float32(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x [T, K] @ weight [N, K] transposed, computed in float32; weight and result are float32."""
        ...

    def add(self, update: Tensor, residual: Tensor, scale: float = 1.0) -> None:
        """Adds update [T, W] times scale to residual in place."""
        ...

    def copy(self, x: Tensor, out: Tensor) -> None:
        """Copies x [T, W] to out [T, W]."""
        ...

    def add_and_scale(self, update: Tensor, residual: Tensor, factor: Tensor) -> None:
        """Adds update [T, W] to residual in place, and multiplies the sum by factor [1]."""
        ...

    def multiply(self, x: Tensor, other: Tensor) -> None:
        """Multiplies x [T, W] in place by other [T, W], which may be columns of a wider tensor."""
        ...

    def columns_twice(self, x: Tensor, first: int) -> Tensor:
        """Returns x [T, N] with its columns from `first` on once more behind them, as [T, 2 N - first]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, around_one: bool = False) -> Tensor:
        """Returns x [T, W], each row normalised, times weight [W] (around_one: times 1 + weight)."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, around_one: bool = False, scale: float = 1.0
    ) -> Tensor:
        """Adds x times scale to residual in place; returns the norm of the sum, as rms_norm does."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Returns x [T, W], each row less its mean and normalised, times weight [W], plus bias [W]."""
        ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: float = 1.0
    ) -> Tensor:
        """Adds x times scale to residual in place; returns the norm of the sum, as layer_norm does."""
        ...

    def norm_columns(self, x: Tensor, first: int, weight: Tensor, eps: float, around_one: bool) -> None:
        """Normalises columns first to first + W of x [T, N] in place, as rms_norm does with weight [W]."""
        ...

    def column_squares(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Returns the sums of squares [T, C], in float32, of C ranges of x's columns, which follow each other and are `widths`
        wide."""
        ...

    def norm_columns_by(self, x: Tensor, weights: tuple[Tensor, ...], squares: Tensor, parts: int, eps: float) -> None:
        """Normalises C ranges of x's columns in place, as rms_norm does with weights [W] of each range, where what is normalised
        has `parts` times as many columns, and sums of squares [T, C]."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up as [T, W]; gate_up is [T, 2 W]."""
        ...

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Returns gelu(gate) * up as [T, W]; gate_up is [T, 2 W]. gelu: its form with tanh."""
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """Returns gelu(x) [T, W]. gelu: its form with tanh."""
        ...

    def experts(self, x: Tensor, scores: Tensor, experts: ExpertMatrices, shared: Tensor | None, batch: BatchT_contra) -> Tensor:
        """Returns what a layer's experts make of x [T, W], as [T, W]: the sum of each token's chosen experts' outputs
        (down(activation(gate, up))), weighted with the softmax of its scores, or as experts.sigmoid says. It is 0 for padding,
        which reads no expert.

        scores [T, E]: the router's; float32 if experts.sigmoid is given. Of equal scores the lower expert is chosen. shared [T, W]:
        what an expert for all tokens made of x. It is added, times the sigmoid of a further column of scores if there is one,
        [T, E + 1]."""
        ...

    def rope_and_store(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        layer: int,
        heads: int,
        batch: BatchT_contra,
        interleaved: bool = False,
        num_turned: int | None = None,
    ) -> None:
        """Normalises (if norms are given) and rotates the queries of qkv [T, (H + 2 G) D] in place, does the same to the keys,
        normalises the values if they have a norm, and stores keys and values in the KV blocks. The keys in qkv are undefined
        afterwards, and so are the values. interleaved: pairs are neighbouring dimensions, else dimension i and dimension P + i.
        num_turned: so many heads are rotated, from the first query on; None: all queries and keys."""
        ...

    def rope(
        self, queries: Tensor, norms: HeadNorms | None, layer: int, heads: int, batch: BatchT_contra, interleaved: bool = False
    ) -> None:
        """Normalises and rotates queries [T, H D] in place as rope_and_store does, and stores nothing."""
        ...

    def attention(
        self,
        qkv: Tensor,
        layer: int,
        heads: int,
        scale: float,
        softcap: float,
        batch: BatchT_contra,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns causal attention [T, H D] of every token over its row's KV blocks in the layer's window. Runs after
        rope_and_store. Of qkv only the first H D columns are read. softcap: scores become softcap * tanh(score / softcap); 0: they
        are unchanged. sinks: [H] float32, one more score for each head, which takes weight and gives no value."""
        ...

    def normed_columns(self, x: Tensor, first: int, weight: Tensor, eps: float) -> Tensor:
        """Returns columns first to first + W of x [T, N] as [T, W], normalised as rms_norm does with weight [W]."""
        ...

    def rope_and_store_latents(
        self,
        queries: Tensor,
        down: Tensor,
        norm: Tensor,
        eps: float,
        layer: int,
        heads: LatentHeads,
        batch: BatchT_contra,
        interleaved: bool,
    ) -> None:
        """Rotates the last R dimensions of each head of queries [T, H (K + R)] in place. Stores in the KV blocks of each token the
        last L + R columns of down [T, N]: the latent, normalised as rms_norm does with norm [L], and the keys' rotated part.
        interleaved: as in rope_and_store."""
        ...

    def latent_attention(self, queries: Tensor, layer: int, heads: LatentHeads, scale: float, batch: BatchT_contra) -> Tensor:
        """Returns causal attention [T, H V] of every token over its row's KV blocks. Runs after rope_and_store_latents."""
        ...

    def without_gates(self, x: Tensor, heads: int, head_dim: int) -> Tensor:
        """Returns x [T, (2 H + 2 G) D] without the gates that are behind each head's queries, as [T, (H + 2 G) D]."""
        ...

    def gate_heads(self, attended: Tensor, x: Tensor, head_dim: int) -> None:
        """Multiplies attended [T, H D] in place by the sigmoids of those gates of x."""
        ...

    def gated_delta(self, x: Tensor, gates: Tensor, rule: DeltaRule, layer: int, batch: BatchT_contra) -> Tensor:
        """Returns what the heads of a gated delta rule give [T, V D], of value_dim D, in the step's tokens, normalised and gated. x
        [T, C + V D], gates [T, 2 V]: what its projections made. Reads each row's state before the step, and writes those in the
        step that the row has a block for (scheduler/batch/group_cache.py). It is 0 for padding."""
        ...

    def scaled(self, x: Tensor, scale: float) -> Tensor:
        """Returns x times scale, computed in place."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Returns cap * tanh(x / cap), computed in place; with cap 0, x unchanged."""
        ...
