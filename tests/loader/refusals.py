"""Changes of one tensor or several in a checkpoint of one file, and what a scan says of it then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from loader.errors import CheckpointError
from loader.models.catalog import scan_one

Change = Callable[[dict[str, Tensor]], Any]  # of the tensors by name, in place


def check_refused(folder: Path, change: Change, said: str) -> None:
    """Changes the checkpoint's tensors, and checks that it is refused in these words, a regular expression."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    found = scan_one(folder)
    assert not found.complete
    with pytest.raises(CheckpointError, match=said):
        raise found.failure or AssertionError(found.reason)
