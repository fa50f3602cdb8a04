"""Packed weights from the command line to the first token: which files a load reads, and what `hearth why` says of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import kernel_cache
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

MIB = 1 << 20
NAME = "org/oak"
RATES = "read-rates.json"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One model of 70 MiB, large enough for a choice. Its cache folder has the tests' kernels, and rates of its own."""
    folder = tmp_path_factory.mktemp("packed")
    make_model(folder / "models" / NAME, dtype="bfloat16", weights_bytes=70 * MIB)
    kernel_cache.warm()
    (folder / "cache").mkdir()
    for kept in Path(kernel_cache.CACHE_DIR).iterdir():
        if kept.name != RATES:
            (folder / "cache" / kept.name).symlink_to(kept)
    flags = ["--threads", "1", "--cache-dir", str(folder / "cache"), "--load-deadline-s", "80", "--max-wait-s", "80"]
    with Node(folder, devices=["cpu:0=192MiB"], runner="torch", flags=flags) as running:
        yield running


def set_rates(node: Node, **bytes_per_s: float) -> None:
    """As though the drive had been measured so."""
    path = node.folder / "cache" / RATES
    kept = json.loads(path.read_text())
    for name, rate in bytes_per_s.items():
        kept[name] = dict.fromkeys(kept[name], rate)
    path.write_text(json.dumps(kept))


def drop_from_cache(node: Node) -> None:
    for path in (node.models / NAME).rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def loaded(node: Node) -> str:
    """Loads the model; returns what `why` says of the files that were read."""
    done = node.cli("load", NAME)
    assert done.returncode == 0, done.stderr
    said = node.cli("why", NAME).stdout
    return next(line for line in reversed(said.splitlines()) if "read its" in line)


def test_the_choice_and_its_reasons_are_told(node: Node) -> None:
    assert node.cli("pack", NAME).returncode == 0
    assert "equal to the original, bit by bit" in node.cli("verify", NAME).stdout
    text = Stream(node, NAME, "once upon a time", 20).join().text
    texts = [text]

    def again() -> str:
        assert node.cli("unload", NAME).returncode == 0
        said = loaded(node)
        texts.append(Stream(node, NAME, "once upon a time", 20).join().text)
        return said

    for path in (node.models / NAME).glob("*.safetensors"):
        path.read_bytes()
    assert again().endswith("read its plain files, which the page cache holds")

    drop_from_cache(node)
    said = again()
    found = re.search(
        r"read its (plain|packed) files: (\d+\.\d\d) s expected, (\d+\.\d\d) s for the (plain|packed) ones \(0\.07 GB plain at "
        r"(\d+\.\d) GB/s; 0\.05 GB packed, read and decoded to weights at (\d+\.\d) GB/s\)$",
        said,
    )
    assert found is not None, said
    kept = json.loads((node.folder / "cache" / RATES).read_text())
    assert [f"{next(iter(kept[name].values())) / 1e9:.1f}" for name in ("read_bytes_per_s", "packed_bytes_per_s")] == [
        found[5],
        found[6],
    ]

    set_rates(node, read_bytes_per_s=0.1e9, packed_bytes_per_s=2e9)
    drop_from_cache(node)
    assert "read its packed files: 0.04 s expected, 0.7" in again()

    set_rates(node, read_bytes_per_s=4e9, packed_bytes_per_s=4.1e9)
    drop_from_cache(node)
    assert "read its plain files: 0.02 s expected, 0.02 s for the packed ones" in again()  # decoding takes a core: a draw is no win

    assert node.cli("unload", NAME).returncode == 0
    for path in (node.models / NAME).glob("*.safetensors"):
        path.unlink()
    node.wait_for(lambda: node.cli("load", NAME).returncode == 0, "a load of what is left")
    assert again().endswith("read its packed files: there are no plain ones")
    assert set(texts) == {text}
    assert text
