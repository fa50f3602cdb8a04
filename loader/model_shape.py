"""Holds what config.json says about a model of any family: the sizes and settings that the engine and the memory accounts need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from loader.rope_config import RopeParameters

# What makes the relevance of a cross-encoder's score: the logistic function, or nothing.
SIGMOID, IDENTITY = "sigmoid", "identity"


@dataclass(slots=True, frozen=True)
class SigmoidShape:
    """Sizes of a router whose scores pass through a sigmoid, or through a softmax but with groups (reference.route_by_sigmoid)."""

    num_groups: int  # equal parts of a layer's experts
    num_chosen_groups: int  # whose experts a token may pass through
    factor: float  # of the weights
    by_softmax: bool = False


@dataclass(slots=True, frozen=True)
class TemperatureShape:
    """How queries grow with their position p: by 1 + scale * ln(1 + floor((p + 1) / tokens)) (reference.temperature_of)."""

    scale: float
    tokens: int


# Stacks of experts' matrices. The experts of the last two kinds may be stored one by one, too.
ALTERNATING = "alternating"  # [experts, outputs, inputs], in which a row of the gate and one of up take turns
INPUT_MAJOR = "input-major"  # [experts, inputs, outputs], the gate's outputs before up's
OUTPUT_MAJOR = "output-major"  # [experts, outputs, inputs], likewise
OPTIONAL_STACKS = (INPUT_MAJOR, OUTPUT_MAJOR)

LAST_TOKEN = "lasttoken"  # ModelShape.pooling of a decoder: the vector is the last token's hidden state


@dataclass(slots=True, frozen=True)
class ExpertShape:
    """The experts of a model (loader/architectures/experts.py). Every layer has them, except dense_layers, which have an MLP of
    ModelShape.intermediate_size. Of a share of a model (SplitShape) intermediate_size and shared_size are those of the share."""

    num_experts: int  # of a layer
    num_chosen: int  # for each token
    intermediate_size: int  # of each expert
    normalised: bool  # the weights of a token's experts add up to 1
    shared_size: int = 0  # intermediate size of the expert that all tokens pass through; 0: there is none
    dense_layers: frozenset[int] = frozenset()
    sigmoid: SigmoidShape | None = None  # None: the weights are a softmax of the router's scores
    stacked: bool = False  # the checkpoint has one tensor for the matrices of all experts
    stack: str = ""  # how the family orders such a tensor: one of the three below; "": it has none
    weighs_inputs: bool = False  # an expert's weight is the sigmoid of its score, and multiplies what the expert reads
    swiglu_limit: float = 0.0  # clamped SwiGLU (reference.clamped_swiglu): the clamp of gate and up; 0: SiLU instead
    swiglu_alpha: float = 0.0  # the factor of the gate within its sigmoid
    beside: bool = False  # experts are beside a layer's MLP, not in its place
    first_own: int = 0  # of a share: the number of the first expert that it has
    num_own: int = 0  # of a share: how many experts it has; 0: all

    @property
    def own(self) -> range:
        """The numbers of the experts whose matrices the model, or the share, has."""
        return range(self.first_own, self.first_own + (self.num_own or self.num_experts))


@dataclass(slots=True, frozen=True)
class HeadShape:
    """The heads of keys and values that a layer of attention has. keys_are_values: one projection makes both; values are what it
    gave, keys its norm, rotated. reads_only: the layer makes queries alone, and reads the keys and values of an earlier layer."""

    num_kv_heads: int
    head_dim: int  # of queries, too
    keys_are_values: bool = False
    reads_only: bool = False

    @property
    def num_projections(self) -> int:
        """How many of queries, keys and values have a matrix of their own, the first ones."""
        return 1 if self.reads_only else 2 if self.keys_are_values else 3


@dataclass(slots=True, frozen=True)
class LayerInputShape:
    """Inputs that each layer has of its own (engine/layers/layer_inputs.py): an embedding table for all layers, and a projection of
    the token's embedding."""

    vocab_size: int
    width: int  # numbers that one layer gets of a token


@dataclass(slots=True, frozen=True)
class LatentShape:
    """Sizes of multi-head latent attention (https://arxiv.org/abs/2405.04434). The KV of a token is one vector for all heads: a
    latent, of which a matrix makes every head's keys and values, and a rotated part of the keys."""

    query_rank: int  # of the two matrices that make the queries; 0: one makes them
    rank: int  # numbers of a latent
    plain_dim: int  # dimensions of a head's queries and keys that are not rotated; the keys' come from the latent
    rope_dim: int  # dimensions that are rotated; all heads' keys have the same
    value_dim: int  # dimensions of a head's values

    @property
    def token_values(self) -> int:
        """The numbers that a layer keeps of a token."""
        return self.rank + self.rope_dim


@dataclass(slots=True, frozen=True)
class DeltaShape:
    """Sizes of layers of the gated delta rule (https://arxiv.org/abs/2412.06464). What such a layer keeps of a sequence is a matrix
    for each value head, and the last columns that its convolution has seen."""

    layers: frozenset[int]  # the others have attention
    num_key_heads: int  # of queries and keys; each serves as many value heads as the next
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_tokens: int  # that the convolution sees, the token's own included
    by_head: bool  # one matrix makes everything, head of keys by head; else one after the other (engine/ops/ops.py, DeltaRule)

    @property
    def conv_width(self) -> int:
        """The columns of queries, keys and values of a token."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def with_key_heads(self, num: int) -> DeltaShape:
        """Returns the sizes with so many key heads, each of which serves as many value heads as here."""
        return replace(self, num_key_heads=num, num_value_heads=self.num_value_heads * num // self.num_key_heads)

    @property
    def state_values(self) -> int:
        """The numbers that one layer keeps of a sequence."""
        return self.num_value_heads * self.key_dim * self.value_dim + (self.conv_tokens - 1) * self.conv_width


@dataclass(slots=True, frozen=True)
class EagleShape:
    """Sizes and settings of a head that drafts tokens (loader/architectures/eagle.py). layer: of its only layer; family: that one's
    model_type. outer_prefix, layer_prefix: what the names of its tensors begin with in its files, and those of its layer behind
    that. read_layers: of the model, those before which its states are read (the number of layers: behind the last one), target_size
    wide. has_offsets: its tokens are not the model's first ones. has_embedding: it has a table of embeddings of its own.
    norm_before_residual: the residual is normed. one_norm: of the states it reads, all in one; norms: each on its own. norm_output:
    its own state is normed before it reads it again."""

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
    """How a model is divided among devices. size: how many devices there are. num_stages: into how many stages its layers are
    divided, of consecutive ones; each stage has as many devices. expert_parts: into how many parts the experts of a layer are
    divided, whole ones; each expert of a part is divided among the devices of the stage that hold the part."""

    size: int
    expert_parts: int = 1
    num_stages: int = 1

    @property
    def stage_size(self) -> int:
        """How many devices each stage has."""
        return self.size // self.num_stages

    @property
    def inner_parts(self) -> int:
        """Into how many parts each expert is divided."""
        return self.stage_size // self.expert_parts

    def stage_of(self, rank: int) -> int:
        """Returns the stage of a device; that of rank 0, which samples, is the last one."""
        return self.num_stages - 1 - rank // self.stage_size


class DeviceShare(NamedTuple):
    """What one device holds of a model that is divided: the share of number `rank`."""

    rank: int
    division: Division


@dataclass(slots=True, frozen=True)
class SplitShape:
    """Which share of a model's matrices a shape describes, of a model that is split over the devices of a group. The shape's
    num_heads, num_kv_heads, intermediate_size, experts and the like are then those of the share; its other sizes are the whole
    model's.

    rank: which share of the layers of its stage. size: how many devices have shares of these. expert_parts: as in Division.
    num_kv_heads: of the whole model, which are fewer than `size` where several devices hold the same head; 0: each device has
    heads of its own. num_full_kv_heads: the same of ModelShape.full_heads. stage: which of the stages. stage_ends: for each stage
    the number of the layer behind its last one; (): the layers are not divided."""

    rank: int
    size: int
    num_kv_heads: int = 0
    expert_parts: int = 1
    num_full_kv_heads: int = 0
    stage: int = 0
    stage_ends: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stage_ends))

    @property
    def division(self) -> Division:
        return Division(self.size * self.num_stages, self.expert_parts, self.num_stages)

    @property
    def is_first_stage(self) -> bool:
        """Whether the share has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the share has the head."""
        return self.stage == self.num_stages - 1

    def layers_of(self, stage: int) -> range:
        """Returns the layers of a stage. Only for a share whose layers are divided."""
        return range(self.stage_ends[stage - 1] if stage else 0, self.stage_ends[stage])

    @property
    def expert_part(self) -> int:
        """Which part of the experts of a layer this share has."""
        return self.rank // self.division.inner_parts

    @property
    def inner_part(self) -> int:
        """Which part this share has of each of its experts."""
        return self.rank % self.division.inner_parts


@dataclass(slots=True, frozen=True)
class ModelShape:
    """Sizes and settings of one model. Counts are numbers of elements, lengths are in tokens. What all models of a family have in
    common is in the family's description (loader/architectures)."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int  # where a rotary scaling reaches further: as far as it reaches
    rope: RopeParameters
    tie_word_embeddings: bool
    attention_bias: bool  # of queries, keys and values
    output_bias: bool  # of the attention's output
    mlp_bias: bool
    dtype: str
    layer_windows: tuple[int, ...]  # by layer: positions a query sees, its own included; 0: all
    query_scale: float  # factor of attention scores
    unrotated_layers: frozenset[int] = frozenset()  # without rotary embedding
    temperature: TemperatureShape | None = None  # of queries in layers without windows, which are unrotated; None: they have none
    unit_norms: bool = False  # rotated queries and keys have norms without weights
    chunked_windows: bool = False  # a query of such a layer sees its own chunk of so many positions, up to itself
    embedding_scale: float = 1.0  # factor of embeddings
    branch_scale: float = 1.0  # factor of what attention and the MLP add
    logit_scale: float = 1.0
    parallel_branches: bool = False  # the MLP reads what attention reads, not its sum with what attention adds
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: they are not capped
    logit_softcap: float = 0.0
    whole_width_norms: bool = False  # norms of queries and keys are over all heads at once
    has_head_norms: bool = True  # queries and keys have the norms that the family names
    num_predicting_layers: int = 0  # behind the last layer; the checkpoint may hold them
    # the first of them, or a head from other files, is loaded and drafts tokens (loader/architectures/predictor.py, eagle.py)
    predicts: bool = False
    eagle: EagleShape | None = None  # that head
    local_rope: RopeParameters | None = None  # of windowed layers, where theirs differs from `rope`
    full_heads: HeadShape | None = None  # of layers without windows, where theirs differ from num_kv_heads and head_dim
    num_reading_layers: int = 0  # the last ones, which read the KV of the last layer before them that sees as far
    reading_intermediate_size: int = 0  # of their MLPs; 0: intermediate_size
    layer_inputs: LayerInputShape | None = None  # None: a layer reads the residual alone
    experts: ExpertShape | None = None  # of a mixture of experts
    latent: LatentShape | None = None  # of latent attention; num_kv_heads is then 1, head_dim that of queries
    delta: DeltaShape | None = None  # of layers of the gated delta rule
    gated_attention: bool = False  # each head's queries have as many gates of its output behind them
    pooling: str = ""  # of a model that makes vectors: mean or cls of an encoder, lasttoken of a decoder; "": it generates text
    scoring: str = ""  # of an encoder that scores pairs of texts (a cross-encoder): SIGMOID or IDENTITY; "": it makes vectors
    type_vocab_size: int = 0  # of an encoder: kinds of segments
    first_position: int = 0  # of an encoder: the row of its table of positions that a text's first token has
    cut_sizes: tuple[int, ...] = ()  # of a model trained for it (Matryoshka): what its vectors may be cut to
    any_cut_size: bool = False  # of a model trained for it: its vectors may be cut to any size
    named_headless: bool = False  # config.json names the decoder alone (Qwen3Model), without a head
    bare_names: bool = False  # the parameters' names lack the `model.` that they have beside a head
    tensor_prefix: str = ""  # what the parameters' names begin with, where a family's checkpoints differ in it
    stored_format: str = ""  # the weight format (loader/formats) of the checkpoint's matrices; "": plain
    plain_groups: frozenset[int] = frozenset()  # tensor groups that are stored plain although the others are not
    split: SplitShape | None = None  # None: the whole model
    block_offsets: tuple[int, ...] = ()  # where large parameters begin in the files (block_offsets in layout.py); (): unknown

    @property
    def is_encoder(self) -> bool:
        """Whether the model makes vectors and keeps no KV."""
        return self.pooling not in ("", LAST_TOKEN)

    @property
    def own_layers(self) -> range:
        """The layers that a device computes: all of them, or those of its stage."""
        if (split := self.split) is None or not split.stage_ends:
            return range(self.num_layers)
        return split.layers_of(split.stage)

    @property
    def num_writing_layers(self) -> int:
        """The layers, the first ones, that do not read the keys and values of other layers."""
        return self.num_layers - self.num_reading_layers

    @property
    def num_computed_layers(self) -> int:
        """The layers that have weights, that of the predictor included."""
        return self.num_layers + self.predicts

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values of each token, that of the predictor included."""
        own = tuple(layer for layer in range(self.num_writing_layers) if self.delta is None or layer not in self.delta.layers)
        return (*own, self.num_layers) if self.predicts else own

    def heads_of(self, layer: int) -> HeadShape:
        """Returns the heads of a layer of attention."""
        if self.eagle is not None and layer == self.num_layers:
            return HeadShape(self.eagle.layer.num_kv_heads, self.eagle.layer.head_dim)
        heads = self.full_heads
        if heads is None or self.layer_windows[layer]:
            heads = HeadShape(self.num_kv_heads, self.head_dim)
        return replace(heads, reads_only=True) if self._reads(layer) else heads

    def kv_layer(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer reads: itself, or for those that read others' the last one before them
        that sees as far."""
        if not self._reads(layer):
            return layer
        windows = self.layer_windows
        return next(one for one in reversed(range(self.num_writing_layers)) if windows[one] == windows[layer])

    def _reads(self, layer: int) -> bool:
        """Returns whether a layer reads the keys and values of another one."""
        return self.num_writing_layers <= layer < self.num_layers

    def inner_size_of(self, layer: int) -> int:
        """Returns the intermediate size of a layer's MLP."""
        return self.intermediate_size if layer < self.num_writing_layers else self.widest_inner_size

    @property
    def widest_inner_size(self) -> int:
        return self.reading_intermediate_size or self.intermediate_size

    @property
    def kinds_of_heads(self) -> tuple[HeadShape, ...]:
        """The heads of layers without windows, and of those with them, once if they are the same."""
        usual = HeadShape(self.num_kv_heads, self.head_dim)
        return (usual,) if self.full_heads is None else (self.full_heads, usual)

    @property
    def widest_head_dim(self) -> int:
        return max(heads.head_dim for heads in self.kinds_of_heads)

    @property
    def widest_key(self) -> int:
        """The numbers of a token's keys, or values, in the layer where they are most."""
        return max(heads.num_kv_heads * heads.head_dim for heads in self.kinds_of_heads)

    @property
    def fewest_kv_heads(self) -> int:
        return min(heads.num_kv_heads for heads in self.kinds_of_heads)

    @property
    def rotary_head_dims(self) -> tuple[int, int]:
        """The dimensions of a head of which the rotary embedding turns all or a share: in layers without windows, and with them."""
        if self.latent is not None:
            return self.latent.rope_dim, self.latent.rope_dim
        return self.kinds_of_heads[0].head_dim, self.head_dim
