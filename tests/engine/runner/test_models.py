"""Tests of what a loaded model computes: in each dtype, in batches, and with several models in one arena."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cpu.backend import SINGLE_THREAD_WEIGHTS_BYTES, threads_for
from engine.cpu.model import CpuModel
from engine.loading.runner import TorchRunner
from loader.errors import CheckpointError
from loader.formats.int8 import INT8
from loader.formats.plain import PLAIN
from loader.formats.stored_int8 import STORED_INT8
from loader.models.catalog import scan_one
from loader.shapes import kv_layout
from loader.sizes import layout
from tests.engine.model_bench import (
    BLOCK_TOKENS,
    CASES,
    CHUNK_BYTES,
    NUM_CHUNKS,
    load,
    load_task,
    make_checkpoint,
    make_table,
    plan,
    put,
)
from tests.engine.runner.specs import PROMPT, spec
from tests.loader.compressed import compress


def test_what_a_model_says_of_itself(runner: TorchRunner, saved: tuple[Path, Any], folder: Path) -> None:
    progress: list[tuple[int, int]] = []
    checkpoint = scan_one(folder)
    assert checkpoint.shape is not None
    model = runner.load(load_task(spec(folder), lambda done, total: progress.append((done, total))))
    assert model.weights_bytes == checkpoint.weights_bytes["float32"]
    assert model.vocab_size == 211
    (group,) = model.kv_groups
    assert (group.kind, group.block_tokens, group.layers) == ("full", BLOCK_TOKENS, (0, 1, 2))
    assert group.block_bytes == kv_layout.block_bytes(checkpoint.shape, "float32", BLOCK_TOKENS)
    assert progress[-1][0] == progress[-1][1] == sum(p.numel() * 4 for p in saved[1].parameters())
    model.release()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_int8_weights_are_those_that_a_load_rounds(
    runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path, dtype: str
) -> None:
    """A checkpoint that holds int8 matrices gives bit for bit the logits of the plain one rounded at its load; with one matrix of
    each layer plain, those of neither; with bfloat16 scales nearly the same."""
    table = make_table()
    put(table, 0, PROMPT)
    logits = {}
    for name, source, quantize in (
        ("rounded", saved[0], "int8"),
        ("stored", compress(saved[0], tmp_path / "stored"), STORED_INT8.name),
        ("mixed", compress(saved[0], tmp_path / "mixed", plain="down_proj"), STORED_INT8.name),
        ("coarse", compress(saved[0], tmp_path / "coarse", torch.bfloat16), STORED_INT8.name),
        ("plain", saved[0], ""),
    ):
        model = runner.load(load_task(spec(source, dtype=dtype, quantize=quantize)))
        found = [model.logits(plan((0, 0, 49)), table, every_token=True), model.logits(plan((0, 49, 1)), table)]
        logits[name] = np.concatenate(found)
        model.release()
    np.testing.assert_array_equal(logits["stored"], logits["rounded"])
    for other in ("rounded", "plain"):
        assert not np.array_equal(logits["mixed"], logits[other])
        assert np.abs(logits["mixed"] - logits[other]).mean() < 0.1
    assert np.abs(logits["coarse"] - logits["stored"]).mean() < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["qwen3-moe", "deepseek-v3"])
def test_experts_are_rounded_as_a_checkpoint_stores_them(runner: TorchRunner, tmp_path: Path, case: str, dtype: str) -> None:
    """For few rows an expert and for many."""
    make_checkpoint(tmp_path / "plain", **CASES[case] | {"hidden_size": 64, "num_hidden_layers": 2})
    compress(tmp_path / "plain", tmp_path / "stored")
    logits, sizes, table = [], [], make_table()
    put(table, 0, PROMPT)
    for name, quantize in (("plain", "int8"), ("stored", STORED_INT8.name), ("plain", "")):
        model = load(runner, tmp_path / name, dtype, quantize=quantize)
        found = [model.logits(plan((0, 0, 49)), table, every_token=True), model.logits(plan((0, 49, 1)), table)]
        logits.append(np.concatenate(found))
        sizes.append(model.weights_bytes)
        model.release()
    np.testing.assert_array_equal(logits[0], logits[1])
    assert sizes[0] == sizes[1] < sizes[2]
    assert 0 < np.abs(logits[0] - logits[2]).mean() < 0.1 * logits[2].std()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_int8_scale_that_is_no_number_fails_the_load_by_name(
    runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path, value: float
) -> None:
    """Every answer of such a model would be NaN. The engine serves on."""
    compress(saved[0], tmp_path)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    file = next(file for file in tmp_path.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    damaged = tensors[name].clone()
    damaged[-1, -1] = value
    save_file(tensors | {name: damaged}, file)
    task = load_task(spec(tmp_path, quantize=STORED_INT8.name))
    with pytest.raises(CheckpointError, match=f"{file.name}: tensor {name}: holds NaN or an infinity: no scale"):
        runner.load(task)
    save_file(tensors, file)
    runner.load(task).release()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_int8_weights_are_the_rounded_ones(
    runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path, dtype: str, tolerance: float
) -> None:
    """int8 weights give the logits of a checkpoint with the rounded values, for prompts and single tokens, with one row and
    several."""
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
    assert sizes == [layout.weights_bytes(checkpoint.shape, dtype, one) for one in (PLAIN, INT8)]
    assert sizes[1] < sizes[0]
    assert np.abs(logits[0] - logits[1]).max() < tolerance * np.abs(logits[0]).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_transformers(runner: TorchRunner, saved: tuple[Path, Any], dtype: str) -> None:
    """Logits in half precision are near those of transformers, within a loose tolerance because rounding happens in other places.
    Logits of mixed, padded and single steps are also compared with each other."""
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


def test_nan_weights_make_bad_rows_not_errors(runner: TorchRunner, saved: tuple[Path, Any], folder: Path) -> None:
    """With NaN in one token's embedding, rows that contain the token are bad and other rows are not."""
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
        assert generate([slot], [together[slot][:27]], 40) == [together[slot]]  # resubmitted after a crash, with the output so far
    assert temperature == 0.0 or len({tuple(text[12:]) for text in together}) == 8
    model.release()


def test_two_models_share_the_arena(runner: TorchRunner, saved: tuple[Path, Any], tmp_path: Path) -> None:
    """Two models with different block sizes over the same bytes do not disturb each other: each uses only blocks inside its own
    chunks."""
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


def test_small_models_use_one_thread() -> None:
    assert threads_for(SINGLE_THREAD_WEIGHTS_BYTES - 1, 4) == 1
    assert threads_for(SINGLE_THREAD_WEIGHTS_BYTES, 4) == 4
    assert threads_for(1 << 40, 7) == 7


def test_runner_fits_its_contract(runner: TorchRunner) -> None:
    from engine.contracts.loads import Runner
    from engine.contracts.steps import HostedModel

    def accepts(made: Runner) -> None: ...

    accepts(runner)
    assert set(HostedModel.__annotations__) <= {"name", "kv_groups", "weights_bytes", "vocab_size"}
    assert hasattr(CpuModel, "execute")
