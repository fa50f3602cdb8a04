"""Tiny model folders as Hugging Face would lay them out: config, seeded weights, a byte-level tokenizer, a chat template.

Good for both runners. Token ids 0-255 are the bytes of the text (each byte is one token), the special ones follow.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from loader.architectures import eagle
from loader.configs import hf_config
from loader.shapes import dtypes, model_shape
from loader.shapes.config_fields import Fields
from loader.sizes import layout

BEGIN, END, USER, ASSISTANT, SYSTEM = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIALS = (BEGIN, END, USER, ASSISTANT, SYSTEM)
END_ID = 256 + SPECIALS.index(END)
VOCAB_SIZE = 264

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_model(
    folder: Path,
    *,
    seed: int = 0,
    architecture: str = "LlamaForCausalLM",
    dtype: str = "float32",
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_position_embeddings: int = 2048,
    weights_bytes: int = 0,
    agreeing_predictor: bool = False,
    **config: Any,
) -> Path:
    """Writes a complete model and returns its folder. `agreeing_predictor`: the model's next token follows from the last one alone,
    and a predictor says the same of the token after that. `weights_bytes`: as many layers of moderate width as take at least that
    much (to fill a device; sizes given beside it are ignored). `config`: further keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if weights_bytes:
        # deep rather than wide: work space grows with the width, reserved KV with heads; both stay small this way
        hidden_size, num_heads, num_kv_heads = 256, 16, 1
        layer_bytes = dtypes.ITEM_BYTES[dtype] * (
            hidden_size * hidden_size * 2 + 2 * hidden_size * 16 + 3 * 2 * hidden_size * hidden_size
        )
        num_layers = -(-weights_bytes // layer_bytes)
    settings: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3" if architecture.startswith("Qwen3") else "llama",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "bos_token_id": 256,
        "eos_token_id": END_ID,
        **config,
    }
    text = json.dumps(settings, indent=1)
    shape = hf_config.parse_config(text.encode())
    write_weights(folder / "model.safetensors", replace(shape, predicts=agreeing_predictor), seed, agreeing_predictor)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID, "bos_token_id": 256}))
    (folder / "config.json").write_text(text)
    return folder


def write_weights(path: Path, shape: model_shape.ModelShape, seed: int, agreeing: bool = False) -> None:
    """One safetensors file with every parameter the shape asks for, drawn with std 0.2 so that logits differ clearly. agreeing:
    layers add nothing, norms have no weights, and a predictor passes on the embedding of the token that follows."""
    write_tensors(path, layout.parameter_shapes(shape), shape.dtype, seed, agreeing)


def make_head(folder: Path, model: Path, *, seed: int = 9, **config: Any) -> Path:
    """Writes an EAGLE-3 head of random weights for a model that `make_model` wrote, and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    own = json.loads((model / "config.json").read_text())
    reads = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}
    settings = own | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1} | reads | config
    head = eagle.parse_head(Fields(settings, "config.json"), [])
    fitted = head.fitted(hf_config.parse_config(json.dumps(own).encode()), "config.json")
    shapes = {name.removeprefix(eagle.PREFIX): dims for group in eagle.eagle_groups(fitted, 0) for name, dims in group.tensors}
    write_tensors(folder / "model.safetensors", shapes, own.get("dtype") or own["torch_dtype"], seed)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str, seed: int, agreeing: bool = False) -> None:
    """One safetensors file with tensors of these names. agreeing: as in `write_weights`."""
    generator = np.random.default_rng(seed)
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, dims in shapes.items():
        values = generator.standard_normal(math.prod(dims), dtype=np.float32) * np.float32(0.2)
        if "norm" in name:
            values = values * np.float32(not agreeing) + np.float32(1)
        elif agreeing and name.endswith(("o_proj.weight", "down_proj.weight")):
            values[:] = 0
        elif agreeing and name.endswith("eh_proj.weight"):
            values = np.eye(dims[0], dims[1], dtype=np.float32).reshape(-1)
        data = _as_bytes(values, dtype)
        kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
        header[name] = {"dtype": kind, "shape": list(dims), "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(parts)


def _as_bytes(values: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(np.float16 if dtype == "float16" else np.float32).tobytes()


def write_tokenizer(folder: Path) -> None:
    """One token a byte, then the special tokens; ids follow the byte-level alphabet sorted by byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {_byte_level_char(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BEGIN, "eos_token": END, "chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _byte_level_char(byte: int) -> str:
    """GPT-2's printable stand-in for a byte: printable Latin-1 stands for itself, the rest is counted up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [b for b in range(256) if b not in printable].index(byte))
