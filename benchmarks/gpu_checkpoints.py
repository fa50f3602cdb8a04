"""Checkpoints of well known shapes for a server to load: random bfloat16 weights made on the device, a byte-level BPE of 128,000
entries. Nothing is downloaded. usage: python -m benchmarks.gpu_checkpoints FOLDER NAME=8b|1b|tiny … [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import torch

from benchmarks.checkpoints import make_large_tokenizer, train_tokenizer, write_tokenizer
from benchmarks.gpu_shapes import CONFIGS, LLAMA, shape_of
from benchmarks.server import ROOT
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
        for name_of_file in TOKENIZER_FILES:
            shutil.copy(tokenizer_of / name_of_file, folder / name_of_file)
    return offset


def make_apart(folder: pathlib.Path, shapes: Mapping[str, str], device: str) -> list[int]:
    """Makes checkpoints below a folder in a process of its own, because the one that has used a device keeps a context and torch's
    cache there, which an engine with the default budget has no room beside. shapes: name -> shape. Returns the bytes of weights of
    each. Raises CalledProcessError."""
    command = [sys.executable, "-m", "benchmarks.gpu_checkpoints", str(folder), "--device", device]
    command += [f"{name}={shape}" for name, shape in shapes.items()]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    sizes: list[int] = json.loads(done.stdout)
    return sizes


def _write_tokenizer(folder: pathlib.Path, size: int) -> None:
    """Trained on the standard library; a large one is filled up with random merges."""
    if size <= TRAINED_SIZE:
        write_tokenizer(folder, train_tokenizer(size))
        return
    with tempfile.TemporaryDirectory() as small:
        write_tokenizer(pathlib.Path(small), train_tokenizer(TRAINED_SIZE))
        make_large_tokenizer(folder, pathlib.Path(small), size)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_checkpoints", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("models", nargs="+", metavar="NAME=SHAPE", help=f"shapes: {', '.join(CONFIGS)}")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    sizes, first = list[int](), None
    for name, _, shape in (model.partition("=") for model in options.models):
        sizes.append(make(options.folder / name, shape, options.device, first))
        first = first or options.folder / name
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
