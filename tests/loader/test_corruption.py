"""A hundred seeded corruptions of a small checkpoint: each is refused by name, or provably harmless.

A flip inside a weight's bytes can't be told in a plain file, which has no checksums: such a load must bring exactly the bytes that
are there now, and every other tensor unharmed.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from loader.errors import CheckpointChanged, CheckpointError, LoaderError
from loader.models.catalog import scan_one
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, stream_weights
from loader.sizes.layout import weight_layout, weights_bytes
from tests.loader.checkpoints import CONFIG, tensors_for, write_checkpoint

SHARDS = 3


def load(folder: Path, fingerprint: str, during: Callable[[], object] | None = None) -> dict[str, bytes]:
    """Weights by name. during: called once, after the first read."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, fingerprint, stack)
        memory = bytearray(weights_bytes(source.shape, "float32"))
        todo = [during] if during else []

        def progress(done: int, total: int) -> None:
            if todo:
                todo.pop()()

        stream_weights(source, "float32", HostSink(memoryview(memory)), StagingRing(3, 8192), progress, lambda: False)
        slots = weight_layout(source.shape, "float32")
        return {slot.name: bytes(memory[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]) for slot in slots}


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def header_end(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def check_refusal(error: LoaderError, folder: Path) -> None:
    """It names a file of the folder, and says so in one line."""
    assert any(path.name in str(error) for path in folder.iterdir()), error
    assert "\n" not in str(error)


@pytest.mark.parametrize("seed", range(25))
def test_truncations(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = write_checkpoint(tmp_path / "m", shards=SHARDS)
    path = rng.choice(weight_files(folder))
    length = rng.randrange(path.stat().st_size)
    cut_weights = length >= header_end(path)
    os.truncate(path, length)
    with pytest.raises(CheckpointChanged) as caught:  # it may still be on its way
        load(folder, "")
    assert path.name in str(caught.value)
    assert not cut_weights or "tensor " in str(caught.value)


@pytest.mark.parametrize("seed", range(15))
def test_truncations_while_it_is_read(tmp_path: Path, seed: int) -> None:
    """Named with its tensor and the offset if bytes are missing, as changed if they had all been read."""
    rng = random.Random(seed)
    folder = write_checkpoint(tmp_path / "m", CONFIG | {"hidden_size": 64, "vocab_size": 512}, shards=SHARDS)
    path = rng.choice(weight_files(folder))
    length = rng.randrange(header_end(path), path.stat().st_size)
    with pytest.raises(LoaderError, match=path.name) as caught:
        load(folder, "", lambda: os.truncate(path, length))
    if isinstance(caught.value, CheckpointError):
        assert caught.value.tensor
        ends_at = re.search(r"ends at offset (\d+)", str(caught.value))
        assert ends_at is not None
        assert int(ends_at[1]) >= length  # more where that read was through already


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_flips_in_headers(tmp_path: Path, seed: int, registered: bool) -> None:
    """Whoever registered the model notices any of them; without that a header must be wrong to be refused, or mean the same."""
    rng = random.Random(seed)
    folder = write_checkpoint(tmp_path / "m", shards=SHARDS)
    before, fingerprint = load(folder, ""), scan_one(folder).fingerprint
    path = rng.choice(weight_files(folder))
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[rng.randrange(header_end(path))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if registered:
        with pytest.raises(LoaderError) as caught:
            load(folder, fingerprint)
        assert path.name in str(caught.value) or "changed since" in str(caught.value)
        return
    try:
        after = load(folder, "")
    except LoaderError as error:
        check_refusal(error, folder)
    else:
        assert after == before


@pytest.mark.parametrize("seed", range(15))
def test_flips_in_weights_stay_where_they_are(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = write_checkpoint(tmp_path / "m", shards=SHARDS)
    fingerprint = scan_one(folder).fingerprint
    path = rng.choice(weight_files(folder))
    data = bytearray(path.read_bytes())
    data[rng.randrange(header_end(path), len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointChanged, match="changed since the model was registered"):
        load(folder, fingerprint)  # a registered model is the file with its times
    after = load(folder, "")
    wrong = {name for name, (_, _, wanted) in tensors_for(CONFIG).items() if after[name] != wanted}
    assert len(wrong) == 1
    (name,) = wrong
    flipped = int.from_bytes(after[name], "little") ^ int.from_bytes(tensors_for(CONFIG)[name][2], "little")
    assert flipped.bit_count() == 1


@pytest.mark.parametrize("seed", range(15))
def test_shards_in_each_other_s_place(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = write_checkpoint(tmp_path / "m", shards=SHARDS)
    first, second = rng.sample(weight_files(folder), 2)
    if rng.random() < 0.5:  # swapped, or one of them twice
        os.replace(first, folder / "aside")
        os.replace(second, first)
        os.replace(folder / "aside", second)
    else:
        first.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError) as caught:
        load(folder, "")
    assert caught.value.tensor
    assert caught.value.file in (first.name, second.name)


BAD_HEADERS = {
    "empty": b"",
    "length only": (1 << 40).to_bytes(8, "little"),
    "length 0": bytes(8) + b"{}",
    "no JSON": (8).to_bytes(8, "little") + b"weights!",
    "not UTF-8": (8).to_bytes(8, "little") + b'{"\xff": 1}'[:8],
    "a list": (2).to_bytes(8, "little") + b"[]",
    "no tensors": (2).to_bytes(8, "little") + b"{}",
    "pickle": b"\x80\x04\x95" + bytes(64),
    "nested": (4000).to_bytes(8, "little") + b"[" * 4000,
    "not a tensor": (12).to_bytes(8, "little") + b'{"a":"abcd"}',
}


@pytest.mark.parametrize("name", list(BAD_HEADERS))
def test_bad_headers(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=SHARDS)
    path = weight_files(folder)[1]
    path.write_bytes(BAD_HEADERS[name])
    with pytest.raises(LoaderError, match=path.name) as caught:
        load(folder, "")
    check_refusal(caught.value, folder)


def test_float_bits_pass_unchanged(tmp_path: Path) -> None:
    """A weight's bits are not looked at: signalling NaNs and denormals come out as they are in the file."""
    folder = write_checkpoint(tmp_path / "m")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    patterns = torch.tensor([0x7FA00001, 0x00000001, -1, 0x7F800000], dtype=torch.int32).numpy().tobytes()
    begin = header_end(path)
    data[begin : begin + len(patterns)] = patterns
    path.write_bytes(data)
    assert any(weights.startswith(patterns) for weights in load(folder, "").values())
