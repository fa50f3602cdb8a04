"""Tiles of attention are measured where the table has none that were: once for each shape, in idle time, for the next engine. The
GPU's times are made up here.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from engine.cuda import tile_choice, tile_trials
from engine.cuda.compile_process import CompileJob
from engine.cuda.kernel_builds import CudaKernelBuilds
from engine.cuda.kernels import linear_choice, tiles, triton_decode
from engine.cuda.kernels.linear_choice import MEASURE_TRIES
from engine.cuda.kernels.tiles import DECODE_KERNEL, EXTEND_KERNEL, HOPPER, Tile
from engine.cuda.tile_choice import JOINED_TURNS, ModelTiles, TileChoice, choice_file
from engine.cuda.tile_trials import Trial, trials_of
from tests.engine.kernels.key_cases import BLOCK_TOKENS, CASES, KeyCase
from tests.engine.not_interpreted import environment

CASE: KeyCase = CASES[0]  # 4 heads of 64 in bfloat16
ADA = 89
KEPT = '{"kept": [%s], "excluded": []}'
ROOT = Path(__file__).parents[2]
OF_DECODE_STEPS = {"_piece_kernel", "_combine_kernel", "_in_order_kernel", "_split_kernel"}
# prints for each kernel that a process would compile to compare tiles its name and the fields of its tile
LAUNCHES = """
import json, sys
import msgspec
from engine.cuda import compile_process
from engine.cuda.launches import recorded
job = msgspec.json.decode(sys.stdin.buffer.read(), type=compile_process.CompileJob)
with recorded(job.capability) as launches:
    compile_process.launch_trials(job)
for launch in launches.values():
    sizes = [launch.options.get(name, 0) for name in ("M", "N", "num_warps", "num_stages")]
    print(json.dumps([launch.name, *sizes, launch.options.get("JOINS", False)]))
"""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "capability", lambda: ADA)
    yield
    tiles.use([])


class Gpu:
    """An engine on a GPU. seconds: what a tile takes; 1.0 for others. wrong: tiles with other results than the table's, each with
    the turn in which that shows. is_slow: the host cannot launch ahead of the device. compiles: whether compilers succeed.
    has_room: whether there is memory to compare results."""

    def __init__(self, folder: Path, seconds: Mapping[Tile, float]) -> None:
        self.seconds, self.is_slow, self.compiles = seconds, False, True
        self.measured: list[tuple[Trial, tuple[Tile, ...]]] = []
        self.num_compiled = 0
        self.wrong: dict[Tile, int] = {}
        self.compared: Counter[tuple[Trial, Tile]] = Counter()
        self.has_room = True
        tries = (self._compile, self._measure, self._compare)
        self.choice = TileChoice(choice_file(folder, "a GPU 8.9"), BLOCK_TOKENS, *tries)
        self.choice.begin()

    def _compile(self, spec: Any, shape: Any) -> bool:
        self.num_compiled += 1
        return self.compiles

    def _compare(self, trial: Trial, tile: Tile) -> bool | None:
        if not self.has_room:
            return None
        self.compared[trial, tile] += 1
        return self.compared[trial, tile] != self.wrong.get(tile, 0)

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
    return entry_at(kernel, CASE.shape.head_dim)


def entry_at(kernel: str, head_dim: int) -> tiles.Entry:
    return tiles.entry_of(kernel, head_dim, 2, False)


def joining() -> Tile:
    """Returns the table's tile for decode steps in the form that joins pieces."""
    return entry(DECODE_KERNEL).tile._replace(joins=True)


def used_next(folder: Path) -> Tile:
    """Returns the tile with which the next engine computes decode steps."""
    Gpu(folder, {})
    return tiles.decode_tile(CASE.shape.head_dim, 2, group=CASE.shape.num_heads // CASE.shape.num_kv_heads)


def test_the_fastest_is_used_by_the_next_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    own, *others = (entry(EXTEND_KERNEL).tile, *entry(EXTEND_KERNEL).others)
    fastest = others[-1]
    assert len(entry(DECODE_KERNEL).others) == 5
    first = Gpu(tmp_path, dict.fromkeys(others, 2.0) | {fastest: 0.5})
    first.measure_all(first.model())
    assert tiles.extend_tile(CASE.shape.head_dim, 2) == own, "nothing changes in the engine that measured"
    assert f"takes 0.50 of the time of {own.tokens} x {own.positions}" in caplog.text
    measured = [pair for trial, pair in first.measured if trial.kernel == EXTEND_KERNEL]
    assert measured == [(own, other) for other in others], "each once, with the best so far"
    compared = [(tile, times) for (trial, tile), times in first.compared.items() if trial.kernel == EXTEND_KERNEL]
    assert compared == [(other, 1) for other in others], "and its results before that"
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


def test_without_memory_for_a_thread_what_was_chosen_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu(tmp_path, {entry(EXTEND_KERNEL).others[-1]: 0.5})
    of_model = gpu.model()

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    gpu.measure_all(of_model)
    assert not of_model.num_open
    assert "are not kept for the next engine" in caplog.text
    assert "can't start new thread" in caplog.text


def test_one_comparison_at_a_time(tmp_path: Path) -> None:
    """The loop looks for requests after each."""
    gpu = Gpu(tmp_path, {})
    of_model = gpu.model()
    for num in range(1, 1 + of_model.num_open):
        of_model.measure_next()
        assert len(gpu.measured) + gpu.compared.total() == num
    assert all(len(compared) == 2 for _, compared in gpu.measured)


def test_what_is_not_apart_keeps_the_tables_tile(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path, {})
    of_model = gpu.model()
    gpu.measure_all(of_model)  # all take the same time
    rivals = [tile for kernel in (EXTEND_KERNEL, DECODE_KERNEL) for tile in entry(kernel).others if not tile.joins]
    assert len(gpu.measured) == (len(rivals) + 1) * MEASURE_TRIES, "the one more joins the pieces of the best"
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
    gpu.measure_all(gpu.model(case))
    tile = entry_at(DECODE_KERNEL, 128).tile
    assert {pair for _, pair in gpu.measured} == {(tile, tile._replace(joins=True))}, "but its form that joins pieces is new"
    gpu.measured.clear()
    gpu.measure_all(gpu.model(next(case for case in CASES if case.name == "gemma4 at odd places")))
    assert {trial.head_dim for trial, _ in gpu.measured if trial.kernel == EXTEND_KERNEL} == {512}


@pytest.mark.parametrize(
    "damaged",
    ["", "[[1, 2", "[5]", KEPT % '["extend", 64]', KEPT % '["extend", 64, 2, false, 0, [7, 7, 7, 7]]', '{"kept": []}', "{}"],
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
    assert {(kernel, dim, is_fp8) for kernel, dim, _, is_fp8, *_ in kept} == {
        (kernel, dim, is_fp8) for kernel in (EXTEND_KERNEL, DECODE_KERNEL) for dim, is_fp8 in ((64, False), (128, True))
    }


@pytest.mark.parametrize(("seconds", "wins"), [(0.5, True), (1.0, False), (2.0, False)])
def test_a_form_that_joins_pieces_is_used_if_it_is_right_and_faster(
    tmp_path: Path, seconds: float, wins: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu(tmp_path, {joining(): seconds})
    gpu.measure_all(gpu.model())
    told = [(tile, times) for (_, tile), times in gpu.compared.items() if tile.joins]
    assert told == [(joining(), JOINED_TURNS)], "128 launches, before it is measured"
    assert used_next(tmp_path) == (joining() if wins else entry(DECODE_KERNEL).tile)
    assert not tiles.decode_tile(CASE.shape.head_dim, 2, group=16).joins, "another group has trials of its own"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_form_that_joins_pieces_is_tried_of_the_best_size(tmp_path: Path) -> None:
    best = entry(DECODE_KERNEL).others[1]
    gpu = Gpu(tmp_path, {best: 0.5, best._replace(joins=True): 0.25, joining(): 0.1})
    gpu.measure_all(gpu.model())
    assert {tile for _, tile in gpu.compared if tile.joins} == {best._replace(joins=True)}
    assert used_next(tmp_path) == best._replace(joins=True)


@pytest.mark.parametrize("turn", [1, JOINED_TURNS])
def test_a_tile_with_other_results_is_excluded_for_good(tmp_path: Path, turn: int, caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu(tmp_path, {joining(): 0.1})
    gpu.wrong = {joining(): turn}
    gpu.measure_all(gpu.model())
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith("decode steps with heads of 64 in groups of 2 in bfloat16: 1 x 64, 4 warps, 3 stages, joining pieces")
    assert warning.endswith(" has other results than 1 x 64, 4 warps, 3 stages on this GPU, and is excluded for good")
    assert not any(joining() in compared for _, compared in gpu.measured), "its time is of no interest"
    assert used_next(tmp_path) == entry(DECODE_KERNEL).tile
    path = choice_file(tmp_path, "a GPU 8.9")
    kept = json.loads(path.read_text())
    assert kept["excluded"] == [[DECODE_KERNEL, 64, 2, False, 2, list(joining())]]
    path.write_text(json.dumps(kept | {"kept": []}))  # what an engine leaves that ends before the last comparison
    caplog.clear()
    again = Gpu(tmp_path, {joining(): 0.1})
    (warning,) = [record.message for record in caplog.records]
    assert warning == "decode 64: 1 x 64, 4 warps, 3 stages, joining pieces had wrong results on this GPU before, and is not used"
    again.measure_all(again.model())
    assert not any(tile.joins for _, tile in again.compared)
    assert used_next(tmp_path) == entry(DECODE_KERNEL).tile


def test_what_one_engine_excludes_another_does_not_choose(tmp_path: Path) -> None:
    """A wrong order need not show on each of two GPUs, nor each time."""
    one, other = Gpu(tmp_path, {joining(): 0.5}), Gpu(tmp_path, {joining(): 0.5})
    one.wrong = {joining(): 3}
    one.measure_all(one.model())
    other.measure_all(other.model())
    assert used_next(tmp_path) == entry(DECODE_KERNEL).tile
    third = Gpu(tmp_path, {joining(): 0.5})
    third.measure_all(third.model())
    assert used_next(tmp_path) == entry(DECODE_KERNEL).tile


def test_a_tile_of_another_size_with_other_results_is_excluded(tmp_path: Path) -> None:
    wrong = entry(EXTEND_KERNEL).others[0]
    gpu = Gpu(tmp_path, {wrong: 0.1})
    gpu.wrong = {wrong: 1}
    gpu.measure_all(gpu.model())
    Gpu(tmp_path, {})
    assert tiles.extend_tile(CASE.shape.head_dim, 2) == entry(EXTEND_KERNEL).tile


def test_what_cannot_be_compared_is_neither_chosen_nor_excluded(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path, dict.fromkeys(entry(DECODE_KERNEL).others, 0.1))
    gpu.has_room = False
    gpu.measure_all(gpu.model())
    assert gpu.measured == []
    assert used_next(tmp_path) == entry(DECODE_KERNEL).tile
    assert json.loads(choice_file(tmp_path, "a GPU 8.9").read_text())["excluded"] == []


def test_large_groups_keep_the_second_kernel() -> None:
    trial = Trial(DECODE_KERNEL, 16, 1, 128, "bfloat16", "bfloat16", 16)
    assert not any(tile.joins for tile in trial.tiles)
    assert any(tile.joins for tile in trial._replace(heads=8).tiles)


def compare_little(patch: pytest.MonkeyPatch, rows: tuple[int, ...]) -> None:
    """Makes comparisons small: rows of these numbers of pieces and one of two, and three launches."""
    small = {"PROMPT_TOKENS": 40, "SHORT_ROWS": rows, "LONG_ROWS": (2,), "PROGRAMS_PER_CORE": 1, "LAUNCHES": 3}
    for name, value in (small | {"COMPARED_BLOCKS_BYTES": 1 << 16}).items():
        patch.setattr(tile_trials, name, value)
    patch.setattr(linear_choice, "FLUSH_BYTES", 64)


@triton.jit
def too_early(counter, number):
    """Takes the place of triton_decode._finishes: the last program but one joins the pieces, as if the last had stored its own."""
    before = tl.atomic_add(counter, 1)
    if before == number - 1:
        tl.store(counter, 0)
    return before == tl.maximum(number - 2, 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
def test_a_program_that_joins_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads then lies where the launch before wrote the same piece of other numbers."""
    compare_little(monkeypatch, (0, 1, 3))
    compare = tile_choice.compared_on(torch.device("cpu"), 1)
    trial = Trial(DECODE_KERNEL, 4, 2, 64, "float16", "float16", BLOCK_TOKENS)
    tile = trial.tiles[0]._replace(joins=True)
    assert compare(trial, tile) is True
    monkeypatch.setattr(triton_decode, "_finishes", too_early)
    assert compare(trial, tile) is False


class Faults:
    """Changes what launches of decode attention that join pieces leave behind. wrong: the numbers of the launches that are
    changed."""

    def __init__(self, patch: pytest.MonkeyPatch, wrong: set[int]) -> None:
        self.num, self.own, self.wrong = 0, triton_decode.decode_attention, wrong
        patch.setattr(triton_decode, "decode_attention", self._attend)

    def _attend(self, *arguments: Any) -> None:
        self.own(*arguments)
        *_, out, in_order = arguments
        if tiles.decode_tile(64, 2).joins and not in_order:
            if self.num in self.wrong:
                out[2, 5] = torch.nextafter(out[2, 5], out[2, 5] + 1)
            self.num += 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
def test_a_bit_of_one_launch_excludes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The real comparison runs interpreted, with few pieces and launches. Other tiles may round otherwise, but not differ else."""
    compare_little(monkeypatch, (0, 1, 2, 17))
    compare = tile_choice.compared_on(torch.device("cpu"), 1)
    trial = Trial(DECODE_KERNEL, 2, 1, 64, "float16", "float16", BLOCK_TOKENS)
    tile = trial.tiles[0]._replace(joins=True)
    assert tile in trial.tiles
    assert compare(trial, tile) is True
    with monkeypatch.context() as patch:
        faults = Faults(patch, {2})
        assert compare(trial, tile) is False
        assert faults.num == 3
        assert compare(trial, trial.tiles[1]) is True
        gpu = Gpu(tmp_path, {joining(): 0.1})
        gpu.wrong = {}
        faults.num = -3 * (JOINED_TURNS - 1)  # in the last turn
        patch.setattr(gpu.choice, "_compare", lambda _, own: compare(trial, own) if own.joins else True)
        gpu.measure_all(gpu.model())
    assert faults.num == 3
    assert "joining pieces has other results than 1 x 64, 4 warps, 3 stages on this GPU, and is excluded for good" in caplog.text
    assert used_next(tmp_path) == entry(DECODE_KERNEL).tile


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kernel", [EXTEND_KERNEL, DECODE_KERNEL])
def test_results_of_each_tile_are_compared(monkeypatch: pytest.MonkeyPatch, kernel: str, fp8: bool) -> None:
    """Interpreted, at sizes of a few tokens. A kernel that leaves a token out is wrong; without memory nothing is known."""
    compare_little(monkeypatch, (0, 3))
    trial = Trial(kernel, 2, 1, 64, "float16", "fp8" if fp8 else "float16", 16)
    compare = tile_choice.compared_on(torch.device("cpu"), 1)
    assert [compare(trial, tile) for tile in trial.tiles[1:]] == [True] * (len(trial.tiles) - 1)
    call = tile_trials.Inputs.call

    def without_a_token(inputs: Any, tile: Tile, qkv: Any, out: torch.Tensor, in_order: bool = False) -> Any:
        own = call(inputs, tile, qkv, out, in_order)

        def launch() -> None:
            own()
            if tile == trial.tiles[1]:
                out[out.any(1).nonzero()[-1]] = 0

        return launch

    monkeypatch.setattr(tile_trials.Inputs, "call", without_a_token)
    assert compare(trial, trial.tiles[1]) is False

    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tile_trials.Inputs, "call", refuse)
    assert compare(trial, trial.tiles[1]) is None


def test_a_comparison_has_rows_of_all_kinds_and_more_programs_than_a_gpu_holds() -> None:
    for kv_heads in (1, 2, 8, 32):
        for num_cores in (1, 40, 132, 192):
            trial = Trial(DECODE_KERNEL, kv_heads, kv_heads, 128, "bfloat16", "bfloat16", BLOCK_TOKENS)
            pieces = tile_trials._compared_pieces(trial, num_cores)
            assert sum(pieces) * kv_heads > 32 * num_cores
            assert {0, 1, 2, 16, 17} <= set(pieces)
            assert max(pieces) > 256
            assert len(pieces) < triton_decode.MANY_ROWS


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
    assert tuple(times) == tuple(dict.fromkeys(taken)) == trial.tiles

    def refuse(error: RuntimeError) -> Any:
        def times_s(calls: Any, flush: Any) -> Any:
            raise error

        return times_s

    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")):
        monkeypatch.setattr(linear_choice, "times_s", refuse(error))
        assert measure(trial, trial.tiles) is None
    monkeypatch.setattr(linear_choice, "times_s", refuse(RuntimeError("Triton Error [CUDA]: an illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal"):
        measure(trial, trial.tiles)


def test_each_tile_to_compare_is_among_what_is_compiled(tmp_path: Path) -> None:
    job = msgspec.json.encode(CompileJob(CASE.spec, CASE.shape, BLOCK_TOKENS, ADA, str(tmp_path), trials=True))
    command = [sys.executable, "-c", LAUNCHES]
    told = subprocess.run(command, cwd=ROOT, env=environment(), input=job, capture_output=True, timeout=100, check=True).stdout
    launched = [(name, Tile(*sizes)) for name, *sizes in map(json.loads, told.splitlines())]
    assert {name for name, _ in launched} == {"_extend_kernel", *OF_DECODE_STEPS}
    for kernel, name in ((EXTEND_KERNEL, "_extend_kernel"), (DECODE_KERNEL, "_piece_kernel")):
        (trial,) = (each for each in trials_of(CASE.spec, CASE.shape, BLOCK_TOKENS) if each.kernel == kernel)
        own = [tile if kernel == EXTEND_KERNEL else tile._replace(tokens=1) for of, tile in launched if of == name]
        assert sorted(own) == sorted(trial.tiles), "each once"
        assert len(own) > 2


def test_tiles_to_compare_are_compiled_by_one_process_without_the_loads_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is one with the fewest tiles: on Hopper, attention with heads of 128 compares one tile, in both of its forms."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(tiles, "capability", lambda: HOPPER)
    case = next(case for case in CASES if case.name == "qwen3 norms at odd places")
    builds = CudaKernelBuilds(str(tmp_path), HOPPER, BLOCK_TOKENS, 2, lambda news: pytest.fail("loads do not wait for it"))
    with open(tmp_path / "compiling", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert builds.build_trials(case.spec, case.shape)
    made = [path.stem for path in tmp_path.glob("*/*.cubin")]
    assert set(made) == OF_DECODE_STEPS
    (trial,) = trials_of(case.spec, case.shape, BLOCK_TOKENS)
    assert made.count("_piece_kernel") == len(trial.tiles) == 2
    broken = msgspec.structs.replace(case.spec, dtype="no dtype")
    assert not builds.build_trials(broken, case.shape)
    assert "the tiles to compare are not all compiled: a compiler ended with 1" in caplog.text
