"""An engine adopts the weights that an earlier engine left in the device's memory, without reading or copying them. Weights that
are not exactly what they should be are not adopted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.protocol import LoadDone, WeightsHeld
from tests.engine.tier_bench import CHUNK_BYTES, TierBench, make_models

PROMPT = list(range(3, 40))


def left_by(bench: TierBench, *names: str, **changes: Any) -> list[WeightsHeld]:
    """Loads the models into the bench and returns its reports of their weights."""
    told = []
    for name in names:
        bench.load(name, **changes)
        told.append(bench.pump(WeightsHeld))
    return told


def answer(bench: TierBench, name: str, request_id: int) -> list[int]:
    bench.submit(name, request_id, PROMPT, 12)
    bench.run(name)
    return bench.output[request_id]


def read_anew(done: LoadDone) -> bool:
    return done.bytes_read > 0 and not done.adopted


def test_adopted_weights_serve_at_once_where_they_are(tmp_path: Path) -> None:
    make_models(tmp_path, oak={"seed": 1}, elm={"seed": 2})
    first = TierBench(tmp_path, outlives=True)
    left = left_by(first, "oak", "elm")
    expected = {name: answer(first, name, at) for at, name in enumerate(("oak", "elm"))}

    second = TierBench(tmp_path, before=first, left=left, outlives=True)
    for at, (name, held) in enumerate(zip(("oak", "elm"), left, strict=True)):
        done = second.load(name)
        assert (done.adopted, done.bytes_read, done.copy_seconds) == (True, 0, 0.0)
        told = second.pump(WeightsHeld)
        assert (told.chunks, told.checksum) == (held.chunks, held.checksum)
        assert second.models.by_name[name].place.weights[: len(held.chunks)].tolist() == held.chunks
        assert answer(second, name, at) == expected[name]
    for name in ("oak", "elm"):
        second.evict(name)
    second.check_empty()
    assert read_anew(second.load("oak")), "what was evicted is not there any more"
    second.pump(WeightsHeld)


def test_a_model_that_comes_back_finds_its_weights_where_nothing_has_taken_their_place(tmp_path: Path) -> None:
    """None of the engines outlives itself here: nothing is summed up, and the engine's own account tells what is still there."""
    make_models(tmp_path, oak={"seed": 1}, elm={"seed": 2})
    bench = TierBench(tmp_path)
    assert read_anew(bench.load("oak"))
    place = bench.models.by_name["oak"].place.weights
    expected = answer(bench, "oak", 1)
    bench.evict("oak", comes_back=True)
    bench.check_empty()
    chunks = bench.models.chunks
    num_held = int(chunks._is_left.sum())
    assert 0 < num_held <= len(place)
    assert read_anew(bench.load("elm")), "which takes chunks that hold nothing"
    done = bench.load("oak")
    assert (done.adopted, done.bytes_read) == (True, 0)
    assert bench.models.by_name["oak"].place.weights[:num_held].tolist() == place[:num_held].tolist()
    assert answer(bench, "oak", 2) == expected

    bench.evict("elm")
    bench.evict("oak", comes_back=True)
    for num_taken, is_there in ((chunks.num_chunks - num_held, True), (chunks.num_chunks - num_held + 1, False)):
        chunks.give_back_weights(chunks.take_weights(num_taken))
        assert ("oak" in chunks.left) == is_there
    assert read_anew(bench.load("oak"))
    assert answer(bench, "oak", 3) == expected
    bench.evict("oak")
    assert read_anew(bench.load("oak")), "nobody said that it would come back"


@pytest.mark.parametrize("quantize", ["", "int8"])
def test_one_changed_bit_and_they_are_read_again(tmp_path: Path, quantize: str) -> None:
    make_models(tmp_path, oak={"seed": 1})
    first = TierBench(tmp_path, outlives=True)
    (held,) = left_by(first, "oak", quantize=quantize)
    expected = answer(first, "oak", 1)
    assert first.memory is not None
    place = held.chunks[-1] * CHUNK_BYTES + (held.num_bytes - 1) % CHUNK_BYTES
    first.memory.arena[place] ^= 1

    second = TierBench(tmp_path, before=first, left=[held], outlives=True)
    assert read_anew(second.load("oak", quantize=quantize))
    assert second.pump(WeightsHeld).checksum == held.checksum
    assert answer(second, "oak", 1) == expected


def test_other_weights_of_that_name_are_not_used(tmp_path: Path) -> None:
    make_models(tmp_path, oak={"seed": 1})
    first = TierBench(tmp_path, outlives=True)
    left = left_by(first, "oak")
    make_models(tmp_path, oak={"seed": 9})
    second = TierBench(tmp_path, before=first, left=left)
    assert read_anew(second.load("oak"))
    assert not second.models.chunks.left
    third = TierBench(tmp_path, before=first, left=left)
    assert read_anew(third.load("oak", quantize="int8"))


def test_accounts_that_cannot_be_true_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import msgspec

    make_models(tmp_path, oak={"seed": 1}, elm={"seed": 2})
    first = TierBench(tmp_path, outlives=True)
    (held,) = left_by(first, "oak")
    twice = msgspec.structs.replace(held, model="elm")
    outside = msgspec.structs.replace(held, model="ash", chunks=[255, 256])
    second = TierBench(tmp_path, before=first, left=[held, twice, outside])
    assert list(second.models.chunks.left) == ["oak"]
    assert "weights of elm" in caplog.text
    assert "weights of ash" in caplog.text
    assert second.load("oak").adopted


def test_a_copy_in_the_host_tier_stays_good(tmp_path: Path) -> None:
    make_models(tmp_path, oak={"seed": 1})
    first = TierBench(tmp_path, outlives=True)
    kept = first.load("oak", keep_slots=list(range(12)))
    held = first.pump(WeightsHeld)
    assert held.checksum == kept.checksums[0], "no second pass is made where the copy has the sum"
    second = TierBench(tmp_path, before=first, left=[held])
    again = second.load("oak", source_slots=list(range(12)), checksum=kept.checksums[0])
    assert (again.adopted, again.kept, again.checksums[0]) == (True, True, kept.checksums[0])
    second.evict("oak")
    from_tier = second.load("oak", source_slots=list(range(12)), checksum=kept.checksums[0])
    assert (from_tier.adopted, from_tier.bytes_read, from_tier.kept) == (False, 0, True)


def test_what_is_left_gives_way_to_what_needs_room(tmp_path: Path) -> None:
    """Chunks with adoptable weights are taken only when no blank ones are left. After one of them was taken the model is read from
    disk."""
    make_models(tmp_path, oak={"seed": 1})
    first = TierBench(tmp_path, outlives=True)
    left = left_by(first, "oak")
    expected = answer(first, "oak", 1)
    second = TierBench(tmp_path, before=first, left=left)
    chunks = second.models.chunks
    chunks.set_lease(chunks.num_chunks)
    blank = np.flatnonzero(chunks.choosable(1)).astype(np.int32)
    chunks.take(blank, reserved=False)
    assert list(chunks.left) == ["oak"]
    taken = chunks.take_weights(1)
    assert not chunks.left
    assert taken[0] in left[0].chunks
    chunks.give_back(blank, reserved=False)
    assert read_anew(second.load("oak"))
    assert answer(second, "oak", 1) == expected
