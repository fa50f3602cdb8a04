"""Chooses the tiles of attention (how many queries and positions a kernel's program computes at a time) by measuring on the GPU,
where the table in kernels/tiles.py names alternatives. Another process compiles the alternatives for a model's attention. In idle
time the engine then compares two tiles at a time: first their results, then their times. The fastest tiles are kept in a file,
which the next engine on such a GPU reads before its first launch.

A tile whose results differ from those of the table's tile is excluded: neither this engine nor a later one measures it, and the log
has a warning. This is mainly for the variant of the decode kernel with `joins` (triton_decode.py), in which the programs of one
launch combine the split-K parts of a sequence's attention themselves. It relies on an order in which the GPU makes writes to memory
visible. On a GPU with another order some of its results would be wrong, which measured times do not show.

Where FlashAttention is installed, prompts are also measured with it (tiles with `flash`). Its code ends the process where it fails,
so a TrialMark is set while its results are compared. If an engine finds, when it starts, the mark of another one that has ended in
the comparison, FlashAttention is neither compared nor used until the mark's file is deleted.

A choice takes effect only in the next engine, because graphs hold grids and tiles, and because another tile may change the last
bits of logits and so the text of a running request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from engine.cuda import tile_trials
from engine.cuda.kernels import flash_attention, linear_choice, tiles, triton_decode, triton_extend, triton_fp8, triton_softmax
from engine.cuda.kernels.linear_choice import MEASURE_TRIES, apart
from engine.cuda.kernels.tiles import MeasuredTile, Place, Tile
from engine.cuda.tile_trials import Trial, trials_of
from engine.cuda.trial_marks import TrialMark
from engine.memory.out_of_memory import lacks_memory
from engine.protocol import LoadModel
from loader import cached_file
from loader.shapes.model_shape import ModelShape
from loader.threads import Thread

log = logging.getLogger("engine")

_MODULES = (tiles, flash_attention, triton_decode, triton_extend, triton_fp8, triton_softmax)
SOURCES = tuple(Path(str(module.__file__)) for module in _MODULES)

NOT_KEPT = "the measured tiles of attention are not kept for the next engine: %s: %s"
JOINED_TURNS = 4  # in which the results of a form that joins pieces are compared: 128 launches (tile_trials.LAUNCHES)

# The seconds that some launches of each of a trial's tiles took, in turns; None: they could not be measured.
Measure = Callable[[Trial, Sequence[Tile]], Mapping[Tile, list[float]] | None]
# Whether a tile has the results of the table's tile; None: there was no memory to compare them.
Compare = Callable[[Trial, Tile], bool | None]
Compile = Callable[[LoadModel, ModelShape], bool]
Capture = Callable[[Callable[[], None]], Any]  # captures what the function launches, and returns the graph


class _Contest:
    """A measurement of alternatives: the tiles of one trial (tile_trials.Trial), compared with each other until one is left.

    excluded: tiles that are not compared, because their results are wrong.
    best: the tile that no other has beaten so far.
    rivals: the tiles that `best` has not been compared with yet. After all rivals of other sizes, the variant of `best` is the last
    rival: in decode steps the one that combines split-K parts itself (`joins`), for prompts the one with FlashAttention (`flash`).
    ready: whether all tiles are compiled.
    num_compared: number of calls of TileChoice.compare in which the first rival had the right results. num_tries: number of calls
    since then that decided nothing."""

    def __init__(self, trial: Trial, excluded: Collection[Tile]) -> None:
        self.trial, self.ready, self.num_compared, self.num_tries = trial, False, 0, 0
        self.best, *others = (tile for tile in trial.tiles if tile not in excluded)
        self.rivals = [tile for tile in others if tile == tile.size]
        self._variants = [tile for tile in others if tile != tile.size]
        self.gained = 1.0  # the time of `best` over that of the table's tile, as it was measured
        self._add_variant()

    @property
    def is_open(self) -> bool:
        return bool(self.rivals) and self.ready

    @property
    def num_turns(self) -> int:
        """Returns the least number of calls of TileChoice.compare that the remaining rivals take."""
        return sum(JOINED_TURNS + 1 if tile.joins else 2 for tile in self.rivals) - self.num_compared

    @property
    def is_compared(self) -> bool:
        """Returns whether the results of the first rival were right as often as they have to be compared, so that only its time is
        still to be measured."""
        return self.num_compared == (JOINED_TURNS if self.rivals[0].joins else 1)

    def end_rival(self) -> None:
        self.rivals.pop(0)
        self.num_compared = self.num_tries = 0
        self._add_variant()

    def _add_variant(self) -> None:
        if not self.rivals:
            self.rivals = [tile for tile in self._variants if tile.size == self.best]
            self._variants = []


class ModelTiles:
    """The measurements of tiles for one model's attention. Models with attention of the same sizes share them."""

    def __init__(self, choice: TileChoice, contests: list[_Contest]) -> None:
        self._choice, self._contests = choice, contests

    @property
    def num_open(self) -> int:
        """Returns for how many calls, at least, measure_next still has something to do. Tiles that are not compiled yet do not
        count."""
        return sum(contest.num_turns for contest in self._contests if contest.ready)

    def measure_next(self) -> None:
        """Compares the results or the times of two tiles on the current stream, which takes the device some ten milliseconds. Does
        nothing if no tiles that are compiled are left to compare."""
        contest = next((contest for contest in self._contests if contest.is_open), None)
        if contest is not None:
            self._choice.compare(contest)


class TileChoice:
    """The choice of tiles for attention on one GPU.

    path: the file in which choices are kept (see choice_file).
    flash_mark: set while results of FlashAttention are compared (see usable_flash); None: it cannot be used.
    compile_tiles: compiles, in another process, all kernels with which a model's tiles are measured, and returns whether that
    succeeded; it is called in a thread.
    measure: measures the times of tiles on the device. compare: compares a tile's results with those of the table's tile."""

    def __init__(
        self,
        path: Path,
        block_tokens: int,
        compile_tiles: Compile,
        measure: Measure,
        compare: Compare,
        flash_mark: TrialMark | None = None,
    ) -> None:
        self._path, self._block_tokens, self._compile, self._flash_mark = path, block_tokens, compile_tiles, flash_mark
        self._measure, self._compare = measure, compare
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._contests: dict[Place, _Contest] = {}
        self._kept = _Kept({}, set())

    def begin(self) -> None:
        """Reads the choices of earlier engines from the file, and makes the kernels use them from now on. Called once, before the
        first launch of attention. A file that cannot be read, or that names tiles which the table does not, counts as empty."""
        try:
            self._kept = _read(self._path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the tiles of attention are measured anew: %s: %s: %s", self._path, type(error).__name__, error)
        kept = [MeasuredTile(*place, tile) for place, tile in self._kept.chosen.items()]
        changed = [one for one in kept if one.tile != tiles.entry_of(*one[:4]).tile]
        tiles.use(changed)
        if kept:
            told = "; ".join(f"{one.kernel} {one.head_dim}{' fp8' if one.fp8 else ''}: {_told(one.tile)}" for one in changed)
            what = "tiles of attention: %d were measured on this GPU before; other than the table's are: %s"
            log.info(what, len(kept), told or "none")
        for one in sorted(self._kept.excluded):
            told_of = (one.kernel, one.head_dim, _told(one.tile))
            log.warning("%s %d: %s had wrong results on this GPU before, and is not used", *told_of)

    def of_model(self, spec: LoadModel, shape: ModelShape) -> ModelTiles:
        """Returns the measurements of tiles for a model that was just loaded, and starts to compile their tiles in the background.
        Called by the threads of loads."""
        with self._lock:
            trials = trials_of(spec, shape, self._block_tokens, self._flash_mark is not None)
            wanted = [trial for trial in trials if trial.place not in self._kept.chosen]
            new = [trial for trial in wanted if trial.place not in self._contests]
            self._contests.update((trial.place, _Contest(trial, self._kept.excluded_at(trial.place))) for trial in new)
            contests = [self._contests[trial.place] for trial in wanted]
        if new:
            own = [contest for contest in contests if contest.trial in new]
            try:
                Thread(target=self._compile_all, args=(spec, shape, own), name="tiles").start()
            except MemoryError as error:
                log.warning("%s: the tiles of its attention are not measured: %s", spec.model, error)
        return ModelTiles(self, contests)

    def _compile_all(self, spec: LoadModel, shape: ModelShape, contests: list[_Contest]) -> None:
        if self._compile(spec, shape):
            for contest in contests:
                contest.ready = True
        else:
            log.warning("%s: the tiles of its attention are not measured, since not all could be compiled", spec.model)

    def compare(self, contest: _Contest) -> None:
        """Makes the next comparison of a measurement. If the results of the first rival have not been compared often enough, the
        call compares them, and excludes a rival with wrong results. Otherwise the call measures the times of the rival and of the
        best tile; the rival becomes the best if it is clearly faster.

        The best tile stays if MEASURE_TRIES calls find neither clearly faster, or cannot compare results. After the last rival the
        best tile is written to the file."""
        rival = contest.rivals[0]
        try:
            is_decided = self._has_results(contest, rival) if not contest.is_compared else self._has_times(contest, rival)
        except OutOfResources as error:
            log.warning("%s: %s does not fit on this GPU: %s", contest.trial, _told(rival), error)
            is_decided = True
        if not is_decided and contest.num_tries < MEASURE_TRIES:
            return
        contest.end_rival()
        if not contest.rivals:
            self._keep(contest)

    def _has_results(self, contest: _Contest, rival: Tile) -> bool:
        """Compares the results of a rival tile once with those of the table's tile. Returns True if they differ, which excludes the
        rival; False if they agree or could not be compared, so that further calls are needed."""
        is_right = self._compare_flash(contest.trial, rival) if rival.flash else self._compare(contest.trial, rival)
        if is_right is None:
            contest.num_tries += 1
            return False
        if is_right:
            contest.num_compared, contest.num_tries = contest.num_compared + 1, 0
            return False
        told = (contest.trial, _told(rival), _told(contest.trial.entry.tile))
        log.warning("%s: %s has other results than %s on this GPU, and is excluded for good", *told)
        with self._lock:
            self._kept.excluded.add(MeasuredTile(*contest.trial.place, rival))
        self._write_behind()
        return True

    def _compare_flash(self, trial: Trial, rival: Tile) -> bool | None:
        """Compares the results of FlashAttention as the function `compare` does. The mark is set meanwhile, and stays if the
        process ends. Returns False also if the library refuses the call, and None if the mark cannot be set."""
        assert self._flash_mark is not None
        try:
            with self._flash_mark.set():
                try:
                    return self._compare(trial, rival)
                except RuntimeError as error:
                    if type(error) is not RuntimeError or "CUDA" in str(error):  # the device is lost, and the engine ends
                        raise
                    log.warning("%s: FlashAttention refuses it: %s", trial, error)
                    return False
        except OSError as error:
            log.warning("%s: FlashAttention is not compared: %s", trial, error)
            return None

    def _has_times(self, contest: _Contest, rival: Tile) -> bool:
        """Measures the times of a rival tile and of the best tile once. Returns whether one is clearly faster; if that is the
        rival, it becomes the best. False also if the times could not be measured."""
        times = self._measure(contest.trial, (contest.best, rival))
        contest.num_tries += 1
        if times is None or not apart(times[contest.best], times[rival]):
            return False
        ratio = statistics.median(times[rival]) / statistics.median(times[contest.best])
        if ratio < 1.0:
            contest.best, contest.gained = rival, contest.gained * ratio
        return True

    def _keep(self, contest: _Contest) -> None:
        trial = contest.trial
        if contest.best == trial.entry.tile:
            log.info("%s: the table's tile stays (%s)", trial, _told(contest.best))
        else:
            told = (trial, _told(contest.best), contest.gained, _told(trial.entry.tile))
            log.info("%s: %s takes %.2f of the time of %s; the next engine on this GPU uses it", *told)
        with self._lock:
            self._kept.chosen[trial.place] = contest.best
        self._write_behind()

    def _write_behind(self) -> None:
        try:
            Thread(target=self._write, name="kernels").start()  # a file system may hang
        except MemoryError as error:  # the next choice writes this one, too
            log.warning(NOT_KEPT, self._path, error)

    def _write(self) -> None:
        """Replaces the file, in one step, by this engine's choices and excluded tiles together with those that another engine has
        written meanwhile. An OSError becomes a warning in the log."""
        with self._writing:
            with self._lock:
                kept = _Kept(dict(self._kept.chosen), set(self._kept.excluded))
            try:
                other = _read(self._path)
                kept = _Kept(other.chosen | kept.chosen, other.excluded | kept.excluded)
            except (OSError, ValueError, TypeError, KeyError):
                pass  # there is none yet, or it was told of at the engine's start
            try:
                cached_file.replace(self._path, kept.as_json())
            except OSError as error:
                log.warning(NOT_KEPT, self._path, error)


class _Kept(NamedTuple):
    """The content of a file of choices. chosen: the tile chosen for each key of the table (MeasuredTile.place). excluded: the tiles
    with wrong results."""

    chosen: dict[Place, Tile]
    excluded: set[MeasuredTile]

    def excluded_at(self, place: Place) -> list[Tile]:
        return [one.tile for one in self.excluded if one.place == place]

    def as_json(self) -> bytes:
        chosen = [MeasuredTile(*place, tile) for place, tile in self.chosen.items()]
        kept = [one for one in chosen if one not in self.excluded]
        return json.dumps({"kept": kept, "excluded": sorted(self.excluded)}).encode()  # a tuple becomes a list


def usable_flash(folder: Path, gpu: int) -> tuple[str, TrialMark | None]:
    """Returns the version of FlashAttention that can be used, and the mark in `folder` that is set while its results are compared;
    "" and None if none can be used. gpu: the compute capability, 90 for 9.0."""
    if not (version := flash_attention.version(gpu)):
        return "", None
    mark = TrialMark(folder, f"flash-attention-{version}")
    if (left := mark.left()) is not None:
        log.warning(
            "FlashAttention %s is not used: an engine ended while it compared its results; to try again, delete %s", version, left
        )
        return "", None
    return version, mark


def choice_file(folder: Path, gpu: str, flash: str = "") -> Path:
    """Returns the path of the file with the choices for a GPU. Its name depends on the GPU, the versions of Triton and of
    FlashAttention, and the source text of the attention kernels and the table. gpu: the GPU's name and compute capability. flash:
    the version of FlashAttention; "": none can be used."""
    digest = hashlib.blake2b(f"{gpu} {triton.__version__} {flash}".encode(), digest_size=12)
    for source in SOURCES:
        digest.update(source.read_bytes())
    return folder / f"tiles-{digest.hexdigest()}.json"


def _read(path: Path) -> _Kept:
    """Returns the content of a file of choices, without chosen tiles that are also excluded. (Two engines may have written the
    file, of which one chose a tile that had wrong results in the other.) Raises OSError, and ValueError, TypeError or KeyError for
    a file with other content."""
    read = json.loads(path.read_text())
    chosen, excluded = ([_row(row) for row in read[name]] for name in ("kept", "excluded"))
    return _Kept({one.place: one.tile for one in chosen if one not in excluded}, set(excluded))


def _row(row: list[Any]) -> MeasuredTile:
    """Returns the measured tile that a row of the file describes. Raises ValueError, TypeError or KeyError for a row of another
    form, and ValueError for a tile that the table does not name, with FlashAttention or without it."""
    kernel, head_dim, item_bytes, fp8, group, sizes = row
    one = MeasuredTile(kernel, head_dim, item_bytes, fp8, group, Tile(*sizes))
    entry = tiles.entry_of(*one[:4])
    if one.tile._replace(flash="") not in (entry.tile, *entry.others):
        raise ValueError(f"{_told(one.tile)} is none of the tiles of {kernel} with heads of {head_dim}")
    return one


def _told(tile: Tile) -> str:
    told = f"{tile.tokens} x {tile.positions}, {tile.warps} warps, {tile.stages} stages{', joining pieces' if tile.joins else ''}"
    return f"FlashAttention (heads of {tile.flash}) beside {told}" if tile.flash else told


def measured_on(device: torch.device, num_cores: int) -> Measure:
    """Returns a function that measures the times of a trial's tiles on this GPU, which has num_cores multiprocessors. The function
    returns the seconds of several launches of each tile, or None if there is not enough free memory or the host launches too slowly
    to measure (linear_choice.times_s). It takes some 200 MiB of torch's memory while it runs."""

    def measure(trial: Trial, compared: Sequence[Tile]) -> dict[Tile, list[float]] | None:
        try:
            flush: Tensor = torch.empty(linear_choice.FLUSH_BYTES, dtype=torch.uint8, device=device)
            launching: dict[Tile, Callable[[], Any]] = dict(tile_trials.launching(trial, device, num_cores, compared))
            return linear_choice.times_s(launching, flush)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            return None

    return measure


def compared_on(device: torch.device, num_cores: int, capture: Capture | None = None) -> Compare:
    """Returns a function that compares a tile's results with those of the table's tile on this GPU, which has num_cores
    multiprocessors. The function returns whether the tile's results are right, or None if there is not enough free memory. It first
    keeps the device busy with other work until the host has launched the first kernels to compare, so that these run close after
    each other.

    capture: captures the launches of FlashAttention, so that the results of replays are compared too; None: they are not. A capture
    is on a stream of its own, where some builds of the library fail, and a second replay finds what the first has left in the
    library's work space."""

    def compare(trial: Trial, tile: Tile) -> bool | None:
        try:
            flush = torch.empty(linear_choice.FLUSH_BYTES, dtype=torch.uint8, device=device)
            comparison = tile_trials.Comparison(trial, device, num_cores, tile)
            for _ in range(linear_choice.HEAD_START):
                flush.zero_()
            comparison.launch()
            is_right = comparison.is_right()
            if is_right and tile.flash and capture is not None:
                graph = capture(comparison.launch)
                for _ in range(2):
                    comparison.forget()
                    graph.replay()
                    is_right &= comparison.is_right()
            return is_right
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            return None

    return compare
