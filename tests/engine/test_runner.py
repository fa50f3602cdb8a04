"""TorchRunner: loads that succeed, fail, are cancelled or run beside a step; corrupt files; dtypes; sampling end to end."""

from __future__ import annotations

import copy
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import hosted_model
from engine.contracts import LoadCancelled
from engine.device import SINGLE_THREAD_WEIGHTS_BYTES, num_cores, threads_for
from engine.hosted_model import TorchModel
from engine.loading.weight_gate import WeightGate
from engine.model_runner import TorchRunner
from engine.protocol import LoadModel
from loader import sizing
from loader.catalog import scan_one
from loader.errors import CheckpointChanged, CheckpointError
from loader.source_choice import SourceChoice
from tests.engine.model_bench import (
    BLOCK_TOKENS,
    CHUNK_BYTES,
    MAX_LEN,
    NUM_CHUNKS,
    load,
    load_task,
    make_checkpoint,
    make_memory,
    make_runner,
    make_table,
    plan,
    put,
)
from tests.loader.packed_checkpoints import pack_checkpoint

PROMPT = np.random.default_rng(11).integers(0, 211, 50).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_checkpoint(folder, tie_word_embeddings=False)


@pytest.fixture
def folder(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchRunner]:
    arena = make_memory()
    yield make_runner(arena)
    arena.close()


def spec(folder: Path, **changes: Any) -> LoadModel:
    fields = {
        "placement_id": 1,
        "model": "tiny",
        "path": str(folder),
        "dtype": "float32",
        "fingerprint": "",
        "weights_chunks": 1 << 10,
        "kv_reserved_chunks": 0,
        "lease_chunks": 0,
        "max_model_len": MAX_LEN,
        "max_sequences": 8,
        "eos_token_ids": [1],
    }
    return LoadModel(**(fields | changes))


def test_what_a_model_says_of_itself(runner: TorchRunner, saved: tuple[Path, Any], folder: Path) -> None:
    progress: list[tuple[int, int]] = []
    checkpoint = scan_one(folder)
    assert checkpoint.shape is not None
    model = runner.load(load_task(spec(folder), lambda done, total: progress.append((done, total))))
    assert model.weights_bytes == checkpoint.weights_bytes["float32"]
    assert model.vocab_size == 211
    (group,) = model.kv_groups
    assert (group.kind, group.block_tokens, group.layers) == ("full", BLOCK_TOKENS, (0, 1, 2))
    assert group.block_bytes == sizing.block_bytes(checkpoint.shape, "float32", BLOCK_TOKENS)
    assert progress[-1][0] == progress[-1][1] == sum(p.numel() * 4 for p in saved[1].parameters())
    model.release()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_int8_weights_are_the_rounded_ones(
    runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path, dtype: str, tolerance: float
) -> None:
    """Against a checkpoint of the values that int8 stands for: prompts and single tokens, one row and many."""
    rounded = copy.deepcopy(saved[1])
    for name, parameter in rounded.named_parameters():
        if name.endswith("_proj.weight"):
            step = parameter.detach().abs().amax(1, keepdim=True) / 127
            parameter.data = (parameter.detach() / step).round() * step
    rounded.save_pretrained(tmp_path)
    table = make_table()
    for slot in range(6):
        put(table, slot, PROMPT)
    logits, sizes = [], []
    for source, quantize in ((tmp_path, ""), (saved[0], "int8")):
        model = runner.load(load_task(spec(source, dtype=dtype, quantize=quantize)))
        found = [model.logits(plan((0, 0, 49)), table, every_token=True), model.logits(plan((0, 49, 1)), table)]
        found += [model.logits(plan(*((slot, 0, 4) for slot in range(1, 6))), table, every_token=True)]
        logits.append(np.concatenate(found))
        sizes.append(model.weights_bytes)
        model.release()
    checkpoint = scan_one(saved[0])
    assert checkpoint.shape is not None
    assert sizes == [sizing.weights_bytes(checkpoint.shape, dtype, quantize) for quantize in ("", "int8")]
    assert sizes[1] < sizes[0]
    assert np.abs(logits[0] - logits[1]).max() < tolerance * np.abs(logits[0]).max()


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_transformers(runner: TorchRunner, saved: tuple[Path, Any], dtype: str) -> None:
    """Loose: rounding differs from place to place. Mixed, padded and single steps are held to each other as well."""
    model = load(runner, saved[0], dtype)
    table = make_table()
    put(table, 0, PROMPT)
    whole = model.logits(plan((0, 0, 50)), table, every_token=True)
    with torch.inference_mode():
        half = copy.deepcopy(saved[1]).to(getattr(torch, dtype))
        wanted = half(torch.tensor([PROMPT])).logits[0].float().numpy()
    spread = wanted.std()
    assert np.abs(whole - wanted).mean() < 0.03 * spread
    put(table, 1, PROMPT)
    model.logits(plan((1, 0, 30)), table)
    mixed = model.logits(plan((0, 49, 1), (1, 30, 20)), table, every_token=True)
    assert np.abs(mixed[0] - whole[49]).mean() < 0.03 * spread
    assert np.abs(mixed[1:] - whole[30:]).mean() < 0.03 * spread
    model.release()


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
    """While prompts may run behind the weights: what they have seen of the damaged ones is void."""
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
    assert isinstance(model, TorchModel)
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
    """Loading and releasing in another thread changes nothing of a model that is stepping."""
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


def test_nan_weights_make_bad_rows_not_errors(runner: TorchRunner, saved: tuple[Path, Any], folder: Path) -> None:
    """NaN in one token's embedding: rows that contain it are bad, their neighbours are not."""
    model = load(runner, folder)
    model._weights.tensor(0, (211, 48), torch.float32)[77] = torch.nan
    table = make_table()
    put(table, 0, [3, 4, 77, 5])
    put(table, 1, [3, 4, 78, 5])
    put(table, 2, [9] * 30)
    result = model.execute(plan((0, 0, 4), (1, 0, 4), (2, 0, 30)), table)
    assert result.bad.tolist() == [True, False, False]
    model.release()


def test_a_step_in_which_nothing_samples(runner: TorchRunner, saved: tuple[Path, Any]) -> None:
    for dtype in ("float32", "bfloat16"):
        model = load(runner, saved[0], dtype)
        table = make_table()
        put(table, 0, PROMPT)
        result = model.execute(plan((0, 0, 20), samples=(False,)), table)
        assert len(result.ids) == len(result.bad) == 0
        model.release()


def test_logits_in_parts_are_the_same(runner: TorchRunner, saved: tuple[Path, Any]) -> None:
    model = load(runner, saved[0])
    table = make_table()
    for slot in range(7):
        put(table, slot, PROMPT[slot : slot + 20])
    table.temperature[::2] = 1.0
    table.seed[:] = np.arange(8)
    step = plan(*((slot, 0, 20) for slot in range(7)))
    whole = model.execute(step, table).ids.tolist()
    model._logits_rows = 3
    assert model.execute(step, table).ids.tolist() == whole
    model.release()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_same_text_alone_and_in_a_full_batch_and_when_submitted_again(
    runner: TorchRunner, saved: tuple[Path, Any], temperature: float
) -> None:
    model = load(runner, saved[0])

    def generate(slots: list[int], given: list[list[int]], until: int) -> list[list[int]]:
        table = make_table()
        table.temperature[:] = temperature
        tokens = [list(t) for t in given]
        computed = [0] * len(slots)
        for slot in range(8):
            table.seed[slot] = 1234 + 7 * slot
        while len(tokens[0]) < until:
            for slot, text in zip(slots, tokens, strict=True):
                put(table, slot, text)
            rows = [(slot, done, len(text) - done) for slot, done, text in zip(slots, computed, tokens, strict=True)]
            ids = model.execute(plan(*rows), table).ids.tolist()
            computed = [len(text) for text in tokens]
            for text, token in zip(tokens, ids, strict=True):
                text.append(token)
        return tokens

    prompts = [PROMPT[slot : slot + 12] for slot in range(8)]
    together = generate(list(range(8)), prompts, 40)
    for slot in (0, 3, 7):
        assert generate([slot], [prompts[slot]], 40) == [together[slot]]
        assert generate([slot], [together[slot][:27]], 40) == [together[slot]]  # after a crash: prompt and output so far
    assert temperature == 0.0 or len({tuple(text[12:]) for text in together}) == 8
    model.release()


def test_two_models_share_the_arena(runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path) -> None:
    """Different block sizes over the same bytes: each keeps to blocks inside its own chunks, and neither disturbs the other."""
    made = make_checkpoint(tmp_path, kind="qwen3", num_hidden_layers=2, tie_word_embeddings=True)
    first, second = load(runner, saved[0]), load(runner, tmp_path)
    table_one, table_two = make_table(), make_table()
    half = NUM_CHUNKS // 2 * CHUNK_BYTES
    table_one.block_tables[0][0, :20] = np.arange(20)
    table_two.block_tables[0][0, :20] = -(-half // second.kv_groups[0].block_bytes) + np.arange(20)
    for table in (table_one, table_two):
        put(table, 0, PROMPT)
    with torch.inference_mode():
        wanted = [m(torch.tensor([PROMPT])).logits[0].numpy() for m in (saved[1], made)]
    for at in range(0, 50, 10):
        step = plan((0, at, 10))
        for model, table, logits in ((first, table_one, wanted[0]), (second, table_two, wanted[1])):
            assert np.abs(model.logits(step, table, every_token=True) - logits[at : at + 10]).max() < 2e-4
    first.release()
    second.release()


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


def test_small_models_use_one_thread() -> None:
    assert threads_for(SINGLE_THREAD_WEIGHTS_BYTES - 1, 4) == 1
    assert threads_for(SINGLE_THREAD_WEIGHTS_BYTES, 4) == 4
    assert threads_for(1 << 40, 0) == num_cores()


def test_runner_fits_its_contract(runner: TorchRunner) -> None:
    from engine.contracts import HostedModel, Runner

    def accepts(made: Runner) -> None: ...

    accepts(runner)
    assert set(HostedModel.__annotations__) <= {"name", "kv_groups", "weights_bytes", "vocab_size"}
    assert hasattr(hosted_model.TorchModel, "execute")
