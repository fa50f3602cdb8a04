"""Model folders that were made to hurt, drawn from a seed: configurations, headers, indexes, tokenizers, templates, links and
special files."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from tests.loader.checkpoints import CONFIG

DEEP = "[" * 100_000
KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "layer_types",
    "eos_token_id",
    "architectures",
    "dtype",
    "quantization_config",
    "tie_word_embeddings",
)
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def _value(draw: random.Random) -> object:
    return draw.choice(
        [
            0,
            -1,
            1,
            10**9,
            1 << 62,
            10**30,
            1e308,
            True,
            None,
            "",
            "x" * 100_000,
            "\u0000\u001b[2J\n",
            [],
            [1] * 100_000,
            {},
            {"rope_type": "llama3", "factor": 1e300},
            {"full_attention": {}, "sliding_attention": []},
            ["full_attention"] * 10_000,
            ["GPT2LMHeadModel"],
            ["Gemma3ForCausalLM"],
            ["BertModel"],
        ]
    )


def _changed_config(folder: Path, draw: random.Random) -> None:
    changes = {draw.choice(KEYS): _value(draw) for _ in range(draw.randint(1, 3))}
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def _rubbish(folder: Path, draw: random.Random) -> None:
    content = draw.choice(
        [b"", b"{}", b"[]", b"null", DEEP.encode(), ('{"a":' * 50_000).encode(), draw.randbytes(draw.randint(1, 5000))]
    )
    _new(folder, draw).write_bytes(content)


def _cut(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(("config.json", "model.safetensors"))
    os.truncate(path, draw.randint(0, path.stat().st_size))


def _grown(folder: Path, draw: random.Random) -> None:
    """Long files without a byte on the drive."""
    path = _new(folder, draw)
    path.touch()
    os.truncate(path, draw.choice([1 << 20, 1 << 28, 1 << 40]))


def _header(folder: Path, draw: random.Random) -> None:
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = draw.choice([name for name in header if name != "__metadata__"])
    change = draw.randrange(6)
    if change == 0:
        header[name]["shape"] = draw.choice([[1 << 62] * 1000, [-1], [0], [], [10**12, 10**12]])
    elif change == 1:
        header[name]["data_offsets"] = draw.choice([[0, 1 << 62], [5, 3], [0], [-4, 0]])
    elif change == 2:
        header[name]["dtype"] = draw.choice(["F4", "", None, "F64", 7])
    elif change == 3:
        header["\u001b]0;x" + "y" * 50_000] = header.pop(name)
    elif change == 4:
        header["__metadata__"] = {"hearthd.packed": draw.choice(["", "{}", '{"version": 9}', "[" * 50_000])}
    else:
        header |= {f"more.{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(20_000)}
    text = json.dumps(header).encode()
    length = draw.choice([len(text), len(text), 1, 1 << 40, len(text) + 1])
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + data[8 + len(data) :])


def _index(folder: Path, draw: random.Random) -> None:
    files: object = draw.choice(
        [{"a": "../../etc/passwd"}, {"a": "b.safetensors"}, {"": ""}, [], {"a": 7}, {"x" * 100_000: "m.safetensors"}]
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _special(folder: Path, draw: random.Random) -> None:
    path = _new(folder, draw)
    kind = draw.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(draw.choice(["/dev/zero", "/dev/tty", "/proc/self/mem", "/proc/kmsg", "/", path.name, "/nowhere"]))
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        listening = socket.socket(socket.AF_UNIX)
        at = os.getcwd()
        os.chdir(folder)  # a socket's path may be no longer than some 100 bytes
        try:
            listening.bind(path.name)
        finally:
            os.chdir(at)
            listening.close()
    else:
        (folder / "packed").mkdir()
        os.mkfifo(folder / "packed" / "model.safetensors")


def _links(folder: Path, draw: random.Random) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(draw.choice(["..", ".", "/", "/proc", folder.name, "/nowhere"]))


def _names(folder: Path, draw: random.Random) -> None:
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    inner = folder / draw.choice(["two\nlines", "\x1b[2J", "models--a", "models--a--b--c", "'\"<b>", "é" * 100])
    inner.mkdir()
    (inner / "config.json").write_text("{}")


def _new(folder: Path, draw: random.Random) -> Path:
    path = folder / draw.choice(FILES)
    path.unlink(missing_ok=True)
    return path


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (
    _changed_config,
    _changed_config,
    _changed_config,
    _rubbish,
    _cut,
    _grown,
    _header,
    _header,
    _index,
    _special,
    _special,
    _links,
    _names,
)


def make_hostile(folder: Path, template: Path, seed: int) -> str:
    """Makes one, from a copy of a good checkpoint; returns its kind."""
    draw = random.Random(seed)
    shutil.copytree(template, folder)
    kind = draw.choice(KINDS)
    kind(folder, draw)
    return kind.__name__.removeprefix("_")
