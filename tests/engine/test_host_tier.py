"""Weights and KV in the host tier survive an eviction, and weights also the end of an engine."""

from __future__ import annotations

import gc
import mmap
import os
import select
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.contracts.group_share import GroupShare
from engine.contracts.loads import LoadTask
from engine.cpu import backend as cpu_backend
from engine.lifecycle.kv_transfer import KVTransfer
from engine.lifecycle.life import State
from engine.memory.host_tier import HostTier
from engine.null import runner as null_runner
from engine.protocol import Evicted, EvictModel, Group, LoadDone, LoadFailed
from engine.serve.channel import wait_until
from tests.engine.model_bench import BLOCK_TOKENS, CASES
from tests.engine.tier_bench import CHUNK_BYTES, NUM_SLOTS, TierBench, make_models

PROMPTS = {number: np.random.default_rng(number).integers(2, 211, 3 + 7 * number).tolist() for number in range(1, 7)}
COMMON = np.random.default_rng(99).integers(2, 211, 13).tolist()
PROMPTS[5] = COMMON + PROMPTS[5]
PROMPTS[6] = COMMON + PROMPTS[6]
PROMPTS[7] = PROMPTS[6]  # the same text twice, so both requests hold the same last block
OUTPUT_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    kinds = {"llama": "llama", "gemma": "gemma2", "mistral": "mistral-window", "deepseek": "deepseek-v2", "qwen": "qwen3-next"}
    make_models(made, **{name: CASES[case] for name, case in kinds.items()})
    return made


def undisturbed(folder: Path, name: str, bench_class: type[TierBench] = TierBench) -> dict[int, list[int]]:
    bench = bench_class(folder)
    bench.load(name)
    for request_id, prompt in PROMPTS.items():
        bench.submit(name, request_id, prompt, OUTPUT_TOKENS)
    bench.run(name)
    return bench.output


def spoil(bench: TierBench, slot: int, at: int = 1000) -> None:
    with mmap.mmap(bench.slots_fd, NUM_SLOTS * CHUNK_BYTES) as tier:
        tier[slot * CHUNK_BYTES + at] ^= 1


# ---- weights


def test_a_kept_share_of_a_null_model_is_a_share_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loads of both ranks use the slots of one host tier, and find their own share's in them alone."""
    monkeypatch.setattr(null_runner, "NullShare", lambda *_: SimpleNamespace(region=SimpleNamespace(num_stages=1)))
    bench = TierBench(tmp_path, null=True)

    def load(rank: int, **changes: Any) -> LoadTask:
        spec = bench.spec("m", group=Group(rank, [0, 1], 0, 0), **changes)
        task = LoadTask(spec, np.arange(12, dtype=np.int32), lambda done, total: None, lambda: False)
        assert isinstance(bench.runner.load(task), GroupShare)
        return task

    kept = [load(rank, keep_slots=[rank]) for rank in (0, 1)]
    assert [task.kept for task in kept] == [True, True]
    for rank in (0, 1):
        own = load(rank, source_slots=[rank], checksum=kept[rank].checksum)
        assert (own.bytes_read, own.source_rejected) == (0, "")
        assert load(rank, source_slots=[1 - rank], checksum=kept[1 - rank].checksum).source_rejected


@pytest.mark.parametrize(("null", "quantize"), [(True, ""), (False, ""), (False, "int8"), (False, "packed")])
def test_a_kept_copy_is_loaded_without_the_disk(folder: Path, tmp_path: Path, null: bool, quantize: str) -> None:
    bench = TierBench(tmp_path if null else folder, null)
    slots = [9, 4, 17, 2, 30, 31, 32, 33, 34, 35, 36, 37]
    how = {"quantize": quantize, "dtype": "bfloat16" if quantize == "packed" else "float32"}
    done = bench.load("llama", keep_slots=slots, **how)
    assert done.bytes_read > 0
    assert done.kept
    assert done.checksums[0]
    bench.submit("llama", 1, PROMPTS[3], 20)
    bench.run("llama")
    first = bench.output.pop(1)
    assert bench.evict("llama").kv_slots_used == []
    again = bench.load("llama", source_slots=slots, checksum=done.checksums[0], **how)
    assert (again.bytes_read, again.kept, again.checksums[0], again.source_rejected) == (0, True, done.checksums[0], "")
    if not null:
        assert done.copy_seconds > 0
        assert again.copy_seconds > 0
        assert again.map_seconds > 0
    bench.submit("llama", 1, PROMPTS[3], 20)
    bench.run("llama")
    assert bench.output[1] == first
    bench.evict("llama")
    if quantize:  # loads from disk again, without a copy
        bench.load("llama", **how)
        bench.output.pop(1)
        bench.submit("llama", 1, PROMPTS[3], 20)
        bench.run("llama")
        assert bench.output[1] == first
        bench.evict("llama")
    bench.check_empty()


def test_the_next_engine_finds_the_copy(folder: Path) -> None:
    bench = TierBench(folder)
    done = bench.load("llama", keep_slots=list(range(12)))
    bench.submit("llama", 1, PROMPTS[3], 20)
    bench.run("llama")
    second = TierBench(folder, slots_fd=bench.slots_fd)
    assert second.load("llama", source_slots=list(range(12)), checksum=done.checksums[0]).bytes_read == 0
    second.submit("llama", 1, PROMPTS[3], 20)
    second.run("llama")
    assert second.output == bench.output


@pytest.mark.parametrize("null", [True, False])
def test_a_copy_that_has_changed_is_not_used(folder: Path, tmp_path: Path, null: bool) -> None:
    bench = TierBench(tmp_path if null else folder, null)
    slots = list(range(12))
    done = bench.load("llama", keep_slots=slots)
    bench.evict("llama")
    wrong = bench.load("llama", source_slots=slots, checksum=done.checksums[0] + 1, keep_slots=slots)
    assert f"{done.checksums[0] + 1:#x}" in wrong.source_rejected
    assert wrong.bytes_read == done.bytes_read
    assert wrong.kept, "what came from disk was kept"
    bench.evict("llama")
    spoil(bench, 1, 3)
    rejected = bench.load("llama", source_slots=slots, checksum=done.checksums[0])
    assert rejected.source_rejected
    assert (rejected.bytes_read, rejected.kept) == (done.bytes_read, False)
    bench.evict("llama")
    few = bench.load("llama", source_slots=[NUM_SLOTS], checksum=done.checksums[0])
    assert few.source_rejected
    assert few.bytes_read == done.bytes_read
    if not null:
        bench.evict("llama")
        few = bench.load("llama", source_slots=[1, 2], checksum=done.checksums[0])
        assert "2 slots of 65536 bytes are too few" in few.source_rejected
    bench.evict("llama")
    bench.check_empty()


def test_a_file_too_small_for_its_slots() -> None:
    fd = os.memfd_create("small")
    os.ftruncate(fd, CHUNK_BYTES)
    with pytest.raises(ValueError, match="2 slots of 65536 bytes asked, the file has 65536"):
        HostTier(fd, 2, CHUNK_BYTES)
    os.close(fd)


# ---- KV


def preempted(bench: TierBench, name: str, num_steps: int, save_slots: range) -> tuple[Evicted, LoadDone]:
    """Submits all requests, evicts the model after num_steps steps, loads it again, submits the requests again and runs them to
    their end. Returns the messages of the eviction and of the second load."""
    bench.load(name)
    for request_id, prompt in PROMPTS.items():
        bench.submit(name, request_id, prompt, OUTPUT_TOKENS)
    for _ in range(num_steps):
        bench.step(name)
    gone = bench.evict(name, save_slots)
    bench.check_empty()
    done = bench.load(name, kv_slots=gone.kv_slots_used, kv_index=gone.kv_index)
    for request_id in PROMPTS:
        bench.submit(name, request_id, PROMPTS[request_id], OUTPUT_TOKENS)
    bench.run(name)
    return gone, done


@pytest.mark.parametrize("name", ["llama", "gemma", "mistral", "deepseek", "qwen"])
@pytest.mark.parametrize("num_steps", [5, 18])
def test_preempted_requests_go_on_as_if_nothing_had_been(folder: Path, name: str, num_steps: int) -> None:
    """Requests go on from saved KV with only one token computed again each. Prompts of several lengths fill the last block
    differently; some models have windows, one keeps latents, one states; some prompts share their beginning, two are equal."""
    bench = TierBench(folder)
    gone, done = preempted(bench, name, num_steps, range(NUM_SLOTS))
    assert gone.recompute_kv_tokens == 0
    assert 0 < gone.saved_kv_tokens == done.restored_kv_tokens
    assert gone.kv_slots_used == list(range(len(gone.kv_slots_used)))
    assert len(gone.kv_slots_used) < NUM_SLOTS
    assert bench.resumed.keys() == PROMPTS.keys(), "all had begun"
    assert [recomputed for _, recomputed in bench.resumed.values()] == [1] * len(PROMPTS), "the last token only"
    assert bench.output == undisturbed(folder, name)
    bench.evict(name)
    bench.check_empty()


@pytest.mark.parametrize("num_slots", [0, 1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma", "qwen"])
def test_what_finds_no_room_is_computed_again(folder: Path, name: str, num_slots: int) -> None:
    bench = TierBench(folder)
    gone, done = preempted(bench, name, 20, range(3, 3 + num_slots))
    assert gone.saved_kv_tokens == done.restored_kv_tokens
    assert gone.recompute_kv_tokens > 0
    assert len(gone.kv_slots_used) <= num_slots
    assert sum(recomputed for _, recomputed in bench.resumed.values()) > len(PROMPTS)
    assert bench.output == undisturbed(folder, name)


def test_saved_kv_that_has_changed_is_computed_again(folder: Path) -> None:
    expected = undisturbed(folder, "llama")
    bench = TierBench(folder)
    bench.load("llama")
    for request_id, prompt in PROMPTS.items():
        bench.submit("llama", request_id, prompt, OUTPUT_TOKENS)
    for _ in range(20):
        bench.step("llama")
    gone = bench.evict("llama", range(NUM_SLOTS))
    spoil(bench, gone.kv_slots_used[0])
    done = bench.load("llama", kv_slots=gone.kv_slots_used, kv_index=gone.kv_index)
    assert 0 < done.restored_kv_tokens < gone.saved_kv_tokens
    for request_id, prompt in PROMPTS.items():
        bench.submit("llama", request_id, prompt, OUTPUT_TOKENS)
    bench.run("llama")
    assert bench.output == expected
    bench.evict("llama")
    for bad_index, slots in ((b"nonsense", gone.kv_slots_used), (gone.kv_index, []), (gone.kv_index[:-9], gone.kv_slots_used)):
        assert bench.load("llama", kv_slots=slots, kv_index=bad_index).restored_kv_tokens == 0
        bench.evict("llama")
    bench.check_empty()


def test_kept_prefixes_come_back_the_most_recent_first(folder: Path) -> None:
    bench = TierBench(folder)
    bench.load("llama")
    for request_id in (3, 5, 6, 4):
        bench.submit("llama", request_id, PROMPTS[request_id], 4)
        bench.run("llama")
    gone = bench.evict("llama", range(1))  # holds the last prompt and a part of another
    assert gone.recompute_kv_tokens == 0
    block_bytes = 3 * 2 * 2 * 16 * 4 * BLOCK_TOKENS  # layers, keys and values, heads, head size, float32
    assert gone.saved_kv_tokens == CHUNK_BYTES // block_bytes * BLOCK_TOKENS
    bench.load("llama", kv_slots=gone.kv_slots_used, kv_index=gone.kv_index)
    bench.submit("llama", 14, PROMPTS[4], 4)
    bench.run("llama")
    assert bench.output[14] == bench.output[4]
    assert bench.cached[14] == len(PROMPTS[4]) // 4 * 4
    bench.submit("llama", 24, PROMPTS[4], 4, salt="another tenant")
    bench.run("llama")
    assert 24 not in bench.cached


def test_saved_twice_without_being_used(folder: Path) -> None:
    """KV that was restored and is saved again, before any request used it, is complete."""
    bench = TierBench(folder)
    bench.load("llama")
    for request_id, prompt in PROMPTS.items():
        bench.submit("llama", request_id, prompt, OUTPUT_TOKENS)
    for _ in range(20):
        bench.step("llama")
    gone = bench.evict("llama", range(NUM_SLOTS))
    for slots in (range(10, NUM_SLOTS), range(NUM_SLOTS)):
        bench.load("llama", kv_slots=gone.kv_slots_used, kv_index=gone.kv_index)
        before, gone = gone, bench.evict("llama", slots)
        assert gone.saved_kv_tokens == before.saved_kv_tokens
    bench.load("llama", kv_slots=gone.kv_slots_used, kv_index=gone.kv_index)
    for request_id, prompt in PROMPTS.items():
        bench.submit("llama", request_id, prompt, OUTPUT_TOKENS)
    bench.run("llama")
    assert [recomputed for _, recomputed in bench.resumed.values()] == [1] * len(PROMPTS)
    assert bench.output == undisturbed(folder, "llama")


def test_an_eviction_during_a_save_and_during_a_restore(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TierBench(folder)
    bench.load("llama")
    bench.submit("llama", 1, PROMPTS[6], OUTPUT_TOKENS)
    for _ in range(9):
        bench.step("llama")
    bench.sent.clear()
    bench.lifecycle.evict(EvictModel(5, "llama", 64, list(range(NUM_SLOTS))))
    bench.lifecycle.evict(EvictModel(6, "llama", 64, []))
    bench.lifecycle.load(bench.spec("llama"))
    assert [message.error for message in bench.sent if isinstance(message, LoadFailed)] == ["model llama is being evicted"]
    assert bench.lifecycle.busy
    gone = bench.pump(Evicted)
    assert [message.placement_id for message in bench.sent if isinstance(message, Evicted)] == [5, 6]
    may_copy, run = threading.Event(), KVTransfer.run
    monkeypatch.setattr(KVTransfer, "run", lambda transfer: (may_copy.wait(60), run(transfer)))
    bench.lifecycle.load(bench.spec("llama", kv_slots=gone.kv_slots_used, kv_index=gone.kv_index))
    while bench.lifecycle.lives["llama"].state is not State.LOADED:
        assert wait_until(bench.lifecycle.fileno(), select.POLLIN, 60)
        bench.lifecycle.take()
    bench.lifecycle.evict(EvictModel(7, "llama", 64, []))
    may_copy.set()
    assert bench.pump(Evicted).placement_id == 7
    assert not any(isinstance(message, LoadDone) for message in bench.sent)
    bench.check_empty()
    assert not bench.lifecycle.busy


def test_nothing_of_an_evicted_model_waits_for_the_garbage_collector(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evicted model is freed without the garbage collector, which engines disable while they work: anything in a reference cycle
    would stay, chunk maps and tables included. What the runner keeps of a few models on purpose is turned off here."""
    monkeypatch.setattr(cpu_backend, "MAX_KEPT_MODELS", 0)
    bench = TierBench(folder)
    bench.load("llama")
    bench.submit("llama", 1, PROMPTS[3], 8)
    bench.run("llama")
    served = bench.models.by_name["llama"]
    alive = [weakref.ref(served.scheduler.kv), weakref.ref(served.scheduler), weakref.ref(served.hosted)]
    del served
    gc.disable()
    try:
        bench.evict("llama", range(NUM_SLOTS))
        bench.sent.clear()
        for thread in threading.enumerate():  # the thread that saved its KV has reported, but may not have ended
            if thread.name.startswith(("KV of", "load", "first step")):
                thread.join()
        left = [held for reference in alive if (held := reference()) is not None]
        holders = [str(holder)[:200] for held in left for holder in gc.get_referrers(held) if holder is not left]
        assert not left, f"{left}, held by {holders} while {threading.enumerate()} ran"
    finally:
        gc.enable()


def test_null_models_keep_their_keys_too(tmp_path: Path) -> None:
    bench = TierBench(tmp_path, null=True)
    bench.load("m")
    bench.submit("m", 1, list(range(5, 55)), 60)
    for _ in range(30):
        bench.step("m")
    gone = bench.evict("m", range(NUM_SLOTS))
    assert gone.saved_kv_tokens == 79
    bench.load("m", kv_slots=gone.kv_slots_used, kv_index=gone.kv_index)
    bench.submit("m", 1, list(range(5, 55)), 60)
    bench.run("m")
    assert bench.resumed == {1: (79, 1)}
    assert len(bench.output[1]) == 60
