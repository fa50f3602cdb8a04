"""The load orders that tests of TorchRunner use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.protocol import LoadModel
from tests.engine.model_bench import MAX_LEN

PROMPT = np.random.default_rng(11).integers(0, 211, 50).tolist()


def spec(folder: Path, **changes: Any) -> LoadModel:
    """Returns the order to load the model in `folder`: float32, 8 sequences, unless `changes` say otherwise."""
    fields = {
        "placement_id": 1,
        "model": "tiny",
        "path": str(folder),
        "dtype": "float32",
        "fingerprint": "",
        "weights_chunks": 1 << 10,
        "kv_reserved_chunks": 0,
        "lease_chunks": 0,
        "max_model_len": MAX_LEN,
        "max_sequences": 8,
        "eos_token_ids": [1],
    }
    return LoadModel(**(fields | changes))
