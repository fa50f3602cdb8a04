"""Describes wrappers: checkpoints that hold a decoder beside an encoder of images or sound. Only the decoder is read and served.

The object `text_config` of config.json has the decoder's settings. The prefix of the names of the decoder's tensors depends on the
version of transformers that wrote the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from loader.architectures.architecture import TensorGroup
from loader.architectures.decoder import Decoder, TensorNames
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import ModelShape

TEXT_KEY = "text_config"
_BODY = "model."  # prefix of the names of a decoder's tensors, except the head's
# the prefix that replaces it in a wrapper, and the prefix of the head's name
_PREFIXES = {"language_model.model.": "language_model.", "model.language_model.": ""}
_FIRST = "language_model.model."
# keys that a wrapper may have outside text_config instead of within it
_OUTER_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings")


@dataclass(slots=True, frozen=True)
class Wrapper:
    """The description of one family of wrappers: checkpoints with a decoder beside an encoder of images or sound.

    name, model_type: as in Architecture. text: the decoder's description. defaults: key -> value, for keys that text_config may
    leave out although the config.json of the decoder alone must have them. also: further values that `model_type` may have in
    text_config. others: prefixes of the names of all tensors that do not belong to the decoder."""

    name: str
    model_type: str
    text: Decoder
    defaults: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    others: tuple[str, ...] = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )

    def parse(self, fields: Fields) -> ModelShape:
        """Returns the shape of the decoder that text_config in a wrapper's config.json describes. Raises UnsupportedModel for a
        variant that is not served, and CheckpointError, which names a key with a wrong value."""
        text = fields.mapping(TEXT_KEY)
        if text is None:
            raise fields.fail(TEXT_KEY, "missing")
        model_type = text.values.get("model_type", self.text.model_type)
        served = (self.text.model_type, *self.also)
        if model_type not in served:
            raise text.unsupported("model_type", f"{model_type!r} is not supported in {self.name}; supported: {', '.join(served)}")
        outer = {key: fields.values[key] for key in _OUTER_KEYS if fields.has(key)}
        inner = {key: value for key, value in text.values.items() if value is not None or key not in self.defaults}
        shape = self.text.parse(Fields({**self.defaults, **outer, **inner}, text.file, text.prefix))
        return replace(shape, architecture=self.name, tensor_prefix=_FIRST)

    def tensor_groups(self, shape: ModelShape) -> list[TensorGroup]:
        """Returns the decoder's tensors with their names in a wrapper's checkpoint, in the order in which they lie in the model's
        memory. A group has the tensors that one matrix multiplication reads together."""
        return self.decoder_of(shape).tensor_groups(shape)

    def ignores(self, shape: ModelShape, name: str) -> bool:
        """Returns whether a checkpoint may contain the tensor `name` although it is not read: it belongs to an encoder, or the
        decoder does not need it."""
        return name.startswith(self.others) or self.decoder_of(shape).ignores(shape, name)

    def as_stored(self, shape: ModelShape, names: Collection[str]) -> ModelShape:
        """Returns the shape with the prefix that this checkpoint gives to the names of the decoder's tensors. names: names of all
        tensors of the checkpoint. If a head (output matrix) is among them, the shape says that the model uses it, even if
        config.json says that the embedding serves as the head: some config files are wrong about that."""
        for prefix, of_head in _PREFIXES.items():
            if any(name.startswith(prefix) for name in names):
                tied = shape.tie_word_embeddings and f"{of_head}{self.text.names.head}.weight" not in names
                shape = replace(shape, tensor_prefix=prefix, tie_word_embeddings=tied)
                break
        return self.text.as_stored(shape, names)

    def predicting(self, shape: ModelShape, names: Collection[str] | None) -> ModelShape | None:
        """Returns the shape with the model's predictor, the layer that predicts one token further
        (loader/architectures/predictor.py), if the checkpoint holds one that can draft tokens; otherwise None. names: names of the
        checkpoint's tensors; None: they are not known, and config.json decides."""
        return self.decoder_of(shape).predicting(shape, names)

    def decoder_of(self, shape: ModelShape) -> Decoder:
        """Returns the decoder's description with the tensor names of a wrapper's checkpoint, whose names begin with
        shape.tensor_prefix."""
        return replace(self.text, names=_placed(self.text.names, shape.tensor_prefix))


@cache
def _placed(names: TensorNames, prefix: str) -> TensorNames:
    return replace(
        names,
        embedding=prefix + names.embedding.removeprefix(_BODY),
        layer=prefix + names.layer.removeprefix(_BODY),
        final_norm=prefix + names.final_norm.removeprefix(_BODY),
        input_embedding=prefix + names.input_embedding.removeprefix(_BODY),
        input_projection=prefix + names.input_projection.removeprefix(_BODY),
        input_norm=prefix + names.input_norm.removeprefix(_BODY),
        head=_PREFIXES[prefix] + names.head,
    )
