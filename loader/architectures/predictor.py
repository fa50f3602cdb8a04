"""Lists the tensors of a model's predictor: a layer after the last one, which some checkpoints hold and which predicts one token
further (multi-token prediction, https://arxiv.org/abs/2412.19437, section 2.2). For each token it reads the model's last hidden
state and the embedding of the next token. It shares the model's embedding and head.
"""

from __future__ import annotations

from collections.abc import Collection

from loader.architectures.architecture import TensorGroup, one_tensor
from loader.shapes.model_shape import ModelShape

# names of the tensors, without `.weight`, that its layer has and other layers lack
TOKEN_NORM, HIDDEN_NORM, PROJECTION, OUTPUT_NORM = "enorm", "hnorm", "eh_proj", "shared_head.norm"


def predictor_groups(shape: ModelShape, layer: list[TensorGroup]) -> list[TensorGroup]:
    """Returns the tensor groups of a model's predictor, the layer that predicts one token further. layer: the groups of an ordinary
    layer of the same kind in this model. The norm of the predictor's output comes last."""
    hidden = shape.hidden_size
    return [
        one_tensor(f"{TOKEN_NORM}.weight", hidden),
        one_tensor(f"{HIDDEN_NORM}.weight", hidden),
        one_tensor(f"{PROJECTION}.weight", hidden, 2 * hidden),  # never quantised: the published formats leave it out
        *layer,
        one_tensor(f"{OUTPUT_NORM}.weight", hidden),
    ]


def holds_predictor(prefix: str, names: Collection[str] | None) -> bool:
    """Returns whether a checkpoint holds a predictor, the layer that predicts one token further. prefix: prefix of the names of the
    predictor's tensors. names: names of all tensors of the checkpoint; None: they are not known, and the result is True."""
    return names is None or f"{prefix}{PROJECTION}.weight" in names
