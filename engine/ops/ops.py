"""Defines the operations of which models and layers are made. Each kind of device implements them (engine/cpu/ops.py,
engine/cuda/ops.py), and a model gets one implementation when it is built.

Shapes: T tokens, W width, H query heads, G KV heads, D head size, P pairs of a head's dimensions that are rotated, N sampling rows,
V vocabulary, E experts, I an expert's intermediate size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from loader.shapes.model_shape import TemperatureShape


@dataclass(slots=True, frozen=True)
class Int8Matrix:
    """A matrix of N outputs and K inputs in int8, or several such matrices. values [..., N, K] int8. scales [..., N] float32: one
    for each output. A weight is a value times the scale of its output."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def group_inputs(self) -> int:
        """The number of inputs that share a scale: all K inputs of an output."""
        return self.values.shape[-1]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int | slice) -> Int8Matrix:
        """Returns the matrix of expert `number` if the object holds several matrices; else the matrix with only the outputs
        `number` (a slice)."""
        return Int8Matrix(self.values[number], self.scales[number])


@dataclass(slots=True, frozen=True)
class Fp8Matrix:
    """A matrix of N outputs and K inputs in FP8, or several such matrices. values [..., N, K] uint8: codes of float8_e4m3fn, of
    which none is NaN. scales [..., N, G] float32: one for each group_inputs adjacent inputs of an output; the last group may be
    shorter. A weight is a code's number times its scale."""

    values: Tensor
    scales: Tensor
    group_inputs: int

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int | slice) -> Fp8Matrix:
        """Returns the matrix of expert `number` if the object holds several matrices; else the matrix with only the outputs
        `number` (a slice)."""
        return Fp8Matrix(self.values[number], self.scales[number], self.group_inputs)


@dataclass(slots=True, frozen=True)
class Int4Matrix:
    """A matrix of N outputs and K inputs in INT4, or several such matrices. A weight is (number - its zero point) * its scale.

    packed [..., N, K / 2] uint8: the numbers, 0 to 15, two in a byte with the first in the low four bits.
    scales [..., N, G] bfloat16 or float16: one for each group_inputs adjacent inputs of an output. group_inputs is a power of two
    from 32 on, or all of an output's inputs.
    zeros [..., N, G] uint8: the zero points, 0 to 16; None: all are 8.
    order [K] int32: the index of the input to which each column belongs, for a single matrix; None: columns are in the order of the
    inputs (loader/formats/int4_layout.py)."""

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
        """Returns the matrix of expert `number` if the object holds several matrices; else the matrix with only the outputs
        `number` (a slice). `order` must be None."""
        zeros = None if self.zeros is None else self.zeros[number]
        return Int4Matrix(self.packed[number], self.scales[number], self.group_inputs, zeros)


@dataclass(slots=True, frozen=True)
class Nvfp4Matrix:
    """A matrix of N outputs and K inputs in NVFP4, or several such matrices. A weight is number * scale * factor
    (loader/formats/stored_nvfp4.py).

    packed [..., N, K / 2] uint8: the numbers (e2m1), two in a byte with the first in the low four bits.
    scales [..., N, K / 16] uint8: codes of float8_e4m3fn, of which none is NaN, one for each 16 adjacent inputs.
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
        """Returns the matrix of expert `number` if the object holds several matrices; else the matrix with only the outputs
        `number` (a slice)."""
        return Nvfp4Matrix(self.packed[number], self.scales[number], self.factors[number])


@dataclass(slots=True, frozen=True)
class PackedMatrix:
    """A matrix of N outputs and K inputs whose bfloat16 weights are packed without loss. body uint8, codes uint64, bases uint8,
    starts uint32, escapes uint8: the arrays of the format (loader/formats/packed_rows.py). escapes holds the exponents that have no
    code and are stored apart; further bytes, which are not used, may follow."""

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
    """A matrix multiplication of a layer whose result LoRA adapters may change. number: its index in
    loader.configs.adapter_matrices.adapted_matrices. parts: number of outputs of each of the checkpoint's matrices that it computes
    at once, such as those of queries, keys and values."""

    number: int
    parts: tuple[int, ...]


Matrix = Tensor | Int8Matrix | Fp8Matrix | Int4Matrix | Nvfp4Matrix | PackedMatrix  # the weights of a product


@dataclass(slots=True, frozen=True, eq=False)
class Mxfp4Matrix:
    """E matrices of N outputs and K inputs in MXFP4, one for each expert. blocks [E, N, K / 32, 16] uint8: the numbers (e2m1), two
    in a byte. scales [E, N, K / 32] uint8: one for each 32 adjacent inputs; scale s stands for 2**(s - 127)
    (loader/formats/mxfp4.py)."""

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
    limit: the bound to which gate and up are clamped. alpha: a factor of the gate within the activation's sigmoid."""

    limit: float
    alpha: float


@dataclass(slots=True, frozen=True, eq=False)
class SigmoidRouting:
    """The settings of DeepSeek's rule by which a token's experts are chosen and weighted (reference.route_by_sigmoid).

    correction [E] float32: added to the scores when experts are chosen, but not when they are weighted.
    num_groups: number of groups into which the experts are divided. num_chosen_groups: number of groups from which a token's
    experts are chosen.
    factor: a factor of all weights.
    by_softmax: whether scores are a softmax, and a group's score is that of its best expert; False: scores are sigmoids, and a
    group's score is the sum of its two best."""

    correction: Tensor
    num_groups: int
    num_chosen_groups: int
    factor: float
    by_softmax: bool = False


@dataclass(slots=True, frozen=True, eq=False)
class ExpertMatrices:
    """The experts of one layer.

    gate_up [E, 2 I, W]: each expert's gate, then its up. down [E, W, I]. Of quantised matrices, an Fp8Matrix has values [E, N, K]
    and scales [E, N, G]; a four-bit matrix has packed [E, N, K / 2]. Tensors may be contiguous along their outputs instead of their
    inputs.
    gate_up_bias [E, 2 I], down_bias [E, W]: biases of the matrix multiplications; None: there are none.
    num_chosen: how many experts each token passes through.
    normalised: whether the weights of a token's experts are divided by their sum.
    clamped: the settings of gpt-oss's activation, if the experts use it; rows of gate_up then alternate between gate and up. gelu:
    whether the activation is gelu(gate) * up, with the tanh approximation of gelu. Otherwise it is silu(gate) * up.
    sigmoid: the rule by which experts are chosen and weighted; None: by the softmax of their scores.
    weighs_inputs: whether an expert's weight is the sigmoid of its score, and multiplies the expert's input instead of its output.
    factors [E]: factors of the experts' weights, applied last; None: there are none.

    In a split model a rank (device) may have only some of the experts. The matrices and biases are then those of the rank's own
    experts, from number first_own on, and num_routed is the number of all experts. num_routed 0: the matrices are those of all
    experts.

    turns [num_experts, 3] int32: how ranks divide the tokens of an expert of which several ranks have copies; None: no rank has
    copies. For each expert it has the number of ranks that hold it, this rank's index among these, and the expert's index among
    this rank's matrices (loader.shapes.expert_copies.turns). A rank computes those tokens whose place in the KV cache, modulo the
    number of ranks that hold the expert, is its index. first_own is not used then.

    counts [num_experts] int64: how many tokens have passed through each expert, over all ranks; with turns [num_own]: how many
    tokens this rank has computed with each of its matrices. None: nothing is counted. Each call of Ops.experts adds the tokens of
    its step to counts. The address stays the same as long as the model is used."""

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
        """The number of experts to which tokens are routed, over all ranks."""
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

    plain_dim: K, the number of dimensions of a head's queries and keys that are not rotated. rope_dim: R, the number of their
    dimensions that are rotated. value_dim: V, the number of dimensions of a head's values.
    up [H (K + V), L]: for each head, the matrix that maps a latent [L] to the part of its key that is not rotated [K], followed by
    the matrix that maps it to its value [V]."""

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
    """The columns of a gated delta rule's heads in the outputs of the layer's two projections. K is the number of key heads, V that
    of value heads; each key head h has V / K value heads, of which j is one.

    In the output of the first projection:
    queries of key head h: from column query + h key_stride on.
    keys of key head h: from column key + h key_stride on.
    values of value head j of h, D dimensions: from column value + h value_stride + j D on.
    gates of the output of value head j of h, D dimensions: from column gate + h value_stride + j D on.

    In the output of the second projection, that of the gates:
    update of value head j of h: column update + h head_stride + j.
    step of value head j of h: column step + h head_stride + j."""

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

    convolution [C, N]: weights for the C columns of queries, keys and values, in this order and head by head. The last of a
    column's N weights is for the token itself, the others are for the N - 1 tokens before it.
    decay, step_bias [V] float32: a head's state decays by the factor exp(-exp(decay) softplus(step + step_bias)).
    norm [value_dim], eps: the weight of the norm of each head's output, and the number that is added to the mean square.

    A sequence's state is float32: V matrices [key_dim, value_dim], then the columns of its last N - 1 tokens [N - 1, C]."""

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
        """The number of values in a sequence's state that belong to its matrices. They are the first values of the state; those of
        the convolution follow."""
        return self.num_value_heads * self.key_dim * self.value_dim


@dataclass(slots=True, frozen=True)
class HeadNorms:
    """The RMS norms of each head's queries, keys and, in some models, values. query, key, value [D]: the norms' weights; value
    None: values are not normalised. around_one: whether queries and keys are multiplied by 1 + weight instead of weight."""

    query: Tensor
    key: Tensor
    eps: float
    around_one: bool = False
    value: Tensor | None = None


@dataclass(slots=True, frozen=True, eq=False)
class Rotary:
    """A rotary embedding of 2 P dimensions of each head. inv_freq [P] float32: the angle per position. scale: a factor of cosines
    and sines. temperature: how a further factor of the queries depends on the position; None: there is no such factor. In layers
    with a temperature only queries are rotated, and by an angle of 0 (inv_freq is 0), so that the rotation only multiplies them by
    that factor."""

    inv_freq: Tensor
    scale: float = 1.0
    temperature: TemperatureShape | None = None


@dataclass(slots=True)
class BatchAdapters:
    """The LoRA adapters of one step's T tokens. The tables places and ranks have a column for each of S adapter numbers, and a row
    for each of M matrix multiplications that adapters may change. All arrays but memory are numpy arrays if the host computes, else
    tensors in device memory.

    numbers [T] int32: the adapter number of each token; -1 for tokens without an adapter, and for padding.
    places [M, S] int64: the index in `memory` at which an adapter's matrices for a multiplication begin (loader.adapters.layout);
    -1: the adapter does not change the multiplication.
    ranks [M, S] int32: the LoRA rank r of these matrices.
    memory: the KV arena, which also holds all adapters, as a flat tensor in the model's dtype."""

    numbers: Any
    places: Any
    ranks: Any
    memory: Tensor


class StepBatch(Protocol):
    """The inputs of one step, as far as models read them. Each kind of device has its own class, with further fields that its
    operations read."""

    layer_inputs: Tensor | None  # [T L, W]: the inputs of L layers that have inputs of their own, set by the model
    kept: list[Tensor] | None  # [T, W] each: filled with the states that the model's predictor reads; None: none are kept

    @property
    def adapters(self) -> BatchAdapters | None:
        """The LoRA adapters of the step's tokens. None if the model's steps do not compute adapters, which is so until the model
        gets its first adapter."""
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
        """Returns log-softmax values of M rows of logits [N, V] as three arrays: the values [M] float32 of the tokens chosen [M]
        int32; the ids [M, num_top] of the most likely tokens, the most likely first; and the values [M, num_top] of these. rows [M]
        int32: the indices of the M rows, whose logits must be finite."""
        ...

    def ranks(self, logits: Tensor, chosen: Any) -> Any:
        """Returns, for each row of logits [N, V], the rank of the token in chosen [N] int32, as [N] int32: how many tokens are at
        least as likely, the token itself included. Rank 1 is the most likely token."""
        ...


class SamplingOps(LogprobOps, Protocol):
    """The operations with which the host samples from logits (engine/sampling). Devices that sample by themselves, such as GPUs, do
    not have them. Arguments and results other than logits are numpy arrays."""

    def greedy(self, logits: Tensor) -> tuple[Any, Any]:
        """Returns two arrays for the rows of logits [N, V]: the most likely token id of each row, [N] int32, and whether the row
        holds NaN or an infinity, [N] bool."""
        ...

    def sample(self, logits: Tensor, temperature: Any, top_p: Any, top_k: Any, min_p: Any, key0: Any, key1: Any) -> tuple[Any, Any]:
        """Samples one token for each row of logits [N, V] (reference.sample). Returns the ids [N], and whether each row holds NaN
        or an infinity [N]. temperature, top_p, top_k, min_p [N]: the rows' settings; rows of temperature 0 get their most likely
        token. key0, key1 [N] uint32: keys of the rows' random noise."""
        ...

    def penalise(self, row: Tensor, tokens: Any, num_prompt: int, presence: float, frequency: float, repetition: float) -> None:
        """Applies penalties to one row's logits [V] float32, in place (reference.penalise). tokens: int32, the num_prompt tokens of
        the prompt, then those of the output. repetition: the logits of all these tokens are divided by it if positive, else
        multiplied by it; 1: no effect. frequency: subtracted for each time a token is in the output. presence: subtracted once for
        each token of the output."""
        ...


class Ops(LogprobOps, Protocol[BatchT_contra]):
    """The operations of one kind of device, of which models are made. BatchT_contra: the type of a step's inputs on this kind of
    device."""

    def embedding(self, ids: Tensor, weight: Tensor | PackedMatrix, scale: float = 1.0, first: int | None = None) -> Tensor:
        """Returns the rows of a table with the indices ids [T] int64, times scale, as [T, W]. weight [V, W]: the table; if `first`
        is given, only a part of the table, whose first row has the index `first`, and which is not packed. Indices outside of this
        part give rows of zeros."""
        ...

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """Returns x [T, K] @ weight [N, K] transposed, plus bias [N] (None: no bias), in x's dtype."""
        ...

    def add_adapters(self, x: Tensor, out: Tensor, product: AdaptedProduct, batch: BatchT_contra) -> None:
        """Adds the contributions of the tokens' LoRA adapters to out [T, N], the product of x [T, K] and a matrix, in place. For
        each part of the matrix (AdaptedProduct.parts), with n outputs, the contribution is x @ down [r, K] transposed @ up [r, n],
        computed in float32 and rounded once with the sum. Rows of a token without an adapter, or with one that does not change this
        product, stay as they are. batch.adapters must not be None. In memory all parts' `down` lie one after the other, followed by
        their `up`."""
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
        """Returns the RMS norm of x [T, W]: each row divided by sqrt(its mean square + eps), times weight [W], or with around_one
        times 1 + weight."""
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
        """Normalises W adjacent columns of x [T, N], from column `first` on, in place, as rms_norm does with weight [W]. The other
        columns stay."""
        ...

    def column_squares(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Returns sums of squares of the elements of each row of x: one sum for each of C adjacent ranges of columns, [T, C]
        float32. widths: the number of columns of each range. The first range begins at column 0."""
        ...

    def norm_columns_by(self, x: Tensor, weights: tuple[Tensor, ...], squares: Tensor, parts: int, eps: float) -> None:
        """Normalises C adjacent ranges of x's columns in place, as rms_norm does, but with given sums of squares. weights: one
        weight [W] for each range. In a split model x holds only one of `parts` equal parts of each range. squares [T, C]: for each
        range the sum of squares over all parts (column_squares)."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up as [T, W]; gate_up [T, 2 W] has gate's columns before up's."""
        ...

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Returns gelu(gate) * up as [T, W], with the tanh approximation of gelu; gate_up [T, 2 W] has gate's columns before
        up's."""
        ...

    def gated_linear(self, x: Tensor, weight: Matrix, bias: Tensor | None, gelu: bool) -> Tensor:
        """Returns gelu_and_mul (if gelu, else silu_and_mul) of the product that `linear` returns, as [T, W]. weight [2 W, K] has
        gate's rows before up's; bias [2 W]."""
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """Returns the tanh approximation of gelu(x) [T, W]."""
        ...

    def experts(self, x: Tensor, scores: Tensor, experts: ExpertMatrices, shared: Tensor | None, batch: BatchT_contra) -> Tensor:
        """Returns the output [T, W] of a layer's experts for x [T, W]: for each token the weighted sum of its chosen experts'
        outputs, down(activation(gate, up)). The weights are the softmax of the token's scores, or follow the rule experts.sigmoid.
        Padding passes through no expert, and its output is 0. Also adds to experts.counts.

        scores [T, E]: the router's scores; float32 if experts.sigmoid is given. Of equal scores the expert with the lower number is
        chosen.
        shared [T, W]: the output of the shared expert, which is added; None: there is none. If scores has a further column, [T, E +
        1], `shared` is multiplied by the sigmoid of that column."""
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
        """Normalises (if norms are given) and rotates the queries and keys of qkv [T, (H + 2 G) D], normalises the values (if they
        have a norm), and stores keys and values in the KV blocks. Queries are changed in place; the keys and values in qkv are
        undefined afterwards.

        layer: index of the layer. heads: H. interleaved: whether the two dimensions of a rotated pair are adjacent; False: they are
        dimensions i and P + i. num_turned: how many heads are rotated, counted from the first query head on; None: all queries and
        keys."""
        ...

    def rope(
        self, queries: Tensor, norms: HeadNorms | None, layer: int, heads: int, batch: BatchT_contra, interleaved: bool = False
    ) -> None:
        """Normalises (if norms are given) and rotates queries [T, H D] in place, and stores nothing. layer, heads, interleaved: as
        in rope_and_store."""
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
        """Returns causal attention [T, H D] of every token to its row's KV blocks in the layer's window. rope_and_store must have
        run before. Of qkv only the first H D columns, the queries, are read.

        heads: H. scale: factor of the scores. softcap: scores become softcap * tanh(score / softcap); 0: they are unchanged. sinks
        [H] float32: a further score for each head, which takes weight in the softmax but has no value; None: there are none."""
        ...

    def normed_columns(self, x: Tensor, first: int, weight: Tensor, eps: float) -> Tensor:
        """Returns W adjacent columns of x [T, N], from column `first` on, normalised as rms_norm does with weight [W], as [T,
        W]."""
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
        of the keys. interleaved: whether the two dimensions of a rotated pair are adjacent. K, R, V and L are explained at
        LatentHeads."""
        ...

    def latent_attention(self, queries: Tensor, layer: int, heads: LatentHeads, scale: float, batch: BatchT_contra) -> Tensor:
        """Returns causal latent attention [T, H V] of every token to its row's KV blocks. rope_and_store_latents must have run
        before. scale: factor of the scores. K, R, V and L are explained at LatentHeads."""
        ...

    def without_gates(self, x: Tensor, heads: int, head_dim: int) -> Tensor:
        """Returns x [T, (2 H + 2 G) D] without the gates, as [T, (H + 2 G) D]. In x each query head's D columns are followed by D
        columns of gates. heads: H. head_dim: D."""
        ...

    def gate_heads(self, attended: Tensor, x: Tensor, head_dim: int) -> None:
        """Multiplies the outputs of attention, attended [T, H D], in place by the sigmoids of the gates in x [T, (2 H + 2 G) D]
        (see without_gates). head_dim: D."""
        ...

    def gated_delta(self, x: Tensor, gates: Tensor, rule: DeltaRule, layer: int, batch: BatchT_contra) -> Tensor:
        """Returns the normalised and gated outputs [T, V D] of the V value heads of a gated delta rule, for D = value_dim; 0 for
        padding. x [T, C + V D], gates [T, 2 V]: outputs of the layer's two projections (DeltaColumns). Reads each row's state
        before the step. Writes the row's states after those of its tokens for which the row has a block
        (scheduler/batch/group_cache.py)."""
        ...

    def scaled(self, x: Tensor, scale: float) -> Tensor:
        """Multiplies x by scale in place, and returns x."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Replaces x by cap * tanh(x / cap) in place, and returns x. With cap 0, x stays unchanged."""
        ...
