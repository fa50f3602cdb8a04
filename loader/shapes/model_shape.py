"""Defines the shape of a model of any family: the sizes and settings from config.json by which the engine computes and memory is
planned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from loader.shapes.rope_config import RopeParameters

# The function that turns a cross-encoder's score into a relevance: the logistic function, or none.
SIGMOID, IDENTITY = "sigmoid", "identity"


@dataclass(slots=True, frozen=True)
class SigmoidShape:
    """The settings of a mixture of experts' router that chooses a token's experts in two steps: first some groups of experts, then
    experts within them (route_by_sigmoid in engine/ops/reference.py). by_softmax: whether the router's scores pass through a
    softmax instead of a sigmoid."""

    num_groups: int  # number of equal groups of a layer's experts
    num_chosen_groups: int  # number of groups whose experts a token may pass through
    factor: float  # factor of the weights
    by_softmax: bool = False


@dataclass(slots=True, frozen=True)
class TemperatureShape:
    """The settings by which queries are scaled depending on their position p: they are multiplied by 1 + scale * ln(1 + floor((p +
    1) / tokens)) (temperature_of in engine/ops/reference.py)."""

    scale: float
    tokens: int


# For each layer and each part of its experts (Division.expert_parts), the numbers of the further experts that the devices with this
# part hold, in ascending order; () for a layer without experts.
ExpertCopies = tuple[tuple[tuple[int, ...], ...], ...]

# Ways in which experts' matrices are stacked in a tensor. Families with the last two may also store experts one by one.
ALTERNATING = "alternating"  # [experts, outputs, inputs], in which a row of the gate and one of up take turns
INPUT_MAJOR = "input-major"  # [experts, inputs, outputs], the gate's outputs before up's
OUTPUT_MAJOR = "output-major"  # [experts, outputs, inputs], the gate's outputs before up's
OPTIONAL_STACKS = (INPUT_MAJOR, OUTPUT_MAJOR)

LAST_TOKEN = "lasttoken"  # ModelShape.pooling of a decoder: the vector is the last token's hidden state


@dataclass(slots=True, frozen=True)
class ExpertShape:
    """The experts of a model (loader/architectures/experts.py). Every layer has experts, except dense_layers, which have an MLP of
    ModelShape.intermediate_size. In the shape of a device's share of a split model (SplitShape), intermediate_size and shared_size
    are the share's."""

    num_experts: int  # number of experts of a layer
    num_chosen: int  # number of experts that each token passes through
    intermediate_size: int  # intermediate size of each expert
    normalised: bool  # the weights of a token's experts add up to 1
    shared_size: int = 0  # intermediate size of the expert that all tokens pass through; 0: there is none
    dense_layers: frozenset[int] = frozenset()
    sigmoid: SigmoidShape | None = None  # None: the weights are a softmax of the router's scores
    stacked: bool = False  # the checkpoint has one tensor for the matrices of all experts
    stack: str = ""  # how the family orders such a tensor: ALTERNATING, INPUT_MAJOR or OUTPUT_MAJOR; "": it has none
    weighs_inputs: bool = False  # an expert's weight is the sigmoid of its score, and multiplies what the expert reads
    swiglu_limit: float = 0.0  # clamped SwiGLU (reference.clamped_swiglu): the clamp of gate and up; 0: SiLU instead
    swiglu_alpha: float = 0.0  # the factor of the gate within its sigmoid
    beside: bool = False  # experts are beside a layer's MLP, not in its place
    first_own: int = 0  # for a share: the number of its first expert
    num_own: int = 0  # for a share: how many experts it has, without copies of other parts' experts; 0: all

    @property
    def own(self) -> range:
        """The indices of the experts of a layer whose matrices the model, or a device's share of it, has; they are the same in
        every layer. Copies of experts that belong to other shares are not included."""
        return range(self.first_own, self.first_own + (self.num_own or self.num_experts))


@dataclass(slots=True, frozen=True)
class HeadShape:
    """The KV heads of a layer with attention. keys_are_values: one projection makes both keys and values; the values are its
    output, and the keys are the same output after a norm and rotary embedding (RoPE). reads_only: the layer makes only queries, and
    reads the keys and values of an earlier layer."""

    num_kv_heads: int
    head_dim: int  # dimensions of a head of queries, keys or values
    keys_are_values: bool = False
    reads_only: bool = False

    @property
    def num_projections(self) -> int:
        """The number of matrices that make queries, keys and values: 1 if the layer makes only queries, 2 if one matrix makes keys
        and values, else 3."""
        return 1 if self.reads_only else 2 if self.keys_are_values else 3


@dataclass(slots=True, frozen=True)
class LayerInputShape:
    """The sizes of per-layer inputs (engine/layers/layer_inputs.py): vectors that each layer reads for each token besides the
    residual. Such a vector is computed from a row of an embedding table for all layers, and from a projection of the token's
    embedding."""

    vocab_size: int
    width: int  # size of one layer's input for a token


@dataclass(slots=True, frozen=True)
class LatentShape:
    """The sizes of multi-head latent attention (https://arxiv.org/abs/2405.04434). The KV of a token is one vector for all heads,
    which has two parts: a latent, from which a matrix computes every head's keys and values, and the dimensions of the keys that
    have rotary embedding (RoPE)."""

    query_rank: int  # rank of the two matrices that make the queries; 0: a single matrix makes them
    rank: int  # size of a latent
    plain_dim: int  # dimensions of a head's queries and keys that are not rotated; the keys' come from the latent
    rope_dim: int  # rotated dimensions of a head's queries and keys; all heads share those of the keys
    value_dim: int  # dimensions of a head's values

    @property
    def token_values(self) -> int:
        """The number of elements that the KV of one token has in a layer."""
        return self.rank + self.rope_dim


@dataclass(slots=True, frozen=True)
class DeltaShape:
    """The sizes of layers of the gated delta rule (https://arxiv.org/abs/2412.06464). The state that such a layer keeps of a
    sequence consists of a matrix for each value head, and of the convolution's inputs for the last tokens."""

    layers: frozenset[int]  # layers with the delta rule; the others have attention
    num_key_heads: int  # number of heads of queries and of keys; each serves the same number of value heads
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_tokens: int  # number of tokens that the convolution covers, the current one included
    by_head: bool  # the projections' outputs are grouped by key head, else by kind (engine/ops/ops.py, DeltaColumns)

    @property
    def conv_width(self) -> int:
        """The number of elements of one token over which the convolution runs: those of its queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def with_key_heads(self, num: int) -> DeltaShape:
        """Returns a copy of the sizes with `num` key heads. Each of them serves as many value heads as before."""
        return replace(self, num_key_heads=num, num_value_heads=self.num_value_heads * num // self.num_key_heads)

    @property
    def state_values(self) -> int:
        """The number of elements that the state of one sequence has in one layer."""
        return self.num_value_heads * self.key_dim * self.value_dim + (self.conv_tokens - 1) * self.conv_width


@dataclass(slots=True, frozen=True)
class EagleShape:
    """The sizes and settings of an EAGLE-3 head, a layer that drafts tokens for another model (loader/architectures/eagle.py).

    layer: the shape of this layer. family: the layer's model_type. outer_prefix: prefix of the names of the head's tensors in its
    files, except those of the output matrix and of the offsets to token ids. layer_prefix: in the names of the layer's tensors, the
    prefix that follows outer_prefix.

    draft_vocab_size: number of tokens that the head can draft. has_offsets: whether the files hold, for each of these tokens, the
    offset from its index to its id in the model's vocabulary; if not, they are the first tokens of the vocabulary.

    read_layers: indices of the model's layers whose inputs (hidden states) the head reads; the index num_layers means the output of
    the last layer. target_size: width of these states, in elements.

    has_embedding: whether the head has an embedding table of its own; if not, it uses the model's. norm_before_residual: whether
    the residual is taken after the norm of the state; if not, before it. one_norm: whether one norm is applied to all states that
    the head reads together. norms: whether each of these states has a norm. norm_output: whether the state that the head outputs
    passes through a norm before the next draft reads it."""

    layer: ModelShape
    family: str
    outer_prefix: str
    layer_prefix: str
    draft_vocab_size: int
    has_offsets: bool
    norm_before_residual: bool
    one_norm: bool
    norms: bool
    norm_output: bool
    read_layers: tuple[int, ...] = ()
    target_size: int = 0
    has_embedding: bool = False


class Division(NamedTuple):
    """The way in which a model is divided among devices. size: number of devices. num_stages: number of pipeline stages; each has
    consecutive layers, and all have the same number of devices.

    expert_parts: number of parts, of whole experts, into which the experts of a layer are divided (expert parallelism). If several
    devices of a stage have a part, each of its experts is divided among them. copies: for each layer and part, the experts of other
    parts of which the devices with this part hold copies (loader/shapes/expert_copies.py); (): none."""

    size: int
    expert_parts: int = 1
    num_stages: int = 1
    copies: ExpertCopies = ()

    @property
    def stage_size(self) -> int:
        """The number of devices of each pipeline stage."""
        return self.size // self.num_stages

    @property
    def inner_parts(self) -> int:
        """The number of devices of a pipeline stage that have the same experts. Each of these experts is divided among them."""
        return self.stage_size // self.expert_parts

    def stage_of(self, rank: int) -> int:
        """Returns the index of the pipeline stage of the device with this rank. Rank 0, which samples, is in the last stage."""
        return self.num_stages - 1 - rank // self.stage_size


class DeviceShare(NamedTuple):
    """A device's share of a divided model. rank: the device's index, from 0. division: how the model is divided."""

    rank: int
    division: Division


@dataclass(slots=True, frozen=True)
class SplitShape:
    """Describes which share of a split model a ModelShape is about. In such a ModelShape num_heads, num_kv_heads, the intermediate
    sizes, the experts and the heads of delta layers are those of the share; all other sizes are those of the whole model.

    rank: index of the share within its pipeline stage. size: number of devices in the stage. expert_parts: number of parts, of
    whole experts, into which the experts of a layer are divided.

    num_kv_heads: number of KV heads of the whole model; 0: it is ModelShape.num_kv_heads times `size`. It is less if there are
    fewer heads than devices, since several devices then hold the same head. num_full_kv_heads: the same for ModelShape.full_heads.

    stage: index of the pipeline stage. stage_ends: for each stage, the index of its last layer plus 1; (): the layers are not
    divided. copies: as in Division, for all parts."""

    rank: int
    size: int
    num_kv_heads: int = 0
    expert_parts: int = 1
    num_full_kv_heads: int = 0
    stage: int = 0
    stage_ends: tuple[int, ...] = ()
    copies: ExpertCopies = ()

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stage_ends))

    @property
    def division(self) -> Division:
        return Division(self.size * self.num_stages, self.expert_parts, self.num_stages, self.copies)

    @property
    def is_first_stage(self) -> bool:
        """Returns whether the share's stage is the first one, which has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Returns whether the share's stage is the last one, which has the final norm and the head."""
        return self.stage == self.num_stages - 1

    def layers_of(self, stage: int) -> range:
        """Returns the indices of the layers that a pipeline stage computes. stage: the stage's index. Only for a model whose layers
        are divided into stages."""
        return range(self.stage_ends[stage - 1] if stage else 0, self.stage_ends[stage])

    @property
    def expert_part(self) -> int:
        """The index, from 0, of the part of each layer's experts that this share has. A layer's experts are divided into
        expert_parts parts of whole experts."""
        return self.rank // self.division.inner_parts

    @property
    def inner_part(self) -> int:
        """The index (from 0) of this share's slice of each expert that it has, if an expert is divided among several devices of a
        pipeline stage."""
        return self.rank % self.division.inner_parts

    def experts_of(self, part: int, layer: int | None, num_experts: int) -> tuple[int, ...]:
        """Returns the indices of the experts of a layer that the devices with a part of the experts hold, in ascending order. part:
        the part's index. layer: the layer's index, by which copies of other parts' experts are included; None: copies are left out.
        num_experts: number of experts of the layer."""
        num_own = num_experts // self.expert_parts
        own = range(part * num_own, (part + 1) * num_own)
        copies = self.copies[layer] if layer is not None and layer < len(self.copies) else ()
        return tuple(sorted((*own, *copies[part]))) if copies else tuple(own)


@dataclass(slots=True, frozen=True)
class ModelShape:
    """The sizes and settings of one model. Sizes are numbers of elements, lengths are numbers of tokens. What is the same in all
    models of a family is in the family's description (loader/architectures), not here."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int  # longest context, including the reach of a rotary scaling
    rope: RopeParameters
    tie_word_embeddings: bool
    attention_bias: bool  # queries, keys and values have biases
    output_bias: bool  # attention's output has a bias
    mlp_bias: bool
    dtype: str
    layer_windows: tuple[int, ...]  # for each layer, how many positions a query attends to, its own included; 0: all
    query_scale: float  # factor of attention scores
    unrotated_layers: frozenset[int] = frozenset()  # layers without rotary embedding
    temperature: TemperatureShape | None = None  # scaling of queries in layers without windows, which are unrotated; None: none
    unit_norms: bool = False  # rotated queries and keys have norms without weights
    chunked_windows: bool = False  # windows are chunks: a query attends to its own chunk of positions, up to itself
    embedding_scale: float = 1.0  # factor of embeddings
    branch_scale: float = 1.0  # factor of the updates of attention and MLP
    logit_scale: float = 1.0
    parallel_branches: bool = False  # the MLP reads the same input as attention
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: they are not capped
    logit_softcap: float = 0.0
    whole_width_norms: bool = False  # norms of queries and keys are over all heads at once
    has_head_norms: bool = True  # queries and keys have the norms that the family names
    num_predicting_layers: int = 0  # predicting layers after the last layer, which the checkpoint may hold
    # whether the first of them, or a head from other files, is loaded and drafts tokens (loader/architectures/predictor.py,
    # eagle.py)
    predicts: bool = False
    eagle: EagleShape | None = None  # the head from other files
    local_rope: RopeParameters | None = None  # rotary embedding of layers with windows, if it differs from `rope`
    full_heads: HeadShape | None = None  # heads of layers without windows, if they differ from num_kv_heads and head_dim
    num_reading_layers: int = 0  # how many last layers read the KV of the last layer before them with the same window
    reading_intermediate_size: int = 0  # intermediate size of these layers' MLPs; 0: intermediate_size
    layer_inputs: LayerInputShape | None = None  # None: a layer reads only the residual
    experts: ExpertShape | None = None  # None: not a mixture of experts
    latent: LatentShape | None = None  # sizes of latent attention; num_kv_heads is then 1, and head_dim that of queries
    delta: DeltaShape | None = None  # sizes of layers of the gated delta rule
    gated_attention: bool = False  # each head's queries are followed by as many gates of its output
    pooling: str = ""  # for a model that embeds: mean or cls (encoders), lasttoken (decoders); "": it generates text
    scoring: str = ""  # for an encoder that scores pairs of texts (a cross-encoder): SIGMOID or IDENTITY; "": it embeds
    type_vocab_size: int = 0  # for an encoder: number of segment types
    first_position: int = 0  # for an encoder: the row of its table of positions for a text's first token
    cut_sizes: tuple[int, ...] = ()  # sizes to which its vectors may be cut, if it was trained for that (Matryoshka)
    any_cut_size: bool = False  # its vectors may be cut to any size
    named_headless: bool = False  # config.json names the decoder alone (Qwen3Model), without a head
    bare_names: bool = False  # the parameters' names lack the `model.` that they have in checkpoints with a head
    tensor_prefix: str = ""  # prefix of the parameters' names, if a family's checkpoints differ in it
    stored_format: str = ""  # the weight format (loader/formats) of the checkpoint's matrices; "": plain
    plain_groups: frozenset[int] = frozenset()  # indices of tensor groups that are stored plain although others are not
    split: SplitShape | None = None  # None: the whole model
    block_offsets: tuple[int, ...] = ()  # where large parameters begin in the files (block_offsets in layout.py); (): unknown

    @property
    def is_encoder(self) -> bool:
        """Returns whether the model is an encoder, which has no KV cache."""
        return self.pooling not in ("", LAST_TOKEN)

    @property
    def own_layers(self) -> range:
        """The indices of the layers that a device computes: all layers, or those of its pipeline stage."""
        if (split := self.split) is None or not split.stage_ends:
            return range(self.num_layers)
        return split.layers_of(split.stage)

    def experts_of(self, layer: int) -> tuple[int, ...]:
        """Returns the indices of the experts of a layer whose matrices the model, or a device's share of it, has. They are in
        ascending order and include copies of other shares' experts. Only for a mixture of experts."""
        assert self.experts is not None
        if (split := self.split) is None:
            return tuple(self.experts.own)
        return split.experts_of(split.expert_part, layer, self.experts.num_experts)

    @property
    def num_writing_layers(self) -> int:
        """The number of layers that compute keys and values themselves; they are the first layers. Each later layer reads the keys
        and values of one of them."""
        return self.num_layers - self.num_reading_layers

    @property
    def num_computed_layers(self) -> int:
        """The number of layers that have weights, including the layer that drafts tokens if it is loaded."""
        return self.num_layers + self.predicts

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The indices of the layers that keep keys and values of each token. The layer that drafts tokens comes last, if it is
        loaded. Layers of the gated delta rule, and layers that read other layers' KV, are left out."""
        own = tuple(layer for layer in range(self.num_writing_layers) if self.delta is None or layer not in self.delta.layers)
        return (*own, self.num_layers) if self.predicts else own

    def heads_of(self, layer: int) -> HeadShape:
        """Returns the KV heads of a layer with attention; they may differ between layers with and without sliding windows. layer:
        index of the layer; num_layers means the layer that drafts tokens."""
        if self.eagle is not None and layer == self.num_layers:
            return HeadShape(self.eagle.layer.num_kv_heads, self.eagle.layer.head_dim)
        heads = self.full_heads
        if heads is None or self.layer_windows[layer]:
            heads = HeadShape(self.num_kv_heads, self.head_dim)
        return replace(heads, reads_only=True) if self._reads(layer) else heads

    def kv_layer(self, layer: int) -> int:
        """Returns the index of the layer whose keys and values a layer reads. It is the layer itself or, for a layer that computes
        none, the last layer with the same window length that does."""
        if not self._reads(layer):
            return layer
        windows = self.layer_windows
        return next(one for one in reversed(range(self.num_writing_layers)) if windows[one] == windows[layer])

    @property
    def first_joined_layer(self) -> int:
        """The index of the first layer that must be in the same pipeline stage as the last layer: the first one whose keys and
        values a later layer reads. If no layer reads those of another one, it is the last layer."""
        reading = range(self.num_writing_layers, self.num_layers)
        return min(map(self.kv_layer, reading), default=self.num_layers - 1)

    def _reads(self, layer: int) -> bool:
        """Returns whether a layer reads the keys and values of an earlier layer instead of computing them itself."""
        return self.num_writing_layers <= layer < self.num_layers

    def inner_size_of(self, layer: int) -> int:
        """Returns the intermediate size of a layer's MLP, in elements."""
        return self.intermediate_size if layer < self.num_writing_layers else self.widest_inner_size

    @property
    def widest_inner_size(self) -> int:
        return self.reading_intermediate_size or self.intermediate_size

    @property
    def kinds_of_heads(self) -> tuple[HeadShape, ...]:
        """The KV heads of full-attention layers and those of sliding-window layers, in this order; one entry if both are the
        same."""
        usual = HeadShape(self.num_kv_heads, self.head_dim)
        return (usual,) if self.full_heads is None else (self.full_heads, usual)

    @property
    def widest_head_dim(self) -> int:
        return max(heads.head_dim for heads in self.kinds_of_heads)

    @property
    def widest_key(self) -> int:
        """The largest number of elements that one token's keys have in a layer, in all KV heads together. The token's values have
        the same number."""
        return max(heads.num_kv_heads * heads.head_dim for heads in self.kinds_of_heads)

    @property
    def fewest_kv_heads(self) -> int:
        return min(heads.num_kv_heads for heads in self.kinds_of_heads)

    @property
    def rotary_head_dims(self) -> tuple[int, int]:
        """The numbers of dimensions of a head to which rotary embedding (RoPE) may apply: (in full-attention layers, in
        sliding-window layers). RoPE may be limited to a part of them (RopeParameters.partial_rotary_factor)."""
        if self.latent is not None:
            return self.latent.rope_dim, self.latent.rope_dim
        return self.kinds_of_heads[0].head_dim, self.head_dim
