"""Small checkpoints written by hand, so that loader tests need neither torch nor transformers."""

from __future__ import annotations

import json
import math
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loader.architectures.architecture import Cut
from loader.configs.hf_config import parse_config
from loader.files.safetensors import DTYPE_BYTES
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import parameter_shapes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "float32",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
# Matrices of 64 KiB and more, so that their places follow from the file; sizes that end within a block.
LARGE = CONFIG | {"hidden_size": 120, "intermediate_size": 500, "num_key_value_heads": 2, "vocab_size": 700}


def shape(**changes: object) -> ModelShape:
    """CONFIG with some changes, parsed."""
    return parse_config(json.dumps(CONFIG | changes).encode())


FINITE = bytes(byte & 0xBF for byte in range(256))  # no exponent of ones, in any dtype's top byte


def safetensors_bytes(tensors: dict[str, tuple[str, tuple[int, ...], bytes]], padding: int = 0) -> bytes:
    """name -> (dtype, shape, data), as one file. padding: spaces behind the header's own, which move all data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    return len(text).to_bytes(8, "little") + text + body


def tensors_for(
    config: dict[str, Any], dtype: str = "F32", random_bytes: bool = False
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every parameter the config asks for, with bytes that differ from tensor to tensor, or are all random (and finite)."""
    shapes = parameter_shapes(parse_config(json.dumps(config).encode()))
    generator = random.Random(0)
    tensors = {}
    for i, (name, shape) in enumerate(shapes.items()):
        num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        data = generator.randbytes(num_bytes).translate(FINITE) if random_bytes else bytes([i % 60 + 1]) * num_bytes
        tensors[name] = (dtype, shape, data)
    return tensors


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] | None = None,
    shards: int = 1,
    dtype: str = "F32",
    random_bytes: bool = False,
    padding: int = 0,
) -> Path:
    """A complete checkpoint; with shards > 1 as an index and that many files."""
    config = CONFIG if config is None else config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors_for(config, dtype, random_bytes)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, padding))
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        (folder / file).write_bytes(safetensors_bytes(part, padding))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def cut_out(whole: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """Returns the part of a tensor that a device's share has. cut: which part; None: all."""
    if cut is None:
        return whole
    whole = cut_out(whole, cut.experts)
    return torch.cat([whole.narrow(cut.axis, begin, end - begin) for begin, end in cut.ranges], cut.axis)


def bfloat16_weights(num_values: int, seed: int, sigma: float = 0.02) -> bytes:
    """As trained ones are: normally distributed."""
    values = np.random.default_rng(seed).normal(0, sigma, num_values).astype(np.float32)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()


# Five matrices a layer and the embedding are worth packing, the norms are not; widths that are no multiple of anything.
PACKABLE: dict[str, Any] = CONFIG | {
    "hidden_size": 120,
    "intermediate_size": 500,
    "num_key_value_heads": 4,
    "vocab_size": 700,
    "dtype": "bfloat16",
}


def write_packable(folder: Path, shards: int = 1, config: dict[str, Any] = PACKABLE) -> Path:
    """A complete bfloat16 checkpoint whose weights look trained."""
    write_checkpoint(folder, config, shards, "BF16")
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        begin = len(data) - max(one["data_offsets"][1] for name, one in header.items() if name != "__metadata__")
        for name, one in header.items():
            if name != "__metadata__":
                start, end = (begin + offset for offset in one["data_offsets"])
                data[start:end] = bfloat16_weights((end - start) // 2, zlib.crc32(name.encode()))
        path.write_bytes(data)
    return folder
