"""A random history of one engine's memory: loads, evictions, growing and shrinking KV, LoRA adapters that come and go, failures,
crashes. After every operation the ledger of chunks, the page tables, the adapters' tables and the reference counts must agree, and
all memory must hold what its owner wrote there.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.contracts.adapters import ReadAdapter
from engine.contracts.loads import LoadTask
from engine.cpu.memory import CpuMemory
from engine.lifecycle.lifecycle import Lifecycle
from engine.lifecycle.loads import Loads
from engine.loading.weight_copies import WeightCopies
from engine.memory import mappings
from engine.memory.host_tier import HostTier
from engine.memory.weight_range import WeightRange, WeightRanges
from engine.null.runner import NullModel, NullRunner
from engine.protocol import AdapterSource, Evicted, EvictModel, LoadDone, LoadFailed, SamplingParams
from engine.serve.adapter_loads import MAX_OVERDUE, MAX_READS, AdapterLoads, AdapterRead
from engine.serve.identity import adapter_identity, adapter_source
from engine.serve.served_models import ServedModels
from loader.adapters.layout import AdapterLayout
from loader.errors import CheckpointError
from scheduler.batch.request import BatchRequest
from tests.engine.engine_process import load_message, null_checkpoint, null_configure

CHUNK_BYTES = 4096
NUM_CHUNKS, NUM_SLOTS, WORK_CHUNKS = 96, 40, 6
BUDGET = NUM_CHUNKS - WORK_CHUNKS
NAMES = {"a": 1, "b": 2, "c": 3, "d": 5, "w": 2}  # name -> KV heads: blocks of 1, 2, 3 and 5 sixteenths of a chunk
WINDOWED = "w"  # one of its two layers attends to the last WINDOW tokens alone, so it has two KV groups
WINDOW = 8
ADAPTERS = {name: AdapterSource(name, f"/{name}", "1") for name in ("x1", "x4", "x7", "x11", "x16")}  # their chunks; of any model
BROKEN = "x7"  # an adapter whose reads fail while `fails` has it


class StampedModel(NullModel):
    """A null model whose weights are real memory: every chunk contains the model's name and the chunk's number."""

    weights: WeightRange


class StampedAdapters:
    """The adapters of one model (AdapterMemory). Each chunk of an adapter contains its name and the chunk's number."""

    def __init__(self, fails: set[str], done: Counter[str]) -> None:
        self._fails, self._done = fails, done
        self.first_bytes: dict[int, int] = {}  # number of an adapter in memory -> its first byte in the arena

    def prepare(self) -> None:
        pass

    def read(self, source: AdapterSource) -> ReadAdapter:
        if source.name in self._fails:
            raise CheckpointError("adapter_config.json", "r", "is broken")
        num_chunks = int(source.name[1:])
        data = np.zeros(num_chunks * CHUNK_BYTES - 100, np.uint8)
        for number in range(num_chunks):
            text = f"{source.name} {number}".encode().ljust(16)
            data[number * CHUNK_BYTES : number * CHUNK_BYTES + len(text)] = list(text)
        return ReadAdapter(AdapterLayout((), len(data)), data)

    def set(self, number: int, first_byte: int, layout: AdapterLayout) -> None:
        assert number not in self.first_bytes, "two adapters have one number"
        self.first_bytes[number] = first_byte
        self._done["adapters placed"] += 1

    def clear(self, number: int) -> None:
        del self.first_bytes[number]
        self._done["adapters dropped"] += 1


class StampedRunner(NullRunner):
    def __init__(self, configure: Any, memory: CpuMemory, tier: HostTier, done: Counter[str]) -> None:
        super().__init__(configure, tier)
        self.done = done
        self.ranges, self.copies = WeightRanges(memory), WeightCopies(memory, tier)
        self.fails: set[str] = set()
        self.addresses: dict[str, int] = {}

    def load(self, task: LoadTask) -> NullModel:
        spec = task.spec
        weights = self.ranges.of(spec.model, spec.fingerprint, spec.weights_chunks * CHUNK_BYTES - 100)
        weights.map(task.chunks.tolist())
        if not self.copies.take(task, weights):
            with self.copies.keeping(task, weights, [(0, weights.num_bytes)]) as kept:
                for number in range(spec.weights_chunks):
                    stamp(weights.address + number * CHUNK_BYTES, f"{spec.model} {number}".encode())
                    if kept is not None:
                        kept.landed(number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES)
            task.bytes_read = weights.num_bytes
        if spec.model in self.fails:
            weights.unmap()
            raise CheckpointError("model.safetensors", "w", "is broken")
        model: Any = super().load(LoadTask(load_message(spec.path, spec.model), task.chunks, task.progress, task.cancelled))
        model.weights = weights
        model.adapter_memory = StampedAdapters(self.fails, self.done)
        model.release = weights.unmap
        assert self.addresses.setdefault(spec.model, weights.address) == weights.address, "addresses are for life"
        return model


def stamp(address: int, text: bytes) -> None:
    memory = np.frombuffer(mappings.bytes_at(address, 16), np.uint8)
    memory[:] = np.frombuffer(text.ljust(16)[:16], np.uint8)


def stamped(address: int) -> bytes:
    return bytes(np.frombuffer(mappings.bytes_at(address, 16), np.uint8)).rstrip()


def memory_machine(folder: Path, done: Counter[str] | None = None) -> Callable[[], RuleBasedStateMachine]:
    """Returns the state machine for hypothesis's run_state_machine_as_test. done: counts what was done, by its effect."""
    for name, heads in NAMES.items():
        null_checkpoint(folder / name)
        config = (folder / name / "config.json").read_text().replace('"num_key_value_heads": 2', f'"num_key_value_heads": {heads}')
        if name == WINDOWED:
            types = ["sliding_attention", "full_attention"]
            windowed = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": WINDOW, "layer_types": types, "hidden_size": 16}
            config = json.dumps(json.loads(config) | windowed | {"intermediate_size": 16, "max_position_embeddings": 64})
        (folder / name / "config.json").write_text(config.replace('"head_dim": 16', '"head_dim": 4'))
    counts: Counter[str] = Counter() if done is None else done
    return lambda: MemoryMachine(folder, counts)


class MemoryMachine(RuleBasedStateMachine):
    """Runs an engine's memory in the daemon's place: it keeps the ledger of chunks and assigns the slots of the host tier."""

    def __init__(self, folder: Path, done: Counter[str]) -> None:
        super().__init__()
        self.folder, self.done = folder, done
        self.slots_fd = os.memfd_create("tier")
        os.ftruncate(self.slots_fd, NUM_SLOTS * CHUNK_BYTES)
        self.free_slots = set(range(NUM_SLOTS))
        self.kept: dict[str, tuple[list[int], int]] = {}  # name -> slots, checksum
        self.saved: dict[str, Evicted] = {}
        # evicted model -> request -> its tokens, the prompt's length, its adapter
        self.waiting: dict[str, dict[int, tuple[list[int], int, str]]] = {}
        self.memory: CpuMemory | None = None
        self.runner: StampedRunner
        self.tier: HostTier
        self.next_request = 1
        self.contents: dict[tuple[str, int, bytes], bytes] = {}  # (model, KV group, key) -> content of a cached prefix's block
        self._start()

    def _start(self) -> None:
        """Starts an engine with nothing in it, after freeing the memory of the one before."""
        if self.memory is not None:
            for _, held in self.runner.ranges._ranges.values():
                held.close()
            self.memory.close()
            mappings.release(self.tier._address, NUM_SLOTS * CHUNK_BYTES)
        self.memory = CpuMemory(NUM_CHUNKS, CHUNK_BYTES)
        self.tier = HostTier(os.dup(self.slots_fd), NUM_SLOTS, CHUNK_BYTES)
        sizes = {"num_chunks": NUM_CHUNKS, "chunk_bytes": CHUNK_BYTES, "work_space_bytes": WORK_CHUNKS * CHUNK_BYTES}
        self.configure = null_configure(**sizes, null_step_ms=0.0, block_tokens=4)
        self.runner = StampedRunner(self.configure, self.memory, self.tier, self.done)
        self.models = ServedModels(self.configure, self.memory)
        self.sent: list[Any] = []
        self.loads = Loads(self.runner)
        self.lifecycle = Lifecycle(self.models, self.loads, self.sent.append, lambda name: None, self.memory, self.tier)
        self.held: dict[str, int] = {}  # chunks of each model in the daemon's ledger
        self.reads: list[AdapterRead] = []  # under way
        self.adapter_loads = AdapterLoads(self.models, self.memory, self, lambda told: None, self._failed, lambda: None)

    def read(self, read: AdapterRead) -> None:
        """Begins a read for adapter_loads; the rule `reads_end` ends it."""
        self.reads.append(read)

    def _failed(self, request_id: int, code: str, error: str) -> None:
        if code == "adapter_unavailable":
            assert len(self.adapter_loads._outlived) == MAX_OVERDUE, error
        else:
            assert (code, BROKEN in error) == ("adapter_unusable", True), error
        self.done["requests whose adapter failed"] += 1

    def _look_after_adapters(self) -> None:
        """Does what the engine's loop does between two steps."""
        wanting = [served for served in self.models.by_name.values() if self.adapter_loads.is_wanted(served)]
        if wanting or self.adapter_loads.under_way:
            self.adapter_loads.look_after(wanting, may_free_memory=True)

    def teardown(self) -> None:
        self._start()
        assert self.memory is not None
        self.memory.close()
        os.close(self.slots_fd)

    def _pump(self, *kinds: type[Any]) -> Any:
        while not (found := [message for message in self.sent if isinstance(message, kinds)]):
            self.lifecycle.take()
        self.sent.clear()
        return found[0]

    def _lease(self) -> int:
        return BUDGET - sum(self.held.values())

    @property
    def loaded(self) -> list[str]:
        return sorted(self.models.by_name)

    # ---- operations

    @rule(name=st.sampled_from(sorted(NAMES)), weights=st.integers(1, 14), kv=st.integers(6, 14), keep=st.booleans())
    def load(self, name: str, weights: int, kv: int, keep: bool) -> None:
        weights = self.runner_weights(name, weights)
        if name in self.models or self._lease() < weights + kv:
            return
        slots = sorted(self.free_slots)[:weights] if keep and len(self.free_slots) >= weights and name not in self.kept else []
        source, checksum = self.kept.get(name, ([], 0))
        kv_state = self.saved.pop(name, None)
        self.held[name] = weights + kv
        spec = load_message(
            str(self.folder / name),
            name,
            weights_chunks=weights,
            kv_reserved_chunks=kv,
            lease_chunks=self._lease(),
            max_model_len=60,
            source_slots=source,
            checksum=checksum,
            keep_slots=slots,
            kv_slots=kv_state.kv_slots_used if kv_state else [],
            kv_index=kv_state.kv_index if kv_state else b"",
        )
        self.lifecycle.load(spec)
        done = self._pump(LoadDone, LoadFailed)
        if kv_state:
            self.free_slots |= set(kv_state.kv_slots_used)
        if isinstance(done, LoadFailed):
            assert name in self.runner.fails, done.error
            self.done["loads that failed"] += 1
            del self.held[name]
            return
        assert (done.bytes_read == 0) == bool(source)
        self.done["loads from the tier" if source else "loads"] += 1
        self.done["loads that took KV back"] += done.restored_kv_tokens > 0
        if slots:
            assert done.kept
            self.kept[name] = (slots, done.checksums[0])
            self.free_slots -= set(slots)
        if kv_state:
            assert done.restored_kv_tokens <= kv_state.saved_kv_tokens
        for request_id, (tokens, num_prompt, adapter) in self.waiting.pop(name, {}).items():
            self._submit(name, request_id, tokens, num_prompt, adapter)

    def runner_weights(self, name: str, weights: int) -> int:
        """Returns the chunks of a model's weights: `weights` when its size is not known yet, and the known size from then on."""
        known = self.runner.ranges._ranges.get(name)
        slots = self.kept.get(name)
        return len(slots[0]) if slots else known[1].num_chunks if known else weights

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), num_slots=st.integers(0, 20))
    def evict(self, data: st.DataObject, num_slots: int) -> None:
        name = data.draw(st.sampled_from(self.loaded))
        scheduler = self.models.by_name[name].scheduler
        queued = (*scheduler.waiting.requests(), *scheduler.adapters.requests())
        requests = {each.request_id: (each.tokens.tolist(), each.num_prompt, each.adapter) for each in queued}
        for slot, request in scheduler.running.requests():
            tokens = scheduler.table.tokens[slot, : scheduler.table.num_tokens[slot]].tolist()
            requests[request.request_id] = (tokens, request.num_prompt, request.adapter)
        slots = sorted(self.free_slots)[:num_slots]
        del self.held[name]
        self.lifecycle.evict(EvictModel(1, name, self._lease(), slots))
        gone = self._pump(Evicted)
        self.adapter_loads.forget(name)
        assert gone.kv_slots_used == slots[: len(gone.kv_slots_used)]
        self.free_slots -= set(gone.kv_slots_used)
        self.waiting[name] = requests
        self.done["evictions"] += 1
        self.done["evictions that saved KV"] += bool(gone.kv_index)
        if gone.kv_index:
            self.saved[name] = gone

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), prompt=st.integers(1, 40), family=st.integers(0, 3))
    def submit(self, data: st.DataObject, prompt: int, family: int) -> None:
        name = data.draw(st.sampled_from(self.loaded))
        self.done["requests"] += 1
        self._submit(name, self.next_request, [300 + family] * prompt, prompt)
        self.next_request += 1

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), prompt=st.integers(1, 40), family=st.integers(0, 3), adapters=st.lists(st.sampled_from(sorted(ADAPTERS))))
    def submit_adapted(self, data: st.DataObject, prompt: int, family: int, adapters: list[str]) -> None:
        """Submits a request for each of some adapters of a model, with the prompts that requests for the model itself have, too."""
        name = data.draw(st.sampled_from(self.loaded))
        for adapter in adapters:
            self.done["requests for adapters"] += 1
            self._submit(name, self.next_request, [300 + family] * prompt, prompt, adapter_identity(ADAPTERS[adapter]))
            self.next_request += 1
        self._look_after_adapters()

    @precondition(lambda self: self.reads)
    @rule(num=st.integers(1, 4), last_first=st.booleans())
    def reads_end(self, num: int, last_first: bool) -> None:
        """Ends reads of adapters, in an order that differs from that of their beginnings."""
        for _ in range(min(len(self.reads), num)):
            self._end_read(-1 if last_first else 0)
        self._look_after_adapters()

    def _end_read(self, which: int) -> None:
        read = self.reads.pop(which)
        read.run()
        self.adapter_loads.ended(read)
        self.done["reads of adapters"] += 1

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), adapter=st.sampled_from(sorted(ADAPTERS)), ahead=st.booleans())
    def operate(self, data: st.DataObject, adapter: str, ahead: bool) -> None:
        """Has an adapter loaded ahead of requests, or retires it, as an operator does."""
        served = self.models.by_name[data.draw(st.sampled_from(self.loaded))]
        (self.adapter_loads.bring if ahead else self.adapter_loads.retire)(served, ADAPTERS[adapter])
        self.done["adapters brought" if ahead else "adapters retired"] += 1
        self._look_after_adapters()

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), num=st.integers(4, 10), prompt=st.integers(1, 24))
    def crowd(self, data: st.DataObject, num: int, prompt: int) -> None:
        """Runs more sequences than the reserved KV holds and aborts every second one early, so that the remaining blocks lie in
        gaps."""
        name = data.draw(st.sampled_from(self.loaded))
        scheduler = self.models.by_name[name].scheduler
        self.done["crowds"] += 1
        for number in range(num):
            self._submit(name, self.next_request, [400 + self.next_request % 500, 300 + number] * prompt, 2 * prompt)
            self.next_request += 1
        self._step(name, 4)
        for _, request in scheduler.running.requests()[::2]:
            scheduler.abort(request.request_id)

    def _submit(self, name: str, request_id: int, tokens: list[int], num_prompt: int, adapter: str = "") -> None:
        if len(tokens) < 60:
            request = BatchRequest(
                request_id, np.array(tokens, np.int32), num_prompt, SamplingParams(30, seed=request_id % 4), adapter=adapter
            )
            self.models.by_name[name].scheduler.submit(request)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), num=st.integers(1, 12), reads_end=st.booleans())
    def grow(self, data: st.DataObject, num: int, reads_end: bool) -> None:
        self.done["growths"] += 1
        while reads_end and self.reads:
            self._end_read(0)
            self._look_after_adapters()
        self._step(data.draw(st.sampled_from(self.loaded)), num)

    def _step(self, name: str, num: int) -> None:
        served = self.models.by_name[name]
        for _ in range(num):
            self._look_after_adapters()
            plan = served.scheduler.plan(0)
            self.models.discard_returned()  # as the engine does
            assert not served.scheduler.failed, "the floor holds one sequence of full length"
            if plan is None:
                return
            result = served.hosted.execute(plan, served.scheduler.table)
            self._stamp_blocks(served, plan)
            served.scheduler.finish_step(plan, result.ids, result.bad)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), num=st.integers(1, 6))
    def abort(self, data: st.DataObject, num: int) -> None:
        """Aborts some sequences and drops cached prefixes, so that the chunks of the remaining sequences have gaps."""
        scheduler = self.models.by_name[data.draw(st.sampled_from(self.loaded))].scheduler
        running = [request.request_id for _, request in scheduler.running.requests()]
        for request_id in running[::2][:num]:
            self.done["aborts"] += scheduler.abort(request_id)
        for group in scheduler.kv.groups:
            group.pool.put_free(np.array(group.prefixes.give_up(3 * num), np.int32))

    @rule(share=st.integers(0, 100))
    def shrink(self, share: int) -> None:
        """Makes the lease smaller, then restores all of it."""
        if not self.loaded:
            return
        self.done["shrinks"] += 1
        self._set_lease(self._lease() * share // 100)
        self.check()
        self._set_lease(self._lease())

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), num_chunks=st.integers(1, 8))
    def gather(self, data: st.DataObject, num_chunks: int) -> None:
        """Empties a model's sparse chunks, as when another model needs them. No sequence and no cached prefix is lost."""
        scheduler = self.models.by_name[data.draw(st.sampled_from(self.loaded))].scheduler
        before = (scheduler.kv.held_bytes, scheduler.kv.recent_keys(), scheduler.num_preemptions, self.models.chunks.num_drawn)
        given = self.models.compaction.gather(scheduler, num_chunks)
        after = (scheduler.kv.held_bytes, scheduler.kv.recent_keys(), scheduler.num_preemptions)
        assert after == before[:3]
        assert self.models.chunks.num_drawn == before[3] - given
        assert given <= num_chunks
        self.done["chunks gathered"] += given

    def _set_lease(self, lease_chunks: int) -> None:
        moved = self.models.compaction.moved_bytes
        self.models.set_lease(lease_chunks)
        self.done["shrinks that moved blocks"] += self.models.compaction.moved_bytes > moved

    @rule(name=st.sampled_from([*sorted(NAMES), BROKEN]), chance=st.integers(0, 5))
    def fail(self, name: str, chance: int) -> None:
        """Switches whether the next loads of a model, or the next reads of an adapter, fail."""
        if chance < 4 and name not in self.runner.fails:
            return
        self.runner.fails ^= {name}
        self.done["fail switched"] += 1

    @rule(name=st.sampled_from(sorted(NAMES)))
    def drop_copy(self, name: str) -> None:
        if name not in self.models:
            self.free_slots |= set(self.kept.pop(name, ([], 0))[0])

    @rule(chance=st.integers(0, 9))
    def crash(self, chance: int) -> None:
        """Ends the engine with all that it ran. What the daemon holds stays."""
        if chance < 9 or not self.loaded:
            return
        self.done["crashes"] += 1
        self._start()
        self.waiting.clear()

    # ---- what must hold

    def _stamp_blocks(self, served: Any, plan: Any) -> None:
        """Writes KV as a model would: each block that becomes full is stamped with its content, which is the same when computed
        again."""
        scheduler, table = served.scheduler, served.scheduler.table
        adapters = {slot: request.adapter for slot, request in scheduler.running.requests()}
        for slot, first, num in zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_new.tolist(), strict=True):
            for index in range(first // 4, (first + num) // 4):
                for g, group in enumerate(scheduler.kv.groups):
                    block = int(table.block_tables[g][slot, index])
                    assert group.pool.refcount[block] >= 1
                    stamp(self._block(group, block), self._content(g, table.tokens[slot, : 4 * (index + 1)], adapters[slot]))

    def _block(self, group: Any, block: int) -> int:
        assert self.memory is not None
        return int(self.memory.arena.data_ptr()) + block * int(group.block_bytes)

    @staticmethod
    def _content(group: int, tokens: Any, adapter: str) -> bytes:
        return hex(hash((group, adapter, *tokens.tolist())))[-12:].encode()

    @invariant()
    def check(self) -> None:
        chunks = self.models.chunks
        owned = np.zeros(NUM_CHUNKS, np.int32)
        drawn = reserved = weights = 0
        for name, served in self.models.by_name.items():
            place, kv, scheduler = served.place, served.scheduler.kv, served.scheduler
            weights += len(place.weights)
            owned[place.weights] += 1
            for number in range(len(place.weights)):  # the range's page table leads to these very chunks
                address = served.hosted.weights.address + number * CHUNK_BYTES  # type: ignore[attr-defined]
                assert stamped(address) == f"{name} {number}".encode()
                assert self.memory is not None
                assert stamped(self.memory.arena.data_ptr() + int(place.weights[number]) * CHUNK_BYTES) == stamped(address)
            drawn += self._check_adapters(served, owned)
            for g, group in enumerate(kv.groups):
                group.pool.check()
                owned += (group.pool._home | group.pool._drawn).astype(np.int32)
                drawn += group.pool.num_drawn_chunks
                reserved += int(np.count_nonzero(group.pool._home))
                counts = np.zeros(group.pool.num_blocks, np.int32)
                for slot, request in scheduler.running.requests():
                    computed = int(scheduler.table.num_computed[slot])
                    starts, ends = scheduler.blocks._starts[g], scheduler.blocks._ends[g]
                    assert starts[slot] <= group.first_needed(computed), "blocks within the window are held"
                    for index in range(int(starts[slot]), int(ends[slot])):
                        block = int(scheduler.table.block_tables[g][slot, index])
                        counts[block] += 1
                        if index < computed // 4:
                            content = self._content(g, scheduler.table.tokens[slot, : 4 * (index + 1)], request.adapter)
                            assert stamped(self._block(group, block)) == content, "KV is where the table says"
                assert (counts == group.pool.refcount).all()
                for key in group.prefixes.recent_keys():
                    block = group.prefixes.block_of(key)
                    assert block not in group.pool._stack[: group.pool.num_free], "a kept block is nobody else's"
                    if key not in kv.tails:
                        content = stamped(self._block(group, block))
                        assert self.contents.setdefault((name, g, key), content) == content, "what was kept has not changed"
        reads = [read for read in self.reads if read not in self.adapter_loads._outlived]
        under_way = {(read.model, adapter_identity(read.source)) for read in reads}
        assert len(under_way) == len(reads) <= MAX_READS, "an adapter is read once for all that want it"
        assert self.adapter_loads.by_model.keys() <= self.models.by_name.keys()
        assert owned.max(initial=0) <= 1, "a chunk has two owners"
        assert (owned == 0).sum() == np.count_nonzero(chunks.free)
        assert (chunks.num_drawn, chunks.num_reserved, chunks.num_weights, chunks.num_leaving) == (drawn, reserved, weights, 0)
        assert drawn <= chunks.lease_chunks
        assert chunks.num_drawn + reserved + weights <= BUDGET
        assert np.count_nonzero(chunks.resident) <= BUDGET
        assert chunks.resident[owned > 0].all()
        assert not self.lifecycle.busy
        lent = [slot for slots, _ in self.kept.values() for slot in slots]
        lent += [slot for gone in self.saved.values() for slot in gone.kv_slots_used]
        assert sorted([*lent, *self.free_slots]) == list(range(NUM_SLOTS))

    def _check_adapters(self, served: Any, owned: Any) -> int:
        """Checks the adapters of a model: their memory, their tables and the rows that use them. Adds their chunks to owned
        [NUM_CHUNKS], and returns how many they are."""
        scheduler, memory = served.scheduler, self.memory
        assert memory is not None
        adapters, rows = scheduler.adapters, Counter[str]()
        for slot, request in scheduler.running.requests():
            number = adapters.resident[request.adapter].number if request.adapter else -1
            assert scheduler.table.adapter[slot] == number
            rows[request.adapter] += 1
        for key, adapter in adapters.resident.items():
            assert adapter.num_rows == rows[key]
            assert served.hosted.adapter_memory.first_bytes[adapter.number] == int(adapter.chunks[0]) * CHUNK_BYTES
            for number, chunk in enumerate(adapter.chunks.tolist()):
                text = f"{adapter_source(key).name} {number}".encode()
                assert stamped(memory.arena.data_ptr() + chunk * CHUNK_BYTES) == text, "an adapter is where its table says"
            owned[adapter.chunks] += 1
        numbers = sorted([*served.hosted.adapter_memory.first_bytes, *adapters._free_numbers])
        assert numbers == list(range(adapters._most)), "each number is free or belongs to one adapter in memory"
        assert not adapters.wanted & adapters.resident.keys(), "nobody waits for what is there"
        assert sum(len(waiting) for waiting in adapters._waiting.values()) == adapters.num_waiting
        return int(adapters.num_chunks)
