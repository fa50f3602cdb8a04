"""Describes BERT and its MiniLM distillations: encoders that turn texts into vectors. They have no KV cache, and nothing is
sampled. RoBERTa and the cross-encoders have BERT's layers, so the files that describe them use Encoder, too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from loader.architectures.architecture import MAX_LAYERS, TensorGroup, one_tensor, stored_dtype
from loader.architectures.cut_sizes import cut_sizes
from loader.architectures.scoring import scoring_of
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import ModelShape
from loader.shapes.rope_config import RopeParameters

_SUPPORTED = (("hidden_act", "gelu"), ("position_embedding_type", "absolute"))


@dataclass(slots=True, frozen=True)
class Encoder:
    """The description of a family with BERT's layers: what its config.json may say, and which tensors its checkpoints hold.

    body: prefix of the names of the encoder's tensors in checkpoints that were saved with a head. pad_token_id: the id of padding
    if config.json gives none; a text's first position is this id plus 1. None: the first position is 0.

    score_head: for a cross-encoder, the names of the two matrices with biases that compute a score from the vector of the first
    token; tanh is applied between them. In a name, {} stands for the prefix that the checkpoint's tensor names have: `body` or "".
    (): the family computes vectors instead of scores."""

    name: str
    model_type: str
    body: str = "bert."
    pad_token_id: int | None = None
    score_head: tuple[str, ...] = ()

    def parse(self, fields: Fields) -> ModelShape:
        """Returns the shape of the encoder that a config.json describes. Raises UnsupportedModel for a variant that is not served,
        and CheckpointError, which names a key with a wrong value. How token vectors are pooled is read from another file
        (loader/configs/pooling.py)."""
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden_size % num_heads:
            raise fields.fail("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
        for key, supported in _SUPPORTED:
            if (value := fields.values.get(key) or supported) != supported:
                raise fields.unsupported(key, f"{value!r} is not supported; supported: {supported}")
        for key in ("is_decoder", "add_cross_attention"):
            if fields.boolean(key):
                raise fields.unsupported(key, "only encoders are supported")
        num_layers = fields.integer("num_hidden_layers", at_most=MAX_LAYERS)
        num_positions, first_position = fields.integer("max_position_embeddings"), self._first_position(fields)
        if num_positions <= first_position:
            raise fields.fail("max_position_embeddings", f"{num_positions} leaves no position behind pad_token_id")
        sizes, any_size = ((), False) if self.score_head else cut_sizes(fields, hidden_size)
        return ModelShape(
            architecture=self.name,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            vocab_size=fields.integer("vocab_size"),
            rms_norm_eps=fields.positive("layer_norm_eps", 1e-12),
            max_position_embeddings=num_positions - first_position,
            rope=RopeParameters(),
            tie_word_embeddings=True,
            attention_bias=True,
            output_bias=True,
            mlp_bias=True,
            dtype=stored_dtype(fields),
            layer_windows=(0,) * num_layers,
            query_scale=(hidden_size // num_heads) ** -0.5,
            pooling="cls" if self.score_head else "mean",
            scoring=scoring_of(fields) if self.score_head else "",
            type_vocab_size=fields.integer("type_vocab_size", 2),
            first_position=first_position,
            cut_sizes=sizes,
            any_cut_size=any_size,
        )

    def _first_position(self, fields: Fields) -> int:
        return 0 if self.pad_token_id is None else fields.integer("pad_token_id", self.pad_token_id, at_least=0) + 1

    def score_names(self, shape: ModelShape) -> tuple[str, ...]:
        """Returns the names of the matrices that score a pair of texts, as this checkpoint stores them, without `.weight` and
        `.bias`; () for a family that computes vectors."""
        return tuple(name.format(shape.tensor_prefix) for name in self.score_head)

    def tensor_groups(self, shape: ModelShape) -> list[TensorGroup]:
        """Returns the tensors that an encoder's checkpoint must hold, in the order in which they lie in the model's memory. A group
        has the tensors that one matrix multiplication reads together."""
        hidden, inner = shape.hidden_size, shape.intermediate_size

        def one(name: str, *dims: int) -> list[TensorGroup]:
            return [one_tensor(f"{name}.weight", *dims), one_tensor(f"{name}.bias", dims[0])]

        at = shape.tensor_prefix + "embeddings."
        num_positions = shape.first_position + shape.max_position_embeddings
        tables = (("word", shape.vocab_size), ("position", num_positions), ("token_type", shape.type_vocab_size))
        groups = [one_tensor(f"{at}{name}_embeddings.weight", rows, hidden) for name, rows in tables]
        groups += one(at + "LayerNorm", hidden)
        mixing = [f"attention.self.{name}" for name in ("query", "key", "value")]
        in_a_layer = [
            TensorGroup(tuple((f"{name}.weight", (hidden, hidden)) for name in mixing)),
            TensorGroup(tuple((f"{name}.bias", (hidden,)) for name in mixing)),
            *one("attention.output.dense", hidden, hidden),
            *one("attention.output.LayerNorm", hidden),
            *one("intermediate.dense", inner, hidden),
            *one("output.dense", hidden, inner),
            *one("output.LayerNorm", hidden),
        ]
        for layer in range(shape.num_layers):
            prefix = f"{shape.tensor_prefix}encoder.layer.{layer}."
            groups += [group.in_layer(layer, prefix) for group in in_a_layer]
        for name, num_outputs in zip(self.score_names(shape), (hidden, 1), strict=False):
            groups += one(name, num_outputs, hidden)
        return groups

    def ignores(self, shape: ModelShape, name: str) -> bool:
        """Returns whether a checkpoint may contain the tensor `name` although it is not read. Such tensors are a pooler that
        computes no score, and stored position indices."""
        return name.removeprefix(shape.tensor_prefix).startswith(("pooler.", "embeddings.position_ids"))

    def as_stored(self, shape: ModelShape, names: Collection[str]) -> ModelShape:
        """Returns the shape with tensor_prefix set to the prefix that the encoder's tensors have in this checkpoint: the value of
        the field `body` (such as "bert.") if the model was saved with a head, otherwise "". names: the names of the checkpoint's
        tensors."""
        return replace(shape, tensor_prefix=self.body) if any(name.startswith(self.body) for name in names) else shape


ARCHITECTURE = Encoder("BertModel", "bert")
