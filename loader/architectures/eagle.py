"""Describes EAGLE-3 heads (https://arxiv.org/abs/2503.01840), which draft tokens for another model, as SpecForge and `speculators`
save them.

A draft head is one layer. It reads hidden states of some of the model's layers, by default three, and the embedding of the next
token. Its output vocabulary may have only the most frequent tokens of the model's vocabulary. When a head is loaded with its model,
its tensors are treated as tensors of the model whose names begin with PREFIX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loader.architectures import llama, qwen3
from loader.architectures.architecture import TensorGroup, one_tensor
from loader.architectures.decoder import Decoder
from loader.files.safetensors import TensorRef
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import EagleShape, ModelShape

PREFIX = "drafter."
STATES, ONE_NORM, NORMS, NORM, HEAD, OFFSETS, EMBEDDING = "fc", "input_norm", "fc_norm.{}", "norm", "lm_head", "d2t", "embed_tokens"
TOKEN_NORM, STATE_NORM, MLP_NORM = "input_layernorm", "hidden_norm", "post_attention_layernorm"  # of the layer
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_FAMILIES = {"llama": llama.ARCHITECTURE, "qwen3": qwen3.ARCHITECTURE}  # of the layer, by its model_type
_LAYER_KEY, _EAGLE_KEY, _READS_KEY = "transformer_layer_config", "eagle_config", "eagle_aux_hidden_state_layer_ids"
_LAYER_NAMES = ("midlayer.", "layers.0.")
_NOT_READ = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
MOST_READ = 8  # most layers whose states are read; published heads read three


@dataclass(slots=True, frozen=True)
class EagleHead:
    """A head that drafts tokens for another model (EAGLE-3), as its own files describe it.

    tensors: the tensors that the files' headers list. read_layers: indices of the model's layers whose inputs the head reads; ():
    config.json names none, and `fitted` chooses three. target_size: the width (hidden size) of the model; 0: the model is as wide
    as the head. verifier: the name of the model that the head was made for; "": it is not given."""

    shape: EagleShape
    tensors: tuple[TensorRef, ...]
    read_layers: tuple[int, ...]
    target_size: int
    verifier: str

    def fitted(self, shape: ModelShape, file: str) -> EagleShape:
        """Returns the shape of the head (EagleShape) for use with a given model: the layers that it reads and the model's width are
        filled in. shape: the model's shape. file: path of the head's config.json, for errors. Raises CheckpointError, which names
        the key, if head and model do not belong together."""
        fields = Fields({}, file)
        num_layers, own = shape.num_layers, self.shape
        if own.layer.vocab_size != shape.vocab_size:
            raise fields.fail("vocab_size", f"{own.layer.vocab_size} is not the model's {shape.vocab_size}")
        if (self.target_size or own.layer.hidden_size) != shape.hidden_size:
            key = "target_hidden_size" if self.target_size else "hidden_size"
            raise fields.fail(key, f"{self.target_size or own.layer.hidden_size} is not the model's {shape.hidden_size}")
        read = self.read_layers
        if not read:
            if num_layers < 6:
                raise fields.fail(_READS_KEY, f"missing, and a model of {num_layers} layers has no default")
            read = (2, num_layers // 2, num_layers - 3)
        if read[-1] > num_layers:
            raise fields.fail(_READS_KEY, f"{list(read)} reaches beyond the model's {num_layers} layers")
        has_embedding = own.layer.hidden_size != shape.hidden_size
        return replace(own, read_layers=read, target_size=shape.hidden_size, has_embedding=has_embedding)


def is_head(fields: Fields) -> bool:
    """Returns whether a config.json describes a head that drafts tokens (EAGLE-3), not a model."""
    named = fields.values.get("architectures")
    names = named if isinstance(named, list) else []
    return any(name in _ARCHITECTURES for name in names) or fields.values.get("speculators_model_type") == "eagle3"


def parse_head(fields: Fields, tensors: Sequence[TensorRef] | None) -> EagleHead:
    """Returns the draft head that a config.json describes. tensors: the tensors that the headers of the head's files list; None:
    the files are not there yet. Raises UnsupportedModel for a head that is not served, and CheckpointError for a wrong value; both
    name the key."""
    names = {OFFSETS} if tensors is None else {tensor.name for tensor in tensors}
    inner = fields.mapping(_LAYER_KEY)
    layer_fields = fields if inner is None else inner
    family = family_of(layer_fields)
    if (num := layer_fields.integer("num_hidden_layers", 1)) != 1:
        raise layer_fields.unsupported("num_hidden_layers", f"{num} is not supported; heads have one layer")
    layer = family.parse(layer_fields)
    if any(layer.layer_windows):
        raise layer_fields.unsupported("sliding_window", "heads with windows are not supported")
    eagle = fields.mapping(_EAGLE_KEY) or Fields({}, fields.file, f"{_EAGLE_KEY}.")
    if not eagle.boolean("use_aux_hidden_state", True):
        raise eagle.unsupported("use_aux_hidden_state", "false is not supported; supported: true (EAGLE-3)")
    first = next((one for one in _LAYER_NAMES if any(one + "self_attn.q_proj.weight" in name for name in names)), _LAYER_NAMES[0])
    outer = "model." if any(name.startswith(f"model.{first}") for name in names) else ""
    shape = EagleShape(
        layer=layer,
        family=family.model_type,
        outer_prefix=outer,
        layer_prefix=first,
        draft_vocab_size=fields.integer("draft_vocab_size", layer.vocab_size, at_most=layer.vocab_size),
        has_offsets=OFFSETS in names,
        norm_before_residual=fields.boolean("norm_before_residual"),
        one_norm=fields.boolean("norm_before_fc"),
        norms=fields.boolean("fc_norm"),
        norm_output=fields.boolean("norm_output"),
    )
    if shape.draft_vocab_size < layer.vocab_size and not shape.has_offsets:
        raise fields.fail("draft_vocab_size", f"{shape.draft_vocab_size} tokens, and no tensor {OFFSETS} says which")
    target_size = fields.integer("target_hidden_size") if fields.has("target_hidden_size") else 0
    return EagleHead(shape, tuple(tensors or ()), _read_layers(fields, eagle), target_size, _verifier(fields))


def family_of(layer_fields: Fields) -> Decoder:
    """Returns the family of decoders to which a draft head's layer belongs. layer_fields: the object of config.json that describes
    the layer. Raises UnsupportedModel for another family."""
    model_type = layer_fields.values.get("model_type", "llama")
    if model_type not in _FAMILIES:
        raise layer_fields.unsupported("model_type", f"{model_type!r} is not supported; supported: {', '.join(_FAMILIES)}")
    return _FAMILIES[model_type]


def layer_family(eagle: EagleShape) -> Decoder:
    """Returns the description of the family of decoders to which a draft head's layer belongs, with the names that the layer's
    tensors have among the model's tensors."""
    family = _FAMILIES[eagle.family]
    return replace(family, names=replace(family.names, layer=PREFIX + eagle.outer_prefix + eagle.layer_prefix))


def eagle_groups(eagle: EagleShape, number: int) -> list[TensorGroup]:
    """Returns the tensor groups of a draft head, with the head's final norm last. None of them may be quantised. number: the index
    that the head's layer gets among the model's layers."""
    shape, family = eagle.layer, _FAMILIES[eagle.family]
    hidden, num_read, names = shape.hidden_size, len(eagle.read_layers), family.names
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    groups = [one_tensor(f"{STATES}.weight", hidden, num_read * eagle.target_size)]
    if eagle.one_norm:
        groups.append(one_tensor(f"{ONE_NORM}.weight", num_read * eagle.target_size))
    if eagle.norms:
        groups += [one_tensor(f"{NORMS.format(one)}.weight", eagle.target_size) for one in range(num_read)]
    widths = (query, key, key)
    layer = [
        one_tensor(f"{TOKEN_NORM}.weight", hidden),
        one_tensor(f"{STATE_NORM}.weight", hidden),
        _joined(names.queries_keys_values, widths, 2 * hidden),
        *([_biases(names.queries_keys_values, widths)] if shape.attention_bias else []),
        *(one_tensor(f"{name}.weight", shape.head_dim) for name in (names.query_norm, names.key_norm) if name),
        _joined((names.attention_output,), (hidden,), query),
        *([_biases((names.attention_output,), (hidden,))] if shape.output_bias else []),
        one_tensor(f"{MLP_NORM}.weight", hidden),
        _joined(names.gate_up, (shape.intermediate_size,) * 2, hidden),
        *([_biases(names.gate_up, (shape.intermediate_size,) * 2)] if shape.mlp_bias else []),
        _joined((names.down,), (hidden,), shape.intermediate_size),
        *([_biases((names.down,), (hidden,))] if shape.mlp_bias else []),
    ]
    if eagle.has_embedding:
        groups.append(one_tensor(f"{EMBEDDING}.weight", shape.vocab_size, hidden))
    groups += [group.in_layer(number, eagle.layer_prefix) for group in layer]
    last = [one_tensor(f"{HEAD}.weight", eagle.draft_vocab_size, hidden)]
    if eagle.has_offsets:
        last.append(TensorGroup(((OFFSETS, (eagle.draft_vocab_size,)),), held_as="int64"))
    last.append(one_tensor(f"{NORM}.weight", hidden))
    # d2t and lm_head do not have the prefix of the body
    outside = (f"{HEAD}.weight", OFFSETS)
    return [_placed(group, number, eagle.outer_prefix, outside) for group in (*groups, *last)]


def ignores(name: str) -> bool:
    """Returns whether a draft head's files may hold the tensor `name` although it is not read, for example a stored embedding if
    the head uses the model's embedding."""
    bare = name.removeprefix(PREFIX).removeprefix("model.")
    return bare in _NOT_READ or bare == f"{EMBEDDING}.weight" or bare.endswith("rotary_emb.inv_freq")


def _placed(group: TensorGroup, number: int, outer: str, outside: tuple[str, ...]) -> TensorGroup:
    renamed = tuple((PREFIX + ("" if name in outside else outer) + name, dims) for name, dims in group.tensors)
    return group._replace(tensors=renamed, layer=number)


def _joined(names: tuple[str, ...], outputs: tuple[int, ...], inputs: int) -> TensorGroup:
    pairs = zip(names, outputs, strict=True)
    return TensorGroup(tuple((f"{name}.weight", (width, inputs)) for name, width in pairs))


def _biases(names: tuple[str, ...], outputs: tuple[int, ...]) -> TensorGroup:
    return TensorGroup(tuple((f"{name}.bias", (width,)) for name, width in zip(names, outputs, strict=True)))


def _read_layers(fields: Fields, eagle: Fields) -> tuple[int, ...]:
    """Returns the indices of the model's layers whose inputs a draft head reads; (): config.json does not say. In config.json a
    list within `eagle_config` names layers whose output is read, so 1 is added to each index; a list outside `eagle_config` names
    layers whose input is read. Raises CheckpointError for a list that is not valid."""
    for own, further in ((eagle, 1), (fields, 0)):
        listed = own.values.get(_READS_KEY)
        if listed is None:
            continue
        good = isinstance(listed, list) and all(type(one) is int and one + further >= 0 for one in listed)
        if not good or not listed or len(listed) > MOST_READ or sorted(set(listed)) != listed:
            raise own.fail(_READS_KEY, f"{listed!r} is not a list of up to {MOST_READ} layers in their order")
        return tuple(one + further for one in listed)
    return ()


def _verifier(fields: Fields) -> str:
    config = fields.mapping("speculators_config")
    verifier = None if config is None else config.mapping("verifier")
    name = None if verifier is None else verifier.values.get("name_or_path")
    return name if isinstance(name, str) else ""
