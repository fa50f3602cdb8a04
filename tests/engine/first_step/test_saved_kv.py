"""Saved KV is restored at the same time as the weights: a first prompt waits for it, and its blocks are freed whatever happens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine.lifecycle.kv_transfer import KVTransfer
from engine.lifecycle.life import State
from engine.protocol import Evicted, EvictModel, LoadDone, LoadFailed, LoadStreams, TokensOut
from tests.engine.first_step.bench import NUM_SLOTS, PROMPT, Bench, truncate
from tests.engine.model_bench import BLOCK_TOKENS


@pytest.fixture
def may_copy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event that copies of KV wait for; it is set at first."""
    event, run = threading.Event(), KVTransfer.run
    event.set()

    def held_run(transfer: KVTransfer) -> None:
        assert event.wait(60)
        run(transfer)

    monkeypatch.setattr(KVTransfer, "run", held_run)
    return event


def waits_for_kv(bench: Bench) -> bool:
    """Returns whether the model's load has ended before its saved KV was back."""
    return bench.engine.lifecycle.lives["m"].state is State.LOADED


def answered_and_saved(bench: Bench) -> dict[str, Any]:
    """Has the model answer PROMPT and evicts it. Returns the fields of a load that restores its KV."""
    bench.load()
    bench.until(LoadDone)
    bench.submit(1)
    bench.until_answered(1)
    bench.channel.sent.clear()
    bench.engine._handle(EvictModel(9, "m", 64, list(range(NUM_SLOTS))))
    gone: Evicted = bench.until(Evicted)
    assert gone.saved_kv_tokens >= len(PROMPT)
    return {"kv_slots": gone.kv_slots_used, "kv_index": gone.kv_index}


def restored_blocks(bench: Bench, request_id: int) -> int:
    """Returns how many tokens of the request's prompt were found in restored KV."""
    out = [message for message in bench.channel.sent if isinstance(message, TokensOut)]
    return next((message.cached[request_id] for message in out if request_id in message.cached), 0)


def test_saved_kv_comes_beside_the_weights_and_before_a_prompt(bench: Bench, wanted: list[int], may_copy: threading.Event) -> None:
    saved = answered_and_saved(bench)
    may_copy.clear()
    bench.allow(1)
    bench.load(**saved)
    bench.pump(lambda: bench.engine.lifecycle.first_steps)
    assert "LoadStreams" not in bench.kinds(), "a prompt would not find its KV"
    may_copy.set()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(2)
    assert "LoadDone" not in bench.kinds()
    bench.allow(99)
    assert bench.until_answered(7) == [wanted]
    assert bench.until(LoadDone).restored_kv_tokens >= len(PROMPT)
    assert restored_blocks(bench, 7) >= len(PROMPT) - BLOCK_TOKENS
    bench.pump(lambda: not bench.engine.models.busy())
    bench.evict()


def test_weights_that_are_there_first_wait_for_saved_kv(bench: Bench, wanted: list[int], may_copy: threading.Event) -> None:
    saved = answered_and_saved(bench)
    may_copy.clear()
    bench.load(**saved)
    bench.pump(lambda: waits_for_kv(bench))
    assert "LoadDone" not in bench.kinds()
    may_copy.set()
    done: LoadDone = bench.until(LoadDone)
    assert done.restored_kv_tokens >= len(PROMPT)
    assert done.copy_seconds > 0, "what the KV took longer than the weights"
    bench.submit(7)
    assert bench.until_answered(7) == [wanted]
    assert restored_blocks(bench, 7) >= len(PROMPT) - BLOCK_TOKENS
    bench.evict()


@pytest.mark.parametrize("how", ["withdrawn", "spoilt", "evicted"])
def test_a_load_that_comes_to_nothing_frees_its_blocks_when_they_are_copied(
    bench: Bench, wanted: list[int], folder: Path, may_copy: threading.Event, how: str
) -> None:
    saved = answered_and_saved(bench)
    may_copy.clear()
    bench.allow(1)
    bench.load(**saved)
    bench.pump(lambda: bench.engine.lifecycle.first_steps)
    if how == "withdrawn":
        bench.engine._handle(EvictModel(9, "m", 64))
    elif how == "spoilt":
        bench.spoil = lambda read: truncate(folder, read)
    bench.allow(99)
    bench.pump(lambda: waits_for_kv(bench))
    if how == "evicted":
        bench.engine._handle(EvictModel(9, "m", 64))
    chunks = bench.engine.models.chunks
    assert not chunks.free.all(), "KV is still on its way into them"
    may_copy.set()
    bench.until(LoadFailed if how == "spoilt" else Evicted)
    assert bench.kinds().count("Evicted") + bench.kinds().count("LoadFailed") == 1
    assert not {"LoadDone", "LoadStreams"} & set(bench.kinds())
    assert chunks.free.all()
    assert not bench.engine.lifecycle.busy
