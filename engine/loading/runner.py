"""Loads checkpoints into this process and makes models of them (TorchRunner), on the device of a Backend."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.contracts.backend import Backend, SplitsModels
from engine.contracts.group_share import GroupShare
from engine.contracts.loads import KernelNews, LoadCancelled, LoadTask
from engine.contracts.steps import HostedEncoder, HostedModel, StreamedModel
from engine.exchange import Exchange
from engine.grammar.row_masks import LockedMasks
from engine.loading.kernel_wait import Compilation, time_of_kernels, wait_for_kernels
from engine.loading.left_weights import adopt
from engine.loading.probe import probe_token
from engine.loading.weight_copies import KeptCopy, WeightCopies
from engine.memory.group_region import open_region
from engine.memory.host_registration import BACKGROUND_SHARE, RegistersHost, register, register_whole
from engine.memory.host_tier import HostTier
from engine.memory.weight_arrivals import parameter_places
from engine.memory.weight_gate import WeightGate
from engine.memory.weight_range import WeightRange, WeightRanges
from engine.protocol import Configure, LoadModel
from loader.configs.hf_config import CONFIG_NAME
from loader.errors import CheckpointError, UnsupportedModel
from loader.files.file_calls import FileCalls, ReadCancelled
from loader.formats.registry import FORMATS
from loader.reading.landings import Places
from loader.reading.read_rates import ReadRates
from loader.reading.shared_reads import SharedReads
from loader.reading.source_choice import SourceChoice
from loader.reading.staging import StagingRing
from loader.reading.unpack import Decoder
from loader.reading.weight_stream import OpenCheckpoint, open_checkpoint, stream_weights
from loader.shapes import kv_layout
from loader.shapes.model_shape import DeviceShare, Division
from loader.sizes.layout import weight_layout, weights_bytes
from loader.threads import Thread

log = logging.getLogger("engine")


class TorchRunner:
    """The Runner (engine.contracts.loads) for all models that compute; null models have another Runner. It loads checkpoints onto
    one device and makes models of them. backend: the device."""

    def __init__(
        self, backend: Backend, options: Configure, tier: HostTier | None = None, exchange: Exchange | None = None
    ) -> None:
        """options: the engine's settings.
        tier: the host tier; None: the daemon has none.
        exchange: the memory that this engine shares with engines of other devices; None: it can load no share of a split model."""
        self.backend, self.compute_threads, self._options = backend, backend.compute_threads, options
        self.memory = memory = backend.memory
        self._ranges, self._kv_ranges, self._exchange = WeightRanges(memory), WeightRanges(memory), exchange
        self._copies = WeightCopies(memory, tier)
        self._ring = StagingRing()
        self._rates = ReadRates(options.cache_dir)
        self._news: list[KernelNews] = []  # from before watch_kernels was called
        self._tell: Callable[[KernelNews], None] = self._news.append
        self._telling = threading.Lock()
        self._looking = threading.Lock()  # held while _kernels may be replaced
        self._kernels = _in_background(self._prepare)
        if tier is not None and isinstance(memory, RegistersHost):
            _in_background(partial(self._register, memory, tier))

    def _prepare(self) -> None:
        self._ring.prepare()
        if isinstance(self.memory, RegistersHost):
            register(self.memory, "staging", [self._ring.span], self._ring.slot_bytes)
        self._find_kernels()

    def _find_kernels(self) -> None:
        self.backend.prepare(self._tell_of_kernels)

    def _found(self) -> Future[None]:
        """Returns the future that is done when the device's kernels have been set up. If that has failed before, it is begun again,
        because the reason may be gone: a disk that was full, or memory that was lacking."""
        with self._looking:
            if self._kernels.done() and (error := self._kernels.exception()) is not None:
                log.warning("kernels are looked for again: %s: %s", type(error).__name__, error)
                self._kernels = _in_background(self._find_kernels)
            return self._kernels

    def _register(self, memory: RegistersHost, tier: HostTier) -> None:
        wait([self._kernels])  # loads wait for these, and none for the tier
        register(memory, "host tier", [tier.span], tier.slot_bytes, BACKGROUND_SHARE)

    def lock_masks(self, bits: npt.NDArray[np.uint32]) -> LockedMasks | None:
        if isinstance(self.memory, RegistersHost) and register_whole(self.memory, "grammar masks", bits.ctypes.data, bits.nbytes):
            return LockedMasks(bits)
        return None

    def unlock_masks(self, locked: LockedMasks) -> None:
        if locked.is_locked and isinstance(self.memory, RegistersHost):
            locked.is_locked = False
            self.memory.unregister_host(locked.bits.ctypes.data, locked.bits)

    def probe(self, number: int) -> None:
        token, right = probe_token(number, self.memory.arena.device)
        if token != right:
            raise RuntimeError(f"the device computed the token {token} of a probe, not {right}")

    def watch_kernels(self, tell: Callable[[KernelNews], None]) -> None:
        """Calls `tell` with all earlier reports about kernels that are being compiled, and lets other threads call it with all
        later ones."""
        with self._telling:
            self._tell = tell
            for news in self._news:
                tell(news)

    def _tell_of_kernels(self, news: KernelNews) -> None:
        with self._telling:
            self._tell(news)

    def load(self, task: LoadTask) -> HostedModel | HostedEncoder:
        """Loads one model, or this device's share of a split model, while steps of other models run, and returns it. Raises
        CheckpointError (permanent), CheckpointChanged, MemoryError and LoadCancelled; for a split model also GroupBroken, and
        ValueError if this engine shares no memory with others."""
        spec, asked_s, backend, group = task.spec, time.perf_counter(), self.backend, task.spec.group
        share: DeviceShare | None = None
        if group is not None:
            division = Division(len(group.members), group.expert_parts, group.num_stages, group.copies)
            share = DeviceShare(group.rank, division)
        wait_for_kernels(self._found(), task)
        with ExitStack() as stack:
            files = stack.enter_context(FileCalls(spec.model, task.cancelled))
            choice = SourceChoice(self._rates, self._ring, backend.measured_decoder)
            source = _open(spec, files, backend.reads_in_place, wants_packed=choice.wants_packed, share=share)
            for note in source.checkpoint.notes:
                log.info("%s: %s", spec.model, note)
            weight_format = FORMATS[spec.quantize]
            backend.check(spec, source.shape, weight_format)
            num_bytes = weights_bytes(source.shape, spec.dtype, weight_format)
            granted = len(task.chunks) * self._options.chunk_bytes
            if num_bytes > granted:
                raise MemoryError(f"weights take {num_bytes} bytes, {len(task.chunks)} chunks were granted ({granted} bytes)")
            compilation = stack.enter_context(Compilation(backend.need_kernels(spec, source.shape, weight_format), task))
            task.kernels_seconds = time.perf_counter() - asked_s
            if weight_format.waits_for_kernels:
                compilation.wait()
            held_as = (spec.fingerprint, spec.dtype, spec.quantize, spec.predicts, share)
            weights = self._ranges.of(spec.model, held_as, num_bytes)
            started_s = time.perf_counter()
            weights.map(task.chunks[: weights.num_chunks].tolist())
            task.map_seconds = time.perf_counter() - started_s
            gate: WeightGate | None = None
            early: StreamedModel | None = None
            if share is not None:
                return self._load_share(task, choice, source, weights, compilation, files)
            try:
                early = backend.early_model(spec, source.shape, weights)
                if early is not None:
                    compilation.wait()
                if early is not None and task.begun is not None and backend.steps_may_overlap:
                    gate = WeightGate(weight_layout(source.shape, spec.dtype, weight_format))
                    task.begun(early, gate)
                self._fill(task, choice, source, weights, gate, files)
                if early is not None:
                    return early
                compilation.wait()
                with time_of_kernels(task):
                    return backend.model(spec, source.shape, weights)
            except BaseException as error:
                if gate is not None:
                    gate.withdraw(str(error))
                if early is not None:
                    early.release()
                weights.unmap()
                if isinstance(error, ReadCancelled):
                    raise LoadCancelled(str(error)) from None
                raise

    def _load_share(
        self,
        task: LoadTask,
        choice: SourceChoice,
        source: OpenCheckpoint,
        weights: WeightRange,
        compilation: Compilation,
        files: FileCalls,
    ) -> GroupShare:
        """Loads this device's share of a split model into the mapped range `weights`, and returns the share. Its KV gets an address
        range of its own. After an error both ranges are unmapped.
        choice: has chosen packed or plain files, and has the reason. source: the opened checkpoint.
        compilation: compiles the model's kernels while the weights are read.
        files: the thread that opens and closes files."""
        spec, backend = task.spec, self.backend
        kv_chunks = [] if task.kv_chunks is None else task.kv_chunks.tolist()
        kv: WeightRange | None = None
        try:
            if not isinstance(backend, SplitsModels):
                raise UnsupportedModel(CONFIG_NAME, None, f"parallel: not built for device {self._options.device}")
            groups = kv_layout.kv_groups(source.shape, spec.kv_dtype, self._options.block_tokens)
            region = open_region(self._exchange, spec, self._options.block_tokens)
            if len(region.table.block_tables) != len(groups):
                raise ValueError(f"model {spec.model}: {len(groups)} KV groups, and the group's region has another number")
            kv = self._kv_ranges.of(spec.model, None, len(kv_chunks) * self._options.chunk_bytes)
            kv.map(kv_chunks)
            with region.sharing_reads() as shared:
                self._fill(task, choice, source, weights, None, files, shared)
            compilation.wait()
            with time_of_kernels(task):
                memory = kv.tensor(0, (kv.num_bytes,), torch.uint8)
                return GroupShare(backend.split_model(spec, source.shape, weights, memory, region), region, kv.unmap)
        except BaseException as error:
            weights.unmap()
            if kv is not None:
                kv.unmap()
            if isinstance(error, ReadCancelled):
                raise LoadCancelled(str(error)) from None
            raise

    def _fill(
        self,
        task: LoadTask,
        choice: SourceChoice,
        source: OpenCheckpoint,
        weights: WeightRange,
        gate: WeightGate | None,
        files: FileCalls,
        shared: Sequence[SharedReads] = (),
    ) -> None:
        """Fills the mapped range `weights` with the weights that `task` loads: with those that are in device or host memory
        already, if there are any, else from files.
        choice: has chosen packed or plain files, and has the reason. source: the opened checkpoint.
        gate: notified of the bytes that have arrived; None: no step waits for them.
        files: the thread that opens and closes files.
        shared: memory through which the devices of a split model share what they read; (): they share nothing."""
        if not self._in_memory(task, weights, gate):
            self._read(task, choice, source, weights, gate, files, shared)
        task.weights_bytes = weights.num_bytes

    def _in_memory(self, task: LoadTask, weights: WeightRange, gate: WeightGate | None) -> bool:
        """Fills the range `weights` without reading files: with weights that were left on the device, or else with a copy in the
        host tier. Returns False if neither exists or can be used; the files must then be read."""
        for way, given in ((partial(adopt, self.memory), task.left), (self._copies.take, task.spec.source_slots)):
            if given:
                if way(task, weights, gate):
                    return True
                if gate is not None:
                    gate.begin_anew()
        return False

    def _read(
        self,
        task: LoadTask,
        choice: SourceChoice,
        source: OpenCheckpoint,
        weights: WeightRange,
        gate: WeightGate | None,
        files: FileCalls,
        shared: Sequence[SharedReads],
    ) -> None:
        """Reads the weights from files into the mapped range `weights`, and copies them to the host tier if the daemon asked for
        that. If packed files are damaged and the model has plain files, too, all weights are read again from the plain files.
        choice: has chosen packed or plain files, and has the reason. source: the opened checkpoint.
        gate: notified of the bytes that have arrived; None: no step waits for them.
        files: the thread that opens and closes files.
        shared: memory through which the devices of a split model share what they read; (): they share nothing."""
        spec = task.spec
        layout = weight_layout(source.shape, spec.dtype, FORMATS[spec.quantize])
        places = [(begin, end) for begin, end, _ in parameter_places(layout)]
        with self._copies.keeping(task, weights, places) as kept:
            behind = [each for each in (gate, kept) if each is not None]
            try:
                self._stream(task, source, weights, behind, shared)
                task.read_as = choice.reason or source.packed_reason
            except CheckpointError as error:
                if not source.has_plain_files_beside:
                    raise
                log.warning("%s: %s: reading its plain files", spec.model, error)
                for each in behind:
                    each.begin_anew()
                plain = _open(spec, files, self.backend.reads_in_place)
                self._stream(task, plain, weights, behind)
                task.read_as = f"read its plain files: the packed ones are damaged ({error})"

    def _stream(
        self,
        task: LoadTask,
        source: OpenCheckpoint,
        weights: WeightRange,
        behind: Sequence[WeightGate | KeptCopy],
        shared: Sequence[SharedReads] = (),
    ) -> None:
        """Reads the weights of an opened checkpoint into the range. behind: objects that process weights as they arrive; their
        `landed` is called for all bytes. shared: memory through which the devices of a split model share what they read; (): they
        share nothing."""

        def landed(places: Places) -> None:
            for begin_bytes, end_bytes in places:
                for each in behind:
                    each.landed(begin_bytes, end_bytes)

        report = stream_weights(
            source,
            task.spec.dtype,
            self.backend.sink(weights),
            self._ring,
            task.progress,
            task.cancelled,
            FORMATS[task.spec.quantize],
            landed=landed,
            decoder=self.backend.decoder() if source.is_packed else Decoder(),
            shared=shared,
        )
        task.bytes_read = report.num_bytes


def _open(spec: LoadModel, files: FileCalls, in_place: bool, **options: Any) -> OpenCheckpoint:
    """Opens a model's checkpoint in the thread of `files`, and returns it. in_place: whether reads may write directly into the
    weights' memory. options: further keyword arguments of loader.reading.weight_stream.open_checkpoint. Raises what open_checkpoint
    raises, and LoadCancelled if the load is cancelled."""
    options |= {"predicts": spec.predicts, "head": spec.head_path, "name": spec.model}
    try:
        return files.run(lambda: open_checkpoint(spec.path, spec.fingerprint, files.opened, in_place, **options))
    except ReadCancelled as error:
        raise LoadCancelled(str(error)) from None


def _in_background(work: Callable[[], object]) -> Future[None]:
    """Runs `work` in a thread for which the process does not wait when it exits. Returns a future that is done when `work` has
    returned, and that has the error if `work` raised one."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:  # reported by loads; ignored, it would leave the engine on the slow path
            future.set_exception(error)

    Thread(target=run, name="kernels").start()
    return future
