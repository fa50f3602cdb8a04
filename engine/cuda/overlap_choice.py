"""Finds out, once for each kind of GPU and in idle time, whether kernels are to overlap (kernels/triton_overlap.py). Another
process compiles the layers of overlap_trial.py in each of the three ways. The engine then compares their results, in captured
graphs and without graphs, and measures their times. What it finds out is kept in a file, which the next engine on such a GPU reads
before its first launch.

A GPU, a driver or a compiler on which a kernel does not wait for the one before it computes wrong results, without an error.
Overlapping is then not used, neither by this engine nor by a later one, and the log has a warning. A TrialMark tells a later engine
if one has ended in the comparison.

A choice takes effect only in the next engine, because graphs hold how their kernels follow each other.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import triton
from torch import Tensor

from engine.cuda.kernels import linear_choice, triton_decode, triton_linear, triton_overlap, triton_rope, triton_rows
from engine.cuda.kernels.linear_choice import MEASURE_TRIES, apart
from engine.cuda.kernels.triton_overlap import Way
from engine.cuda.overlap_trial import NUM_INPUTS, ROWS, Layers, are_near, same_bits
from engine.cuda.trial_marks import TrialMark
from engine.memory.out_of_memory import lacks_memory
from engine.protocol import LoadModel
from loader import cached_file
from loader.shapes.model_shape import ModelShape
from loader.threads import Thread

log = logging.getLogger("engine")

SOURCES = tuple(Path(str(module.__file__)) for module in (triton_overlap, triton_decode, triton_linear, triton_rope, triton_rows))
TURNS = 4  # calls that compare results, for each number of rows
LAUNCHES = 8  # of overlapping layers in each call, by a graph; as many without, which take the host some 2 ms each (docs/gpu.md)
NOT_KEPT = "whether kernels overlap is not kept for the next engine: %s: %s"

Capture = Callable[[Callable[[], None]], Any]  # captures what the function launches, and returns the graph
Compare = Callable[[int], "bool | None"]  # see Trial
Measure = Callable[[int], "Times | None"]


class Times(NamedTuple):
    """The seconds of several replays of the same layers, whose kernels run apart, or overlap."""

    apart: list[float]
    overlapping: list[float]


class Trial(NamedTuple):
    """The steps by which an engine finds out on its GPU whether kernels are to overlap.

    compile: compiles all kernels of the layers, in another process, and returns whether that succeeded. compile_next: compiles a
    model's kernels as they are if kernels overlap. Threads call both, for a model that was loaded.
    compare: returns whether overlapping layers of so many rows have the right results; None: there is no memory to compare them.
    measure: returns the times of layers of so many rows; None: they could not be measured."""

    compile: Callable[[LoadModel, ModelShape], bool]
    compile_next: Callable[[LoadModel, ModelShape], None]
    compare: Compare
    measure: Measure


class Found(msgspec.Struct):
    """The content of the file. is_right: whether the results of overlapping layers are right. overlaps: whether kernels are to
    overlap. ratios: the times of overlapping layers over those of others, by number of rows."""

    is_right: bool
    overlaps: bool
    ratios: dict[str, float]


class OverlapChoice:
    """The choice for one GPU.

    path: the file in which it is kept (see choice_file). A TrialMark beside it is set while results are compared."""

    def __init__(self, path: Path, trial: Trial) -> None:
        self._path, self._mark, self._trial = path, TrialMark(path.parent, path.stem), trial
        self._steps: Sequence[Callable[[], bool]] = []  # what is still to be done: each returns whether it is done
        self._num_tries, self._is_begun, self._is_compiled = 0, False, False
        self._ratios: dict[str, float] = {}
        self._beginning = threading.Lock()
        self._models: dict[str, tuple[LoadModel, ModelShape]] = {}  # those that were loaded, each as it was loaded last

    def begin(self) -> None:
        """Reads what an earlier engine has found out, and makes kernels overlap if they are to. Called once, before the first
        launch. A file that cannot be read counts as missing."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=Found)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("whether kernels overlap is tried anew: %s: %s", self._path, error)
        else:
            self._is_begun = True
            triton_overlap.use(found.is_right and found.overlaps)
            if not found.is_right:
                log.warning("overlapping kernels had wrong results on this GPU before, and are not used")
            else:
                log.info("kernels %s on this GPU (%s)", "overlap" if found.overlaps else "do not overlap", _told(found.ratios))
            return
        if (left := self._mark.left()) is not None:
            self._is_begun = True
            log.warning("kernels do not overlap: an engine ended while it compared their results; to try again, delete %s", left)

    def start(self, spec: LoadModel, shape: ModelShape) -> None:
        """Starts to compile the layers in the background, unless that was done before or is not needed. Called by the threads of
        loads, with the model that was loaded."""
        self._models[spec.model] = spec, shape
        with self._beginning:
            if self._is_begun:
                return
            self._is_begun = True
        comparisons = [partial(self._compare, rows) for rows in ROWS for _ in range(TURNS)]
        self._steps = comparisons + [partial(self._measure, rows) for rows in ROWS]
        try:
            Thread(target=self._compile, args=(spec, shape), name="overlap").start()
        except MemoryError as error:
            log.warning("whether kernels may overlap is not tried: %s", error)

    def _compile(self, spec: LoadModel, shape: ModelShape) -> None:
        self._is_compiled = self._trial.compile(spec, shape)
        if not self._is_compiled:
            log.warning("whether kernels may overlap is not tried, since not all could be compiled")

    @property
    def num_open(self) -> int:
        """Returns for how many calls, at least, measure_next still has something to do; 0 while kernels are compiled."""
        return len(self._steps) if self._is_compiled else 0

    def measure_next(self) -> None:
        """Compares results or times on the current stream, which takes the device some ten milliseconds. Does nothing if num_open
        is 0."""
        if not self.num_open:
            return
        self._num_tries += 1
        if self._steps[0]():
            self._steps, self._num_tries = self._steps[1:], 0

    def _compare(self, num_rows: int) -> bool:
        """Compares the results of layers of num_rows rows once. Returns whether that is done. If they are wrong, or there is no
        memory to compare them, overlapping is not used, and nothing is left to do."""
        try:
            with self._mark.set():
                is_right = self._trial.compare(num_rows)
        except OSError as error:
            log.warning("overlapping kernels are not compared: %s", error)
            is_right = None
        if is_right is None:
            if self._num_tries == MEASURE_TRIES:
                log.warning("overlapping kernels could not be compared; the next engine tries again")
                self._steps = []
            return False
        if not is_right:
            log.warning("overlapping kernels have wrong results on this GPU, and are excluded for good")
            self._end(Found(False, False, {}))
            return False
        return True

    def _measure(self, num_rows: int) -> bool:
        """Measures layers of num_rows rows. Returns whether that is done. The last measurement ends the trial: kernels are to
        overlap if steps of few rows are clearly faster so, and none is clearly slower. If nothing can be measured, nothing is left
        to do."""
        times = self._trial.measure(num_rows)
        is_clear = times is not None and apart(times.apart, times.overlapping)
        if not is_clear and self._num_tries < MEASURE_TRIES:
            return False
        if times is None:
            log.warning("overlapping kernels could not be measured; the next engine tries again")
            self._steps = []
            return False
        ratio = statistics.median(times.overlapping) / statistics.median(times.apart) if is_clear else 1.0
        self._ratios[str(num_rows)] = round(ratio, 3)
        if len(self._ratios) == len(ROWS):
            overlaps = self._ratios[str(ROWS[0])] < 1.0 >= max(self._ratios.values())
            what = "kernels are to overlap" if overlaps else "kernels are not to overlap"
            log.info("%s on this GPU: %s; the next engine does so", what, _told(self._ratios))
            self._end(Found(True, overlaps, self._ratios))
            return False
        return True

    def _end(self, found: Found) -> None:
        """Writes what was found out to the file, in a thread, since a file system may hang. If kernels are to overlap, those of the
        models that were loaded are compiled before, so that the next engine need not do it. Nothing is left to do here."""
        self._steps = []
        try:
            Thread(target=self._write, args=(found, list(self._models.values())), name="overlap").start()
        except MemoryError as error:
            log.warning(NOT_KEPT, self._path, error)

    def _write(self, found: Found, models: list[tuple[LoadModel, ModelShape]]) -> None:
        if found.overlaps:
            for spec, shape in models:
                self._trial.compile_next(spec, shape)
        try:
            cached_file.replace(self._path, msgspec.json.encode(found))
        except OSError as error:
            log.warning(NOT_KEPT, self._path, error)


def _told(ratios: Mapping[str, float]) -> str:
    """Describes measured times, for the log."""
    return ", ".join(f"decode steps of {rows} rows take {ratio:.2f} of the time" for rows, ratio in ratios.items())


def choice_file(folder: Path, gpu: str) -> Path:
    """Returns the path of the file with the choice for a GPU. Its name depends on the versions of torch and Triton, and the source
    text of the kernels that overlap. gpu: the GPU's name and compute capability, and the version of CUDA that its driver has."""
    digest = hashlib.blake2b(f"{gpu} {torch.__version__} {triton.__version__}".encode(), digest_size=12)
    for source in SOURCES:
        digest.update(source.read_bytes())
    return folder / f"overlap-{digest.hexdigest()}.json"


def compared_on(block_tokens: int, device: torch.device | str, num_cores: int, capture: Capture) -> Compare:
    """Returns a function that compares overlapping layers on this GPU (see Trial), which has num_cores multiprocessors. capture:
    captures launches as steps are captured. The function takes up to 130 MiB of torch's memory while it runs."""

    def compare(num_rows: int) -> bool | None:
        try:
            layers = Layers(num_rows, block_tokens, device, num_cores)
            return have_right_results(layers, partial(_captured, capture, layers))
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            return None

    return compare


def measured_on(block_tokens: int, device: torch.device | str, num_cores: int, capture: Capture) -> Measure:
    """Returns a function that measures the times of layers on this GPU (see Trial), in captured graphs. The arguments are those of
    compared_on. The function takes up to 260 MiB of torch's memory while it runs."""

    def measure(num_rows: int) -> Times | None:
        try:
            layers = Layers(num_rows, block_tokens, device, num_cores)
            flush = torch.empty(linear_choice.FLUSH_BYTES, dtype=torch.uint8, device=device)
            layers.begin(0)
            graphs = {way: _captured(capture, layers, way) for way in (Way.APART, Way.OVERLAPPING)}
            times = linear_choice.times_s({way: graph.replay for way, graph in graphs.items()}, flush)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            return None
        return None if times is None else Times(times[Way.APART], times[Way.OVERLAPPING])

    return measure


def _captured(capture: Capture, layers: Layers, way: Way) -> Any:
    """Returns the captured layers, whose kernels follow each other in this way. Launches them before, because the driver refuses to
    load a kernel within a capture."""
    with triton_overlap.forced(way):
        layers.launch()
        return capture(layers.launch)


def have_right_results(layers: Layers, capture: Callable[[Way], Any]) -> bool:
    """Returns whether overlapping layers have the same bits as result, LAUNCHES times each in a graph and without one, as their
    kernels have if they do not overlap, and about the results of the kernels that are used otherwise. Inputs alternate. Waits for
    the device. capture: captures the layers' kernels, which follow each other in a given way."""
    usual, is_right = _results(layers, Way.APART, layers.launch, NUM_INPUTS), True
    for is_graph in (False, True):  # each with results of its own kind: torch's products may differ in their last bits
        launches = {way: capture(way).replay if is_graph else layers.launch for way in (Way.WAITING, Way.OVERLAPPING)}
        wanted = _results(layers, Way.WAITING, launches[Way.WAITING], NUM_INPUTS)
        found = _results(layers, Way.OVERLAPPING, launches[Way.OVERLAPPING], LAUNCHES)
        is_right &= all(map(are_near, wanted, usual))
        is_right &= all(same_bits(one, wanted[at % NUM_INPUTS]) for at, one in enumerate(found))
    return is_right


def _results(layers: Layers, way: Way, launch: Callable[[], Any], number: int) -> list[Tensor]:
    """Launches layers a number of times, whose kernels follow each other in this way, and returns their results. Inputs
    alternate."""
    results = []
    with triton_overlap.forced(way):
        for at in range(number):
            layers.begin(at % NUM_INPUTS)
            launch()
            results.append(layers.results.clone())
    return results
