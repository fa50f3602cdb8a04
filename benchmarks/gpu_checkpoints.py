"""Checkpoints of well known shapes for a server to load: random bfloat16 weights made on the device, a byte-level BPE of 128,000
entries. Nothing is downloaded. usage: python -m benchmarks.gpu_checkpoints FOLDER 8b|1b|tiny [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import shutil
import struct
import tempfile

import torch

from benchmarks.checkpoints import make_large_tokenizer, train_tokenizer, write_tokenizer
from benchmarks.gpu_shapes import CONFIGS, LLAMA, shape_of
from loader import layout

TRAINED_SIZE = 32_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
TOKENIZER_SIZE = {"8b": 128_000, "1b": 128_000, "tiny": 300}


def make(folder: pathlib.Path, name: str, device: str, tokenizer_of: pathlib.Path | None = None) -> int:
    """Writes the checkpoint and returns the bytes of its weights. tokenizer_of: a checkpoint to take the tokenizer of, which takes
    seconds to train."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = shape_of(name)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA, **CONFIGS[name]}))
    header, offset = {}, 0
    for tensor, dims in layout.parameter_shapes(shape).items():
        num_bytes = math.prod(dims) * 2
        header[tensor] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4096)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor, dims in layout.parameter_shapes(shape).items():
            values = torch.ones(dims, dtype=torch.bfloat16, device=device)
            if "norm" not in tensor:
                values.normal_(0.0, 0.02)
            file.write(values.cpu().view(torch.uint8).numpy().data)
    if tokenizer_of is None:
        _write_tokenizer(folder, TOKENIZER_SIZE[name])
    else:
        for file in TOKENIZER_FILES:
            shutil.copy(tokenizer_of / file, folder / file)
    return offset


def _write_tokenizer(folder: pathlib.Path, size: int) -> None:
    """Trained on the standard library; a large one is filled up with random merges."""
    if size <= TRAINED_SIZE:
        write_tokenizer(folder, train_tokenizer(size))
        return
    with tempfile.TemporaryDirectory() as small:
        write_tokenizer(pathlib.Path(small), train_tokenizer(TRAINED_SIZE))
        make_large_tokenizer(folder, pathlib.Path(small), size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_checkpoints", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("name", choices=tuple(CONFIGS))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    print(make(options.folder, options.name, options.device))
