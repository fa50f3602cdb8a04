"""One random run of an engine on the stand-in for a device.

Its loop does in random order what engine/loop does, and for each model what engine/lifecycle does: loads from the host tier or
from packed files, steps launched ahead, captures in idle time, LoRA adapters that come and go, compaction, evictions that save KV.
One model has a predictor. Loads, copies and everything of engine/cuda are the real code; a model's layers and the kernels are
replaced by launches that tell what they access, and the threads that read packed files by some that read nothing.
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch

from engine.contracts.adapters import ReadAdapter
from engine.contracts.loads import LoadCancelled, LocksMasks
from engine.contracts.steps import NoWorkSpace
from engine.cuda import adapters as device_adapters
from engine.cuda import (
    backend,
    edit_columns,
    edited,
    edited_graphs,
    edited_logits,
    frames,
    graph_room,
    graphs,
    mixed_graphs,
    model,
    predicting,
    sequences,
    sink,
    unmapping,
)
from engine.cuda import expert_counts as device_counts
from engine.cuda.backend import CudaBackend
from engine.cuda.graph_room import GraphRoom
from engine.cuda.kept_models import KeptModels
from engine.cuda.kernels import linear_choice, triton_unpack
from engine.grammar.row_masks import RowMasks
from engine.layers import expert_counts
from engine.layers.expert_counts import ExpertCounts
from engine.lifecycle import loads
from engine.lifecycle.kv_transfer import KVTransfer
from engine.lifecycle.loads import Load, Loads
from engine.loading import adapter_tables, runner
from engine.memory import transfers
from engine.ops.ops import Rotary
from engine.protocol import MTP, AdapterSource, Configure, LoadModel, SamplingParams
from engine.serve.adapter_loads import AdapterLoads, AdapterRead
from engine.serve.served_models import Place
from loader.files.file_calls import ReadCancelled
from loader.packing import checksum
from loader.shapes.model_shape import ExpertShape
from scheduler.batch.plan import BatchPlan, make_sequence_table, write_sampling
from tests.engine import cuda_stand_in
from tests.engine.races import schedule
from tests.engine.races.clocks import Clock
from tests.engine.races.device import FIRST_ADDRESS, TORCH, Access, Device, Here, Named, Rules
from tests.engine.races.schedule import Lock, Schedule, Stuck
from tests.engine.races.tensors import Drawn, Tensor, Torch, reads, writes
from tests.loader.checkpoints import shape

CHUNK = cuda_stand_in.GRANULARITY
NAMES, NUM_CHUNKS, WEIGHT_CHUNKS, KV_CHUNKS = "abc", 12, 2, 1
PREDICTS = "c"  # the model that does
WIDTH, LENGTH, BLOCK_TOKENS = 16, 64, 16
SHAPE = replace(shape(), experts=ExpertShape(num_experts=4, num_chosen=2, intermediate_size=8, normalised=True))
MASK_WORDS = 1  # of the model's vocabulary
ACTIONS = 120
KEPT_BYTES = 200  # what evicted models may keep of the device: some of them, with few graphs
MOST_ADAPTERS = 3  # of a model
NUM_READERS, FRAMES_A_CHUNK = 2, 2  # of packed files: threads, and frames in which the weights of a chunk are
POINTS = 30  # at most so often other threads may go on between two actions of the loop


class Driver(cuda_stand_in.Driver):
    """The stand-in for the driver, whose copies are operations of a stream. Every access reads the mapping by which it is made;
    mapping and unmapping write it, so that nothing may still be running on what is unmapped."""

    device: Device
    arena_address = 0
    _places: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self._given_up = Clock()
        self._registrations, self._num_registered = dict[int, Named](), 0

    def is_arena(self, address: int) -> bool:
        return self.arena_address <= address < self.arena_address + NUM_CHUNKS * CHUNK

    def mappings_at(self, address: int, num_bytes: int) -> Iterator[Hashable]:
        """Yields a name for each chunk's place in a range outside of the arena, whose mappings last."""
        if not self.is_arena(address):
            yield from (("mapping", place // CHUNK) for place in range(address // CHUNK * CHUNK, address + num_bytes, CHUNK))

    def names_at(self, address: int, num_bytes: int) -> Iterator[Hashable | None]:
        """Yields the chunks that are mapped at a range, and None for each part without one."""
        if len(self._places) != len(self.mapped):
            self._places = tuple(sorted(self.mapped))
        at = address
        while at < address + num_bytes:
            found = bisect_right(self._places, at) - 1
            begin = self._places[found] if found >= 0 else 0
            handle = self.mapped.get(begin)
            held = handle if handle is not None and at < begin + handle.num_bytes else None
            yield None if held is None else held.memory or id(held)
            at = at + CHUNK if held is None else begin + held.num_bytes

    def place_in_region(self, address: int) -> tuple[Hashable, int] | None:
        """Returns a name for a place in memory that several devices map, the same for all of them; None: there is no such."""
        if address >= FIRST_ADDRESS:
            return None
        if len(self._places) != len(self.mapped):
            self._places = tuple(sorted(self.mapped))
        begin = self._places[bisect_right(self._places, address) - 1]
        handle = self.mapped[begin]
        return (handle.memory, address - begin) if handle.exportable else None

    def _known(self, handle: cuda_stand_in.Handle) -> cuda_stand_in.Handle:
        if handle.exportable:
            handle.memory = ("a region", os.fstat(handle.fd).st_ino)
        return super()._known(handle)

    def cuMemAddressReserve(self, size: int, *arguments: Any) -> Any:
        self.device.schedule.host.clock.join(self._given_up)
        return super().cuMemAddressReserve(size, *arguments)

    def cuMemAddressFree(self, address: Any, size: int) -> Any:
        self._given_up.join(self.device.schedule.host.clock)  # the driver gives the addresses out again
        self.device.schedule.host.tick()
        return super().cuMemAddressFree(address, size)

    def cuMemMap(self, address: Any, size: int, *arguments: Any) -> Any:
        self._change(address, size, "mapping")
        done = super().cuMemMap(address, size, *arguments)
        self._places = ()  # once more: other threads may have looked meanwhile
        return done

    def cuMemUnmap(self, address: Any, size: int) -> Any:
        self._change(address, size, "unmapping")
        done = super().cuMemUnmap(address, size)
        self._places = ()
        return done

    def _change(self, address: Any, size: int, what: str) -> None:
        self._places = ()
        if self.arena_address:  # else the arena is being made
            self.device.schedule.point()
            self.device.counts[what] += 1
            for name in self.mappings_at(int(address), size):
                self.device.host_uses(name, "a mapping", what)

    def cuMemcpyHtoDAsync(self, target: Any, source: int, size: int, stream: Any) -> Any:
        target = self.device.place_of(int(target), size)
        return self._copied(stream, [(f"host memory {source}", False), (target, True)], "a copy to the device")

    def cuMemcpyDtoHAsync(self, target: int, source: Any, size: int, stream: Any) -> Any:
        return self._copied(stream, [((int(source), size), False), (f"host memory {target}", True)], "a copy from the device")

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> Any:
        self._num_registered += 1
        self._registrations[address] = Named(("registration", self._num_registered), "a registration")
        return super().cuMemHostRegister(address, size, flags)

    def registration_at(self, address: int) -> Named:
        """Returns what stands for the registration of host memory that begins at an address. Whatever has the device read the
        memory reads it."""
        return self._registrations[address]

    def cuMemHostUnregister(self, address: int) -> Any:
        self.device.schedule.point()
        self.device.counts["unregistering"] += 1
        self.device.host_uses(self.registration_at(address), "a registration", "unregistering")
        return super().cuMemHostUnregister(address)

    def _copied(self, stream: str, accesses: list[Any], what: str) -> Any:
        self.device.schedule.point()
        found = next(one for one in self.device.streams if one.cuda_stream == stream)
        self.device.run(what, accesses, found)
        return (cuda_stand_in.CUresult.CUDA_SUCCESS,)


class Grammars:
    """The masks of a model's requests, one row for each slot, and their grammar process, each of whose answers is a thread of its
    own. locks: page-locks the masks."""

    def __init__(self, schedule: Schedule, num_rows: int, locks: LocksMasks, driver: Driver) -> None:
        self._schedule, self._locks = schedule, locks
        memory = mmap.mmap(-1, num_rows * MASK_WORDS * 4)
        self._bits = np.frombuffer(memory, np.uint32).reshape(num_rows, MASK_WORDS)
        self.locked = locks.lock_masks(self._bits)
        self._registration = driver.registration_at(self._bits.ctypes.data)  # no two of them have one name, as addresses may
        self._answers: dict[int, Any] = {}  # row -> the thread that writes its mask
        self._stepping: set[int] = set()  # rows of steps under way

    def place(self, row: int) -> Named:
        return Named(("mask", self._registration, row), "a mask")

    def is_ready(self, row: int) -> bool:
        """Returns whether a row's mask is written, and learns it from the process."""
        answer = self._answers.get(row)
        if row in self._stepping or (answer is not None and answer.is_alive()):
            return False
        if self._answers.pop(row, None) is not None:
            answer.join()
        return True

    def masks(self, rows: list[int], own: list[int]) -> RowMasks:
        """Returns the masks of these rows for a step, whose sampling rows with masks are `own`, and notes what is read of them."""
        host, bits = self._schedule.host, [self._bits[row] for row in rows]
        for row in rows:  # any of them may be copied by the host
            host.device.host_reads(self.place(row), "a mask", "the host")
        host.masks = [(place, False) for place in (self._registration, *map(self.place, rows))]
        self._stepping.update(rows)
        return RowMasks([1] * len(rows), np.array(own, np.intp), bits, self.locked, np.array(rows, np.int32))

    def tell(self, rows: list[int]) -> None:
        """Tells the process the tokens of a step, so that it writes the next masks of these rows."""
        self._stepping.difference_update(rows)

        def write(row: int) -> None:
            self._schedule.point()
            self._schedule.host.device.host_uses(self.place(row), "a mask", "a grammar's process")

        for row in rows:
            self._answers[row] = self._schedule.thread(write, args=(row,), name="grammar")
            self._answers[row].start()

    def close(self) -> None:
        if self.locked is not None:
            self._locks.unlock_masks(self.locked)


@dataclass(slots=True)
class Stepping:
    """A step under way. rows: those of `grammars` that it has masks of."""

    launched: Any
    grammars: Grammars | None
    rows: list[int]

    def wait(self) -> None:
        self.launched.wait()
        self.tell()

    def tell(self) -> None:
        if self.grammars is not None and self.rows:
            self.grammars.tell(self.rows)


class Layers:
    """A model's layers: two products, one around an access to its KV, and experts, which are counted."""

    makes_logits = True

    def __init__(self, on: Here, weights: Any, counts: ExpertCounts, predicts: bool) -> None:
        self._on, self.num_kept = on, int(predicts)
        self._counts = counts.row(0)
        self._inner = weights.tensor(0, (WIDTH, WIDTH), torch.bfloat16)
        self._outer = weights.tensor((WEIGHT_CHUNKS - 1) * CHUNK, (32, WIDTH), torch.bfloat16)

    def forward(self, batch: Any, wanted: Tensor | None) -> Tensor:
        out = self._computed(batch)
        for kept in batch.kept or ():
            kept.copy_(out)
        if wanted is None:
            return out
        rows = self._made(len(wanted))
        self._on.launch("gather", [reads(out), reads(wanted), writes(rows)])
        return rows

    def _computed(self, batch: Any) -> Tensor:
        x = self._first_states(batch)
        x, out = linear_choice.linear(x, self._inner, None), self._made(len(batch.input_ids))
        group = batch.groups[0]
        inputs = [group.block_table, group.kv_slots, group.turns, batch.slots, batch.contexts]
        if group.work is not None:
            inputs.append(group.work)
        if (tiles := batch.tiles) is not None:
            inputs += [tiles.rows, tiles.firsts, tiles.starts, tiles.num_new]
        self._on.launch("attention", [*map(reads, [x, *inputs]), ("kv", True), writes(out)])
        if (adapters := batch.adapters) is not None:
            tables = map(reads, [out, adapters.numbers, adapters.places, adapters.ranks])
            self._on.launch("adapters", [*tables, ("adapters", False), writes(out)])
        self._choose_experts(out)
        self._on.launch("experts", [reads(out), writes(self._counts)])
        return out

    def _first_states(self, batch: Any) -> Tensor:
        x: Tensor = self._made(len(batch.input_ids))
        self._on.launch("embedding", [reads(batch.input_ids), reads(self._inner), writes(x)])
        return x

    def _choose_experts(self, states: Tensor) -> None:
        """Does nothing: where a model is split, its ranks exchange something here."""

    def state_memory(self, num_tokens: int) -> Tensor:
        return self._made(num_tokens)

    def read(self, kept: Any) -> Tensor:
        (states,) = kept
        return states

    def predict(self, states: Tensor, batch: Any) -> Tensor:
        out = self._computed(batch)
        self._on.launch("predictor", [reads(states), writes(out)])
        return out

    def predicted_logits(self, hidden: Tensor) -> Any:
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Any:
        return linear_choice.linear(hidden, self._outer, None)

    def _made(self, num_rows: int) -> Any:
        return Torch(self._on).empty(num_rows, WIDTH, dtype=torch.bfloat16, device=self._inner.device)


def opened(path: str, fingerprint: str, stack: Any, in_place: bool, predicts: bool, **options: Any) -> Any:
    """Stands in for open_checkpoint."""
    files = {"is_packed": True, "has_plain_files_beside": False, "packed_reason": ""}
    return SimpleNamespace(shape=replace(SHAPE, predicts=predicts), checkpoint=SimpleNamespace(notes=()), **files)


def read_adapter(source: AdapterSource, *_: Any) -> ReadAdapter:
    """Stands in for engine.loading.adapter_files.read_adapter. The adapter's rank is the last word of its path."""
    place = SimpleNamespace(number=0, offset=0, rank=int(source.path))
    layout: Any = SimpleNamespace(num_bytes=CHUNK, places=[place])
    return ReadAdapter(layout, np.zeros(CHUNK, np.uint8))


def summed(table: Tensor) -> list[Access]:
    """Returns the accesses of a checksum kernel to the pieces that its table names."""
    return [((address, num_words * 8), False) for address, num_words in table.values.tolist()]


def kernels(on: Here) -> SimpleNamespace:
    """Stands in for engine.cuda.kernels.entry."""
    torch_on = Torch(on)

    def made(num: int, *inputs: Tensor) -> Any:
        out = torch_on.empty(num, dtype=torch.int32, device=inputs[0].device)
        on.launch("a kernel", [*map(reads, inputs), writes(out)])
        return out

    def prepare_inputs(token_rows: Tensor, *inputs: Any) -> Any:
        tensors = [token_rows, *inputs[:-1]]
        return tuple(made(len(token_rows), *tensors) for _ in range(3))

    def set_entries(target: Tensor, places: Tensor, values: Tensor) -> None:
        on.launch("set_entries", [reads(places), reads(values), writes(target)])

    def launch(what: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        on.launch(what, [*map(reads, inputs), *map(writes, outputs)])

    def sample(logits: Tensor, settings: Iterable[Tensor], ids: Tensor, bad: Tensor, is_cut: bool = True) -> None:
        launch("sampling", (logits, *settings), (ids, bad))

    return SimpleNamespace(
        tile_tokens=lambda head_dims, dtype, fp8: 16,
        rank_bound=lambda rank: next(bound for bound in RANK_BOUNDS if rank <= bound),
        SMALLEST_RANK_BOUND=RANK_BOUNDS[0],
        adapter_numbers=lambda of_slots, slots, token_rows: made(len(token_rows), of_slots, slots, token_rows),
        FEW_ROWS=(1, 2),
        MANY_ROWS=8,
        prepare_inputs=prepare_inputs,
        cos_sin=lambda positions, rotary: made(len(positions), positions, rotary.inv_freq),
        split_contexts=lambda contexts, window, target, counted: made(len(contexts), contexts),
        joins_pieces=lambda: False,
        sample=sample,
        set_entries=set_entries,
        INTERPRETED=False,
        EDIT_WORDS=8,
        PENALTIES=4,
        widen=lambda logits, first, masks, words, counted, *out: launch("widen", (logits, masks, words, counted), out),
        add_biases_and_count=lambda wide, counts, *columns: launch("count", columns, (wide, counts)),
        penalise_and_ban=lambda wide, counts, *columns: launch("penalise", columns, (wide, counts)),
        top_logprobs=lambda logits, first, rows, nums, chosen, *out: launch("log-probabilities", (logits, rows, nums, chosen), out),
        ranks=lambda logits, chosen, out: launch("ranks", (logits, chosen), (out,)),
        both_kernels=linear_choice.both_kernels,
        measure_linear=linear_choice.measure,
        is_open=linear_choice.is_open,
        uses_ours=linear_choice.uses_ours,
        one_of_each_size=linear_choice.one_of_each_size,
        weights_of_products=linear_choice.weights_of_products,
    )


RANK_BOUNDS = (16, 32)
CAPTURES_AT_ONCE = 10  # of graphs, or choices of a kernel, in one idle turn


class ReportingLoads(Loads):
    """Loads whose reports hand over the clock of the thread that makes them."""

    schedule: Schedule

    def _report(self, item: Any) -> None:
        if not hasattr(self, "_clock"):
            self._clock = Clock()
        self._clock.join(self.schedule.host.clock)
        self.schedule.host.tick()
        super()._report(item)

    def take(self) -> list[Any]:
        taken = super().take()
        if taken:
            self.schedule.host.clock.join(self._clock)
        return taken


@dataclass(slots=True, eq=False)
class Life:
    """A model from its load to its end. becomes: what the copy of KV under way leads to, "served" or "gone". adapters: the chunk of
    each adapter, by its number. reading: an adapter that is being read. is_split: whether other devices have shares of it, too."""

    spec: LoadModel
    place: Place
    load: Load
    table: Any
    hosted: Any = None
    served: bool = False
    becomes: str = ""
    adapters: dict[int, int] = field(default_factory=dict)
    reading: AdapterRead | None = None
    is_split: bool = False
    grammars: Grammars | None = None


class EngineRun:
    """A run of one seed. faults: what it found. num_replaced: how often a model was loaded with other settings than before.
    backend, streams, copies: what a test changes to put a fault back. may_fail_with: the errors that loads may end with."""

    may_fail_with: tuple[type[Exception], ...] = (LoadCancelled, torch.OutOfMemoryError)

    def __init__(self, seed: int, rules: Rules, monkeypatch: pytest.MonkeyPatch) -> None:
        self.schedule = Schedule(seed, lambda host: self.device.thread_ended(host))
        self._random = self.schedule.random
        self._driver = Driver()
        self.device = self._driver.device = Device(self.schedule, rules, self._driver.names_at, self._driver.mappings_at)
        self.schedule.first.device, self.device.registered = self.device, self._driver.registered
        cuda_memory = self._patch(monkeypatch)
        self._memory = cuda_memory.CudaMemory(NUM_CHUNKS, CHUNK)
        self._arena = self._driver.arena_address = self._memory.arena.data_ptr()
        self._note_unmapping()
        options = Configure("cuda:0", NUM_CHUNKS, CHUNK, 0, 512, BLOCK_TOKENS, 5.0, 0)
        self.backend: Any = CudaBackend(self._memory, options)
        self.backend._kept = KeptModels(KEPT_BYTES)
        self.backend._ops = None
        self.backend._frames = frames.DeviceFrames(self._memory)
        self.streams: Any = self._memory._streams
        self.num_replaced = 0
        self._slots = [np.zeros(CHUNK, np.uint8) for _ in range(WEIGHT_CHUNKS)]
        self._ring, self._free_slots = Lock(self.schedule), [np.zeros(8, np.uint8) for _ in range(NUM_READERS + 1)]
        self._kv_slots = {name: np.zeros(CHUNK, np.uint8) for name in NAMES}
        tier = SimpleNamespace(slot_bytes=CHUNK, span=(0, 0), pieces=lambda slots, num_bytes: self._slots)
        self._runner = runner.TorchRunner(self.backend, options, None)
        self._runner._copies._tier = tier
        self._loads = ReportingLoads(self._runner)
        self._loads.schedule = self.schedule
        self._free = list(range(NUM_CHUNKS))
        models: Any = SimpleNamespace(place_adapter=lambda served, *wanted: served.scheduler.adapters.place(*wanted))
        self.adapter_loads = AdapterLoads(models, self._memory, self._loads, lambda message: None, lambda *_: None, self._finish)
        self._lives: dict[str, Life] = {}
        self._hosted: dict[str, Any] = {}  # the latest of each name
        self._under_way: Any = None
        self._may_lack = False  # whether the step that is launched may find no memory

    @property
    def faults(self) -> list[str]:
        return list(self.device.memory.faults)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        device = Here(self.schedule)
        torch_on = Torch(device)
        cuda_memory = cuda_stand_in.install(monkeypatch, self._driver)
        self.copies = copies = sys.modules["engine.cuda.copies"]
        sums = SimpleNamespace(
            num_programs=lambda most_words: 2,
            partial_sums=lambda table, out: device.launch("a checksum", [reads(table), writes(out), *summed(table)]),
        )
        few_rows = SimpleNamespace(
            MAX_ROWS=4,
            few_rows_linear=lambda x, weight, bias, out, gelu: device.launch("few rows", [reads(x), reads(weight), writes(out)]),
        )
        entry, ended = kernels(device), Future[None]()
        ended.set_result(None)
        choice = SimpleNamespace(wants_packed=None, reason="")
        patches: list[tuple[Any, dict[str, Any]]] = [
            (cuda_memory, {"torch": torch_on, "Thread": self.schedule.thread}),
            (copies, {"torch": torch_on, "triton_checksum": sums}),
            (backend, {"torch": torch_on, "MAX_GRAPH_ROWS": 4, "MAX_GRAPH_TOKENS": 32}),
            (mixed_graphs, {"torch": torch_on, "STEPS_BEFORE_CAPTURE": 2}),
            (graph_room, {"RESTING_S": 0.0}),
            (mixed_graphs, {"pays": lambda *_: self._random.random() < 0.7}),
            (edited, {"torch": torch_on, "entry": entry, "edited_logits": self._edited_logits}),
            (edit_columns, {"entry": entry}),
            *((module, {"torch": torch_on, "entry": entry}) for module in (edited_graphs, edited_logits)),
            (graphs, {"torch": torch_on, "_space": None, "_room": GraphRoom(8), "_recording": schedule.Lock(self.schedule)}),
            (sequences, {"torch": torch_on, "entry": entry}),
            (device_adapters, {"torch": torch_on, "entry": entry}),
            (adapter_tables, {"read_adapter": read_adapter}),
            (frames, {"torch": torch_on, "threading": self.schedule.threading, "codec": SimpleNamespace(Parts=lambda *_: None)}),
            (sink, {"torch": torch_on, "threading": self.schedule.threading}),
            (triton_unpack, {"unpack": self._unpack}),
            (
                linear_choice,
                {"torch": torch_on, "functional": torch_on, "triton_linear": few_rows, "_ours_wins": {}, "_tries": Counter()},
            ),
            (linear_choice, {"HEAD_START": 2, "REPEATS": 2, "HEAD_START_TRIES": 2}),
            (predicting, {"torch": torch_on, "entry": entry}),
            (expert_counts, {"torch": torch_on}),
            (device_counts, {"torch": torch_on, "EventFence": copies.EventFence}),
            (model, {"torch": torch_on, "entry": entry}),
            (model, {"Weights": lambda shape, dtype, weights, held_in, counts: (weights, counts)}),
            (model, {"kv_views": lambda arena, *_: (arena, None)}),
            (model, {"rotaries_of": lambda *_: (Rotary(Drawn(device, (8,))),) * 2}),
            *((module, {"Thread": self.schedule.thread}) for module in (loads, transfers, unmapping)),
            (unmapping, {"threading": self.schedule.threading, "CHUNKS_AT_A_TIME": 1}),
            (
                runner,
                {"open_checkpoint": opened, "SourceChoice": lambda *_: choice, "_in_background": lambda work: ended},
            ),
            (runner, {"weights_bytes": lambda *_: WEIGHT_CHUNKS * CHUNK, "StagingRing": lambda: None, "ReadRates": lambda _: None}),
            (runner, {"time_of_kernels": lambda task: nullcontext()}),  # it would tell the time from a thread of its own
            (runner, {"weight_layout": lambda *_: [], "parameter_places": lambda _: [], "stream_weights": self._stream}),
            (CudaBackend, {"decoder": lambda self: None}),
        ]
        for module, names in patches:
            for name, value in names.items():
                monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(model, "build_model", self._layers)
        return cuda_memory

    def _layers(self, ops: Any, shape: Any, held: Any, ranks: Any, stages: Any) -> Any:
        """Stands in for engine.models.registry.build_model."""
        return Layers(Here(self.schedule), *held, shape.predicts)

    def _edited_logits(self, *arguments: Any) -> Any:
        """Edits logits in launched kernels. At times a step finds no memory for that, after masks were copied."""
        if self._may_lack and self.schedule.host is self.schedule.first and self._random.random() < 0.1:
            self.device.refuses = 1
        return edited_logits.edited_logits(*arguments)

    def _unpack(self, packed: Tensor, begin: Tensor, most_values: int, out: Tensor, verdict: Tensor, number: int) -> None:
        self.device.launch("unpack", [reads(packed), reads(begin), writes(out), writes(verdict)])

    def _stream(self, source: Any, dtype: str, sink: Any, *how: Any, landed: Any, decoder: Any, shared: Any) -> Any:
        """Stands in for loader.reading.weight_stream.stream_weights: threads read frames into slots, and this thread gives a slot
        back when its frame is decoded."""
        cancelled, turn, free, done = how[2], self._ring, self._free_slots, list[tuple[Any, Any]]()
        frame_bytes = CHUNK // FRAMES_A_CHUNK
        left = iter(range(0, WEIGHT_CHUNKS * CHUNK, frame_bytes))

        def taken(held: list[Any]) -> Any:
            with turn:
                return held.pop() if held else None

        def read() -> None:
            for place_bytes in left:
                while (slot := taken(free)) is None:
                    self.schedule.point()
                self.device.host_uses(f"host memory {slot.ctypes.data}", "a slot", "a read")
                frame = SimpleNamespace(num_bytes=frame_bytes)
                segment = SimpleNamespace(frame=frame, target="", place_bytes=place_bytes, is_whole_frame=True)
                assert sink.decode(segment, slot.data)
                fence = sink.fence()
                with turn:
                    done.append((fence, slot))

        readers = [self.schedule.thread(read, name="reader") for _ in range(NUM_READERS)]
        for reader in readers:
            reader.start()
        for _ in range(WEIGHT_CHUNKS * FRAMES_A_CHUNK):
            while (fetched := taken(done)) is None:
                self.schedule.point()
            fence, slot = fetched
            fence.wait()
            with turn:
                free.append(slot)
        for reader in readers:
            reader.join()
        if cancelled():
            raise ReadCancelled("the reads were cancelled")
        sink.finish()
        return SimpleNamespace(num_bytes=WEIGHT_CHUNKS * CHUNK)

    def _note_unmapping(self) -> None:
        """Makes giving up a range an access to its chunks, which have other owners from then on."""
        unmap = self._memory.unmap

        def noted(address: int, num_bytes: int) -> None:
            chunks = list(self._driver.names_at(address, num_bytes))
            unmap(address, num_bytes)
            for name in chunks:
                self.device.host_uses(name, "a chunk", "giving it up")

        self._memory.unmap = noted

    def _proposals(self, life: Life, num_rows: int) -> Any:
        """Returns how many tokens are drafted behind each row of a step of a model with a predictor, which sees most of them."""
        if not life.spec.predicts or self._random.random() < 0.2:
            return None
        return np.full(num_rows, self._random.choice([0, 1, 2]), np.int32)

    # ---- the loop

    def run(self, num_actions: int = ACTIONS) -> None:
        try:
            self._run(num_actions)
        except Stuck as error:
            self.schedule.end_all()
            self.device.memory.fault(f"nothing goes on: {error}")
        finally:
            with suppress(Exception) if self.schedule.stuck else nullcontext():  # who cannot go on keeps what it uses
                self._close()
        for error in self.schedule.errors:
            if not isinstance(error, Stuck):
                raise error

    def _run(self, num_actions: int) -> None:
        actions: list[Callable[[], None]] = [
            *[self._step] * 10,
            *[self._take] * 5,
            *[self._start_load] * 3,
            *[self._idle] * 2,
            *[self._evict] * 2,
            *[self._count] * 2,
            *[self._start_adapters] * 2,
            self._drop_adapter,
            self._compact,
            self._end_grammars,
            self._cancel,
            self._lack_memory,
        ]
        actions += self._more_actions()
        for _ in range(num_actions):
            self._random.choice(actions)()
            for _ in range(self._random.randrange(POINTS)):
                self.schedule.point()
        self._settle()
        self._finish()
        for life in list(self._lives.values()):
            self._end(life)

    def _more_actions(self) -> list[Callable[[], None]]:
        return []

    def _settle(self) -> None:
        """Goes on until no other thread runs."""
        while self.schedule.num_running or any(not life.served for life in self._lives.values()):
            self.schedule.point()
            self._take()

    def _close(self) -> None:
        os.close(self._loads.fileno())
        for _, weights in self._runner._ranges._ranges.values():
            weights.close()
        self._memory.close()

    def _finish(self) -> None:
        step, self._under_way = self._under_way, None
        if step is not None:
            step.wait()

    def _step(self) -> None:
        """Has adapters placed that were read, launches a step of a served model, then reads the one before."""
        self._place_adapters()
        served = [life for life in self._lives.values() if life.served]
        if served:
            self._step_of(self._random.choice(served))

    def _step_of(self, life: Life) -> None:
        plan = self._plan(life)
        self.schedule.host.kv = [((self._arena + chunk * CHUNK, CHUNK), True) for chunk in life.place.kv.tolist()]
        numbers = life.table.adapter[plan.slots].tolist()
        chunks = {life.adapters[number] for number in numbers if number >= 0}
        self.schedule.host.adapters = [((self._arena + chunk * CHUNK, CHUNK), False) for chunk in sorted(chunks)]
        before = self._under_way
        masks, rows = self._masks(life, plan)
        step, self._may_lack = Stepping(None, life.grammars, rows), True
        try:
            try:
                step.launched = life.hosted.launch(plan, life.table, masks)
            finally:
                self._may_lack = False
            self._under_way = step
        except NoWorkSpace:
            self._finish()
            step.tell()  # of other requests, which have the rows now
        else:
            if before is not None:
                before.wait()

    def _masks(self, life: Life, plan: BatchPlan) -> tuple[RowMasks | None, list[int]]:
        """Draws which rows of a step have a grammar, among those whose masks are written. Returns their masks, and their rows of
        the mask memory."""
        self.schedule.host.masks = []
        if plan.drafted or self._random.random() < 0.5:
            return None, []
        if life.grammars is None:
            life.grammars = Grammars(self.schedule, len(life.table.request_id), self._runner, self._driver)
        grammars, slots = life.grammars, plan.slots.tolist()
        own = [at for at, slot in enumerate(slots) if self._random.random() < 0.7 and grammars.is_ready(slot)]
        rows = [slots[at] for at in own]
        return grammars.masks(rows, own) if rows else None, rows

    def _end_grammars(self) -> None:
        """Ends a model's grammar process, also beside a step: it may be found dead as the next step is to be planned."""
        for life in self._lives.values():
            if life.grammars is not None and self._random.random() < 0.3:
                life.grammars.close()
                life.grammars = None

    def _plan(self, life: Life, first_slot: int = 0, most_rows: int = 3) -> BatchPlan:
        """Draws a step of a model, and writes what it reads of its sequences to the table."""
        num_rows = self._random.randint(1, most_rows)
        num_new = np.ones(num_rows, np.int32)
        num_new[-1] = self._random.choice([1, 1, 3])
        slots = np.arange(first_slot, first_slot + num_rows, dtype=np.int32)
        computed = np.full(num_rows, 4, np.int32)
        life.table.block_tables[0][slots, 0] = self._random.randrange(4)
        life.table.num_logprobs[slots] = self._random.choice([-1, -1, -1, 0, 2])
        for slot in slots.tolist():
            edits = self._random.choice([{}, {}, {"frequency_penalty": 0.5, "logit_bias": {3: 1.0}}, {"min_tokens": LENGTH}])
            num_logprobs, temperature = life.table.num_logprobs[slot], life.table.temperature[slot]
            write_sampling(life.table, slot, SamplingParams(LENGTH, **edits), 1, LENGTH)
            life.table.num_logprobs[slot], life.table.temperature[slot] = num_logprobs, temperature
        numbers = [self._random.choice([-1, *life.adapters]) for _ in slots]
        life.table.adapter[slots] = numbers
        plan = BatchPlan(1, life.spec.model, slots, computed, num_new, np.ones(num_rows, np.bool_))
        plan.to_propose = self._proposals(life, num_rows)
        if plan.to_propose is not None and num_new[-1] == 1:
            plan.slots[:], plan.drafted = plan.slots[0], True
        return plan

    def _idle(self) -> None:
        self._finish()
        self.schedule.host.kv = self.schedule.host.adapters = []
        captured = 0
        for life in self._lives.values():
            while life.served and life.hosted.num_uncaptured and captured < CAPTURES_AT_ONCE:
                life.hosted.capture_next()
                captured += 1

    def _count(self) -> None:
        """Reads what a served model's experts have computed, while a step may run."""
        for life in self._lives.values():
            if life.served:
                life.hosted.expert_counts.news(wait=False)

    def _start_load(self) -> None:
        name = self._random.choice(NAMES)
        if name in self._lives or len(self._free) < WEIGHT_CHUNKS + KV_CHUNKS:
            return
        self._finish()
        place = self._taken_place()
        num_sequences = self._random.choice([4, 4, 4, 6])
        limits = (WEIGHT_CHUNKS, KV_CHUNKS, NUM_CHUNKS, LENGTH, num_sequences, [])
        total = checksum.combined([0] * WEIGHT_CHUNKS)
        slots = self._random.choice([list(range(WEIGHT_CHUNKS)), []])  # the host tier's; without any the weights are read
        spec = LoadModel(1, name, "", "bfloat16", "f", *limits, source_slots=slots, checksum=total)
        if name == PREDICTS:
            spec = msgspec.structs.replace(spec, speculator=MTP)
        table = make_sequence_table(num_sequences, LENGTH, LENGTH // BLOCK_TOKENS)
        table.temperature[:] = 0.0
        self._lives[name] = Life(spec, place, self._loads.start(spec, place), table)

    def _taken_place(self) -> Place:
        """Takes the chunks of a model from those that are free."""
        self._random.shuffle(self._free)
        chunks = [self._free.pop() for _ in range(WEIGHT_CHUNKS + KV_CHUNKS)]
        return Place(np.array(chunks[:WEIGHT_CHUNKS], np.int32), np.array(chunks[WEIGHT_CHUNKS:], np.int32))

    # ---- LoRA adapters

    def _start_adapters(self) -> None:
        """Has an adapter read for each served model that reads none."""
        for life in self._lives.values():
            if life.served and life.reading is None and not life.is_split:
                self._start_adapter(life)

    def _start_adapter(self, life: Life) -> None:
        source = AdapterSource("adapter", str(self._random.choice([8, 8, 32])), "f")
        life.reading = AdapterRead(life.spec.model, source, life.hosted.adapter_memory, 0.0)
        self._loads.read(life.reading)

    def _place_adapters(self) -> None:
        """Has adapters placed that were read, in place of others or where there is room. Some have to wait, until a step is under
        way."""
        for life in self._lives.values():
            if life.served and life.reading is not None and life.reading.is_over and self._random.random() < 0.4:
                self._place(life, life.reading)

    def _place(self, life: Life, read: AdapterRead) -> None:
        self.device.refuses = 0  # an engine whose tables find no memory ends

        def place(key: str, num_chunks: int) -> Any:
            if life.adapters and (self._random.random() < 0.5 or not self._free or len(life.adapters) == MOST_ADAPTERS):
                self._drop_adapter_of(life)
            if not self._free:
                return None
            number = next(number for number in range(MOST_ADAPTERS) if number not in life.adapters)
            life.adapters[number] = self._free.pop()
            return SimpleNamespace(number=number, chunks=[life.adapters[number]])

        scheduler = SimpleNamespace(adapters=SimpleNamespace(place=place), adapter_arrived=lambda key: None)
        served: Any = SimpleNamespace(spec=life.spec, hosted=life.hosted, scheduler=scheduler)
        own: Any = SimpleNamespace(reads={"key": read}, stuck_since_s={})
        if self.adapter_loads._place(served, own, read, "key"):
            life.reading = None
            if self._random.random() < 0.5:
                self._start_adapter(life)

    def _drop_adapter(self) -> None:
        """Drops an adapter, also beside a step that uses it: a row's end may be found after the next step was launched."""
        lives = [one for one in self._lives.values() if one.served and one.adapters]
        if not lives:
            return
        self._drop_adapter_of(self._random.choice(lives))

    def _drop_adapter_of(self, life: Life) -> None:
        number = self._random.choice(list(life.adapters))
        self.device.refuses = 0
        life.hosted.adapter_memory.clear(number)
        self._free.append(life.adapters.pop(number))

    # ---- the rest of a model's life

    def _cancel(self) -> None:
        for life in self._lives.values():
            if life.hosted is None and self._random.random() < 0.2:
                life.load.cancelled.set()

    def _lack_memory(self) -> None:
        """Lets some of the next allocations fail, the loop's or a load's."""
        if self._random.random() < 0.3:
            self.device.refuses = self._random.choice([1, 2, 30])

    def _take(self) -> None:
        self._finish()
        for item in self._loads.take():
            if isinstance(item, Load):
                self._load_ended(self._lives[item.task.spec.model])
            elif isinstance(item, AdapterRead):
                if item.error is not None:
                    raise item.error
                self.adapter_loads.ended(item)
            elif isinstance(item, KVTransfer):
                if item.error is not None and not isinstance(item.error, torch.OutOfMemoryError):
                    raise item.error
                life = self._lives[item.served.spec.model]
                if life.becomes == "served":
                    life.served, life.becomes = True, ""
                else:
                    self._end(life)

    def _load_ended(self, life: Life) -> None:
        load, name = life.load, life.spec.model
        hosted = self.backend._kept.of(name)
        if hosted is not None and self._hosted.get(name, hosted) is not hosted:
            self.num_replaced += 1
        self._hosted[name] = hosted
        if load.error is not None and not isinstance(load.error, self.may_fail_with):
            raise load.error
        if load.error is not None or load.cancelled.is_set():
            life.hosted = load.hosted
            self._end(life)
            return
        life.hosted = load.hosted
        if self._random.random() < 0.5:
            life.becomes = "served"
            self._copy(life, save=False)
        else:
            life.served = True

    def _evict(self) -> None:
        served = [life for life in self._lives.values() if life.served and not life.is_split]
        if not served:
            return
        self._finish()
        life = self._random.choice(served)
        life.hosted.expert_counts.news(wait=True)
        life.served = False
        if self._random.random() < 0.5:
            life.becomes = "gone"
            self._copy(life, save=True)
        else:
            self._end(life)

    def _copy(self, life: Life, save: bool) -> None:
        """Copies the KV of a model to the host tier, or back."""
        pieces: Any = [[(self._arena + int(chunk) * CHUNK, self._kv_slots[life.spec.model])] for chunk in life.place.kv]
        served: Any = SimpleNamespace(spec=life.spec)
        self._loads.copy(KVTransfer(served, [], [], life.place.kv, save, pieces, self._memory))

    def _compact(self) -> None:
        """Moves a model's KV to a free chunk, which frees its own."""
        served = [life for life in self._lives.values() if life.served and not life.is_split]
        if not served or not self._free:
            return
        self._finish()
        life, target = self._random.choice(served), self._free.pop()
        source = int(life.place.kv[0])
        self._memory.copy_within(CHUNK, np.array([source], np.int32), np.array([target], np.int32))
        life.place.kv[0] = target
        self._free.append(source)

    def _end(self, life: Life) -> None:
        if life.grammars is not None:
            life.grammars.close()
        if life.adapters:
            self.device.refuses = 0
        if life.hosted is not None:
            life.hosted.release()
        self._free += [*life.place.weights.tolist(), *life.place.kv.tolist(), *life.adapters.values()]
        del self._lives[life.spec.model]


Run = TypeVar("Run", bound=EngineRun)


def run_of(
    seed: int,
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    changed: Callable[[Any, pytest.MonkeyPatch], None] = lambda run, monkeypatch: None,
    kind: type[Run] = EngineRun,  # type: ignore[assignment]
) -> Run:
    """Returns the run of a seed, ended. version: torch's, one of TORCH. changed: called before it, to put a fault back. kind: of
    the run."""
    enabled = gc.isenabled()
    gc.disable()  # as in an engine, where it runs only when the loop says so
    try:
        with monkeypatch.context() as patches:
            run = kind(seed, TORCH[version], patches)
            changed(run, patches)
            run.run()
            return run
    finally:
        if enabled:
            gc.enable()
