"""Loads LoRA adapters into the device's memory: those that requests wait for, and those that an operator asks for.

A thread reads an adapter's files into host memory (engine/lifecycle/loads.py), because a file system may take any time. Then the
engine's loop copies the adapter, between two steps, to the chunks that the model's Adapters (scheduler/batch/adapters.py) take from
the KV lease for it: some 10 ms for 100 MB."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from engine.contracts.adapters import AdapterMemory, ReadAdapter
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.out_of_memory import lacks_memory
from engine.protocol import AdapterLoaded, AdapterSource, Message
from engine.serve.identity import adapter_identity, adapter_source
from engine.serve.served_models import ServedModel, ServedModels
from loader.errors import LoaderError

log = logging.getLogger("engine")

MAX_READS = 4  # most adapters that are being read, or have been read and find no room yet: they take host memory
READ_LIMIT_S = 30.0  # longest time to read one adapter
MAX_OVERDUE = 16  # most reads that have gone on for longer: their threads cannot be ended, and the system limits threads
NO_ROOM_LIMIT_S = 5.0  # how long an adapter waits for room while nothing runs whose end could make room


@dataclass(slots=True)
class AdapterRead:
    """The reading of one adapter in a thread, and its result: `adapter` or `error`.
    model: name of its base model.
    is_prepared: whether the kernels of steps with adapters are compiled, so that the files are being read.
    began_s: when reading the files began or, before is_prepared is True, when compiling the kernels began.
    seconds: how long reading took.
    is_over: whether the engine's loop knows that the thread has ended.
    overdue: whether the requests that waited for the adapter have failed because reading took too long; the thread may still wait
    for the file system."""

    model: str
    source: AdapterSource
    memory: AdapterMemory
    began_s: float
    adapter: ReadAdapter | None = None
    error: Exception | None = None
    seconds: float = 0.0
    is_prepared: bool = False
    is_over: bool = False
    overdue: bool = False

    def run(self) -> None:
        """Compiles the kernels that the adapter needs, then reads its files, and keeps the result. Called in the thread."""
        try:
            self.memory.prepare()
            self.began_s, self.is_prepared = time.monotonic(), True
            self.adapter = self.memory.read(self.source)
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - self.began_s


class StartsReads(Protocol):
    """The interface of the object that runs reads in threads and reports their ends to the loop."""

    def read(self, read: AdapterRead, /) -> None: ...


Fail = Callable[[int, str, str], None]  # (request id, code, error), as in RequestFailed


@dataclass(slots=True)
class _OfModel:
    """The adapters of one model that are being loaded, by their keys (adapter_identity).
    ahead: the adapters to load although no request has named them yet, in order.
    reads: the reads that are under way, and those whose adapters have found no room yet, in the order in which they began."""

    ahead: dict[str, None] = field(default_factory=dict)
    reads: dict[str, AdapterRead] = field(default_factory=dict)
    stuck_since_s: dict[str, float] = field(default_factory=dict)  # key -> since when no step could make room for it


class AdapterLoads:
    """The adapters that are being loaded into one device. No method is called while a step runs on the host.
    memory: the device's memory; None: the device takes no adapters.
    reads: runs AdapterReads in threads.
    send: sends a message to the daemon.
    fail: ends a request with an error.
    await_steps: called before device memory is written; returns when no step is under way."""

    def __init__(
        self,
        models: ServedModels,
        memory: ChunkMemory | None,
        reads: StartsReads,
        send: Callable[[Message], None],
        fail: Fail,
        await_steps: Callable[[], None],
    ) -> None:
        self._models, self._memory, self._reads = models, memory, reads
        self._send, self._fail, self._await_steps = send, fail, await_steps
        self.by_model: dict[str, _OfModel] = {}  # models asked for adapters, kept for the loop, which looks before every step
        self._outlived: list[AdapterRead] = []  # reads under way whose model has left the device
        self._tried_version = -1  # the chunk pool's version when an adapter last found no room

    def why_not(self, served: ServedModel) -> str:
        """Returns why requests for this model's adapters cannot be taken, or "" if they can."""
        if served.hosted.adapter_memory is None or self._memory is None:
            return f"model {served.spec.model} takes no adapters"
        return ""

    def expect(self, served: ServedModel) -> None:
        """Records that a request for this model names an adapter, which `look_after` may have to load."""
        self._own(served)

    def _own(self, served: ServedModel) -> _OfModel:
        return self.by_model.setdefault(served.spec.model, _OfModel())

    def bring(self, served: ServedModel, source: AdapterSource) -> None:
        """Starts to load an adapter that no request has named yet; does nothing if the adapter is in the device's memory. If it
        cannot be read, or there is no room for it, that is only logged."""
        key = adapter_identity(source)
        if served.scheduler.adapters.keep(key):
            return
        if why_not := self.why_not(served):
            log.warning("%s: adapter %s is not read ahead: %s", served.spec.model, source.name, why_not)
        else:
            self._own(served).ahead[key] = None

    def retire(self, served: ServedModel, source: AdapterSource) -> None:
        """Drops an adapter from the device's memory once the requests that run with it have ended."""
        key = adapter_identity(source)
        if (own := self.by_model.get(served.spec.model)) is not None:
            own.ahead.pop(key, None)
        served.scheduler.adapters.retire(key)
        self._models.discard_returned()

    def is_wanted(self, served: ServedModel) -> bool:
        """Returns whether any adapter of the model has yet to be loaded, because requests wait for it or because `bring` asked for
        it."""
        own = self.by_model.get(served.spec.model)
        return bool(served.scheduler.adapters.num_waiting or (own is not None and own.ahead))

    def forget(self, model: str) -> None:
        """Drops the records of the adapters of a model that has left the device. Reads whose threads have not ended still count
        towards MAX_OVERDUE."""
        if (own := self.by_model.pop(model, None)) is not None:
            self._outlived += [read for read in own.reads.values() if not read.is_over]

    @property
    def under_way(self) -> bool:
        """Returns whether adapters are being read, or have been read and are not in the device's memory yet."""
        return any(own.reads for own in self.by_model.values())

    def ended(self, read: AdapterRead) -> None:
        """Marks the read of an adapter as ended. The next `look_after` copies the adapter to the device, or fails the requests that
        wait for it."""
        read.is_over, read.overdue = True, False
        self._outlived = [each for each in self._outlived if not each.is_over]
        self._tried_version = -1

    def look_after(self, waiting: Collection[ServedModel], may_free_memory: bool) -> None:
        """Continues the loads of adapters: copies those that have been read to the device, fails requests whose adapter cannot be
        loaded, and starts reads. Its cost depends on the number of reads, not on how many adapters are wanted. waiting: the models
        with adapters that have yet to be loaded (is_wanted). may_free_memory: whether memory may become free before long, for
        adapters that find no room now."""
        now, retry = time.monotonic(), self._tried_version != self._models.chunks.version
        self._forget_unwanted(waiting)
        for served in waiting:
            own = self._own(served)
            wanted = served.scheduler.adapters.wanted
            for key, read in list(own.reads.items()):
                if key not in wanted and key not in own.ahead:
                    continue  # its requests have ended, and the thread has not
                if not read.is_over:
                    self._check_overdue(served, read, key, now)
                elif read.error is not None:
                    del own.reads[key]
                    code = "adapter_unusable" if getattr(read.error, "permanent", False) else "adapter_unavailable"
                    self._give_up(served, key, code, _said(read.error, read.source))
                elif may_free_memory and not retry:
                    own.stuck_since_s.pop(key, None)
                elif self._place(served, own, read, key):
                    own.ahead.pop(key, None)
                elif key not in wanted:
                    del own.reads[key]
                    self._give_up(served, key, "no_adapter_room", "no room for it now, so it is read when a request names it")
                else:
                    self._check_stuck(served, own, read, key, None if may_free_memory else now)
            self._start_reads(served, own, now)
        self._tried_version = self._models.chunks.version

    def _forget_unwanted(self, waiting: Collection[ServedModel]) -> None:
        """Drops adapters that were read into host memory for requests that have ended meanwhile."""
        wanted = {served.spec.model: served.scheduler.adapters.wanted for served in waiting}
        for model, own in self.by_model.items():
            for key in [key for key, read in own.reads.items() if read.is_over]:
                if key not in own.ahead and key not in wanted.get(model, ()):
                    del own.reads[key]
                    own.stuck_since_s.pop(key, None)

    def _start_reads(self, served: ServedModel, own: _OfModel, now: float) -> None:
        """Starts reads of a model's wanted adapters while fewer than MAX_READS are under way, first of adapters that requests wait
        for. If MAX_OVERDUE reads hang, starts none; requests for adapters that are not being read then fail, and adapters that no
        request waits for are no longer wanted."""
        memory = served.hosted.adapter_memory
        assert memory is not None
        reads = [read for each in self.by_model.values() for read in each.reads.values()]
        num_overdue = sum(read.overdue for read in reads) + len(self._outlived)
        if num_overdue >= MAX_OVERDUE:
            why = f"not read, because the files of {num_overdue} other adapters do not answer"
            for key in [key for key in chain(served.scheduler.adapters.wanted, own.ahead) if key not in own.reads]:
                self._give_up(served, key, "adapter_unavailable", why)
            return
        free = MAX_READS - sum(not read.overdue for read in reads)
        for key in chain(served.scheduler.adapters.wanted, own.ahead):
            if free <= 0:
                break
            if key not in own.reads:
                own.reads[key] = AdapterRead(served.spec.model, adapter_source(key), memory, now)
                self._reads.read(own.reads[key])
                free -= 1

    def _check_overdue(self, served: ServedModel, read: AdapterRead, key: str, now: float) -> None:
        read.overdue = read.is_prepared and now - read.began_s > READ_LIMIT_S
        if read.overdue:
            self._give_up(served, key, "adapter_unavailable", f"its files do not answer: no sign of them for {READ_LIMIT_S:g} s")

    def _place(self, served: ServedModel, own: _OfModel, read: AdapterRead, key: str) -> bool:
        """Copies an adapter that has been read to the device, and queues the requests that waited for it. They fail if memory is
        lacking for the copy. Returns False if the device has no room for the adapter now."""
        adapter, memory = read.adapter, self._memory
        assert adapter is not None
        assert memory is not None
        self._await_steps()
        num_bytes = adapter.layout.num_bytes
        num_chunks = -(-num_bytes // memory.chunk_bytes)
        placed = self._models.place_adapter(served, key, num_chunks)
        if placed is None:
            return False
        began_s = time.monotonic()
        first_byte = int(placed.chunks[0]) * memory.chunk_bytes
        del own.reads[key]
        own.stuck_since_s.pop(key, None)
        try:
            memory.copy_in(memory.arena.data_ptr() + first_byte, adapter.data).wait()
            read.memory.set(placed.number, first_byte, adapter.layout)
        except Exception as error:
            if not lacks_memory(error):
                raise
            served.scheduler.adapters.retire(key)
            line = str(error).partition("\n")[0]
            self._give_up(served, key, "adapter_unavailable", f"no memory to copy it to the device: {line}")
            return True
        copy_s = time.monotonic() - began_s
        told = "%s: adapter %s: %.1f MiB read in %.1f ms, copied in %.1f ms"
        log.info(told, read.model, read.source.name, num_bytes / 2**20, read.seconds * 1e3, copy_s * 1e3)
        self._send(AdapterLoaded(read.model, read.source.name, read.seconds + copy_s, num_bytes))
        served.scheduler.adapter_arrived(key)
        return True

    def _check_stuck(self, served: ServedModel, own: _OfModel, read: AdapterRead, key: str, now: float | None) -> None:
        """Fails the requests that wait for an adapter if, for NO_ROOM_LIMIT_S, there was no room for it and no memory was about to
        become free. now: the current time; None: memory may become free before long, so this time begins again."""
        if now is None:
            own.stuck_since_s.pop(key, None)
        elif now - own.stuck_since_s.setdefault(key, now) > NO_ROOM_LIMIT_S:
            assert read.adapter is not None
            del own.stuck_since_s[key], own.reads[key]
            chunks, num_bytes = self._models.chunks, read.adapter.layout.num_bytes
            why = (
                f"it takes {-(-num_bytes // chunks.chunk_bytes)} adjacent chunks of {chunks.chunk_bytes} bytes, and there is no "
                f"such room beside the models that are loaded ({chunks.lease_chunks} chunks for adapters and KV)"
            )
            self._give_up(served, key, "no_adapter_room", why)

    def _give_up(self, served: ServedModel, key: str, code: str, why: str) -> None:
        """Fails all requests that wait for an adapter, with this code and reason (`why`). If the adapter was to be loaded before a
        request names it, that is given up, too."""
        own = self.by_model[served.spec.model]
        own.ahead.pop(key, None)
        name = adapter_source(key).name
        log.warning("%s: adapter %s: %s", served.spec.model, name, why)
        for request in served.scheduler.adapters.take_waiting(key):
            self._fail(request.request_id, code, f"model {served.spec.model}: adapter {name}: {why}")


def _said(error: Exception, source: AdapterSource) -> str:
    """Returns the text of an error in reading an adapter, for the client: without the path of the adapter's folder, which concerns
    only the operator. The error's type comes first if it is not an error of the loader."""
    text = str(error) if isinstance(error, LoaderError) else f"{type(error).__name__}: {error}"
    return text.replace(f"{source.path}/", "").replace(source.path, "its folder")
