"""Chooses the tiles of attention on a GPU where the table (kernels/tiles.py) names others to try. The tiles that it names for a
model's attention are compiled by another process, then compared in idle time, two at a time: first the results, then the times. The
fastest ones are kept in a file, which the next engine on such a GPU reads before its first launch.

A tile with other results than the table's is excluded: it is not measured, now or by a later engine, and the log has a warning.
This is for the form that joins pieces (triton_decode.py), which no GPU had run when it was written: where a GPU orders memory
otherwise than the kernel relies on, some of its results would be wrong, and no time tells that.

A choice changes nothing in the engine that made it: graphs hold grids and tiles, and a request's text must not change midway, as
the last bits of its logits would.
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
from engine.cuda.kernels import linear_choice, tiles, triton_decode, triton_extend, triton_fp8, triton_softmax
from engine.cuda.kernels.linear_choice import MEASURE_TRIES, apart
from engine.cuda.kernels.tiles import MeasuredTile, Place, Tile
from engine.cuda.tile_trials import Trial, trials_of
from engine.protocol import LoadModel
from loader import cached_file
from loader.shapes.model_shape import ModelShape
from loader.threads import Thread

log = logging.getLogger("engine")

SOURCES = tuple(Path(str(module.__file__)) for module in (tiles, triton_decode, triton_extend, triton_fp8, triton_softmax))

JOINED_TURNS = 4  # in which the results of a form that joins pieces are compared: 128 launches (tile_trials.LAUNCHES)

# The seconds that some launches of each of a trial's tiles took, in turns; None: they could not be measured.
Measure = Callable[[Trial, Sequence[Tile]], Mapping[Tile, list[float]] | None]
# Whether a tile has the results of the table's tile; None: there was no memory to compare them.
Compare = Callable[[Trial, Tile], bool | None]
Compile = Callable[[LoadModel, ModelShape], bool]


class _Contest:
    """The tiles of one trial. excluded: those with wrong results. best: the one that no other has beaten so far. rivals: those that
    it has not been compared with yet; behind those of other sizes comes the form of the best one that joins pieces. ready: whether
    all are compiled. num_compared: in how many turns the first rival had the right results. num_tries: how many turns were in vain
    since then."""

    def __init__(self, trial: Trial, excluded: Collection[Tile]) -> None:
        self.trial, self.ready, self.num_compared, self.num_tries = trial, False, 0, 0
        self.best, *others = (tile for tile in trial.tiles if tile not in excluded)
        self.rivals = [tile for tile in others if not tile.joins]
        self._joining = [tile for tile in others if tile.joins]
        self.gained = 1.0  # the time of `best` over that of the table's tile, as it was measured
        self._add_joining()

    @property
    def is_open(self) -> bool:
        return bool(self.rivals) and self.ready

    @property
    def num_turns(self) -> int:
        """Returns how many turns the rivals take, at least."""
        return sum(JOINED_TURNS + 1 if tile.joins else 2 for tile in self.rivals) - self.num_compared

    @property
    def is_compared(self) -> bool:
        """Returns whether the results of the first rival are known to be right."""
        return self.num_compared == (JOINED_TURNS if self.rivals[0].joins else 1)

    def end_rival(self) -> None:
        self.rivals.pop(0)
        self.num_compared = self.num_tries = 0
        self._add_joining()

    def _add_joining(self) -> None:
        if not self.rivals:
            self.rivals = [tile for tile in self._joining if tile == self.best._replace(joins=True)]
            self._joining = []


class ModelTiles:
    """The contests that one model has asked for, some of which may be other models' as well."""

    def __init__(self, choice: TileChoice, contests: list[_Contest]) -> None:
        self._choice, self._contests = choice, contests

    @property
    def num_open(self) -> int:
        """Returns how many calls of `measure_next` have something to do, at least; tiles that are not compiled yet do not count."""
        return sum(contest.num_turns for contest in self._contests if contest.ready)

    def measure_next(self) -> None:
        """Compares results or times of two tiles on the device, on the current stream, which takes it some ten milliseconds. Does
        nothing if nothing is open."""
        contest = next((contest for contest in self._contests if contest.is_open), None)
        if contest is not None:
            self._choice.compare(contest)


class TileChoice:
    """The choice of tiles on one GPU. path: the file in which choices are kept (see choice_file). compile_tiles: compiles what a
    model's trials launch, in another process, and returns whether all of it is compiled; it is called in a thread. measure,
    compare: measure tiles and compare their results on the device."""

    def __init__(self, path: Path, block_tokens: int, compile_tiles: Compile, measure: Measure, compare: Compare) -> None:
        self._path, self._block_tokens, self._compile = path, block_tokens, compile_tiles
        self._measure, self._compare = measure, compare
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._contests: dict[Place, _Contest] = {}
        self._kept = _Kept({}, set())

    def begin(self) -> None:
        """Reads what was chosen before, and has it used from now on. Called once, before the first launch of attention. A file that
        cannot be read, or has other tiles than the table names, counts as empty."""
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
        """Returns the contests of a model that was loaded, and has their tiles compiled in the background. Called by loads'
        threads."""
        with self._lock:
            wanted = [trial for trial in trials_of(spec, shape, self._block_tokens) if trial.place not in self._kept.chosen]
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
        """Compares the results of a contest's next rival, in as many turns as it takes; a rival with wrong results is excluded.
        Then measures it and the best tile. The one that is clearly faster goes on. If none is in MEASURE_TRIES tries, or the
        results cannot be compared, the best one stays. After the last rival the choice is kept."""
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
        """Compares the results of a rival once, and returns whether that excludes it."""
        is_right = self._compare(contest.trial, rival)
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

    def _has_times(self, contest: _Contest, rival: Tile) -> bool:
        """Measures a rival and the best tile once, and returns whether that decides between them."""
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
        Thread(target=self._write, name="kernels").start()  # a file system may hang

    def _write(self) -> None:
        """Writes what is known to the file, beside what another engine has added meanwhile, replacing it at once. An OSError
        becomes a warning in the log."""
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
                log.warning("the measured tiles of attention are not kept for the next engine: %s: %s", self._path, error)


class _Kept(NamedTuple):
    """The content of a file. chosen: the tile of each place. excluded: tiles with wrong results."""

    chosen: dict[Place, Tile]
    excluded: set[MeasuredTile]

    def excluded_at(self, place: Place) -> list[Tile]:
        return [one.tile for one in self.excluded if one.place == place]

    def as_json(self) -> bytes:
        chosen = [MeasuredTile(*place, tile) for place, tile in self.chosen.items()]
        kept = [one for one in chosen if one not in self.excluded]
        return json.dumps({"kept": kept, "excluded": sorted(self.excluded)}).encode()  # a tuple becomes a list


def choice_file(folder: Path, gpu: str) -> Path:
    """Returns the file of a GPU's choices: another one for another kind of GPU, version of Triton, or source of the kernels or of
    the table. gpu: its name and compute capability."""
    digest = hashlib.blake2b(f"{gpu} {triton.__version__}".encode(), digest_size=12)
    for source in SOURCES:
        digest.update(source.read_bytes())
    return folder / f"tiles-{digest.hexdigest()}.json"


def _read(path: Path) -> _Kept:
    """Returns what a file holds, without choices that are excluded: of two engines on such GPUs one may have seen what the other
    has not. Raises OSError, and ValueError, TypeError or KeyError for a file that holds something else."""
    read = json.loads(path.read_text())
    chosen, excluded = ([_row(row) for row in read[name]] for name in ("kept", "excluded"))
    return _Kept({one.place: one.tile for one in chosen if one not in excluded}, set(excluded))


def _row(row: list[Any]) -> MeasuredTile:
    """Returns a row of a file. Raises ValueError, TypeError or KeyError for another row than this version writes."""
    kernel, head_dim, item_bytes, fp8, group, sizes = row
    one = MeasuredTile(kernel, head_dim, item_bytes, fp8, group, Tile(*sizes))
    entry = tiles.entry_of(*one[:4])
    if one.tile not in (entry.tile, *entry.others):
        raise ValueError(f"{_told(one.tile)} is none of the tiles of {kernel} with heads of {head_dim}")
    return one


def _told(tile: Tile) -> str:
    return f"{tile.tokens} x {tile.positions}, {tile.warps} warps, {tile.stages} stages{', joining pieces' if tile.joins else ''}"


def measured_on(device: torch.device, num_cores: int) -> Measure:
    """Returns the measurement of tiles on this GPU, which has num_cores multiprocessors. It takes some 200 MiB of torch's memory
    meanwhile, and returns None if that is not free, or if the host is too slow (linear_choice.times_s)."""

    def measure(trial: Trial, compared: Sequence[Tile]) -> dict[Tile, list[float]] | None:
        try:
            flush: Tensor = torch.empty(linear_choice.FLUSH_BYTES, dtype=torch.uint8, device=device)
            launching: dict[Tile, Callable[[], Any]] = dict(tile_trials.launching(trial, device, num_cores, compared))
            return linear_choice.times_s(launching, flush)
        except torch.OutOfMemoryError:
            return None

    return measure


def compared_on(device: torch.device, num_cores: int) -> Compare:
    """Returns the comparison of results on this GPU, which has num_cores multiprocessors, and which returns None if there is not
    enough free memory for it. The device has other work until the host has launched the first part, so that launches follow each
    other closely."""

    def compare(trial: Trial, tile: Tile) -> bool | None:
        try:
            flush = torch.empty(linear_choice.FLUSH_BYTES, dtype=torch.uint8, device=device)
            comparison = tile_trials.Comparison(trial, device, num_cores, tile)
            for _ in range(linear_choice.HEAD_START):
                flush.zero_()
            comparison.launch()
            return comparison.is_right()
        except torch.OutOfMemoryError:
            return None

    return compare
