"""Cold, warm, ready and back: what stays in host memory, and what goes for what."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.node.events import HostCopiesFound
from scheduler.node.host_tier import HostCopy, HostTierAccount, KeptWeights, SavedKV
from scheduler.node.node_scheduler import SchedulerSettings
from tests.scheduler.node.fake_node import CHECKSUM, MIB, FakeNode, facts


def node_of(*weights_mib: int, slots: int = 100, **settings: float) -> FakeNode:
    """One device of 100 MiB, models a, b, c ... of the given sizes, and host memory of so many slots of 2 MiB."""
    node = FakeNode(host_tier_slots=slots, **settings)
    node.register(*(facts(name, mib) for name, mib in zip("abcdef", weights_mib, strict=False)))
    return node


def kept(node: FakeNode) -> set[str]:
    return {view.name for view in node.scheduler.snapshot() if view.kept_bytes}


def slots(node: FakeNode) -> dict[str, int]:
    return node.scheduler.host_tier().slots


def test_weights_stay_where_they_were_read_and_come_back_from_there() -> None:
    node = node_of(60, 60)
    node.arrive("a")
    (load,) = node.loads.values()
    assert (len(load.keep_slots), load.source_slots) == (30, ())
    assert slots(node) == {"free": 70, "transit": 30, "weights": 0, "kv": 0}
    node.loaded("a", seconds=4.0)
    node.finish()
    assert slots(node) == {"free": 70, "transit": 0, "weights": 30, "kv": 0}
    node.arrive("b")
    node.evicted()
    assert node.state("a") == "warm"
    node.loaded("b")
    node.finish()
    node.arrive("a")
    node.evicted()
    (again,) = node.loads.values()
    assert again.source_slots == load.keep_slots
    assert again.keep_slots == ()
    node.loaded("a", seconds=0.1)
    assert "loaded from host memory in 0.10 s" in node.view("a").reason
    assert ("a", "warm", "loading") in node.states
    assert ("a", "draining", "warm") in node.states


def test_without_host_memory_nothing_is_kept() -> None:
    node = node_of(60, 60, slots=0)
    node.bring_up("a", "b")
    assert node.state("a") == "cold"
    assert not any(load.keep_slots for load in node.copies.values())


def test_a_model_larger_than_the_tier_is_not_kept_and_takes_nothing_from_others() -> None:
    node = node_of(20, 90, slots=12)
    node.bring_up("a", "b")
    assert kept(node) == {"a"}


def test_a_crash_loses_no_kept_weights() -> None:
    node = node_of(28, 28, 28)
    for name in "abc":
        node.arrive(name)
        node.loaded(name)
    node.engine_down("cpu:0", running=())
    assert [node.state(name) for name in "abc"] == ["warm"] * 3
    node.engine_up("cpu:0")
    for _ in range(3):
        (load,) = node.loads.values()
        assert load.source_slots
        node.loaded()
    assert set(node.running) == {1, 2, 3}


def test_a_crash_during_a_load_gives_the_slots_back() -> None:
    node = node_of(60)
    node.arrive("a")
    assert slots(node)["transit"] == 30
    node.engine_down("cpu:0")
    assert slots(node) == {"free": 100, "transit": 0, "weights": 0, "kv": 0}


def test_unload_to_cold_gives_up_what_is_kept_and_to_warm_keeps_it() -> None:
    node = node_of(40)
    node.bring_up("a")
    cause = node.command("unload", "a", to="warm")
    node.evicted()
    assert node.answers[cause] is None
    assert node.state("a") == "warm"
    node.bring_up("a")
    node.command("unload", "a", to="cold")
    node.evicted()
    assert node.state("a") == "cold"
    assert slots(node)["free"] == 100
    cause = node.command("unload", "a", to="warm")
    assert node.answers[cause] is not None
    assert node.answers[cause].code == "not_kept"


def test_unload_of_a_warm_model_makes_it_cold() -> None:
    node = node_of(40)
    node.bring_up("a")
    node.command("unload", "a", to="warm")
    node.evicted()
    cause = node.command("unload", "a")
    assert node.answers[cause] is None
    assert node.state("a") == "cold"


def test_a_kept_copy_of_files_that_changed_is_given_up() -> None:
    node = node_of(40)
    node.bring_up("a")
    node.command("unload", "a", to="warm")
    node.evicted()
    node.register(facts("a", 40, fingerprint="2"))
    assert node.state("a") == "cold"
    assert slots(node)["free"] == 100


def test_files_that_change_during_the_load_from_host_memory() -> None:
    node = node_of(40)
    node.bring_up("a")
    node.command("unload", "a", to="warm")
    node.evicted()
    node.arrive("a")
    node.register(facts("a", 40, fingerprint="2"))
    assert slots(node)["weights"] == 20, "the load reads them"
    node.loaded("a")
    assert slots(node)["free"] == 100


def test_a_copy_that_was_rejected_is_given_up() -> None:
    node = node_of(40)
    node.bring_up("a")
    node.command("unload", "a", to="warm")
    node.evicted()
    node.arrive("a")
    node.loaded("a", rejected="checksum differs")
    assert slots(node)["free"] == 100
    assert any("checksum differs" in line for line in node.scheduler.why("a"))


def test_a_load_from_host_memory_that_fails_is_tried_again_from_disk() -> None:
    node = node_of(40)
    node.bring_up("a")
    node.command("unload", "a", to="warm")
    node.evicted()
    node.arrive("a")
    node.load_fails()
    node.sleep(1.1)
    (load,) = node.loads.values()
    assert not load.source_slots


def test_what_is_loaded_most_per_byte_stays() -> None:
    """Room for two of three; b is loaded least, and asked for most while it is there."""
    node = node_of(40, 40, 40, slots=45)
    for name in "ac":
        for seconds in (5.0, 0.1, 0.1):  # from disk, and then from host memory
            node.command("load", name)
            node.loaded(name, seconds)
            node.command("unload", name, to="warm")
            node.evicted()
    assert kept(node) == {"a", "c"}
    node.command("load", "b")
    node.loaded("b", 5.0)
    assert kept(node) == {"a", "c"}, "b is not worth what it would cost the others"
    for _ in range(20):
        node.arrive("b")
        node.finish()
    node.command("unload", "b")
    node.evicted()
    node.command("load", "b")
    node.loaded("b", 5.0)
    assert kept(node) == {"a", "c"}


def test_what_never_leaves_its_device_needs_no_copy() -> None:
    """a stays there and is asked for all the time; b and c take turns beside it."""
    node = node_of(40, 40, 40, slots=45)
    node.command("pin", "a")
    node.loaded("a")
    assert kept(node) == {"a"}
    for _ in range(3):
        for name in "bc":
            for _ in range(5):
                node.arrive("a")
                node.finish()
            node.arrive(name)
            node.evicted()
            node.loaded(name)
            node.finish()
    assert kept(node) == {"b", "c"}
    assert node.state("a") == "ready"


def test_a_model_that_loses_its_copy_at_rest_is_cold() -> None:
    node = node_of(60, 60, slots=30)
    node.arrive("a")
    node.loaded("a")
    node.finish()
    node.command("unload", "a", to="warm")
    node.evicted()
    for _ in range(3):
        node.arrive("b")
    assert node.state("a") == "cold"
    assert ("a", "warm", "cold") in node.states


def test_victims_of_a_device_are_chosen_by_what_their_reload_really_takes() -> None:
    """b is kept and a is not: b is quicker back, so it is the one to leave."""
    node = node_of(40, 40, 40, slots=20)
    for name in "ab":
        for _ in range(2):
            node.arrive(name)
            node.loaded(name, seconds=5.0) if node.loads else None
            node.finish()
    (keeper,) = kept(node)
    node.arrive("c")
    assert [evict.model for evict in node.evicts.values()] == [keeper]


def test_the_size_cannot_change_while_running() -> None:
    node = node_of(40)
    with pytest.raises(ValueError, match="host_tier_slots"):
        node.scheduler.reconfigure(SchedulerSettings(host_tier_slots=5))


def test_the_account_itself() -> None:
    tier = HostTierAccount(4)
    assert tier.grant(1, "a", 3) == (0, 1, 2)
    with pytest.raises(ValueError, match="2 slots asked for b, 1 are free"):
        tier.grant(2, "b", 2)
    with pytest.raises(ValueError, match="not granted"):
        tier.end_grant(1, (3,))
    tier = HostTierAccount(4)
    tier.end_grant(1, ())
    tier.grant(1, "a", 2)
    tier.end_grant(1, (0, 1))
    tier.weights["a"] = KeptWeights("f", (0, 1), 10)
    tier.lend("a", 7)
    tier.drop_weights("a")
    assert tier.num_free == 2, "somebody reads it"
    tier.validate()
    tier.returned("a")
    assert tier.num_free == 4
    tier.validate()


def test_weights_taken_over_on_the_device_teach_nothing_and_keep_what_is_kept() -> None:
    """An engine dies; the next one finds the weights of both on the device. One has a copy in host memory, the other has none."""
    node = node_of(40, 40, slots=20)
    node.arrive("a")
    node.loaded("a", seconds=4.0)
    node.arrive("b")
    node.loaded("b", seconds=4.0)
    before = kept(node)
    assert len(before) == 1
    node.engine_down("cpu:0")
    node.engine_up("cpu:0", left=("a", "b"))
    about = {}
    for _ in range(2):
        (load,) = node.loads.values()
        assert "from what was left there" in node.view(load.model).reason
        about[load.model] = node.view(load.model).reason.split(", about ")[1]
        node.loaded(load.model, seconds=0.01, adopted=True)
        assert "taken over from the engine before, in 0.01 s" in node.view(load.model).reason
    assert kept(node) == before
    assert slots(node)["transit"] == 0
    node.engine_down("cpu:0")
    node.engine_up("cpu:0", left=("a",))
    (load,) = node.loads.values()
    assert node.view(load.model).reason.split(", about ")[1] == about[load.model], "0.01 s is what no disk and no copy takes"


def after_restart(*copies: tuple[str, HostCopy]) -> FakeNode:
    """A node of models a and b, 20 MiB each, that finds these copies before its engine is up."""
    node = FakeNode(host_tier_slots=30, up=False)
    node.register(facts("a", 20), facts("b", 20))
    for name, copy in copies:
        kind = "kv" if isinstance(copy, SavedKV) else "weights"
        node.host |= dict.fromkeys(copy.slots, (kind, name, copy.fingerprint))
    node.post(HostCopiesFound, copies=copies)
    node.scheduler.validate()
    return node


def test_what_an_earlier_daemon_left_in_host_memory_is_loaded_from_there() -> None:
    weights = KeptWeights(facts("a", 20).fingerprint, tuple(range(5, 15)), 20 * MIB, checksums=(CHECKSUM,))
    kv = SavedKV(facts("a", 20).fingerprint, (20, 3), 4 * MIB, index=b"index", num_tokens=50)
    node = after_restart(("a", weights), ("a", kv))
    assert (node.state("a"), node.state("b")) == ("warm", "cold")
    assert slots(node) == {"free": 18, "transit": 0, "weights": 10, "kv": 2}
    node.engine_up("cpu:0")
    node.arrive("a")
    (load,) = node.loads.values()
    assert (load.source_slots, load.checksums, load.kv_slots, load.kv_index) == (weights.slots, (CHECKSUM,), kv.slots, b"index")
    node.arrive("b")
    granted = next(one for one in node.loads.values()).keep_slots
    assert not {*granted} & {*weights.slots, *kv.slots}


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gone", {}),
        ("a", {"fingerprint": "of other files"}),
        ("a", {"num_bytes": 19 * MIB}),
        ("a", {"slots": ()}),
        ("a", {"slots": (1, 1)}),
        ("a", {"slots": (29, 30)}),
        ("a", {"slots": (-1, 2)}),
    ],
)
def test_copies_that_are_no_models_now_leave_their_slots_free(model: str, changes: dict[str, Any]) -> None:
    fields = {"fingerprint": facts("a", 20).fingerprint, "slots": (1, 2), "num_bytes": 20 * MIB, "checksums": (9,)} | changes
    node = after_restart((model, KeptWeights(**fields)))
    assert slots(node)["free"] == 30
    assert node.state("a") == "cold"


def test_of_two_copies_that_claim_a_slot_the_first_counts() -> None:
    one, other = ((name, KeptWeights(facts(name, 20).fingerprint, (1, 2), 20 * MIB)) for name in "ab")
    node = after_restart(one, other, one)
    assert slots(node)["weights"] == 2
    assert (node.state("a"), node.state("b")) == ("warm", "cold")
