"""A model's steps call the kernels that loader/configs/kernel_needs.py says, and no others. Sets that it does not name are compiled
once a step has asked for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cpu import backend as cpu_backend
from engine.cpu import model as cpu_model
from engine.cpu.backend import CpuBackend
from engine.cpu.model import CpuModel
from engine.cpu.ops import CpuOps
from engine.loading.runner import TorchRunner
from engine.protocol import SamplingParams
from loader.architectures.decoder import Decoder
from loader.architectures.registry import ARCHITECTURES
from loader.configs.kernel_needs import needed_kernels
from loader.configs.kernel_sets import (
    ADAPTERS,
    ATTENTION,
    EXPERTS,
    GELU,
    GREEDY,
    INT8_EXPERTS,
    LAYER_NORM,
    PLAIN,
    RANKS,
    SAMPLING,
    KernelSet,
)
from loader.formats.registry import FORMATS
from loader.models.catalog import scan_one
from loader.shapes.model_shape import LAST_TOKEN, EagleShape
from scheduler.batch.plan import write_sampling
from tests.engine.model_bench import CASES, MAX_LEN, load, make_checkpoint, make_memory, make_runner, make_table, plan, put
from tests.kernel_cache import CACHE_DIR
from tests.loader import compressed as int_quantized
from tests.loader import fp8, int4

PROMPT = np.random.default_rng(13).integers(2, 211, 40).tolist()
MORE_CASES: dict[str, dict[str, Any]] = {
    "phi": {"kind": "phi", "layer_norm_eps": 1e-5},
    "cohere": {"kind": "cohere", "pad_token_id": 0},
    "granite": {"kind": "granite"},
    "olmo3": {"kind": "olmo3", "sliding_window": 7, "pad_token_id": 0},
    "seed-oss": {"kind": "seed_oss"},
    "glm": {"kind": "glm", "pad_token_id": 0},
}
SETTINGS = (
    SamplingParams(9, temperature=0.0),
    SamplingParams(9, temperature=0.8, logprobs=2),
    SamplingParams(9, temperature=0.0, min_tokens=3),
    SamplingParams(9, temperature=0.8, presence_penalty=0.5),
)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_hidden_layers": 2, "head_dim": 8}
PLAIN_FORMAT = FORMATS[""]
WITHOUT_CHECKPOINTS = {"gemma4_unified"}  # of transformers, for these tests: as gemma4


def without_kernels(runner: TorchRunner) -> CpuOps:
    """Has the runner's models computed by operations that are lent no kernel, and returns these."""
    runner._kernels.result()
    backend = runner.backend
    assert isinstance(backend, CpuBackend)
    backend._ops = CpuOps(CACHE_DIR, deferred=True)
    return backend._ops


def run(model: CpuModel) -> None:
    """Computes a prompt, and samples in each way."""
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    model.execute(plan((0, 0, len(PROMPT) - 1)), table)
    put(table, 1, PROMPT[:4])  # a chunk that is short
    model.execute(plan((1, 0, 4)), table)
    for params in SETTINGS:
        write_sampling(table, 0, params, len(PROMPT), MAX_LEN)
        model.execute(plan((0, len(PROMPT) - 1, 1)), table)


def check(folder: Path, dtype: str, **how: Any) -> set[KernelSet]:
    """Asserts that a model asks for just the kernels that it is said to need, and returns these."""
    runner = make_runner(make_memory())
    ops = without_kernels(runner)
    if (held_in := FORMATS[how.get("quantize", "")]).waits_for_kernels:
        ops.give_up(KernelSet(dtype, held_in.kernels))
    model = load(runner, folder, dtype, **how)
    run(model)
    needed = needed_kernels(model.shape, dtype, FORMATS[model._quantize])
    assert len(set(needed)) == len(needed)
    assert ops.asked == set(needed)
    model.release()
    return ops.asked


@pytest.mark.parametrize("case", [*CASES, *MORE_CASES])
def test_each_family_asks_for_what_it_is_said_to_need(case: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **(CASES | MORE_CASES)[case])
    asked = check(tmp_path, "bfloat16")
    assert KernelSet("bfloat16", PLAIN) in asked
    assert {KernelSet(dtype, SAMPLING) for dtype in ("float32", "bfloat16")} < asked


def test_no_family_is_left_out() -> None:
    tested = {case["kind"] for case in (CASES | MORE_CASES).values()}
    decoders = {one.model_type.removesuffix("_text") for one in ARCHITECTURES.values() if isinstance(one, Decoder)}
    assert decoders - tested == WITHOUT_CHECKPOINTS


def test_a_llama_needs_no_kernels_of_others(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["llama"])
    asked = check(tmp_path, "float32")
    assert asked == {KernelSet("float32", name) for name in (PLAIN, ATTENTION, GREEDY, SAMPLING)}


@pytest.mark.parametrize(
    ("case", "quantize", "names"),
    [
        ("qwen2", partial(fp8.quantize, kind=fp8.KINDS["fine-grained"]), {"fp8"}),
        ("qwen3-moe", partial(fp8.quantize, kind=fp8.KINDS["fine-grained"]), {"fp8", EXPERTS}),
        ("qwen3-moe", int_quantized.quantize, {"int8", INT8_EXPERTS, EXPERTS}),
        ("phi", partial(int4.quantize, config=int4.compressed()), {"int4", LAYER_NORM, GELU}),
    ],
)
def test_a_format_of_weights(case: str, quantize: Callable[[Path, Path], Any], names: set[str], tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", **(CASES | MORE_CASES)[case] | SMALL)
    quantize(tmp_path / "plain", tmp_path / "small")
    asked = check(tmp_path / "small", "bfloat16")
    assert names < {one.name for one in asked}


def test_int8(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["llama"])
    assert KernelSet("bfloat16", "int8") in check(tmp_path, "bfloat16", quantize="int8")


def test_packed_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["llama"])
    assert KernelSet("bfloat16", "packed") in check(tmp_path, "bfloat16", quantize="packed")


def test_a_head_that_drafts_adds_what_its_layer_calls(tmp_path: Path) -> None:
    """Here a head whose layer is Llama's, for a model with latent attention."""
    make_checkpoint(tmp_path, **CASES["deepseek-v2"])
    shape = scan_one(tmp_path).shape
    assert shape is not None
    own = {one.name for one in needed_kernels(shape, "bfloat16", PLAIN_FORMAT)}
    assert ATTENTION not in own
    make_checkpoint(tmp_path / "head", **CASES["llama"])
    layer = scan_one(tmp_path / "head").shape
    assert layer is not None
    eagle = EagleShape(layer, "llama", "", "", 211, False, False, False, False, False)
    with_head = replace(shape, eagle=eagle)
    assert {one.name for one in needed_kernels(with_head, "bfloat16", PLAIN_FORMAT)} == {*own, ATTENTION}


def test_what_has_no_kernels_needs_none(tmp_path: Path) -> None:
    """Encoders are computed by torch, and float16 is, too, up to the sampling of edited rows. A decoder that makes vectors samples
    nothing."""
    make_checkpoint(tmp_path, **CASES["llama"])
    shape = scan_one(tmp_path).shape
    assert shape is not None
    assert check(tmp_path, "float16") == {KernelSet("float32", name) for name in (GREEDY, SAMPLING)}
    assert needed_kernels(replace(shape, architecture="BertModel", pooling="mean"), "float32", PLAIN_FORMAT) == []
    vectors = needed_kernels(replace(shape, pooling=LAST_TOKEN), "bfloat16", PLAIN_FORMAT)
    assert vectors == [KernelSet("bfloat16", PLAIN), KernelSet("bfloat16", ATTENTION)]


def test_a_model_that_is_split_and_one_with_adapters_need_more(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["llama"])
    shape = scan_one(tmp_path).shape
    assert shape is not None
    needed = needed_kernels(shape, "bfloat16", PLAIN_FORMAT, is_split=True, has_adapters=True)
    assert {RANKS, ADAPTERS} < {one.name for one in needed if one.dtype == "bfloat16"}


def test_what_a_step_asks_for_though_no_model_needs_it_is_compiled_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that it was not known. Steps that were recorded without it are recorded again."""
    make_checkpoint(tmp_path, **CASES["gemma2"])
    forgotten = KernelSet("float32", GELU)
    monkeypatch.setattr(cpu_model, "needed_kernels", lambda *args: [])
    monkeypatch.setattr(cpu_backend, "needed_kernels", lambda *args: [])
    runner = make_runner(make_memory(), kernels=[KernelSet("float32", name) for name in (PLAIN, ATTENTION, GREEDY, SAMPLING)])
    runner._kernels.result()
    assert isinstance(runner.backend, CpuBackend)
    builds, was_asked, may_compile = runner.backend._builds, [], threading.Event()
    assert builds is not None
    need = builds.need

    def need_later(sets: list[KernelSet]) -> None:
        if sets:
            was_asked.append(sets)
            may_compile.wait(60)
            need(sets)

    monkeypatch.setattr(builds, "need", need_later)
    ops = runner.backend._ops
    with caplog.at_level(logging.WARNING, "engine"):
        model = load(runner, tmp_path)
        run(model)
    assert was_asked == [[forgotten]]
    assert "kernels for GELU in float32 were not compiled ahead" in caplog.text
    assert not model._steps.decodes
    may_compile.set()
    deadline_s = time.monotonic() + 60
    while ops.num_late == 0 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    run(model)
    assert model._steps.decodes
    model.release()
