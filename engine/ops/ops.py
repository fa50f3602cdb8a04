"""Defines the operations that models and layers are made of. Each kind of device implements them (engine/cpu/ops.py,
engine/cuda/ops.py), and a model gets one implementation when it is built.

Shapes: T tokens, W width, H query heads, G KV heads, D head size, P pairs of a head's dimensions that are rotated, N sampling rows,
V vocabulary, E experts, I an expert's intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from loader.shapes.model_shape import TemperatureShape


@dataclass(slots=True, frozen=True)
class Int8Matrix:
    """A matrix of N outputs and K inputs in int8, or several such matrices: a weight is a value of values [..., N, K] int8 times
    the scale of its output, scales [..., N] float32."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def group_inputs(self) -> int:
        """The number of inputs that share a scale: all of them."""
        return self.values.shape[-1]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int | slice) -> Int8Matrix:
        """Returns the matrix of the expert with this number, if the object holds several matrices, else a slice of the matrix's
        outputs."""
        return Int8Matrix(self.values[number], self.scales[number])


@dataclass(slots=True, frozen=True)
class Fp8Matrix:
    """A matrix of N outputs and K inputs in FP8: a weight is the float8_e4m3fn number whose code is in values [N, K] uint8, times a
    scale. scales [N, G] float32: each for group_inputs adjacent inputs of one output; the last group may be shorter. No code is
    NaN."""

    values: Tensor
    scales: Tensor
    group_inputs: int

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int | slice) -> Fp8Matrix:
        """Returns the matrix of the expert with this number, if the object holds several matrices, else a slice of the matrix's
        outputs."""
        return Fp8Matrix(self.values[number], self.scales[number], self.group_inputs)


@dataclass(slots=True, frozen=True)
class Int4Matrix:
    """A matrix of N outputs and K inputs in INT4, or several: a weight is (number - its zero point) * its scale.

    packed [..., N, K / 2] uint8: the numbers, 0 to 15, two a byte with the first in the low four bits.
    scales [..., N, G] bfloat16 or float16: each for group_inputs adjacent inputs of one output. group_inputs is a power of two from
    32 on, or all of an output's inputs.
    zeros [..., N, G] uint8: the zero points, 0 to 16; None: all are 8.
    order [K] int32: the input index of each column of a single matrix; None: columns are in the order of the inputs
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
        """Returns the matrix of the expert with this number, if the object holds several matrices, else a slice of the matrix's
        outputs (`order` must then be None)."""
        zeros = None if self.zeros is None else self.zeros[number]
        return Int4Matrix(self.packed[number], self.scales[number], self.group_inputs, zeros)


@dataclass(slots=True, frozen=True)
class Nvfp4Matrix:
    """A matrix of N outputs and K inputs in NVFP4, or several: a weight is number * scale * factor
    (loader/formats/stored_nvfp4.py).

    packed [..., N, K / 2] uint8: the numbers (e2m1), two a byte with the first in the low four bits.
    scales [..., N, K / 16] uint8: codes of float8_e4m3fn, of which none is NaN, each for 16 adjacent inputs.
    factors [..., N] float32: one for each output."""

    packed: Tensor
    scales: Tensor
    factors: Tensor

    @property
    def group_inputs(self) -> int:
        """The number of adjacent inputs that share a scale."""
        return 2 * self.packed.shape[-1] // self.scales.shape[-1]

    @property
    def shape(self) -> torch.Size:
        *outer, row_bytes = self.packed.shape
        return torch.Size((*outer, 2 * row_bytes))

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, number: int | slice) -> Nvfp4Matrix:
        """Returns the matrix of the expert with this number, if the object holds several matrices, else a slice of the matrix's
        outputs."""
        return Nvfp4Matrix(self.packed[number], self.scales[number], self.factors[number])


@dataclass(slots=True, frozen=True)
class PackedMatrix:
    """A matrix of N outputs and K inputs whose bfloat16 weights are packed without loss. body uint8, codes uint64, bases uint8,
    starts uint32, escapes uint8: arrays of the format (loader/formats/packed_rows.py); not all bytes of escapes may be in use."""

    num_outputs: int
    num_inputs: int
    body: Tensor
    codes: Tensor
    bases: Tensor
    starts: Tensor
    escapes: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_outputs, self.num_inputs))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.bfloat16

    @property
    def num_panels(self) -> int:
        return len(self.starts)

    def __len__(self) -> int:
        return self.num_outputs


@dataclass(slots=True, frozen=True)
class AdaptedProduct:
    """A matrix multiplication of a layer that LoRA adapters may change. number: its index in
    loader.configs.adapter_matrices.adapted_matrices. parts: it may compute several of the checkpoint's matrices at once, such as
    those of queries, keys and values; the number of outputs of each."""

    number: int
    parts: tuple[int, ...]


Matrix = Tensor | Int8Matrix | Fp8Matrix | Int4Matrix | Nvfp4Matrix | PackedMatrix  # the weights of a product


@dataclass(slots=True, frozen=True, eq=False)
class Mxfp4Matrix:
    """E matrices, one for each expert, of N outputs and K inputs in MXFP4. blocks [E, N, K / 32, 16] uint8: numbers (e2m1), two a
    byte. scales [E, N, K / 32] uint8: each for 32 adjacent inputs, as an exponent of two plus 127 (loader/formats/mxfp4.py)."""

    blocks: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        num, outputs, groups, block_bytes = self.blocks.shape
        return num, outputs, groups * block_bytes * 2


ExpertMatrix = Tensor | Fp8Matrix | Int4Matrix | Int8Matrix | Mxfp4Matrix | Nvfp4Matrix  # [E, N, K]: one matrix for each expert


@dataclass(slots=True, frozen=True)
class ClampedSwiglu:
    """The settings of gpt-oss's activation (reference.clamped_swiglu), for matrices whose rows alternate between gate and up.
    limit: the bound to which both are clamped. alpha: factor of the gate within its sigmoid."""

    limit: float
    alpha: float


@dataclass(slots=True, frozen=True, eq=False)
class SigmoidRouting:
    """The settings of DeepSeek's rule for the choice of experts (reference.route_by_sigmoid).

    correction [E] float32: added to the scores for the choice of experts, but not for their weights.
    num_groups: number of groups of experts. num_chosen_groups: number of groups among which a token's experts are chosen.
    factor: factor of the weights. by_softmax: scores are a softmax instead of sigmoids, and a group's score is that of its best
    expert."""

    correction: Tensor
    num_groups: int
    num_chosen_groups: int
    factor: float
    by_softmax: bool = False


@dataclass(slots=True, frozen=True, eq=False)
class ExpertMatrices:
    """The experts of one layer.

    gate_up [E, 2 I, W]: each expert's gate, then its up. down [E, W, I]. An Fp8Matrix of experts has values [E, N, K] and scales
    [E, N, G]; a four-bit matrix has packed [E, N, K / 2]. Tensors may be contiguous along their outputs instead of their inputs.
    gate_up_bias [E, 2 I], down_bias [E, W]: biases of the matrix multiplications.
    num_chosen: how many experts each token passes through. normalised: the weights of a token's experts are made to add up to 1.
    clamped: the activation, if it is not silu(gate) * up; rows of gate_up then alternate between gate and up. gelu: the activation
    is gelu(gate) * up, with the tanh approximation of gelu.
    sigmoid: how experts are chosen and weighted, if not by the softmax of their scores. weighs_inputs: an expert's weight is the
    sigmoid of its score, and multiplies the expert's input instead of its output.
    factors [E]: factors of the experts' weights, applied after these were made to add up to 1.

    In a split model each rank (device) may have some of the experts: the matrices and biases are then those of the rank's own
    experts, from number first_own on, and num_routed is the number of all experts; 0: the matrices are those of all experts.

    turns [num_experts, 3] int32, if ranks have copies of other ranks' experts: for each expert (number of ranks that hold it, this
    rank's index among them, its index among the matrices here), as loader.shapes.expert_copies.turns returns them; first_own is not
    used then. Of an expert's tokens a rank computes those whose place in the KV cache, modulo the number of holders, is its index.
    None: no rank has copies.

    counts [num_experts] int64: how many tokens have passed through each expert, over all ranks; with turns [num_own]: how many this
    rank has computed with each of its matrices. Each call of Ops.experts adds its own tokens, and changes nothing else of it. The
    address stays the same as long as the model is used. None: nothing is counted."""

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
    counts: Tensor | None = None
    turns: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """The number of experts that tokens are routed to, over all ranks."""
        return self.num_routed or self.num_own

    @property
    def num_own(self) -> int:
        return self.gate_up.shape[0]

    @property
    def is_part(self) -> bool:
        """Returns whether other ranks (devices) compute some of the pairs of a token and an expert."""
        return self.turns is not None or self.num_own < self.num_experts


@dataclass(slots=True, frozen=True, eq=False)
class LatentHeads:
    """The heads of one layer's latent attention (loader.shapes.model_shape.LatentShape).

    plain_dim: K, the number of dimensions of a head's queries and keys that are not rotated. rope_dim: R, the number of those that
    are. value_dim: V.
    up [H (K + V), L]: for each head, the matrix that maps a latent [L] to the part of its key that is not rotated [K], followed by
    the matrix for its value [V]."""

    up: Matrix
    num_heads: int
    plain_dim: int
    rope_dim: int
    value_dim: int

    @property
    def rank(self) -> int:
        """L, the size of a latent."""
        return int((self.up.values if isinstance(self.up, Int8Matrix) else self.up).shape[1])


@dataclass(slots=True, frozen=True)
class DeltaColumns:
    """The columns of a gated delta rule's heads in the outputs of the layer's two projections, for K key heads and V value heads.
    In the output of the first, the queries of key head h begin at column query + h key_stride, and its keys at key + h key_stride.
    The j-th of the V / K value heads that belong to key head h has its values, of D dimensions, at value + h value_stride + j D,
    and the gates of its output at gate + h value_stride + j D. In the output of the second, the projection of the gates, its update
    is at update + h head_stride + j, and its step at step + h head_stride + j."""

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
    """The gated delta rule of one layer (loader.shapes.model_shape.DeltaShape), with K key heads of key_dim and V value heads of
    value_dim.

    convolution [C, N]: weights for the C columns of queries, keys and values, in this order and head by head; the last of the N
    weights is for the token itself, the others for the N - 1 tokens before it. decay, step_bias [V] float32: a head's state decays
    by the factor exp(-exp(decay) softplus(step + step_bias)). norm [value_dim]: weight of the norm of each head's output, with eps.

    A sequence's state is float32: V matrices [key_dim, value_dim], then the last N - 1 tokens' columns [N - 1, C]."""

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
        """C, the number of columns that are convolved."""
        return int(self.convolution.shape[0])

    @property
    def matrix_values(self) -> int:
        """The number of values of a sequence's state that belong to its matrices. They come first; the values of the convolution
        follow."""
        return self.num_value_heads * self.key_dim * self.value_dim


@dataclass(slots=True, frozen=True)
class HeadNorms:
    """The RMS norms of each head's queries, keys and perhaps values. query, key, value [D]: their weights; value None: values are
    not normalised. around_one: queries and keys are multiplied by 1 + weight instead of weight."""

    query: Tensor
    key: Tensor
    eps: float
    around_one: bool = False
    value: Tensor | None = None


@dataclass(slots=True, frozen=True, eq=False)
class Rotary:
    """The rotary embedding of 2 P dimensions of each head. inv_freq [P] float32: angle per position. scale: factor of cosines and
    sines. temperature: how a further factor of the queries depends on the position; None: there is none. A layer with a temperature
    rotates only queries, and by an angle of 0 (inv_freq is 0), so that the rotation only scales them."""

    inv_freq: Tensor
    scale: float = 1.0
    temperature: TemperatureShape | None = None


@dataclass(slots=True)
class BatchAdapters:
    """The LoRA adapters of one step's T tokens. The tables have S columns, one for each adapter number, and M rows, one for each
    matrix multiplication that adapters may change. The arrays are numpy arrays if the host computes, else tensors in device memory.

    numbers [T] int32: each token's adapter; -1 for none and for padding.
    places [M, S] int64: index in `memory` at which an adapter's matrices for a multiplication begin (loader.adapters.layout); -1:
    the adapter does not change it.
    ranks [M, S] int32: the LoRA rank r of these matrices.
    memory: the KV arena, which holds all adapters, as a flat tensor in the model's dtype."""

    numbers: Any
    places: Any
    ranks: Any
    memory: Tensor


class StepBatch(Protocol):
    """The inputs of one step, as models see them. Each kind of device has a class of its own with further fields, which its
    operations read."""

    layer_inputs: Tensor | None  # [T L, W]: the inputs of L layers that have inputs of their own, set by the model
    kept: list[Tensor] | None  # [T, W] each: filled with the states that the model's predictor reads; None: none are kept

    @property
    def adapters(self) -> BatchAdapters | None:
        """The LoRA adapters of the step's tokens. None if the model's steps do not compute adapters, as before its first
        adapter."""
        ...

    @property
    def input_ids(self) -> Tensor:
        """The token ids [T] of all rows, one row after the other."""
        ...


BatchT = TypeVar("BatchT", bound=StepBatch)
BatchT_contra = TypeVar("BatchT_contra", bound=StepBatch, contravariant=True)


class LogprobOps(Protocol):
    """The operations that compute log-probabilities from logits. Arguments and results other than the logits are numpy arrays."""

    def top_logprobs(self, logits: Tensor, rows: Any, chosen: Any, num_top: int) -> tuple[Any, Any, Any]:
        """Returns log-softmax values of M rows of logits [N, V]: [M] float32 at the token ids chosen [M] int32; then the ids [M,
        num_top] of the most likely tokens, the most likely first; then their values [M, num_top]. rows [M] int32: the indices of
        the rows, whose logits must be finite."""
        ...

    def ranks(self, logits: Tensor, chosen: Any) -> Any:
        """Returns the rank [N] int32 of each row's token in chosen [N] int32: how many tokens are at least as likely by logits [N,
        V], the token itself included. 1: it is the most likely one."""
        ...


class SamplingOps(LogprobOps, Protocol):
    """The operations with which the host samples from logits (engine/sampling), on devices that do not sample by themselves as GPUs
    do. Arguments and results other than logits are numpy arrays."""

    def greedy(self, logits: Tensor) -> tuple[Any, Any]:
        """Returns the most likely token id of each row of logits [N, V], [N] int32, and whether the row holds NaN or an infinity,
        [N] bool."""
        ...

    def sample(self, logits: Tensor, temperature: Any, top_p: Any, top_k: Any, min_p: Any, key0: Any, key1: Any) -> tuple[Any, Any]:
        """Samples one token for each row of logits [N, V] (reference.sample). Returns the ids [N], and whether the row holds NaN or
        an infinity [N]. temperature, top_p, top_k, min_p [N]: settings of the rows; rows of temperature 0 get their most likely
        token. key0, key1 [N] uint32: keys of the rows' random noise."""
        ...

    def penalise(self, row: Tensor, tokens: Any, num_prompt: int, presence: float, frequency: float, repetition: float) -> None:
        """Applies penalties to one row's logits [V] float32, in place (reference.penalise). tokens: int32, the num_prompt tokens of
        the prompt, then those of the output. presence, frequency: subtracted for tokens of the output; 0: no effect. repetition:
        factor for all these tokens; 1: no effect."""
        ...


class Ops(LogprobOps, Protocol[BatchT_contra]):
    """The operations of one kind of device, of which models are made. BatchT_contra: the type of a step's inputs on that device."""

    def embedding(self, ids: Tensor, weight: Tensor | PackedMatrix, scale: float = 1.0, first: int | None = None) -> Tensor:
        """Returns the rows of weight [V, W] (a table) with the indices ids [T] int64, times scale, as [T, W]. first: `weight` has
        only some rows of the table, from this index on, and is not packed; rows that it does not have are zeros in the result.
        None: it has all rows."""
        ...

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """Returns x [T, K] @ weight [N, K] transposed, plus bias [N], in their common dtype; with a quantised matrix, in x's
        dtype."""
        ...

    def add_adapters(self, x: Tensor, out: Tensor, product: AdaptedProduct, batch: BatchT_contra) -> None:
        """Adds what the tokens' LoRA adapters contribute to the multiplication of x [T, K] by a matrix to its result out [T, N], in
        place. For each part of the matrix (AdaptedProduct.parts), with n outputs, this is x @ down [r, K] transposed @ up [r, n],
        computed in float32 and rounded once with the sum. Rows of tokens without an adapter, or whose adapter does not change the
        multiplication, stay as they are. batch.adapters must not be None. In memory all parts' `down` lie one after the other,
        followed by their `up`."""
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
        """Multiplies x [T, W] in place by other [T, W], which may be a slice of a wider tensor's columns."""
        ...

    def columns_twice(self, x: Tensor, first: int) -> Tensor:
        """Returns x [T, N] with its columns from `first` on repeated at the end, as [T, 2 N - first]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, around_one: bool = False) -> Tensor:
        """Returns the RMS norm of x [T, W]: each row divided by the root of its mean square plus eps, times weight [W] (around_one:
        times 1 + weight)."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, around_one: bool = False, scale: float = 1.0
    ) -> Tensor:
        """Adds x [T, W] times scale to residual [T, W] in place; returns the RMS norm of the sum, as rms_norm does."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Returns the LayerNorm of x [T, W]: each row minus its mean, divided by its standard deviation, times weight [W], plus
        bias [W] (None: no bias). eps is added to the variance."""
        ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: float = 1.0
    ) -> Tensor:
        """Adds x [T, W] times scale to residual [T, W] in place; returns the LayerNorm of the sum, as layer_norm does."""
        ...

    def norm_columns(self, x: Tensor, first: int, weight: Tensor, eps: float, around_one: bool) -> None:
        """Normalises the columns `first` to `first` + W - 1 of x [T, N] in place, as rms_norm does with weight [W]; the other
        columns stay."""
        ...

    def column_squares(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Returns the sum of squares of each row of x over each of C adjacent ranges of columns, [T, C] float32. widths: the
        numbers of columns of the ranges, of which the first begins at column 0."""
        ...

    def norm_columns_by(self, x: Tensor, weights: tuple[Tensor, ...], squares: Tensor, parts: int, eps: float) -> None:
        """Normalises C adjacent ranges of x's columns in place, as rms_norm does, with a weight [W] for each range and with sums of
        squares that are given. In a split model x holds only one of `parts` equal parts of each range; squares [T, C] are the sums
        of squares over all parts (column_squares)."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up as [T, W]; gate_up [T, 2 W] has gate's columns before up's."""
        ...

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Returns gelu(gate) * up as [T, W], with the tanh approximation of gelu; gate_up [T, 2 W] has gate's columns before
        up's."""
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """Returns the tanh approximation of gelu(x) [T, W]."""
        ...

    def experts(self, x: Tensor, scores: Tensor, experts: ExpertMatrices, shared: Tensor | None, batch: BatchT_contra) -> Tensor:
        """Returns the output [T, W] of a layer's experts for x [T, W]: for each token the weighted sum of its chosen experts'
        outputs, down(activation(gate, up)). The weights are the softmax of the token's scores, or what experts.sigmoid says. The
        output is 0 for padding, which passes through no expert. Also adds to experts.counts.

        scores [T, E]: the router's scores; float32 if experts.sigmoid is given. Of equal scores the expert with the lower number is
        chosen.
        shared [T, W]: the output of the shared expert, which is added; None: there is none. If scores has a further column, [T, E +
        1], the sigmoid of that column is a factor of shared."""
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
        normalises the values if they have a norm, and stores keys and values in the KV blocks. The keys and values in qkv are
        undefined afterwards.

        layer: index of the layer. heads: H. interleaved: the two dimensions of a rotated pair are neighbours, else dimensions i and
        P + i. num_turned: how many heads are rotated, counted from the first query head on; None: all queries and keys."""
        ...

    def rope(
        self, queries: Tensor, norms: HeadNorms | None, layer: int, heads: int, batch: BatchT_contra, interleaved: bool = False
    ) -> None:
        """Normalises (if norms are given) and rotates queries [T, H D] in place, and stores nothing. heads: H. The other parameters
        are those of rope_and_store."""
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
        rope_and_store. Of qkv only the first H D columns, the queries, are read.

        heads: H. scale: factor of the scores. softcap: scores become softcap * tanh(score / softcap); 0: they are unchanged. sinks
        [H] float32: one more score for each head, which takes weight in the softmax and has no value; None: there are none."""
        ...

    def normed_columns(self, x: Tensor, first: int, weight: Tensor, eps: float) -> Tensor:
        """Returns the columns `first` to `first` + W - 1 of x [T, N], normalised as rms_norm does with weight [W], as [T, W]."""
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
        """Rotates the last R dimensions of each head of queries [T, H (K + R)] in place. Stores in the KV blocks, for each token,
        the last L + R columns of down [T, N]: the latent, normalised as rms_norm does with norm [L] and eps, and the rotated part
        of the keys. interleaved: the two dimensions of a rotated pair are neighbours. Letters: as in LatentHeads."""
        ...

    def latent_attention(self, queries: Tensor, layer: int, heads: LatentHeads, scale: float, batch: BatchT_contra) -> Tensor:
        """Returns causal latent attention [T, H V] of every token over its row's KV blocks. Runs after rope_and_store_latents.
        scale: factor of the scores. Letters: as in LatentHeads."""
        ...

    def without_gates(self, x: Tensor, heads: int, head_dim: int) -> Tensor:
        """Returns x [T, (2 H + 2 G) D] without the gates, as [T, (H + 2 G) D]. In x each query head's D columns are followed by D
        columns of gates. heads: H. head_dim: D."""
        ...

    def gate_heads(self, attended: Tensor, x: Tensor, head_dim: int) -> None:
        """Multiplies the outputs of attention, attended [T, H D], in place by the sigmoids of the gates in x (see without_gates).
        head_dim: D."""
        ...

    def gated_delta(self, x: Tensor, gates: Tensor, rule: DeltaRule, layer: int, batch: BatchT_contra) -> Tensor:
        """Returns the normalised and gated outputs [T, V D] of the V value heads of a gated delta rule, for D = value_dim; 0 for
        padding. x [T, C + V D], gates [T, 2 V]: outputs of the layer's two projections (DeltaColumns). Reads each row's state
        before the step, and writes the states after those of its tokens for which the row has a block
        (scheduler/batch/group_cache.py)."""
        ...

    def scaled(self, x: Tensor, scale: float) -> Tensor:
        """Multiplies x by scale in place, and returns x."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Replaces x by cap * tanh(x / cap) in place, and returns x. With cap 0, x stays unchanged."""
        ...
