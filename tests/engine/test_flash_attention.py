"""FlashAttention 3 computes prompts where it is installed, has the right results and is measured to be faster. A stand-in for its
operator computes here; tests/gpu/test_kernels.py makes the same comparison with the real one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.cuda import tile_choice, tile_trials
from engine.cuda.compile_process import CompileJob, launch_trials
from engine.cuda.kernel_builds import CudaKernelBuilds
from engine.cuda.kernels import flash_attention, linear_choice, tiles, triton_extend
from engine.cuda.kernels.tiles import EXTEND_KERNEL, HALF, HOPPER, MeasuredTile, Tile
from engine.cuda.tile_choice import TileChoice, choice_file, compared_on, usable_flash
from engine.cuda.tile_trials import Trial, trials_of
from tests.engine.cuda_bench import OTHER, PROMPT, close, expected, load_cuda_model
from tests.engine.flash_stand_in import ARGUMENTS, StandIn, flash_chosen, stand_in
from tests.engine.kernels.key_cases import BLOCK_TOKENS, KeyCase
from tests.engine.kernels.key_cases import CASES as KEY_CASES
from tests.engine.model_bench import CASES, make_checkpoint, make_table, plan, put
from tests.engine.test_tile_choice import compare_little, join

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted"),
]
CASE: KeyCase = next(case for case in KEY_CASES if case.name == "qwen3 norms at odd places")  # heads of 128 in bfloat16
TRIAL = Trial(EXTEND_KERNEL, 4, 2, 64, "float16", "float16", BLOCK_TOKENS, tries_flash=True)
FLASH = TRIAL.entry.tile._replace(flash="64 float16")
VERSION = "3.0.1"
LIBRARY = Path(__file__)  # its size and time are those of the library
BUILD = f"{VERSION}-{LIBRARY.stat().st_size:x}-{LIBRARY.stat().st_mtime_ns:x}"


@pytest.fixture
def library() -> Iterator[StandIn]:
    with stand_in() as made:
        yield made


@pytest.fixture(autouse=True)
def own_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "capability", lambda: HOPPER)
    flash_attention.version.cache_clear()
    yield
    tiles.use([])
    flash_attention.version.cache_clear()


def install(patch: pytest.MonkeyPatch, error: Exception | None = None, library: Path = LIBRARY) -> None:
    """Makes the library look installed. error: raised when it is loaded. library: its file."""

    def version(name: str) -> str:
        assert name == "flash_attn_3"
        return VERSION

    def load(name: str) -> ModuleType:
        if error is not None:
            raise error
        module = ModuleType(name)
        module.__file__ = str(library)
        return module

    patch.setattr(importlib.metadata, "version", version)
    patch.setattr(importlib, "import_module", load)


# ---- its results


def test_its_results_are_those_of_the_kernel(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that decode, pieces of prompts, a whole prompt and padding, in the comparison that an engine makes."""
    compare_little(monkeypatch, (0, 3))
    compare = compared_on(torch.device("cpu"), 1)
    assert FLASH in TRIAL.tiles
    assert compare(TRIAL, FLASH) is True
    assert library.num_calls == 2
    library.off_by = 0.1
    assert compare(TRIAL, FLASH) is False


def test_a_model_has_the_same_logits(tmp_path: Path) -> None:
    """A step has rows that decode beside pieces of prompts. Layers with a window are left to the kernel."""
    made = tmp_path, make_checkpoint(tmp_path, **(CASES["qwen2-windows"] | {"num_hidden_layers": 2}))
    shape = load_cuda_model(tmp_path).shape
    assert [bool(window) for window in shape.layer_windows] == [False, True]
    first, second = expected(made, PROMPT), expected(made, OTHER)
    with flash_chosen(shape.head_dim, torch.float32) as library:
        model = load_cuda_model(tmp_path)
        table = make_table(groups=model.kv_groups)
        for slot, tokens in ((0, PROMPT), (1, OTHER)):
            put(table, slot, tokens)
        close(model.logits(plan((0, 0, 40), (1, 0, 9)), table, True), np.concatenate((first[:40], second[:9])))
        assert library.num_calls == 1
        close(model.logits(plan((0, 40, 1), (1, 9, 14)), table, True), np.concatenate((first[40:41], second[9:23])))
        assert library.num_calls == 2
        close(model.logits(plan((0, 41, 1), (1, 23, 1)), table), np.stack((first[41], second[23])))
        assert library.num_calls == 2, "a decode step is computed by the kernel"


@pytest.mark.parametrize(
    ("kind", "is_taken"),
    [
        ({}, True),
        ({"head_dim": 80}, True),
        ({"head_dim": 512}, False),
        ({"head_dim": 100}, False),
        ({"reach": 64}, False),
        ({"reach": -64}, False),
        ({"softcap": 30.0}, False),
        ({"sinks": torch.zeros(4)}, False),
    ],
)
def test_it_is_used_for_what_was_compared(kind: dict[str, Any], is_taken: bool) -> None:
    assert flash_attention.takes(**({"head_dim": 128} | kind)) is is_taken


@pytest.mark.parametrize(("num_replays", "is_right"), [(2, True), (1, False), (0, False)])
def test_its_results_in_graphs_are_those_of_the_kernel(
    library: StandIn, monkeypatch: pytest.MonkeyPatch, num_replays: int, is_right: bool
) -> None:
    """Each replay has to compute them, whatever the one before has left. Results of our own tiles are compared without graphs."""
    compare_little(monkeypatch, (0, 3))
    captured: list[Any] = []

    def capture(work: Callable[[], None]) -> SimpleNamespace:
        captured.append(work)
        replays = iter([work] * num_replays)
        return SimpleNamespace(replay=lambda: next(replays, lambda: None)())

    compare = compared_on(torch.device("cpu"), 1, capture)
    assert compare(TRIAL, FLASH) is is_right
    assert len(captured) == 1
    assert compare(TRIAL, FLASH.size) is True
    assert len(captured) == 1


def test_a_lack_of_memory_is_told_as_one(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's error has only the name of a call in it, and would end the engine."""
    monkeypatch.setattr(tile_trials, "PROMPT_TOKENS", 40)
    call = tile_trials.launching(TRIAL, "cpu", 1, [FLASH])[FLASH]

    def new_empty(tensor: torch.Tensor, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
        assert (sizes, dtype) == ((TRIAL.heads, 40), torch.float32)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    with pytest.raises(torch.OutOfMemoryError):
        call()
    assert library.num_calls == 0


@pytest.mark.parametrize(("head_dim", "dtype", "is_used"), [(64, "float16", True), (64, "bfloat16", False), (40, "float16", False)])
def test_it_computes_the_kind_of_prompts_that_was_compared(
    library: StandIn, monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: str, is_used: bool
) -> None:
    """Other heads and types share the tile, but have kernels of their own in the library, or none in some builds."""
    monkeypatch.setattr(tile_trials, "PROMPT_TOKENS", 40)
    trial = TRIAL._replace(head_dim=head_dim, dtype=dtype, kv_dtype=dtype)
    assert trial.place == TRIAL.place
    tile_trials.launching(trial, "cpu", 1, [FLASH])[FLASH]()
    assert library.num_calls == is_used


# ---- whether it can be used


def test_one_that_is_not_installed_is_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert usable_flash(tmp_path, HOPPER) == ("", None)
    assert caplog.text == ""


def test_one_that_is_installed_is_used(library: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    version, mark = usable_flash(tmp_path, HOPPER)
    assert version == BUILD
    assert mark is not None
    assert mark.left() is None


def test_builds_of_one_version_are_different_libraries(library: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention had the version 3.0.0b1 from May 2025 to January 2026, and options of a build leave kernels out."""
    file, found = tmp_path / "_C.abi3.so", set()
    for text in ("one", "other"):
        file.write_text(text)
        install(monkeypatch, library=file)
        flash_attention.version.cache_clear()
        found.add(usable_flash(tmp_path, HOPPER))
    assert len({version for version, _ in found}) == len({mark for _, mark in found}) == 2


@pytest.mark.parametrize(
    ("gpu", "error", "lacks", "why"),
    [
        (120, None, "", "it is not used on GPUs of compute capability 12.0"),
        (89, None, "", "it is not used on GPUs of compute capability 8.9"),
        (90, ImportError("undefined symbol: _ZN3c10"), "", "ImportError: undefined symbol: _ZN3c10"),
        (90, None, "Tensor? seqused_q=None, ", "ValueError: its operator has no seqused_q"),
        (90, None, ARGUMENTS, "AttributeError: "),
    ],
)
def test_one_that_cannot_be_used_is_told_of(
    gpu: int,
    error: Exception | None,
    lacks: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(monkeypatch, error)
    if lacks == ARGUMENTS:
        assert usable_flash(tmp_path, gpu) == ("", None)
    else:
        with stand_in(ARGUMENTS.replace(lacks, "")):
            assert usable_flash(tmp_path, gpu) == ("", None)
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"flash_attn_3 {VERSION} is installed but not used: ")
    assert why in line


# ---- whether it is chosen


class Engine:
    """An engine with FlashAttention on a GPU, where prompts take `seconds` with it and 1.0 with the kernel.

    is_right: what comparisons return; an error is raised. marked: whether the mark was there in each comparison."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, seconds: float = 0.5, is_right: bool | BaseException = True
    ) -> None:
        install(patch)
        self.folder, self.seconds, self.is_right, self.marked = folder, seconds, is_right, list[bool]()
        version, self.mark = usable_flash(folder, HOPPER)
        self.path = choice_file(folder, "a GPU 9.0", version)
        self.choice = TileChoice(self.path, BLOCK_TOKENS, lambda spec, shape: True, self._measure, self._compare, self.mark)
        self.choice.begin()

    def _measure(self, trial: Trial, compared: Sequence[Tile]) -> Mapping[Tile, list[float]]:
        return {tile: [(self.seconds if tile.flash else 1.0) * (1 + at / 100) for at in range(7)] for tile in compared}

    def _compare(self, trial: Trial, tile: Tile) -> bool:
        if not tile.flash:
            return True
        self.marked.append(bool(marks_in(self.folder)))
        if isinstance(self.is_right, BaseException):
            raise self.is_right
        return self.is_right

    def run(self) -> None:
        of_model = self.choice.of_model(CASE.spec, CASE.shape)
        join("tiles")
        while of_model.num_open:
            of_model.measure_next()
        join("kernels")


def marks_in(folder: Path) -> list[Path]:
    return list(folder.glob("flash-attention-*-is-tried-*"))


def chosen() -> Tile:
    return tiles.extend_tile(128, HALF)


@pytest.mark.parametrize(("seconds", "wins"), [(0.5, True), (1.0, False), (2.0, False)])
def test_it_is_used_by_the_next_engine_where_it_is_faster(
    library: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, wins: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = Engine(tmp_path, monkeypatch, seconds)
    own = chosen()
    engine.run()
    assert engine.marked == [True], "the file tells of the comparison while it is made"
    assert not marks_in(tmp_path)
    assert chosen() == own, "nothing changes in the engine that measured"
    size = "128 x 128, 8 warps, 2 stages"
    told = f"FlashAttention (heads of 128 bfloat16) beside {size} takes 0.50 of the time of {size}"
    assert (told in caplog.text) is wins
    caplog.clear()
    again = Engine(tmp_path, monkeypatch)
    assert chosen() == own._replace(flash="128 bfloat16" if wins else "")
    assert ("extend 128: FlashAttention (heads of 128 bfloat16) beside 128 x 128, 8 warps, 2 stages" in caplog.text) is wins
    assert not again.choice.of_model(CASE.spec, CASE.shape).num_open, "measured once"


def test_without_the_library_its_choice_is_not_used(library: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Engine(tmp_path, patch).run()
    assert not trials_of(CASE.spec, CASE.shape, BLOCK_TOKENS, False)[0].tries_flash
    flash_attention.version.cache_clear()
    version, mark = usable_flash(tmp_path, HOPPER)
    TileChoice(choice_file(tmp_path, "a GPU 9.0", version), BLOCK_TOKENS, *[pytest.fail] * 3, mark).begin()
    assert not chosen().flash


@pytest.mark.parametrize("outcome", [False, RuntimeError("This flash attention build does not support paged KV.")])
def test_wrong_results_and_refusals_exclude_it(
    library: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: bool | Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(tmp_path, monkeypatch, is_right=outcome)
    engine.run()
    assert not marks_in(tmp_path)
    assert "FlashAttention (heads of 128 bfloat16) beside 128 x 128, 8 warps, 2 stages has other results" in caplog.text
    assert ("FlashAttention refuses it: This flash attention build" in caplog.text) is isinstance(outcome, Exception)
    again = Engine(tmp_path, monkeypatch)
    again.run()
    assert again.marked == []
    assert not chosen().flash


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: an illegal memory access"), torch.AcceleratorError("an illegal memory access"), SystemExit(1)],
)
def test_an_engine_that_ends_in_the_comparison_does_so_once(
    library: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(type(error)):
        Engine(tmp_path, monkeypatch, is_right=error).run()
    caplog.clear()
    again = Engine(tmp_path, monkeypatch)
    assert again.mark is None
    again.run()
    assert again.marked == []
    assert not chosen().flash
    (mark,) = marks_in(tmp_path)
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert line == (
        f"FlashAttention {BUILD} is not used: an engine ended while it compared its results; to try again, delete {mark}"
    )
    mark.unlink()
    last = Engine(tmp_path, monkeypatch)
    last.run()
    assert last.marked == [True]
    Engine(tmp_path, monkeypatch)
    assert chosen().flash


def test_without_a_file_to_tell_of_it_nothing_is_compared(
    library: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tmp_path, monkeypatch)

    def refuse(path: Path, mode: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", refuse)
    engine.run()
    assert engine.marked == []
    assert "FlashAttention is not compared: [Errno 28] No space left on device" in caplog.text


def test_what_is_compared_with_it_is_compiled_before(tmp_path: Path) -> None:
    """On Hopper the table's tile for these heads was measured and has no rivals, so only FlashAttention makes a trial of it."""
    job = CompileJob(CASE.spec, CASE.shape, BLOCK_TOKENS, HOPPER, str(tmp_path), trials=True, has_flash=True)
    launched: list[int] = []

    def launch(*arguments: Any) -> None:
        launched.append(tiles.extend_tile(128, HALF).tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_extend, "extend_attention", launch)
        patch.setattr(tile_trials, "PROMPT_TOKENS", 40)
        patch.setattr(tile_trials.triton_decode, "decode_attention", lambda *_: None)
        launch_trials(job)
        assert len(launched) > 1
        launched.clear()
        launch_trials(CompileJob(CASE.spec, CASE.shape, BLOCK_TOKENS, HOPPER, str(tmp_path), trials=True))
        assert launched == []


def test_other_processes_compile_the_kernel_that_it_replaces(tmp_path: Path) -> None:
    tile = tiles.entry_of(EXTEND_KERNEL, 128, HALF, False).tile
    builds = CudaKernelBuilds(str(tmp_path), HOPPER, BLOCK_TOKENS, 1, lambda news: None)
    jobs = []
    for flash in ("", "128 bfloat16"):
        tiles.use([MeasuredTile(EXTEND_KERNEL, 128, HALF, False, 0, tile._replace(flash=flash))])
        jobs.append(builds._job(CASE.spec, CASE.shape))
    assert jobs[0] == jobs[1]


def test_another_call_of_it_is_compared_anew() -> None:
    """What its first form excluded for good may be right in the next."""
    assert Path(str(flash_attention.__file__)) in tile_choice.SOURCES


def test_what_takes_no_memory_to_measure_is_measured(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_trials, "PROMPT_TOKENS", 40)
    monkeypatch.setattr(linear_choice, "FLUSH_BYTES", 64)

    def times_s(calls: Mapping[Tile, Any], flush: torch.Tensor) -> dict[Tile, list[float]]:
        for call in calls.values():
            call()
        return {tile: [1.0] * 7 for tile in calls}

    monkeypatch.setattr(linear_choice, "times_s", times_s)
    measure = tile_choice.measured_on(torch.device("cpu"), 2)
    assert measure(TRIAL, (FLASH.size, FLASH)) is not None
    assert library.num_calls == 1
