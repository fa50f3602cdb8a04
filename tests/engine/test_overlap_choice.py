"""Whether kernels overlap is found out once for each kind of GPU, in idle time, and used by the next engine. What happens on the
GPU is made up here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from engine.cuda import overlap_choice
from engine.cuda.backend import CudaBackend
from engine.cuda.compile_process import CompileJob
from engine.cuda.kernel_builds import CudaKernelBuilds
from engine.cuda.kernels import triton_overlap
from engine.cuda.kernels.linear_choice import MEASURE_TRIES
from engine.cuda.overlap_choice import TURNS, OverlapChoice, Times, Trial, choice_file
from engine.protocol import Configure
from tests.engine import cuda_stand_in
from tests.engine.kernels.key_cases import BLOCK_TOKENS, CASES

CASE, OTHER = CASES[:2]
HOPPER = 90
CHUNK_BYTES = 1 << 20
BOTH = {1: 0.5, 64: 1.0}
COMPARED = [f"compare {rows}" for rows in (1, 64) for _ in range(TURNS)]
NEXT = [f"next {case.spec.model}" for case in (CASE, OTHER)]


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    yield
    triton_overlap.use(False)


class Engine:
    """An engine on a GPU. ratios: the times of overlapping layers, by number of rows; those of others are 1.0; None: they cannot be
    measured. is_right: what comparisons return; an error is raised."""

    def __init__(self, folder: Path, ratios: dict[int, float] | None = None, is_right: bool | BaseException | None = True) -> None:
        self.folder, self.ratios, self.is_right = folder, ratios, is_right
        self.compiled, self.told = 0, list[str]()
        self.compiles = True
        trial = Trial(self._compile, self._compile_next, self._compare, self._measure)
        self.choice = OverlapChoice(choice_file(folder, "a GPU 9.0"), trial)
        self.choice.begin()

    def _compile(self, spec: Any, shape: Any) -> bool:
        self.compiled += 1
        return self.compiles

    def _compile_next(self, spec: Any, shape: Any) -> None:
        assert not choice_file(self.folder, "a GPU 9.0").exists(), "the next engine overlaps before its kernels are compiled"
        self.told.append(f"next {spec.model}")

    def _compare(self, num_rows: int) -> bool | None:
        self.told.append(f"compare {num_rows}")
        assert len(list(self.folder.glob("*-is-tried-*"))) == 1
        if isinstance(self.is_right, BaseException):
            raise self.is_right
        return self.is_right

    def _measure(self, num_rows: int) -> Times | None:
        self.told.append(f"measure {num_rows}")
        if self.ratios is None:
            return None
        return Times(*([seconds * (1 + at / 1000) for at in range(7)] for seconds in (1.0, self.ratios[num_rows])))

    def run(self, *cases: Any) -> list[str]:
        """Loads models and has all that is open done. Returns what was asked of the GPU."""
        for case in cases or (CASE,):
            self.choice.start(case.spec, case.shape)
        join()
        while self.choice.num_open:
            self.choice.measure_next()
        join()
        self.choice.measure_next()
        return self.told


def join() -> None:
    for thread in threading.enumerate():
        if thread.name == "overlap":
            thread.join(10)


def overlaps_next(folder: Path) -> bool:
    """Returns whether the kernels of the next engine overlap, which has nothing more to find out."""
    triton_overlap.use(False)
    assert Engine(folder).run() == []
    return triton_overlap.is_used()


@pytest.mark.parametrize(
    ("ratios", "overlaps"),
    [(BOTH, True), ({1: 0.9, 64: 0.95}, True), ({1: 1.1, 64: 0.9}, False), ({1: 0.9, 64: 1.1}, False), ({1: 1.0, 64: 1.0}, False)],
)
def test_it_is_used_by_the_next_engine_where_it_is_faster(
    tmp_path: Path, ratios: dict[int, float], overlaps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = Engine(tmp_path, ratios)
    tries = {rows: MEASURE_TRIES if ratio == 1.0 else 1 for rows, ratio in ratios.items()}
    measured = [f"measure {rows}" for rows, num in tries.items() for _ in range(num)]
    assert engine.run(CASE, OTHER) == [*COMPARED, *measured] + NEXT * overlaps
    assert engine.compiled == 1
    assert not triton_overlap.is_used(), "nothing changes in the engine that measured"
    what = "kernels are to overlap" if overlaps else "kernels are not to overlap"
    times = ", ".join(f"decode steps of {rows} rows take {ratio:.2f} of the time" for rows, ratio in ratios.items())
    assert f"{what} on this GPU: {times}" in caplog.text
    caplog.clear()
    assert overlaps_next(tmp_path) is overlaps
    assert f"kernels {'overlap' if overlaps else 'do not overlap'} on this GPU ({times})" in caplog.text
    assert not list(tmp_path.glob("*-is-tried-*"))


def test_a_model_that_is_loaded_again_is_kept_once(tmp_path: Path) -> None:
    """Otherwise an engine that evicts and loads models for months would keep every load."""
    told = Engine(tmp_path, BOTH).run(*[CASE, OTHER] * 3)
    assert [one for one in told if one.startswith("next")] == NEXT
    engine = Engine(tmp_path)
    engine.run(*[CASE, OTHER] * 3)
    assert len(engine.choice._models) == 2


def test_wrong_results_exclude_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Engine(tmp_path, BOTH, is_right=False).run() == ["compare 1"]
    assert "overlapping kernels have wrong results on this GPU, and are excluded for good" in caplog.text
    caplog.clear()
    assert not overlaps_next(tmp_path)
    assert "overlapping kernels had wrong results on this GPU before, and are not used" in caplog.text


def test_an_engine_that_ends_in_the_comparison_does_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit):
        Engine(tmp_path, BOTH, is_right=SystemExit(1)).run()
    assert not overlaps_next(tmp_path)
    (mark,) = tmp_path.glob("*-is-tried-*")
    assert f"kernels do not overlap: an engine ended while it compared their results; to try again, delete {mark}" in caplog.text
    mark.unlink()
    Engine(tmp_path, BOTH).run()
    assert overlaps_next(tmp_path)


def test_without_memory_the_next_engine_tries_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Engine(tmp_path, BOTH, is_right=None).run() == ["compare 1"] * MEASURE_TRIES
    assert "overlapping kernels could not be compared; the next engine tries again" in caplog.text
    Engine(tmp_path, BOTH).run()
    assert overlaps_next(tmp_path)


def test_what_cannot_be_measured_is_measured_by_the_next_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = Engine(tmp_path, None).run()
    assert [what for what in told if "measure" in what] == ["measure 1"] * MEASURE_TRIES
    assert "overlapping kernels could not be measured; the next engine tries again" in caplog.text
    Engine(tmp_path, BOTH).run()
    assert overlaps_next(tmp_path)


def test_what_cannot_be_compiled_is_not_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path, BOTH)
    engine.compiles = False
    assert engine.run() == []
    assert "whether kernels may overlap is not tried, since not all could be compiled" in caplog.text


def test_without_a_mark_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(tmp_path, BOTH)
    engine.choice.start(CASE.spec, CASE.shape)
    join()

    def refuse(path: Path, mode: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", refuse)
    assert engine.run() == []
    assert "overlapping kernels are not compared: [Errno 28] No space left on device" in caplog.text
    monkeypatch.undo()
    Engine(tmp_path, BOTH).run()
    assert overlaps_next(tmp_path)


@pytest.mark.parametrize("rubbish", ["", "{", "[]", '{"overlaps": true}', '{"is_right": 1, "overlaps": true, "ratios": {}}'])
def test_a_file_of_another_form_is_no_choice(tmp_path: Path, rubbish: str, caplog: pytest.LogCaptureFixture) -> None:
    path = choice_file(tmp_path, "a GPU 9.0")
    path.write_text(rubbish)
    engine = Engine(tmp_path, BOTH)
    assert f"whether kernels overlap is tried anew: {path}: " in caplog.text
    assert not triton_overlap.is_used()
    path.unlink()
    engine.run()
    assert overlaps_next(tmp_path)


def test_a_folder_that_takes_no_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(overlap_choice.cached_file, "replace", refuse)
    engine = Engine(tmp_path, BOTH)
    engine.run()
    assert "whether kernels overlap is not kept for the next engine: " in caplog.text
    assert "No space left on device" in caplog.text


def test_gpus_drivers_and_kernels_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = choice_file(tmp_path, "a GPU 9.0 12080")
    assert own != choice_file(tmp_path, "a GPU 9.0 13000")
    changed = tmp_path / "triton_overlap.py"
    changed.write_text("")
    monkeypatch.setattr(overlap_choice, "SOURCES", (changed, *overlap_choice.SOURCES[1:]))
    assert own != choice_file(tmp_path, "a GPU 9.0 12080")


def test_compilers_are_told_whether_kernels_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = CudaKernelBuilds(str(tmp_path), HOPPER, BLOCK_TOKENS, 1, lambda news: None)
    jobs: list[dict[str, Any]] = []
    succeeds = True

    def build(what: str, job: bytes) -> bool:
        jobs.append(json.loads(job))
        return succeeds

    monkeypatch.setattr(builds, "_build_aside", build)
    monkeypatch.setattr(builds, "_build", lambda model, job, waiting: build(model, job))
    builds.build_overlap_trial(CASE.spec, CASE.shape)
    assert (jobs[-1]["overlap_trial"], jobs[-1]["overlaps"]) == (True, False)
    succeeds = False
    builds.build_overlapping(CASE.spec, CASE.shape)
    succeeds = True
    for _ in range(2):
        builds.build_overlapping(CASE.spec, CASE.shape)
    assert len(jobs) == 3, "what failed is compiled again, and what was compiled is not"
    assert (jobs[-1]["overlap_trial"], jobs[-1]["overlaps"]) == (False, True)
    builds.need(CASE.spec, CASE.shape, lambda: None)
    assert not jobs[-1]["overlaps"]
    triton_overlap.use(True)
    builds.need(CASE.spec, CASE.shape, lambda: None)
    assert len(jobs) == 4, "an engine whose kernels overlap finds them"
    assert CompileJob(CASE.spec, CASE.shape, BLOCK_TOKENS, HOPPER, "").overlaps is False


def test_a_device_overlaps_as_an_earlier_engine_has_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = cuda_stand_in.install(monkeypatch, cuda_stand_in.Driver()).CudaMemory(4, CHUNK_BYTES)
    options = Configure("cuda:0", 4, CHUNK_BYTES, 0, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=str(tmp_path))
    builds = CudaKernelBuilds(str(tmp_path), HOPPER, BLOCK_TOKENS, 1, lambda news: None)
    backend = CudaBackend(memory, options)
    backend._begin_overlap_choice(tmp_path, "a GPU 9.0", 132, builds)
    assert not triton_overlap.is_used()
    choice_file(tmp_path, "a GPU 9.0 12080").write_text('{"is_right": true, "overlaps": true, "ratios": {"1": 0.9}}')
    backend._begin_overlap_choice(tmp_path, "a GPU 9.0", 132, builds)
    assert triton_overlap.is_used()


def test_graphs_of_old_drivers_cannot_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = cuda_stand_in.Driver()
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (cuda_stand_in.CUresult.CUDA_SUCCESS, 12020))
    options = Configure("cuda:0", 4, CHUNK_BYTES, 0, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=str(tmp_path))
    backend = CudaBackend(cuda_stand_in.install(monkeypatch, driver).CudaMemory(4, CHUNK_BYTES), options)
    backend._begin_overlap_choice(tmp_path, "a GPU 9.0", 132, CudaKernelBuilds(str(tmp_path), HOPPER, BLOCK_TOKENS, 1, print))
    assert backend._overlap_choice is None
