"""Divides the tensors of a checkpoint's one file among three, with an index."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from loader.files.safetensors import INDEX_NAME, SINGLE_NAME


def divide_in_three(folder: Path) -> None:
    """Writes three files in place of the one in `folder`. Names that follow one another, such as those of a matrix and of its
    scales, go to different files."""
    tensors = load_file(folder / SINGLE_NAME)
    names = sorted(tensors)
    files = {name: f"model-{at % 3 + 1:05d}-of-00003.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / SINGLE_NAME).unlink()
