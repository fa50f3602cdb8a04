"""Makes tiny decoders that embed texts, in the ways in which such folders are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.engine.model_bench import CASES, make_checkpoint

LAST_TOKEN = {"word_embedding_dimension": 48, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
MODULES = [
    {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for at, (kind, path) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")))
]


def make_embedder(folder: Path, case: str, bare: bool = False, architecture: str = "", **changes: Any) -> Any:
    """Saves a checkpoint of a case of model_bench with sentence-transformers' files, and returns transformers' copy of it. bare: as
    published without a head, whose parameters' names lack `model.`. architecture: what config.json names; "": with the head."""
    from safetensors.torch import save_file

    model = make_checkpoint(folder, **(CASES[case] | changes))
    if bare:
        tensors = {name: tensor.contiguous() for name, tensor in model.model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if architecture:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(LAST_TOKEN))
    (folder / "modules.json").write_text(json.dumps(MODULES))
    return model


def expected(model: Any, text: list[int]) -> np.ndarray:
    """Returns the vector of a text: the last token's hidden state behind the final norm, scaled to length 1."""
    with torch.inference_mode():
        hidden = model.model(torch.tensor([text])).last_hidden_state[0, -1]
    found: np.ndarray = torch.nn.functional.normalize(hidden, dim=0).numpy()
    return found
