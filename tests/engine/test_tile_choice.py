"""Tiles of attention are measured where the table has none that were: once for each shape, in idle time, for the next engine. The
GPU's times are made up here.
"""

from __future__ import annotations

import fcntl
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from engine.cuda import tile_choice, tile_trials
from engine.cuda.kernel_builds import CudaKernelBuilds
from engine.cuda.kernels import linear_choice, tiles
from engine.cuda.kernels.linear_choice import MEASURE_TRIES
from engine.cuda.kernels.tiles import DECODE_KERNEL, EXTEND_KERNEL, HOPPER, Tile
from engine.cuda.tile_choice import ModelTiles, TileChoice, choice_file
from engine.cuda.tile_trials import Trial, trials_of
from tests.engine.kernels.key_cases import BLOCK_TOKENS, CASES, KeyCase

CASE: KeyCase = CASES[0]  # 4 heads of 64 in bfloat16
ADA = 89


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "capability", lambda: ADA)
    yield
    tiles.use([])


class Gpu:
    """An engine on a GPU. seconds: what a tile takes; 1.0 for others. is_slow: the host cannot launch ahead of the device.
    compiles: whether compilers succeed."""

    def __init__(self, folder: Path, seconds: Mapping[Tile, float]) -> None:
        self.seconds, self.is_slow, self.compiles = seconds, False, True
        self.measured: list[tuple[Trial, tuple[Tile, ...]]] = []
        self.num_compiled = 0
        self.choice = TileChoice(choice_file(folder, "a GPU 8.9"), BLOCK_TOKENS, self._compile, self._measure)
        self.choice.begin()

    def _compile(self, spec: Any, shape: Any) -> bool:
        self.num_compiled += 1
        return self.compiles

    def _measure(self, trial: Trial, compared: Sequence[Tile]) -> dict[Tile, list[float]] | None:
        self.measured.append((trial, tuple(compared)))
        if self.is_slow:
            return None
        return {tile: [self.seconds.get(tile, 1.0) * (1 + at / 100) for at in range(7)] for tile in compared}

    def model(self, case: KeyCase = CASE) -> ModelTiles:
        of_model = self.choice.of_model(case.spec, case.shape)
        join("tiles")
        return of_model

    def measure_all(self, of_model: ModelTiles) -> None:
        while of_model.num_open:
            of_model.measure_next()
        join("kernels")


def join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10)


def entry(kernel: str) -> tiles.Entry:
    return tiles.entry_of(kernel, CASE.shape.head_dim, 2, False)


def test_the_fastest_is_used_by_the_next_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    own, *others = (entry(EXTEND_KERNEL).tile, *entry(EXTEND_KERNEL).others)
    fastest = others[-1]
    first = Gpu(tmp_path, dict.fromkeys(others, 2.0) | {fastest: 0.5})
    first.measure_all(first.model())
    assert tiles.extend_tile(CASE.shape.head_dim, 2) == own, "nothing changes in the engine that measured"
    assert f"takes 0.50 of the time of {own.tokens} x {own.positions}" in caplog.text
    compared = [pair for trial, pair in first.measured if trial.kernel == EXTEND_KERNEL]
    assert compared == [(own, other) for other in others], "each once, with the best so far"
    caplog.clear()
    second = Gpu(tmp_path, {})
    assert tiles.extend_tile(CASE.shape.head_dim, 2) == fastest
    assert tiles.decode_tile(CASE.shape.head_dim, 2) == entry(DECODE_KERNEL).tile
    assert tiles.step_tokens([CASE.shape.head_dim], 2, False) == fastest.tokens
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("tiles of attention: 2 were measured on this GPU before; other than the table's are: extend 64: ")
    again = second.model()
    assert (again.num_open, second.num_compiled) == (0, 0)


def test_a_shape_is_measured_once_for_all_models(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path, {entry(kernel).tile: 0.5 for kernel in (EXTEND_KERNEL, DECODE_KERNEL)})
    one, other = gpu.model(), gpu.model()
    assert one.num_open == other.num_open > 0
    assert gpu.num_compiled == 1
    gpu.measure_all(one)
    assert other.num_open == 0
    assert max(Counter(gpu.measured).values()) == 1


def test_one_comparison_at_a_time(tmp_path: Path) -> None:
    """The loop looks for requests after each."""
    gpu = Gpu(tmp_path, {})
    of_model = gpu.model()
    for num in range(1, 1 + of_model.num_open):
        of_model.measure_next()
        assert len(gpu.measured) == num
        assert len(gpu.measured[-1][1]) == 2


def test_what_is_not_apart_keeps_the_tables_tile(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path, {})
    of_model = gpu.model()
    num_open = of_model.num_open
    gpu.measure_all(of_model)  # all take the same time
    assert len(gpu.measured) == num_open * MEASURE_TRIES
    kept = json.loads(choice_file(tmp_path, "a GPU 8.9").read_text())["kept"]
    assert {(kernel, Tile(*sizes)) for kernel, *_, sizes in kept} == {
        (kernel, entry(kernel).tile) for kernel in (EXTEND_KERNEL, DECODE_KERNEL)
    }


def test_a_host_that_is_too_slow_decides_nothing_else(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path, {entry(EXTEND_KERNEL).others[0]: 0.1})
    gpu.is_slow = True
    gpu.measure_all(gpu.model())
    Gpu(tmp_path, {})
    assert tiles.extend_tile(CASE.shape.head_dim, 2) == entry(EXTEND_KERNEL).tile


def test_nothing_is_measured_before_it_is_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu(tmp_path, {})
    gpu.compiles = False
    of_model = gpu.model()
    assert of_model.num_open == 0
    of_model.measure_next()
    assert not gpu.measured
    assert "are not measured, since not all could be compiled" in caplog.text


def test_a_tile_without_room_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(tmp_path, {})

    def refuse(trial: Trial, compared: Sequence[Tile]) -> None:
        raise tile_choice.OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(gpu.choice, "_measure", refuse)
    gpu.measure_all(gpu.model())
    Gpu(tmp_path, {})
    assert tiles.in_use() == []


def test_what_was_measured_for_the_table_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "capability", lambda: HOPPER)
    case = next(case for case in CASES if case.name == "qwen3 norms at odd places")
    assert case.shape.head_dim == 128
    gpu = Gpu(tmp_path, {})
    assert gpu.model(case).num_open == 0
    assert gpu.num_compiled == 0
    gpu.measure_all(gpu.model(next(case for case in CASES if case.name == "gemma4 at odd places")))
    assert {trial.head_dim for trial, _ in gpu.measured if trial.kernel == EXTEND_KERNEL} == {512}


@pytest.mark.parametrize(
    "damaged", ["", "[[1, 2", "[5]", '{"kept": [["extend", 64]]}', '{"kept": [["extend", 64, 2, false, [7, 7, 7, 7]]]}', "{}"]
)
def test_a_file_that_holds_something_else_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str) -> None:
    path = choice_file(tmp_path, "a GPU 8.9")
    path.write_text(damaged)
    gpu = Gpu(tmp_path, {entry(EXTEND_KERNEL).others[0]: 0.5})
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"the tiles of attention are measured anew: {path}: ")
    assert tiles.in_use() == []
    gpu.measure_all(gpu.model())
    Gpu(tmp_path, {})
    assert tiles.extend_tile(CASE.shape.head_dim, 2) == entry(EXTEND_KERNEL).others[0]


def test_choices_are_of_one_kind_of_gpu_and_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = choice_file(tmp_path, "one 8.9")
    assert path == choice_file(tmp_path, "one 8.9")
    assert path != choice_file(tmp_path, "another 8.9")
    changed = tmp_path / "triton_extend.py"
    changed.write_text("other kernels")
    monkeypatch.setattr(tile_choice, "SOURCES", (*tile_choice.SOURCES[:-1], changed))
    assert path != choice_file(tmp_path, "one 8.9")


def test_choices_of_two_engines_are_kept_together(tmp_path: Path) -> None:
    """Each writes the file with what it has chosen itself."""
    one, other = Gpu(tmp_path, {}), Gpu(tmp_path, {})
    one.measure_all(one.model())
    fp8 = next(case for case in CASES if case.name == "qwen3 fp8")
    other.measure_all(other.model(fp8))
    kept = json.loads(choice_file(tmp_path, "a GPU 8.9").read_text())["kept"]
    assert {(kernel, dim, is_fp8) for kernel, dim, _, is_fp8, _ in kept} == {
        (kernel, dim, is_fp8) for kernel in (EXTEND_KERNEL, DECODE_KERNEL) for dim, is_fp8 in ((64, False), (128, True))
    }


def test_models_ask_for_what_their_layers_compute() -> None:
    cases = {case.name: case for case in CASES}

    def asked(name: str) -> set[tuple[str, int, bool]]:
        case = cases[name]
        return {(one.kernel, one.head_dim, one.is_fp8) for one in trials_of(case.spec, case.shape, BLOCK_TOKENS)}

    assert asked("gemma4 at odd places") == {(EXTEND_KERNEL, 512, False), (DECODE_KERNEL, 512, False), (DECODE_KERNEL, 256, False)}
    assert asked("qwen3 fp8") == {(EXTEND_KERNEL, 128, True), (DECODE_KERNEL, 128, True)}
    assert asked("deepseek v3 fp8") == set(), "latent attention has tiles of its own"
    assert asked("mixtral float32 at odd places") == set(), "float32 has no other tiles"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kernel", [EXTEND_KERNEL, DECODE_KERNEL])
def test_what_is_measured_is_attention_with_each_tile(monkeypatch: pytest.MonkeyPatch, kernel: str, fp8: bool) -> None:
    """Interpreted, at sizes of a few tokens. One that finds no memory is not measured."""
    monkeypatch.setattr(tile_trials, "PROMPT_TOKENS", 40)
    monkeypatch.setattr(tile_trials, "DECODE_ROWS", 2)
    monkeypatch.setattr(tile_trials, "DECODE_POSITIONS", 40)
    monkeypatch.setattr(linear_choice, "FLUSH_BYTES", 64)
    taken: list[Tile] = []
    own = tiles.extend_tile if kernel == EXTEND_KERNEL else tiles.decode_tile

    def note(*shape: Any) -> Tile:
        taken.append(own(*shape))
        return taken[-1]

    monkeypatch.setattr(tiles, "extend_tile" if kernel == EXTEND_KERNEL else "decode_tile", note)

    def times_s(calls: Mapping[Tile, Any], flush: torch.Tensor) -> dict[Tile, list[float]]:
        for call in calls.values():
            call()
        return {tile: [1.0] * 7 for tile in calls}

    monkeypatch.setattr(linear_choice, "times_s", times_s)
    trial = Trial(kernel, 2, 1, 64, "float16", "fp8" if fp8 else "float16", 16)
    measure = tile_choice.measured_on(torch.device("cpu"), 2)
    times = measure(trial, trial.tiles)
    assert times is not None
    assert tuple(times) == tuple(taken) == trial.tiles

    def refuse(calls: Any, flush: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(linear_choice, "times_s", refuse)
    assert measure(trial, trial.tiles) is None


def test_tiles_to_compare_are_compiled_by_one_process_without_the_loads_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    builds = CudaKernelBuilds(str(tmp_path), ADA, BLOCK_TOKENS, 2, lambda news: pytest.fail("loads do not wait for it"))
    few = CASE.shape
    with open(tmp_path / "compiling", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert builds.build_trials(CASE.spec, few)
    made = {path.stem for path in tmp_path.glob("*/*.cubin")}
    assert {"_extend_kernel", "_piece_kernel", "_combine_kernel", "_split_kernel"} <= made
    num_tiles = sum(len(trial.tiles) for trial in trials_of(CASE.spec, few, BLOCK_TOKENS))
    assert len([path for path in tmp_path.glob("*/*.cubin") if path.stem in ("_extend_kernel", "_piece_kernel")]) == num_tiles
    broken = msgspec.structs.replace(CASE.spec, dtype="no dtype")
    assert not builds.build_trials(broken, few)
    assert "the tiles to compare are not all compiled: a compiler ended with 1" in caplog.text
