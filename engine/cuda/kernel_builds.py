"""Compiles the Triton kernels of a model in other processes before the model's weights are loaded. So no step of another model
waits for a compiler, and a compiler that crashes does not end the engine.

Compiled kernels are kept in Triton's cache folder, so each node compiles them only once for each kind of model. An empty file in
that folder records that this is done. Its name is a digest of everything that determines what is compiled.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton

from engine.contracts.loads import KernelNews
from engine.cuda.compile_process import CompileJob
from engine.cuda.kernels import tiles, triton_overlap
from engine.host.child_process import MOST_COMPILERS, PACKAGES, child_environment
from engine.protocol import KernelsTold, LoadModel
from loader.formats.registry import FORMATS
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import layout_id
from loader.threads import Thread
from scheduler.report_intervals import KERNEL_WAIT_EVERY_S

log = logging.getLogger("engine")

LIMIT_S = 300.0
START_S, UNIT_S = 6.0, 1.5  # expected time until a process begins to compile, and for each kernel


class CudaKernelBuilds:
    """The compilation of kernels for one GPU.

    folder: Triton's cache folder. capability: the GPU's compute capability, 90 for 9.0.
    num_processes: how many compile processes run at a time, MOST_COMPILERS at most.
    tell: called by the thread that waits for the compilation, again and again with the number of kernels that are compiled, and
    once at the end."""

    def __init__(
        self, folder: str, capability: int, block_tokens: int, num_processes: int, tell: Callable[[KernelNews], None]
    ) -> None:
        self._folder, self._capability, self._block_tokens = folder, capability, block_tokens
        self._num_processes, self._tell = max(1, min(num_processes, MOST_COMPILERS)), tell

    def need(self, spec: LoadModel, shape: ModelShape, waiting: Callable[[], None], adapters: bool = False) -> None:
        """Compiles the model's kernels, unless that was done before, and returns when they are compiled. If that fails, the log
        says why, and the load's warm-up compiles the missing ones.

        waiting: called every KERNEL_WAIT_EVERY_S; an error that it raises ends the compilation and is raised here.
        adapters: compiles the additional kernels of steps with LoRA adapters instead; if that fails, the first step with an adapter
        compiles the missing ones."""
        text = self._job(spec, shape, adapters=adapters)
        mark = self._mark_of(text, spec, shape)
        if mark.exists():
            return
        try:
            with _alone(Path(self._folder, "compiling"), waiting):
                if not mark.exists() and self._build(spec.model, text, waiting):
                    mark.touch()
        except OSError as error:  # the folder is gone, or its disk is full or broken
            log.error("%s: its kernels cannot be compiled ahead, its load compiles them: %s", spec.model, error)

    def build_trials(self, spec: LoadModel, shape: ModelShape, has_flash: bool = False) -> bool:
        """Compiles the attention kernels with which alternative tiles are compared for a model (tile_choice.py), in one process.
        Does not take the lock of `need`, so no load waits for this. Returns whether all of them are compiled; if not, the log says
        why. has_flash: whether FlashAttention is among what is compared."""
        return self._build_aside(f"{spec.model}: the tiles to compare", self._job(spec, shape, trials=True, has_flash=has_flash))

    def build_overlap_trial(self, spec: LoadModel, shape: ModelShape) -> bool:
        """Compiles the kernels with which an engine finds out whether kernels may overlap (overlap_choice.py), as build_trials does
        the tiles. They are the same for all models."""
        return self._build_aside("the overlapping kernels to compare", self._job(spec, shape, overlap_trial=True))

    def build_overlapping(self, spec: LoadModel, shape: ModelShape) -> None:
        """Compiles the model's kernels for an engine whose kernels overlap, unless that was done before. Does not take the lock of
        `need`. If it fails, the log says why, and that engine compiles them itself."""
        text = self._job(spec, shape, overlaps=True)
        mark = self._mark_of(text, spec, shape)
        if not mark.exists() and self._build_aside(f"{spec.model}: its overlapping kernels", text):
            with suppress(OSError):
                mark.touch()

    def _build_aside(self, what: str, job: bytes) -> bool:
        """Compiles the kernels of a job in one process, while loads go on. Returns whether all of them are compiled; if not, the
        log says why. what: names them in the log. job: a CompileJob as JSON."""
        try:
            process = _start(0, 1)
        except OSError as error:
            log.error("%s cannot be compiled: %s", what, error)
            return False
        try:
            Thread(target=_follow, args=(process, job, _Progress()), name="tiles").start()
            code = process.wait(LIMIT_S)
        except (MemoryError, subprocess.TimeoutExpired) as error:
            log.error("%s are not all compiled: %s", what, error)
            return False
        finally:
            process.kill()
            process.wait()
        if code:
            log.error("%s are not all compiled: a compiler ended with %d", what, code)
        return code == 0

    def _mark_of(self, job: bytes, spec: LoadModel, shape: ModelShape) -> Path:
        """Returns the path of the file which records that a model's job is done."""
        return Path(self._folder, f"compiled-{_digest(job, layout_id(shape, spec.dtype, FORMATS[spec.quantize]))}")

    def _job(self, spec: LoadModel, shape: ModelShape, overlaps: bool | None = None, **what: Any) -> bytes:
        """Returns the CompileJob for a model as JSON. Settings of `spec` that do not affect compilation are left empty. The kernels
        that FlashAttention replaces are compiled nevertheless. overlaps: whether kernels overlap; None: as in this engine. what:
        other fields of CompileJob."""
        limits = (spec.max_model_len, spec.max_sequences)
        settings = LoadModel(0, "", "", spec.dtype, "", 0, 0, 0, *limits, [], spec.quantize, kv_cache_dtype=spec.kv_cache_dtype)
        of_gpu = (self._block_tokens, self._capability, self._folder)
        own = [one._replace(tile=one.tile._replace(flash="")) for one in tiles.in_use()]
        follows = triton_overlap.is_used() if overlaps is None else overlaps
        return msgspec.json.encode(CompileJob(settings, shape, *of_gpu, tiles=own, overlaps=follows, **what))

    def _build(self, model: str, job: bytes, waiting: Callable[[], None]) -> bool:
        """Runs compile processes for the job, and returns whether all of them succeeded. job: a CompileJob as JSON. waiting: called
        every KERNEL_WAIT_EVERY_S; an error that it raises ends the processes and is raised here."""
        began_s, progress = time.monotonic(), _Progress()
        log.info("%s: its kernels are being compiled, once for this version and kind of GPU (%s)", model, self._folder)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes.extend(_start(share, self._num_processes) for share in range(self._num_processes))
            readers = [Thread(target=_follow, args=(each, job, progress)) for each in processes]
            for reader in readers:
                reader.start()
            for reader in readers:
                while reader.is_alive():
                    self._tell(KernelNews(progress.told(model, self._num_processes, time.monotonic() - began_s)))
                    waiting()
                    if time.monotonic() - began_s > LIMIT_S:
                        raise TimeoutError(f"not done within {LIMIT_S:.0f} s")
                    reader.join(KERNEL_WAIT_EVERY_S)
            problem = "; ".join(f"a compiler ended with {one.wait()}" for one in processes if one.wait())
        except (OSError, TimeoutError) as error:
            problem = str(error)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            self._tell(KernelNews(KernelsTold("", 0, 0, 0.0)))
        seconds = time.monotonic() - began_s
        if problem:
            log.error("%s: not all its kernels were compiled ahead, its load compiles the rest: %s", model, problem)
        else:
            log.info("%s: its kernels are compiled: %d in %.1f s", model, progress.num_done, seconds)
        return not problem


class _Progress:
    """Counts the kernels that the compile processes have to compile (num_units) and have compiled (num_done), from the lines that
    they print."""

    def __init__(self) -> None:
        self.num_units = self.num_done = 0
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        word, _, number = line.strip().partition(" ")
        with self._lock:
            if word == "units":
                self.num_units += int(number)
            elif word == "done":
                self.num_done += 1

    def told(self, model: str, num_processes: int, passed_s: float) -> KernelsTold:
        left_s = max(0.0, START_S - passed_s) + (self.num_units - self.num_done) * UNIT_S / num_processes
        if self.num_done >= self.num_units / 3 > 0:
            left_s = passed_s * (self.num_units - self.num_done) / self.num_done
        return KernelsTold(model, self.num_done, self.num_units, round(left_s, 1), loads_wait=True)


def _start(share: int, num_shares: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "engine.cuda.compile_process", str(share), str(num_shares)]
    # no device is visible, so a compiler takes no device memory
    environment = child_environment(CUDA_VISIBLE_DEVICES="")
    return subprocess.Popen(command, cwd="/", env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _follow(process: subprocess.Popen[bytes], job: bytes, progress: _Progress) -> None:
    """Sends a compile process its job, and records in `progress` every line that the process prints, until the process ends. Kills
    the process if its output cannot be read, because others wait for its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(job)
        process.stdin.close()
        with process.stdout as lines:
            for line in lines:
                progress.add(line.decode())
        process.wait()
    except BrokenPipeError:
        pass  # the process has ended, and its exit code tells how
    except Exception as error:
        log.error("a compiler's output could not be read: %s: %s", type(error).__name__, error)
        process.kill()


@contextmanager
def _alone(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Returns a context that holds a file lock which all engines of the node share, so that only one of them compiles at a time.
    waiting: called every KERNEL_WAIT_EVERY_S while another engine has the lock. Raises OSError if the file `path` cannot be
    opened."""
    with open(path, "wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(KERNEL_WAIT_EVERY_S)
        yield


def _digest(job: bytes, layout: str) -> str:
    """Returns a digest of everything that determines which kernels a job needs and how they are compiled. layout: the id of the
    weights' layout, which determines their alignment."""
    versions = f"{triton.__version__} {torch.__version__} {sys.version} {layout} {_sources_digest()}"
    return hashlib.blake2b(versions.encode() + job, digest_size=12).hexdigest()


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.blake2b(digest_size=12)
    for package in ("engine", "loader"):
        for source in sorted(Path(PACKAGES, package).rglob("*.py")):
            digest.update(os.path.relpath(source, PACKAGES).encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()
