"""Checkpoints of well known shapes for a server to load: random bfloat16 weights made on the device, a byte-level BPE of 128,000
entries. Nothing is downloaded.

The parts of a `make gpu` run share a folder (HEARTH_GPU_CHECKPOINTS) with the checkpoints SHAPE-0, SHAPE-1 and so on, of different
weights. Each is made by the first part that needs it, under another name until it is complete. A part's models are hard links to
them in its own folder there, so the page cache holds each once, and dropping a model's files from it drops the shared ones.

usage: python -m benchmarks.gpu_checkpoints FOLDER NAME=8b|1b|tiny … [--device cuda] [--tokenizer-of CHECKPOINT]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping

import torch

from benchmarks.checkpoints import make_large_tokenizer, train_tokenizer, write_tokenizer
from benchmarks.gpu_drives import SHARED, make_room
from benchmarks.gpu_node import checkpoints_bytes
from benchmarks.gpu_shapes import CONFIGS, LLAMA, shape_of
from benchmarks.server import ROOT
from loader.sizes import layout

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
    """Makes checkpoints below a folder, or links those that parts of this run share. shapes: name -> shape. Returns the bytes of
    weights of each. Raises CalledProcessError, and RuntimeError if the shared folder has no room for them."""
    shared = os.environ.get(SHARED)
    if not shared:
        return _made_apart(folder, shapes, device)
    numbers, own = Counter[str](), dict[str, pathlib.Path]()
    for name, shape in shapes.items():
        own[name] = pathlib.Path(shared) / f"{shape}-{numbers[shape]}"
        numbers[shape] += 1
    lacking = {path.name: shapes[name] for name, path in own.items() if not path.exists()}
    if lacking:
        make_room(pathlib.Path(shared), checkpoints_bytes(Counter(lacking.values())), {folder, *own.values()})
        making = pathlib.Path(tempfile.mkdtemp(prefix="making-", dir=shared))
        there = next((path for path in own.values() if path.exists()), None)
        _made_apart(making, lacking, device, there)
        for name in lacking:
            (making / name).rename(pathlib.Path(shared) / name)
        making.rmdir()
    for name, path in own.items():
        link(path, folder / name)
    return [weights_bytes(path) for path in own.values()]


def _made_apart(
    folder: pathlib.Path, shapes: Mapping[str, str], device: str, tokenizer_of: pathlib.Path | None = None
) -> list[int]:
    """Makes checkpoints in a process of its own, because the one that has used a device keeps a context and torch's cache there,
    which an engine with the default budget has no room beside."""
    command = [sys.executable, "-m", "benchmarks.gpu_checkpoints", str(folder), "--device", device]
    command += ["--tokenizer-of", str(tokenizer_of)] if tokenizer_of else []
    command += [f"{name}={shape}" for name, shape in shapes.items()]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    sizes: list[int] = json.loads(done.stdout)
    return sizes


def link(checkpoint: pathlib.Path, folder: pathlib.Path) -> None:
    """Makes a folder with the same files as a checkpoint of the same drive."""
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        os.link(path, folder / path.name)


def weights_bytes(checkpoint: pathlib.Path) -> int:
    """Returns the bytes of a checkpoint's weights."""
    path = checkpoint / "model.safetensors"
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
    return path.stat().st_size - 8 - int(header_bytes)


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
    parser.add_argument("--tokenizer-of", type=pathlib.Path, help="a checkpoint to take the tokenizer of")
    options = parser.parse_args()
    sizes, first = list[int](), options.tokenizer_of
    for name, _, shape in (model.partition("=") for model in options.models):
        sizes.append(make(options.folder / name, shape, options.device, first))
        first = first or options.folder / name
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
