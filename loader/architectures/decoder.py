"""Describes decoders that generate text: an embedding, layers of attention and MLP with norms around them, and a head. The MLP of a
layer may be a mixture of experts (experts.py). Decoders whose folder says how to pool token vectors (loader/configs/pooling.py) are
embedding models: they compute vectors, and have no head.

A family is one `Decoder`, whose fields describe how it differs from other families. loader/architectures reads config.json and
lists tensors by these fields; engine/models/decoder.py runs the model by them. Defaults are those of transformers' configuration
classes, which apply if a checkpoint leaves a key out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache

from loader.architectures import predictor
from loader.architectures.architecture import COLUMNS, FIRST_ALONE, MAX_LAYERS, ROWS, WHOLE, TensorGroup, one_tensor, stored_dtype
from loader.architectures.cut_sizes import cut_sizes
from loader.architectures.delta import Deltas
from loader.architectures.experts import Experts
from loader.architectures.factors import Factors, factor
from loader.architectures.full_heads import FullHeads
from loader.architectures.latent import Latents
from loader.architectures.windows import CHUNKED, Windows
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import OPTIONAL_STACKS, HeadShape, LayerInputShape, ModelShape, TemperatureShape
from loader.shapes.rope_config import RopeRules, parse_rope, rotated_layers

SILU, GELU_TANH = "silu", "gelu_pytorch_tanh"
GELU_NEW = "gelu_new"  # the same function, in an MLP without a gate
_BODY = "model."  # prefix of the names of a decoder's tensors in checkpoints with a head
_NO_WINDOWS, _PLAIN_ROPE, _NO_FACTORS = Windows(), RopeRules(), Factors()


@dataclass(slots=True, frozen=True)
class TensorNames:
    """The names of a decoder's tensors in the checkpoint, without `.weight` and `.bias`. The names of a layer's tensors follow
    `layer`, in which {} stands for the layer's index. The name of a norm that the family does not have is "".

    queries_keys_values, gate_up: a name for each matrix, or a single name if the checkpoint holds these matrices as one tensor. In
    an MLP without a gate, gate_up is its first matrix."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"  # norm of attention's input
    queries_keys_values: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = ""
    key_norm: str = ""
    attention_output: str = "self_attn.o_proj"
    sinks: str = ""  # the complete name; "": attention has no sinks
    attended_norm: str = ""  # norm of attention's output
    mlp_norm: str = "post_attention_layernorm"  # norm of the MLP's input; "": the MLP reads the same input as attention
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_output_norm: str = ""  # norm of the MLP's output
    layer_scalar: str = ""  # the complete name of a factor of the residual after the layer; "": there is none
    # tensors of additional layer inputs (engine/layers/layer_inputs.py): those for all layers, then those of a layer
    input_embedding: str = "model.embed_tokens_per_layer"
    input_projection: str = "model.per_layer_model_projection"
    input_norm: str = "model.per_layer_projection_norm"
    input_gate: str = "per_layer_input_gate"
    input_output: str = "per_layer_projection"
    input_output_norm: str = "post_per_layer_input_norm"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    not_read: str = ""  # prefix of the names of tensors that predict further tokens; "": there are none

    def of_heads(self, heads: HeadShape) -> tuple[str, ...]:
        """Returns the names of the matrices that make queries, keys and values in a layer. heads: the layer's heads. The names of
        keys or values are left out if the layer does not make them."""
        return self.queries_keys_values[: heads.num_projections]


@dataclass(slots=True, frozen=True)
class Decoder:
    """The description of one family of decoders: the names of its tensors, the keys that its config.json may contain and their
    defaults, and how its layers differ from Llama's. Most defaults of the fields describe Llama."""

    name: str
    model_type: str
    names: TensorNames = TensorNames()
    windows: Windows = _NO_WINDOWS
    rope: RopeRules = _PLAIN_ROPE
    dtype: str = "float32"
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    norm_eps_key: str = "rms_norm_eps"
    rms_norm_eps: float = 1e-6  # default of the key norm_eps_key
    tie_word_embeddings: bool = False
    attention_bias: bool | None = None  # whether queries, keys and values have biases; None: the key attention_bias_key says
    attention_bias_key: str = "attention_bias"
    attention_bias_default: bool = False  # if that key is absent
    output_bias: bool | None = None  # whether attention's output has a bias; None: as attention_bias
    output_bias_key: str = ""  # the key that says it instead, with default false; "": there is none
    has_mlp_bias_key: bool = False  # whether the key mlp_bias says it, else the field mlp_bias
    mlp_bias: bool = False
    head_bias: bool = False
    query_scalar: float | None = None  # default of the key query_pre_attn_scalar; None: no such key, it is head_dim
    attention_softcap: float | None = None  # default of the key attn_logit_softcapping, 0: no cap; None: the key is not read
    logit_softcap: float | None = None  # default of the key final_logit_softcapping, 0: no cap; None: the key is not read
    activation: str = SILU  # the only one supported, as config.json calls it
    activation_key: str = "hidden_act"
    factors: Factors = _NO_FACTORS
    norms_around_one: bool = False  # norms multiply by 1 + weight
    has_layer_norms: bool = False  # norms subtract the mean, else they are RMS norms
    norm_bias: bool = False  # whether these norms have biases
    parallel_branches: bool = False  # the MLP reads the same input as attention
    fixed: tuple[tuple[str, bool | float], ...] = ()  # keys of config.json, and the only value that is supported
    whole_width_norms: bool = False  # norms of queries and keys are over all heads at once, else over each head
    head_norms_key: str = ""  # the key that says whether queries and keys have the norms of `names`; "": they have
    unit_norms_key: str = ""  # the key that says whether rotated queries and keys have norms without weights; "": they have none
    has_temperature: bool = False  # whether the key attn_temperature_tuning may scale the queries of layers without windows
    intermediate_key: str = "intermediate_size"  # key of the intermediate size of layers with one MLP
    intermediate_size: int | None = None  # default of that key; None: config.json must have it
    predicting_layers: int | None = None  # default of the key num_nextn_predict_layers; None: the key is not read
    scales_embeddings: bool = False  # embeddings are multiplied by the square root of the width
    experts: Experts | None = None  # None: each layer has one MLP
    latents: Latents | None = None  # latent attention; None: keys and values have heads of their own
    deltas: Deltas | None = None  # layers of the gated delta rule; None: all layers have attention
    gated_attention: bool = False  # the matrix of queries also makes gates of attention's output, after each head's queries
    full_heads: FullHeads | None = None  # heads of layers without windows; None: all layers have the same heads
    value_norms: bool = False  # values have norms without weights, head by head
    query_scale: float | None = None  # factor of attention scores, whatever config.json says; None: it follows from config.json
    may_read_kv: bool = False  # whether the key num_kv_shared_layers may have the last layers read the KV of earlier ones
    layer_input_width: int | None = None  # default of the key hidden_size_per_layer_input; None: the key is not read
    # values of the key use_bidirectional_attention, besides false, for which text stays causal
    causal_modes: tuple[str, ...] = ()

    def parse(self, fields: Fields) -> ModelShape:
        """Returns the shape of the decoder that a config.json describes. Raises UnsupportedModel for a variant that is not served,
        and CheckpointError, which names a key with a wrong value."""
        self._refuse_variants(fields)
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise fields.fail("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
        latent = None if self.latents is None else self.latents.parse(fields)
        if latent is None:
            turned = head_dim = fields.integer("head_dim", self.head_dim or hidden_size // num_heads)
            if head_dim % 2:
                raise fields.fail("head_dim", f"{head_dim} is odd; rotary embedding needs pairs")
        else:
            num_kv_heads, head_dim, turned = 1, latent.plain_dim + latent.rope_dim, latent.rope_dim
        num_layers = fields.integer("num_hidden_layers", at_most=MAX_LAYERS)
        max_position_embeddings = fields.integer("max_position_embeddings")
        sliding = [False] * num_layers if self.deltas is not None else self.windows.sliding(fields, self.name, num_layers)
        usual, full_heads = HeadShape(num_kv_heads, head_dim), None
        if self.full_heads is not None:
            full_heads = self.full_heads.parse(fields, sliding, usual, num_heads)
        of_full = turned if full_heads is None else full_heads.head_dim
        rope, local_rope = parse_rope(fields, self.name, self.rope, turned, of_full, max_position_embeddings)
        query_scale = self._query_scalar(fields, head_dim) ** -0.5 if self.query_scale is None else self.query_scale
        if self.factors.scores:
            query_scale = factor(fields, self.factors.scores)
        if self.latents is not None:
            query_scale *= rope.score_factor
            rope = replace(rope, interleaved=self.latents.interleaved(fields))
        max_position_embeddings = max(max_position_embeddings, rope.extended_to)
        # layers with rotary frequencies of their own differ from the others even if their windows are the same
        keeps_all = self.rope.is_local or self.has_temperature
        windows = self.windows.by_layer(fields, sliding, max_position_embeddings, keeps_all)
        attention_bias = self.attention_bias
        if attention_bias is None:
            attention_bias = fields.boolean(self.attention_bias_key, self.attention_bias_default)
        sizes, any_size = cut_sizes(fields, hidden_size)
        intermediate_size = fields.integer(self.intermediate_key, self.intermediate_size)
        num_reading = self._reading_layers(fields, sliding) if self.may_read_kv else 0
        is_double = num_reading > 0 and fields.boolean("use_double_wide_mlp")
        return ModelShape(
            architecture=self.name,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size"),
            rms_norm_eps=fields.positive(self.norm_eps_key, self.rms_norm_eps),
            max_position_embeddings=max_position_embeddings,
            rope=rope,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", self.tie_word_embeddings),
            attention_bias=attention_bias,
            output_bias=self._output_bias(fields, attention_bias),
            mlp_bias=fields.boolean("mlp_bias") if self.has_mlp_bias_key else self.mlp_bias,
            dtype=stored_dtype(fields, self.dtype),
            layer_windows=windows,
            query_scale=query_scale,
            embedding_scale=factor(fields, self.factors.embeddings),
            branch_scale=factor(fields, self.factors.branches),
            logit_scale=self.factors.logit_scale(fields),
            parallel_branches=self.parallel_branches,
            unrotated_layers=self._unrotated(fields, sliding),
            chunked_windows=self.windows.kind == CHUNKED,
            unit_norms=bool(self.unit_norms_key) and fields.boolean(self.unit_norms_key, True),
            temperature=_temperature(fields) if self.has_temperature else None,
            attention_softcap=_softcap(fields, "attn_logit_softcapping", self.attention_softcap),
            logit_softcap=_softcap(fields, "final_logit_softcapping", self.logit_softcap),
            whole_width_norms=self.whole_width_norms,
            has_head_norms=fields.boolean(self.head_norms_key) if self.head_norms_key else True,
            num_predicting_layers=self._predicting_layers(fields),
            local_rope=local_rope,
            experts=None if self.experts is None else self.experts.parse(fields, num_layers),
            latent=latent,
            delta=None if self.deltas is None else self.deltas.parse(fields, num_layers),
            gated_attention=self.gated_attention,
            cut_sizes=sizes,
            any_cut_size=any_size,
            full_heads=full_heads,
            num_reading_layers=num_reading,
            reading_intermediate_size=2 * intermediate_size if is_double else 0,
            layer_inputs=self._layer_inputs(fields),
        )

    def tensor_groups(self, shape: ModelShape) -> list[TensorGroup]:
        """Returns the tensors that a decoder's checkpoint must hold, in the order in which they lie in the model's memory. A group
        has the tensors that one matrix multiplication reads together."""
        names, hidden = self.decoder_of(shape).names, shape.hidden_size
        embedding = one_tensor(f"{names.embedding}.weight", shape.vocab_size, hidden, divided=ROWS)
        groups = [embedding._replace(may_be_packed=True), *self._input_groups(shape)]
        of_delta = self._groups_before_mlp_of_delta(shape)
        sparse, last = self._expert_groups(shape), self._groups_at_the_end(shape)
        kinds: dict[tuple[HeadShape, int], tuple[list[TensorGroup], list[TensorGroup], list[TensorGroup]]] = {}
        of_predictor: list[TensorGroup] = []
        for layer in range(shape.num_layers + (shape.predicts and shape.eagle is None)):
            kind = shape.heads_of(layer), shape.inner_size_of(layer)
            if kind not in kinds:  # the list for each kind is made once, because there may be many layers
                kinds[kind] = (*self._groups_around_mlp(shape, kind[0]), self._mlp_groups(shape, kind[1]))
            before, behind, dense = kinds[kind]
            prefix, first = names.layer.format(layer), of_delta if has_delta_rule(shape, layer) else before
            inner = [*dense, *sparse] if has_experts_beside(shape) else sparse if has_experts(shape, layer) else dense
            own = [*first, *inner, *behind, *last]
            if layer == shape.num_layers:
                of_predictor = [group.in_layer(layer, prefix) for group in predictor.predictor_groups(shape, own)]
            else:
                groups += [group.in_layer(layer, prefix) for group in own]
        groups += self._norms(hidden, names.final_norm)
        if shape.pooling:  # no logits are computed
            return groups
        if not shape.tie_word_embeddings:
            head = one_tensor(f"{names.head}.weight", shape.vocab_size, hidden, divided=ROWS)
            groups.append(head._replace(may_be_packed=True))
        if self.head_bias:
            groups.append(one_tensor(f"{names.head}.bias", shape.vocab_size, divided=ROWS))
        return groups + of_predictor

    def ignores(self, shape: ModelShape, name: str) -> bool:
        """Returns whether a checkpoint may contain the tensor `name` although it is not read. Such tensors are RoPE frequencies,
        the head of an embedding model or of a model whose embedding serves as its head, multi-token-prediction layers after the
        last layer, matrices of keys and values that no layer uses, and tensors that the family names as not read."""
        names = self.decoder_of(shape).names
        behind = range(shape.num_layers, shape.num_layers + shape.num_predicting_layers)
        if any(name.startswith(names.layer.format(layer)) for layer in behind):
            return True
        if names.not_read and name.startswith(names.not_read):
            return True
        if shape.pooling and name in (f"{names.head}.weight", f"{names.head}.bias"):
            return True
        if shape.num_reading_layers and self._is_of_unmade_kv(shape, name):
            return True
        return name.endswith("rotary_emb.inv_freq") or (shape.tie_word_embeddings and name == f"{names.head}.weight")

    def as_stored(self, shape: ModelShape, names: Collection[str]) -> ModelShape:
        """Returns the shape adapted to a checkpoint whose tensors have these names. The names tell whether the matrices of a
        layer's experts are stored as one tensor or as one for each expert, and whether an embedding model was saved without a head,
        so that its tensors' names lack the prefix "model."."""
        bare = f"{self.names.embedding.removeprefix(_BODY)}.weight"
        if shape.pooling and bare in names and f"{self.names.embedding}.weight" not in names:
            shape = replace(shape, bare_names=True)
        if self.experts is None or shape.experts is None or shape.experts.stack not in OPTIONAL_STACKS:
            return shape
        return replace(shape, experts=self.experts.as_stored(shape.experts, names))

    def predicting(self, shape: ModelShape, names: Collection[str] | None) -> ModelShape | None:
        """Returns the shape with the model's predictor, the layer that predicts one token further
        (loader/architectures/predictor.py), if the checkpoint holds one that can draft tokens; otherwise None. names: names of the
        checkpoint's tensors; None: they are not known, and config.json decides."""
        plain = not shape.num_predicting_layers or shape.pooling or shape.delta is not None or any(shape.layer_windows)
        if plain or not predictor.holds_predictor(self.decoder_of(shape).names.layer.format(shape.num_layers), names):
            return None
        return replace(shape, predicts=True)

    def decoder_of(self, shape: ModelShape) -> Decoder:
        """Returns this description with the names that the checkpoint gives the tensors: without the prefix "model." if the decoder
        was saved without a head (shape.bare_names)."""
        return replace(self, names=_bare(self.names)) if shape.bare_names else self

    def _is_of_unmade_kv(self, shape: ModelShape, name: str) -> bool:
        """Returns whether the tensor `name` belongs to a matrix or norm of keys or values in a layer that reads the KV of an
        earlier layer. Such a tensor is not needed, because the layer computes no keys and values."""
        names, parts = self.decoder_of(shape).names, (*self.names.queries_keys_values[1:], self.names.key_norm)
        reading = range(shape.num_writing_layers, shape.num_layers)
        return name.startswith(tuple(f"{names.layer.format(layer)}{part}." for layer in reading for part in parts if part))

    def _groups_around_mlp(self, shape: ModelShape, heads: HeadShape) -> tuple[list[TensorGroup], list[TensorGroup]]:
        """Returns (the tensor groups that a layer with attention has before those of its MLP, the groups that it has after them).
        heads: the layer's heads. The tensors' names lack the layer's prefix."""
        names, hidden = self.names, shape.hidden_size
        if self.latents is not None and shape.latent is not None:
            attention = self.latents.tensor_groups(shape.latent, shape.num_heads, hidden, shape.attention_bias)
            return [*self._norms(hidden, names.attention_norm), *attention, *self._norms(hidden, names.mlp_norm)], []
        query, key = shape.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        made = (2 * query if self.gated_attention else query, key, key)[: heads.num_projections]
        query_norm, key_norm = (query, key) if self.whole_width_norms else (heads.head_dim, heads.head_dim)
        before = [
            *self._norms(hidden, names.attention_norm),
            *_projections(names.of_heads(heads), made, hidden, shape.attention_bias, ROWS, heads.head_dim),
            *(self._head_norms(query_norm, names.query_norm, heads) if shape.has_head_norms else []),
            *(self._head_norms(key_norm, names.key_norm, heads) if shape.has_head_norms and not heads.reads_only else []),
            *_projections((names.attention_output,), (hidden,), query, shape.output_bias, COLUMNS, heads.head_dim),
            *_sinks(names.sinks, shape.num_heads),
            *self._norms(hidden, names.attended_norm, names.mlp_norm),
        ]
        return before, self._norms(hidden, names.mlp_output_norm)

    def _head_norms(self, width: int, name: str, heads: HeadShape) -> list[TensorGroup]:
        """Returns the tensor group of a norm of queries or keys, as a list; [] if the family has no such norm. width: number of the
        norm's weights. name: the norm's name; "": there is none. A norm over all heads at once is divided among devices in the same
        way as the heads."""
        divided = ROWS if self.whole_width_norms else ""
        return [group._replace(divided=divided, unit=heads.head_dim) for group in _weights(width, name)]

    def _norms(self, width: int, *names: str) -> list[TensorGroup]:
        """Returns the tensor groups of norms. names: the norms' names; a name is "" where the family has no such norm, which then
        gets no group. width: number of weights of each norm."""
        if not self.norm_bias:
            return _weights(width, *names)
        return [one_tensor(f"{name}.{part}", width) for name in names if name for part in ("weight", "bias")]

    def _groups_before_mlp_of_delta(self, shape: ModelShape) -> list[TensorGroup]:
        """Returns the tensor groups that a layer of the gated delta rule has before the groups of its MLP; [] in a family without
        such layers. The tensors' names lack the layer's prefix."""
        if self.deltas is None or shape.delta is None:
            return []
        names, hidden = self.names, shape.hidden_size
        own = self.deltas.tensor_groups(shape.delta, hidden)
        return [*self._norms(hidden, names.attention_norm), *own, *self._norms(hidden, names.attended_norm, names.mlp_norm)]

    def _input_groups(self, shape: ModelShape) -> list[TensorGroup]:
        """Returns the groups of the tensors that compute the per-layer inputs of all layers (engine/layers/layer_inputs.py): an
        embedding table, a projection and a norm. [] if the model has no per-layer inputs."""
        names, inputs = self.names, shape.layer_inputs
        if inputs is None:
            return []
        width = shape.num_layers * inputs.width
        return [
            one_tensor(f"{names.input_embedding}.weight", inputs.vocab_size, width)._replace(by_layer=COLUMNS),
            one_tensor(f"{names.input_projection}.weight", width, shape.hidden_size)._replace(by_layer=ROWS),
            *(group._replace(by_layer=WHOLE) for group in _weights(inputs.width, names.input_norm)),
        ]

    def _groups_at_the_end(self, shape: ModelShape) -> list[TensorGroup]:
        """Returns the last tensor groups of a layer: those that add its per-layer input (engine/layers/layer_inputs.py), and the
        factor by which the residual is multiplied after the layer. [] in a family without either. The tensors' names lack the
        layer's prefix."""
        names, groups = self.names, []
        if (inputs := shape.layer_inputs) is not None:
            groups += _projections((names.input_gate,), (inputs.width,), shape.hidden_size, False)
            groups += _projections((names.input_output,), (shape.hidden_size,), inputs.width, False)
            groups += _weights(shape.hidden_size, names.input_output_norm)
        return [*groups, one_tensor(names.layer_scalar, 1)] if names.layer_scalar else groups

    def _mlp_groups(self, shape: ModelShape, inner: int) -> list[TensorGroup]:
        names, hidden = self.names, shape.hidden_size
        made = (inner,) if self.activation == GELU_NEW else (inner, inner)
        return [
            *_projections(names.gate_up, made, hidden, shape.mlp_bias, ROWS),
            *_projections((names.down,), (hidden,), inner, shape.mlp_bias, COLUMNS),
        ]

    def _expert_groups(self, shape: ModelShape) -> list[TensorGroup]:
        if self.experts is None or shape.experts is None:
            return []
        return self.experts.tensor_groups(shape.experts, shape.hidden_size)

    def _refuse_variants(self, fields: Fields) -> None:
        activation = fields.values.get(self.activation_key) or self.activation
        if activation != self.activation:
            raise fields.unsupported(self.activation_key, f"{activation!r} is not supported; supported: {self.activation}")
        if self.gated_attention and not fields.boolean("attn_output_gate", True):
            raise fields.unsupported("attn_output_gate", "false is not supported; supported: true")
        if not fields.boolean("is_causal", True):
            raise fields.unsupported("is_causal", "only causal attention is supported")
        for key, value in self.fixed:
            if fields.has(key) and fields.values[key] != value:
                raise fields.unsupported(key, f"{self.name} is supported with {str(value).lower()} only")
        mode = fields.values.get("use_bidirectional_attention")
        if mode not in self.causal_modes and (isinstance(mode, str) or fields.boolean("use_bidirectional_attention")):
            raise fields.unsupported("use_bidirectional_attention", "only causal attention is supported")

    def _reading_layers(self, fields: Fields, sliding: list[bool]) -> int:
        """Returns how many layers at the end of the decoder read the KV of earlier layers instead of computing their own. sliding:
        for each layer, whether it has a sliding window. Raises CheckpointError if such a layer has no earlier layer with the same
        kind of attention (sliding-window or full) that computes KV."""
        key, num_layers = "num_kv_shared_layers", len(sliding)
        num = fields.integer(key, 0, at_least=0, at_most=MAX_LAYERS)
        if num and not set(sliding[num_layers - num :]) <= set(sliding[: max(0, num_layers - num)]):
            raise fields.fail(key, f"{num} of {num_layers} layers leave no layer of the same kind whose keys and values they read")
        return num

    def _layer_inputs(self, fields: Fields) -> LayerInputShape | None:
        if self.layer_input_width is None:
            return None
        width = fields.integer("hidden_size_per_layer_input", self.layer_input_width, at_least=0)
        if not width:
            return None
        key, vocab_size = "vocab_size_per_layer_input", fields.integer("vocab_size")
        inputs = LayerInputShape(fields.integer(key, 262_144), width)
        if inputs.vocab_size < vocab_size:
            raise fields.unsupported(key, f"{inputs.vocab_size} is less than vocab_size {vocab_size}")
        return inputs

    def _unrotated(self, fields: Fields, sliding: list[bool]) -> frozenset[int]:
        """Returns the indices of the layers without rotary embedding (RoPE). sliding: for each layer, whether it has a sliding
        window."""
        rotated = [True] * len(sliding)
        if self.rope.only_windows:
            rotated = sliding
        elif self.rope.only_listed:
            rotated = rotated_layers(fields, len(sliding))
        return frozenset(layer for layer, is_rotated in enumerate(rotated) if not is_rotated)

    def _output_bias(self, fields: Fields, attention_bias: bool) -> bool:
        if self.output_bias_key:
            return fields.boolean(self.output_bias_key)
        return attention_bias if self.output_bias is None else self.output_bias

    def _predicting_layers(self, fields: Fields) -> int:
        if self.predicting_layers is None:
            return 0
        return fields.integer("num_nextn_predict_layers", self.predicting_layers, at_least=0, at_most=MAX_LAYERS)

    def _query_scalar(self, fields: Fields, head_dim: int) -> float:
        return head_dim if self.query_scalar is None else fields.positive("query_pre_attn_scalar", self.query_scalar)


@cache
def _bare(names: TensorNames) -> TensorNames:
    embedding, layer, final_norm = (name.removeprefix(_BODY) for name in (names.embedding, names.layer, names.final_norm))
    return replace(names, embedding=embedding, layer=layer, final_norm=final_norm)


def has_experts(shape: ModelShape, layer: int) -> bool:
    """Returns whether the layer has a mixture of experts in place of an MLP."""
    return shape.experts is not None and not shape.experts.beside and layer not in shape.experts.dense_layers


def has_experts_beside(shape: ModelShape) -> bool:
    """Returns whether each layer has experts beside its MLP."""
    return shape.experts is not None and shape.experts.beside


def has_delta_rule(shape: ModelShape, layer: int) -> bool:
    """Returns whether the layer has the gated delta rule in place of attention."""
    return shape.delta is not None and layer in shape.delta.layers


def _weights(width: int, *names: str) -> list[TensorGroup]:
    return [one_tensor(f"{name}.weight", width) for name in names if name]


def _sinks(name: str, num_heads: int) -> list[TensorGroup]:
    # kernels add them to float32 sums
    return [TensorGroup(((name, (num_heads,)),), held_as="float32", divided=ROWS)] if name else []


def _projections(
    names: tuple[str, ...], outputs: tuple[int, ...], inputs: int, has_bias: bool, divided: str = "", unit: int = 1
) -> list[TensorGroup]:
    """Returns one TensorGroup with the matrices [outputs, inputs] that one matrix multiplication reads and, if has_bias, a second
    one with their biases. names: the matrices' names; a single name if one tensor holds all of them. outputs: number of outputs of
    each matrix. divided: how devices share the matrices (ROWS, COLUMNS or ""). unit: number of adjacent rows or columns that are
    never divided (head_dim, for example, so that each head is whole)."""
    widths = outputs if len(names) > 1 else (sum(outputs),)
    pairs, joined = list(zip(names, widths, strict=True)), (outputs,) if widths != outputs else ()
    matrices = tuple((f"{name}.weight", (width, inputs)) for name, width in pairs)
    weights = TensorGroup(matrices, may_be_quantized=True, may_be_reordered=True, divided=divided, unit=unit, joined=joined)
    of_biases = FIRST_ALONE if divided == COLUMNS else divided
    biases = TensorGroup(tuple((f"{name}.bias", (width,)) for name, width in pairs), divided=of_biases, unit=unit, joined=joined)
    return [weights, biases] if has_bias else [weights]


def _temperature(fields: Fields) -> TemperatureShape | None:
    """Returns the settings in config.json by which queries are scaled depending on their position; None: they are not scaled.
    Raises CheckpointError for a wrong value."""
    key = "attn_temperature_tuning"
    asked = fields.values.get(key, True)
    if not isinstance(asked, bool | int):
        raise fields.fail(key, f"{asked!r} is neither true nor false")
    return TemperatureShape(fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)) if asked else None


def _softcap(fields: Fields, key: str, default: float | None) -> float:
    if default is None or fields.is_null(key) or (default == 0 and not fields.has(key)):
        return 0.0
    return fields.positive(key, default)
