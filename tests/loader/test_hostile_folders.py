"""Folders that were made to hurt: each gets its own reason, at once, and the model beside it is found."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader.architectures.architecture import MAX_LAYERS
from loader.models.catalog import MAX_CONFIG_BYTES, Checkpoint, scan
from tests.loader.checkpoints import CONFIG, write_checkpoint

DEEP = "[" * 200_000


def config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def fifo(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


def header(folder: Path, text: str) -> None:
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "billions of layers": (lambda f: config(f, num_hidden_layers=10**9), f"num_hidden_layers: {10**9} is out of range"),
    "more layers than tensors": (
        lambda f: config(f, num_hidden_layers=MAX_LAYERS),
        f"num_hidden_layers: {MAX_LAYERS} is more than the files hold tensors",
    ),
    "an encoder's layers": (
        lambda f: config(f, architectures=["BertModel"], hidden_act="gelu", num_hidden_layers=10**9),
        f"num_hidden_layers: {10**9} is out of range",
    ),
    "a list of sizes": (
        lambda f: config(f, architectures=["BertModel"], hidden_act="gelu", matryoshka_dimensions=[1] * 1_000_000),
        "matryoshka_dimensions: holds 1000000 sizes",
    ),
    "very many end ids": (lambda f: config(f, eos_token_id=list(range(100_000))), "eos_token_id: holds 100000 token ids"),
    "an id beyond all vocabularies": (lambda f: config(f, eos_token_id=10**30), "eos_token_id: 1000"),
    "a long value": (lambda f: config(f, hidden_size="x" * 1_000_000), "hidden_size: 'xxx"),
    "a huge number": (lambda f: config(f, hidden_size=1 << 62), "hidden_size: 4611686018427387904 is out of range"),
    "a deep config": (lambda f: (f / "config.json").write_text(DEEP), "config.json: not valid JSON"),
    "a deep key": (lambda f: (f / "config.json").write_text('{"a": ' + DEEP), "config.json: not valid JSON"),
    "a deep generation_config": (
        lambda f: (f / "generation_config.json").write_text(DEEP),
        "generation_config.json: not valid JSON",
    ),
    "a deep index": (lambda f: (f / "model.safetensors.index.json").write_text(DEEP), "not a valid index"),
    "a deep header": (lambda f: header(f, '{"a": ' + DEEP), "header is not valid JSON"),
    "a deep entry": (lambda f: header(f, '{"a": {"dtype": ' + DEEP + "]" * 200_000 + "}}"), "model.safetensors"),
    "a shape of many numbers": (
        lambda f: header(f, json.dumps({"a": {"dtype": "F32", "shape": [1 << 62] * 200_000, "data_offsets": [0, 4]}})),
        "beyond what tensors have",
    ),
    "a header of very many tensors": (
        lambda f: header(f, json.dumps({str(n): {"dtype": "F32", "shape": [], "data_offsets": [0, 4]} for n in range(250_000)})),
        "its header describes more than 200000 tensors",
    ),
    "a header of very many rubbish": (lambda f: header(f, "{" + '"a":1,' * 2_000_000 + '"a":1}'), "more than 200000 tensors"),
    "an index of very many tensors": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {' + '"a":"b",' * 600_000 + '"a":"b"}}'),
        "names more than 500000 tensors",
    ),
    "a long config": (lambda f: os.truncate(f / "config.json", MAX_CONFIG_BYTES + 1), "too long for a configuration"),
    "a long index": (
        lambda f: [(f / "model.safetensors.index.json").touch(), os.truncate(f / "model.safetensors.index.json", 1 << 40)],
        "is longer than",
    ),
    "a pipe of weights": (lambda f: fifo(f, "model.safetensors"), "is a named pipe, not a regular file"),
    "a pipe of an index": (lambda f: fifo(f, "model.safetensors.index.json"), "is a named pipe, not a regular file"),
    "a pipe of a config": (lambda f: fifo(f, "config.json"), "config.json is missing"),
    "a device of weights": (
        lambda f: [(f / "model.safetensors").unlink(), (f / "model.safetensors").symlink_to("/dev/zero")],
        "is a device, not a regular file",
    ),
    "a device of an index": (
        lambda f: (f / "model.safetensors.index.json").symlink_to("/dev/zero"),
        "is a device, not a regular file",
    ),
    "a folder of weights": (
        lambda f: [(f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()],
        "is a folder, not a regular file",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_it_is_told_at_once_and_alone(tmp_path: Path, kind: str) -> None:
    make, said = HOSTILE[kind]
    write_checkpoint(tmp_path / "bad")
    write_checkpoint(tmp_path / "good")
    make(tmp_path / "bad")
    before_kb, begin_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    found = scan(tmp_path)
    assert found["good"].complete
    reason = reason_of(found["bad"])
    assert said in reason
    assert len(reason) < 2000, "whatever the file holds, its message is short"
    # generous, on purpose: without the bounds these take minutes and gigabytes, or for ever
    assert time.monotonic() - begin_s < 20.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 256 << 10


def test_a_pipe_in_a_cache_of_the_hub_is_not_waited_for(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--a"
    write_checkpoint(repo / "snapshots" / "1")
    (repo / "refs").mkdir()
    os.mkfifo(repo / "refs" / "main")
    assert scan(tmp_path)["org/a"].complete


def test_a_link_to_what_holds_the_models_folder_is_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "srv" / "models"
    write_checkpoint(root / "org" / "a")
    (root / "up").symlink_to("..")
    (root / "self").symlink_to(".")
    (root / "org" / "back").symlink_to("../..")
    (root / "everything").symlink_to("/")
    (root / "processes").symlink_to("/proc")
    (root / "task").symlink_to("/proc/self/task")
    assert list(scan(root)) == ["org/a"]


def test_a_link_to_a_folder_elsewhere_is_followed_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "elsewhere" / "a")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to("../elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to("../elsewhere")
    assert list(scan(tmp_path / "models")) == ["linked/a"]


def test_names_that_cannot_be_printed_are_listed_with_escapes(tmp_path: Path) -> None:
    """A line of the log, a label of the metrics and a JSON string must stay what they are."""
    write_checkpoint(tmp_path / "good")
    for name in (b"not \xff UTF-8", b"two\nlines", b"\x1b[2Jcleared"):
        os.mkdir(os.fsencode(tmp_path) + b"/" + name)
    found = scan(tmp_path)
    assert sorted(found) == sorted(["good", r"not \udcff UTF-8", r"two\nlines", r"\x1b[2Jcleared"])
    assert found["good"].complete
    for name, one in found.items():
        assert name == "good" or "rename it" in one.reason


def reason_of(checkpoint: Checkpoint) -> str:
    assert not checkpoint.complete
    return checkpoint.reason or checkpoint.error
