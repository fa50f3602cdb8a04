"""Tests of loads that succeed, fail, are cancelled or run while a model steps, with sharded, packed and corrupt files."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.contracts.loads import LoadCancelled
from engine.cpu.model import CpuModel
from engine.loading.runner import TorchRunner
from engine.memory.weight_gate import WeightGate
from loader.errors import CheckpointChanged, CheckpointError
from loader.reading.source_choice import SourceChoice
from tests.engine.model_bench import load, load_task, make_table, plan, put
from tests.engine.runner.specs import PROMPT, spec
from tests.loader.packed_checkpoints import pack_checkpoint


def test_sharded_checkpoint_equals_single_file(runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path) -> None:
    saved[1].save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    table = make_table()
    put(table, 0, PROMPT)
    answers = []
    for source in (saved[0], tmp_path):
        model = load(runner, source)
        answers.append(model.logits(plan((0, 0, 50)), table, every_token=True))
        model.release()
    assert np.array_equal(*answers)


def test_the_log_names_a_model_as_it_is_served(
    runner: TorchRunner, saved: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "loader"):
        runner.load(load_task(spec(saved[0], model="org/name"))).release()
    assert [line for line in caplog.messages if line.startswith("org/name: read ")]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-1000], "cut off"),
        (lambda data: data[:4], "too short"),
        (lambda data: bytes([data[0] ^ 0x10]) + data[1:], "header"),
        (lambda data: data[:9] + b"\xff" + data[10:], "header is not valid JSON"),
        (lambda data: data.replace(b'"F32"', b'"F16"', 1), "tensor .*don't hold"),
        (lambda data: data.replace(b"model.norm.weight", b"model.n0rm.weight"), "tensor model.n0rm.weight"),
        (lambda data: data + b"\0", "after the last tensor"),
    ],
)
def test_corrupt_files_name_file_and_leave_others_serving(
    runner: TorchRunner, saved: tuple[Path, Any], folder: Path, spoil: Any, message: str
) -> None:
    other = load(runner, saved[0])
    weights = folder / "model.safetensors"
    weights.write_bytes(spoil(weights.read_bytes()))
    with pytest.raises((CheckpointError, CheckpointChanged), match=rf"model\.safetensors.*{message}"):
        runner.load(load_task(spec(folder)))
    table = make_table()
    put(table, 0, PROMPT)
    assert not other.execute(plan((0, 0, 50)), table).bad.any()
    other.release()


def test_damaged_packed_files_have_the_plain_ones_read(
    runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If packed files are damaged the load reads the plain ones instead. Prompts that were computed from damaged weights meanwhile
    are withdrawn."""
    copy.deepcopy(saved[1]).to(torch.bfloat16).save_pretrained(tmp_path)
    table = make_table()
    put(table, 0, PROMPT)
    plain = load(runner, tmp_path, "bfloat16")
    wanted = plain.logits(plan((0, 0, 50)), table, every_token=True)
    plain.release()
    pack_checkpoint(tmp_path)
    path = tmp_path / "packed" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(SourceChoice, "wants_packed", lambda self, checkpoint: True)
    anew: list[int] = []
    begin_anew = WeightGate.begin_anew
    monkeypatch.setattr(WeightGate, "begin_anew", lambda gate: (anew.append(1), begin_anew(gate)))
    task = load_task(spec(tmp_path, dtype="bfloat16"))
    task.begun = lambda hosted, gate: None
    model = runner.load(task)
    assert isinstance(model, CpuModel)
    assert np.array_equal(model.logits(plan((0, 0, 50)), table, every_token=True), wanted)
    assert re.fullmatch(
        r"read its plain files: the packed ones are damaged \(packed/model.safetensors: tensor \S+: bytes \d+ to \d+ "
        r"don't match their checksum\)",
        task.read_as,
    )
    assert "reading its plain files" in caplog.text
    assert anew == [1]
    model.release()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="don't match their checksum"):
        runner.load(load_task(spec(tmp_path, dtype="bfloat16")))


def test_packed_weights_serve_and_damaged_ones_fail_alone(runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path) -> None:
    copy.deepcopy(saved[1]).to(torch.bfloat16).save_pretrained(tmp_path)
    table = make_table()
    put(table, 0, PROMPT)
    answers = []
    for dtype in ("bfloat16", "float32"):
        plain = load(runner, tmp_path, dtype)
        answers.append(plain.logits(plan((0, 0, 50)), table, every_token=True))
        plain.release()
    pack_checkpoint(tmp_path)
    task = load_task(spec(tmp_path, dtype="bfloat16"))
    runner.load(task).release()
    assert task.read_as == "read its plain files: it is too small for packed ones to matter"
    (tmp_path / "model.safetensors").unlink()
    task = load_task(spec(tmp_path, dtype="bfloat16"))
    runner.load(task).release()
    assert task.read_as == "read its packed files: there are no plain ones"
    for dtype, wanted in zip(("bfloat16", "float32"), answers, strict=True):
        packed = load(runner, tmp_path, dtype)
        assert np.array_equal(packed.logits(plan((0, 0, 50)), table, every_token=True), wanted)
        packed.release()
    other = load(runner, saved[0])
    path = tmp_path / "packed" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"packed/model\.safetensors: tensor model\..*: bytes \d+ to \d+ don't match"):
        runner.load(load_task(spec(tmp_path)))
    assert not other.execute(plan((0, 0, 50)), table).bad.any()
    other.release()


def test_a_missing_shard_names_file_and_tensor(runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path) -> None:
    saved[1].save_pretrained(tmp_path, max_shard_size="40KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointChanged, match=rf"{gone.name} is missing \(it holds tensor "):
        runner.load(load_task(spec(tmp_path)))


def test_too_few_chunks_are_a_memory_error(runner: TorchRunner, folder: Path) -> None:
    with pytest.raises(MemoryError, match="2 chunks were granted"):
        runner.load(load_task(spec(folder, weights_chunks=2)))


def test_cancel(runner: TorchRunner, folder: Path) -> None:
    with pytest.raises(LoadCancelled):
        runner.load(load_task(spec(folder), cancelled=lambda: True))


def test_a_load_beside_steps(runner: TorchRunner, saved: tuple[Path, Any], folder: Path) -> None:
    """Loading and releasing a model in another thread changes nothing for a model that is stepping."""
    model = load(runner, saved[0])
    table = make_table()
    put(table, 0, PROMPT)
    wanted = model.logits(plan((0, 0, 50)), table)
    errors: list[BaseException] = []

    def loads() -> None:
        try:
            for _ in range(5):
                load(runner, folder, "bfloat16").release()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=loads)
    thread.start()
    while thread.is_alive():
        assert np.array_equal(model.logits(plan((0, 0, 50)), table), wanted)
    thread.join()
    assert not errors
    model.release()


def test_changed_files_never_touch_the_running_copy(runner: TorchRunner, folder: Path) -> None:
    model = load(runner, folder)
    table = make_table()
    put(table, 0, PROMPT)
    before = model.logits(plan((0, 0, 50)), table)
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    os.unlink(weights)
    (folder / "config.json").write_text(json.dumps({}))
    assert np.array_equal(model.logits(plan((0, 0, 50)), table), before)
    model.release()
