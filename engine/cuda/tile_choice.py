"""Chooses the tiles of attention on a GPU for which the table (kernels/tiles.py) has no measured ones. The tiles that the table
names for a model's attention are compiled by another process, then compared in idle time, two at a time. The fastest ones are kept
in a file, which the next engine on such a GPU reads before its first launch.

A choice changes nothing in the engine that made it: graphs hold grids and tiles, and a request's text must not change midway, as
the last bits of its logits would.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from engine.cuda import tile_trials
from engine.cuda.kernels import linear_choice, tiles, triton_decode, triton_extend, triton_fp8, triton_softmax
from engine.cuda.kernels.linear_choice import MEASURE_TRIES, apart
from engine.cuda.kernels.tiles import MeasuredTile, Tile
from engine.cuda.tile_trials import Trial, trials_of
from engine.protocol import LoadModel
from loader import cached_file
from loader.shapes.model_shape import ModelShape
from loader.threads import Thread

log = logging.getLogger("engine")

SOURCES = tuple(Path(str(module.__file__)) for module in (tiles, triton_decode, triton_extend, triton_fp8, triton_softmax))

# The seconds that some launches of each of a trial's tiles took, in turns; None: they could not be measured.
Measure = Callable[[Trial, Sequence[Tile]], Mapping[Tile, list[float]] | None]
Compile = Callable[[LoadModel, ModelShape], bool]


class _Contest:
    """The tiles of one trial. best: the one that no other has beaten so far. rivals: those that it has not been compared with yet.
    ready: whether all are compiled. num_tries: how often the first rival has been measured without a decision."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.ready, self.num_tries = trial, False, 0
        self.best, *self.rivals = trial.tiles
        self.gained = 1.0  # the time of `best` over that of the table's tile, as it was measured

    @property
    def is_open(self) -> bool:
        return bool(self.rivals) and self.ready


class ModelTiles:
    """The contests that one model has asked for, some of which may be other models' as well."""

    def __init__(self, choice: TileChoice, contests: list[_Contest]) -> None:
        self._choice, self._contests = choice, contests

    @property
    def num_open(self) -> int:
        """Returns how many comparisons `measure_next` has yet to make, at least; those whose tiles are not compiled yet do not
        count."""
        return sum(len(contest.rivals) for contest in self._contests if contest.ready)

    def measure_next(self) -> None:
        """Compares two tiles on the device, on the current stream, which takes it some ten milliseconds. Does nothing if nothing is
        open."""
        contest = next((contest for contest in self._contests if contest.is_open), None)
        if contest is not None:
            self._choice.compare(contest)


class TileChoice:
    """The choice of tiles on one GPU. path: the file in which choices are kept (see choice_file). compile_tiles: compiles what a
    model's trials launch, in another process, and returns whether all of it is compiled; it is called in a thread. measure:
    measures tiles on the device."""

    def __init__(self, path: Path, block_tokens: int, compile_tiles: Compile, measure: Measure) -> None:
        self._path, self._block_tokens, self._compile, self._measure = path, block_tokens, compile_tiles, measure
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._contests: dict[tuple[str, int, int, bool], _Contest] = {}
        self._chosen: dict[tuple[str, int, int, bool], Tile] = {}

    def begin(self) -> None:
        """Reads what was chosen before, and has it used from now on. Called once, before the first launch of attention. A file that
        cannot be read, or has other tiles than the table names, counts as empty."""
        try:
            kept = _read(self._path)
        except FileNotFoundError:
            kept = []
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the tiles of attention are measured anew: %s: %s: %s", self._path, type(error).__name__, error)
            kept = []
        self._chosen = {one[:4]: one.tile for one in kept}
        changed = [one for one in kept if one.tile != tiles.entry_of(*one[:4]).tile]
        tiles.use(changed)
        if kept:
            told = "; ".join(f"{one.kernel} {one.head_dim}{' fp8' if one.fp8 else ''}: {_told(one.tile)}" for one in changed)
            what = "tiles of attention: %d were measured on this GPU before; other than the table's are: %s"
            log.info(what, len(kept), told or "none")

    def of_model(self, spec: LoadModel, shape: ModelShape) -> ModelTiles:
        """Returns the contests of a model that was loaded, and has their tiles compiled in the background. Called by loads'
        threads."""
        with self._lock:
            wanted = [trial for trial in trials_of(spec, shape, self._block_tokens) if trial.key not in self._chosen]
            new = [trial for trial in wanted if trial.key not in self._contests]
            self._contests.update((trial.key, _Contest(trial)) for trial in new)
            contests = [self._contests[trial.key] for trial in wanted]
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
        """Measures a contest's best tile and its next rival. The one that is clearly faster goes on; if none is in MEASURE_TRIES
        tries, the best one stays. After the last rival the choice is kept."""
        rival = contest.rivals[0]
        try:
            times = self._measure(contest.trial, (contest.best, rival))
        except OutOfResources as error:
            log.warning("%s: %s does not fit on this GPU: %s", contest.trial, _told(rival), error)
            times, contest.num_tries = None, MEASURE_TRIES
        contest.num_tries += 1
        if times is not None and apart(times[contest.best], times[rival]):
            ratio = statistics.median(times[rival]) / statistics.median(times[contest.best])
            if ratio < 1.0:
                contest.best, contest.gained = rival, contest.gained * ratio
        elif contest.num_tries < MEASURE_TRIES:
            return
        contest.rivals.pop(0)
        contest.num_tries = 0
        if not contest.rivals:
            self._keep(contest)

    def _keep(self, contest: _Contest) -> None:
        trial = contest.trial
        if contest.best == trial.entry.tile:
            log.info("%s: the table's tile stays (%s)", trial, _told(contest.best))
        else:
            told = (trial, _told(contest.best), contest.gained, _told(trial.entry.tile))
            log.info("%s: %s takes %.2f of the time of %s; the next engine on this GPU uses it", *told)
        with self._lock:
            self._chosen[trial.key] = contest.best
        Thread(target=self._write, name="kernels").start()  # a file system may hang

    def _write(self) -> None:
        """Writes all choices to the file, beside those that another engine has added meanwhile, replacing it at once. An OSError
        becomes a warning in the log."""
        with self._writing:
            with self._lock:
                chosen = dict(self._chosen)
            try:
                for one in _read(self._path):
                    chosen.setdefault(one[:4], one.tile)
            except (OSError, ValueError, TypeError, KeyError):
                pass  # there is none yet, or it was told of at the engine's start
            try:
                cached_file.replace(self._path, json.dumps({"kept": [[*key, list(tile)] for key, tile in chosen.items()]}).encode())
            except OSError as error:
                log.warning("the measured tiles of attention are not kept for the next engine: %s: %s", self._path, error)


def choice_file(folder: Path, gpu: str) -> Path:
    """Returns the file of a GPU's choices: another one for another kind of GPU, version of Triton, or source of the kernels or of
    the table. gpu: its name and compute capability."""
    digest = hashlib.blake2b(f"{gpu} {triton.__version__}".encode(), digest_size=12)
    for source in SOURCES:
        digest.update(source.read_bytes())
    return folder / f"tiles-{digest.hexdigest()}.json"


def _read(path: Path) -> list[MeasuredTile]:
    """Returns the choices in a file. Raises OSError, and ValueError, TypeError or KeyError for a file that holds something else."""
    kept: list[MeasuredTile] = []
    for kernel, head_dim, item_bytes, fp8, sizes in json.loads(path.read_text())["kept"]:
        one = MeasuredTile(kernel, head_dim, item_bytes, fp8, Tile(*sizes))
        entry = tiles.entry_of(*one[:4])
        if one.tile not in (entry.tile, *entry.others):
            raise ValueError(f"{_told(one.tile)} is none of the tiles of {kernel} with heads of {head_dim}")
        kept.append(one)
    return kept


def _told(tile: Tile) -> str:
    return f"{tile.tokens} x {tile.positions}, {tile.warps} warps, {tile.stages} stages"


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
