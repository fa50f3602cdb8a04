"""Reads from config.json how a cross-encoder scores a pair of texts. Such a model has one output; config.json may name the
activation function that turns this output into a relevance, as sentence-transformers writes it.
"""

from __future__ import annotations

from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import IDENTITY, SIGMOID

_ACTIVATIONS = {"torch.nn.modules.activation.Sigmoid": SIGMOID, "torch.nn.modules.linear.Identity": IDENTITY}


def scoring_of(fields: Fields) -> str:
    """Returns the function that turns a cross-encoder's score into a relevance: SIGMOID (also if config.json names none) or
    IDENTITY. Raises UnsupportedModel, which names the key, for a model with several outputs and for other activations."""
    _check_one_output(fields)
    holder, key = fields.mapping("sentence_transformers"), "activation_fn"
    if holder is None or not holder.has(key):
        holder, key = fields, "sbert_ce_default_activation_function"
    named = holder.values.get(key)
    if named is None:
        return SIGMOID
    if named not in _ACTIVATIONS:
        raise holder.unsupported(key, f"{named!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[named]


def _check_one_output(fields: Fields) -> None:
    labels = fields.mapping("id2label")
    if labels is not None:
        key, num_labels = "id2label", len(labels.values)
    else:
        key, num_labels = "num_labels", fields.integer("num_labels", 2)  # transformers leaves the key out if there are two labels
    if num_labels != 1:
        raise fields.unsupported(key, f"{num_labels} labels are not supported; supported: cross-encoders, which have 1")
