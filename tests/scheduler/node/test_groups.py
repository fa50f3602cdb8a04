"""Models that are split over several devices: placed, evicted and lost as one."""

from __future__ import annotations

from itertools import combinations, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.node import actions, events
from scheduler.node.eviction import Resident, Target, victims_on_all
from scheduler.node.groups import MAX_GROUPS, by_rank, groups, host_of, is_group, joined, kind_of, most_groups, pools
from tests.scheduler.node.fake_node import CHECKSUM, MIB, FakeNode, facts, members_of

TWO = {"cpu:0": 100, "cpu:1": 100}
THREE = {**TWO, "cpu:2": 100}


def pair(name: str = "pair", weights_mib: int = 40, **others: object) -> events.ModelFacts:
    """A model of two shares, each with 44 MiB besides 4 MiB of work space."""
    return facts(name, weights_mib, num_ranks=2, **others)


def serving(devices: dict[str, int] = TWO, **others: object) -> FakeNode:
    """The pair is ready and has a request."""
    node = FakeNode(devices)
    node.register(pair(**others))
    node.arrive("pair")
    node.loaded("pair")
    return node


def held(node: FakeNode, name: str) -> dict[str, int]:
    """Chunks of the model on each device that holds some."""
    return {view.name: view.held[name] for view in node.scheduler.devices() if name in view.held}


def of_kind(done: list[actions.Action], kind: type[actions.Action]) -> list[actions.Action]:
    return [action for action in done if isinstance(action, kind)]


# ---- which devices


def test_groups_of_one_kind_the_best_devices_first() -> None:
    assert [kind_of(name) for name in ("cpu:0", "cpu", "cuda:1", "cpu:0/org/x")] == ["cpu", "cpu", "cuda", ""]
    assert groups(["b:1", "a:0", "b:0", "b:2"], 2) == [("b:0", "b:1"), ("b:1", "b:2"), ("b:0", "b:2")]
    assert groups(["a:0", "a:0/x"], 1) == [("a:0",), ("a:0/x",)]
    assert pools(["a:0", "a:0/x", "b:0"], 2) == []
    assert pools([], 1) == []
    assert len(groups([f"a:{at}" for at in range(30)], 3)) == MAX_GROUPS
    assert joined(("a:0", "a:1")) == "a:0+a:1"


def test_devices_are_in_the_order_of_their_numbers() -> None:
    """The order of ranks, the choice among equal devices and what operators read go by numbers, not by text."""
    mixed = ["cuda:10", "cuda:2@b", "cuda:2", "cpu:3", "cuda:10@b", "cuda:2/m"]
    assert sorted(mixed, key=by_rank) == ["cpu:3", "cuda:2", "cuda:2/m", "cuda:10", "cuda:2@b", "cuda:10@b"]
    assert groups(["cuda:10", "cuda:2"], 2) == [("cuda:2", "cuda:10")]
    assert is_group(("cuda:2", "cuda:10"), 2)
    assert not is_group(("cuda:10", "cuda:2"), 2)
    node = FakeNode({"cuda:10": 100, "cuda:2": 100})
    node.register(pair(), facts("alone", 20), pair("large", 200))
    node.bring_up("pair")
    assert node.view("pair").devices == ("cuda:2", "cuda:10")
    node.bring_up("alone")
    assert node.view("alone").devices == ("cuda:2",)
    too_large = node.scheduler.too_large("large")
    assert too_large.index("cuda:2 ") < too_large.index("cuda:10 ")


# ---- devices of other hosts

LENT = {"cpu:0@b": 100, "cpu:0": 100, "cpu:1@b": 100, "cpu:0@c": 100, "cpu:1": 100}


def pipe(name: str = "pipe", num_ranks: int = 2, weights_mib: int = 40, num_stages: int = 2, **others: object) -> events.ModelFacts:
    return facts(name, weights_mib, num_ranks=num_ranks, num_stages=num_stages, **others)


def test_ranks_begin_on_this_machine_and_go_on_by_host_and_name() -> None:
    assert [host_of(name) for name in ("cpu:0", "cpu:0@b", "cpu:0/org/x@y")] == ["", "b", ""]
    names = ["cpu:1@b", "cpu:0@c", "cpu:0@b", "cpu:1", "cpu:0"]
    assert groups(names, 5, 5) == [("cpu:0", "cpu:1", "cpu:0@b", "cpu:1@b", "cpu:0@c")]
    assert groups(names, 4, 2) == [("cpu:0", "cpu:1", "cpu:0@b", "cpu:1@b")], "no stage is on several hosts"
    assert groups(names, 2, 2)[:2] == [("cpu:1", "cpu:1@b"), ("cpu:0", "cpu:1@b")]
    assert groups(names, 2) == [("cpu:0", "cpu:1")], "matrices are not divided over hosts"
    assert groups(names, 1) == [("cpu:1",), ("cpu:0",)], "a whole model is here"


@pytest.mark.parametrize(
    ("devices", "is_one"),
    [
        (("cpu:0", "cpu:0@b"), True),
        (("cpu:0@b", "cpu:0"), False),
        (("cpu:0@b", "cpu:1@b"), False),
        (("cpu:0", "cuda:0@b"), False),
        (("cpu:0", "cpu:0"), False),
        (("cpu:0", "cpu:0/org/x"), False),
        (("cpu:0", "cpu:1", "cpu:2"), False),
    ],
)
def test_what_is_a_group(devices: tuple[str, ...], is_one: bool) -> None:
    assert is_group(devices, 2, 2) == is_one


def test_each_stage_is_on_one_host() -> None:
    assert is_group(("cpu:0", "cpu:1", "cpu:0@b", "cpu:1@b"), 4, 2)
    assert not is_group(("cpu:0", "cpu:1", "cpu:0@b", "cpu:0@c"), 4, 2)
    assert not is_group(("cpu:0", "cpu:0@b", "cpu:1@b", "cpu:2@b"), 4, 2)
    assert not is_group(("cpu:0", "cpu:0@b"), 2, 1)
    assert is_group(("cpu:0",), 1)
    assert not is_group(("cpu:0@b",), 1)


@given(
    names=st.permutations([f"{kind}:{at}{host}" for kind in ("cpu", "cuda") for host in ("", "@b", "@c") for at in range(3)]),
    num=st.integers(1, 14),
    stages=st.integers(1, 4),
    stage_size=st.integers(1, 3),
)
def test_the_groups_are_all_combinations_that_are_groups(names: list[str], num: int, stages: int, stage_size: int) -> None:
    """And in their order; devices that are in none of them are in no pool."""
    there, num_ranks = names[:num], stages * stage_size
    found = groups(there, num_ranks, stages)
    for kind in ("cpu", "cuda"):
        of_kind = [name for name in there if kind_of(name) == kind]
        chosen = (tuple(sorted(one, key=lambda name: (host_of(name), name))) for one in combinations(of_kind, num_ranks))
        valid = [group for group in chosen if is_group(group, num_ranks, stages)]
        assert [group for group in found if kind_of(group[0]) == kind] == list(islice(valid, MAX_GROUPS if num_ranks > 1 else None))
        usable = {name for group in valid for name in group}
        assert usable == {name for pool in pools(there, num_ranks, stages) for name in pool if kind_of(name) == kind}


def test_the_most_groups_have_a_stage_here_each() -> None:
    names = ["cpu:0", "cpu:1", "cpu:0@b", "cpu:1@b", "cpu:2@b", "cpu:0@c"]
    assert [most_groups(names[:num], 2, 2) for num in (1, 2, 3, 4, 6)] == [0, 1, 1, 2, 2]
    assert most_groups(names, 4, 2) == 1
    assert [most_groups(names[:2], *division) for division in ((1, 1), (2, 1), (2, 2))] == [2, 1, 1]
    assert most_groups(names[2:], 1) == 0


def test_a_group_is_found_behind_any_number_of_combinations() -> None:
    """A group is found although none of the 64 better devices is here, and each of their hosts has too few for two stages."""
    lent = [f"cpu:{at}@{host}" for at in range(2) for host in (f"h{number}" for number in range(32))]
    here = ["cpu:0", "cpu:1"]
    assert groups([*lent, *here], 6, 3)[0] == (*here, "cpu:0@h0", "cpu:1@h0", "cpu:0@h1", "cpu:1@h1")


def test_a_whole_model_and_one_whose_matrices_are_divided_stay_here() -> None:
    node = FakeNode({"cpu:0": 60, "cpu:0@b": 100, "cpu:1@b": 100})
    node.register(facts("a", 40), facts("large", 70), pair())
    node.bring_up("a")
    assert node.view("a").device == "cpu:0"
    for name in ("large", "pair"):
        assert node.state(name) == "refused"
        assert "cpu:0@b is another host's and holds stages of pipelines alone" in node.view(name).reason


def test_a_pipeline_that_fits_nowhere_tells_why() -> None:
    node = FakeNode({"cpu:0": 60, "cpu:0@b": 100, "cpu:1@b": 100})
    node.register(pipe(num_ranks=4))
    reason = node.view("pipe").reason
    assert "split over 4 devices of one kind in 2 stages (parallel)" in reason
    assert reason.endswith(
        "4 are needed (2 for each stage, on one host, that of the last one on this), "
        "a share fits on 1 of kind cpu, 2 of kind cpu on b"
    )


def test_a_pipeline_takes_this_machines_devices_first() -> None:
    node = FakeNode(LENT)
    node.register(pipe(), facts("a", 60, devices=("cpu:0",)))
    node.arrive("pipe")
    assert members_of(node.loads[1]) == ["cpu:0", "cpu:1"]
    node.loaded("pipe")
    node.finish()
    node.command("unload", "pipe")
    node.evicted()
    node.bring_up("a")
    request = node.arrive("pipe")
    node.loaded("pipe")
    assert node.view("pipe").device == "cpu:1+cpu:0@b", "no model leaves for it, and the leader is here"
    assert node.running[request].device == "cpu:1"
    assert any("cpu:1+cpu:0@b" in line for line in node.scheduler.why("pipe"))
    plan = node.scheduler.plan_load("pipe", node.now)
    assert plan is not None
    assert (plan.verdict, plan.device) == ("there", "cpu:1+cpu:0@b")


def test_fewer_other_hosts_are_better() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:0@b": 100, "cpu:1@b": 90, "cpu:0@c": 100})
    node.register(pipe(num_ranks=3, num_stages=3))
    plan = node.scheduler.plan_load("pipe", node.now)
    assert plan is not None
    assert (plan.verdict, plan.device) == ("fits", "cpu:0+cpu:0@b+cpu:1@b")


def test_a_dead_host_takes_the_share_here_with_it() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:0@b": 100})
    node.register(pipe())
    node.arrive("pipe")
    node.loaded("pipe")
    done = node.engine_down("cpu:0@b")
    assert [members_of(action) for action in of_kind(done, actions.Evict)] == [["cpu:0"]]  # type: ignore[arg-type]
    node.evicted()
    assert not node.loads
    node.engine_up("cpu:0@b")
    node.loaded("pipe")
    assert 1 in node.running


def test_a_pinned_pipeline_has_a_home_that_is_a_group() -> None:
    node = FakeNode({"cpu:0": 80, "cpu:1": 70, "cpu:0@b": 100, "cpu:1@b": 100})
    node.register(pipe("p", num_ranks=4, pinned=True), pipe("q", pinned=True))
    node.evicted()
    while node.loads:
        node.loaded()
    assert node.view("p").device == "cpu:0+cpu:1+cpu:0@b+cpu:1@b"
    assert node.view("q").pinned is False, "44 MiB more are on other hosts alone"
    node = FakeNode({"cpu:0@b": 100, "cpu:0": 60, "cpu:1": 70}, up=False)
    node.register(pipe("q", pinned=True))
    assert node.scheduler._node.models["q"].home == ("cpu:0", "cpu:1"), "though there is more room elsewhere"


def test_a_home_is_given_up_that_is_no_group_any_more() -> None:
    """Although all of its devices may still hold shares."""
    node = FakeNode({"cpu:0": 100, "cpu:1": 100, "cpu:0@b": 70, "cpu:1@b": 70, "cpu:0@c": 100, "cpu:1@c": 60}, up=False)
    node.register(pipe("q", num_ranks=4, num_stages=4, pinned=True))
    assert node.scheduler._node.models["q"].home == ("cpu:0", "cpu:1", "cpu:0@b", "cpu:0@c"), "those with most room"
    node.register(pipe("q", num_ranks=4, num_stages=2, pinned=True))
    assert node.scheduler._node.models["q"].home == ("cpu:0", "cpu:1", "cpu:0@c", "cpu:1@c")
    node.register(pair("q", pinned=True))
    assert node.scheduler._node.models["q"].home == ("cpu:0", "cpu:1")


def test_a_victim_on_both_devices_spares_another() -> None:
    both = Resident("both", 10, 0, 2.0, 0.0, evictable=True, busy=False)
    one = Resident("one", 10, 0, 1.0, 0.0, evictable=True, busy=False)
    first, second = (Target(10, 0, 20), [both, one]), (Target(20, 0, 20), [both])
    chosen = victims_on_all([first, second])
    assert chosen is not None
    assert [victim.name for victim in chosen] == ["both"], "the cheaper one was chosen first, and then was needless"
    assert victims_on_all([first, (Target(21, 0, 20), [both])]) is None


def test_both_devices_are_taken_and_shown() -> None:
    node = FakeNode(THREE)
    node.register(facts("a", 60, devices=("cpu:0",)), pair())
    node.bring_up("a")
    request = node.arrive("pair")
    load = node.loads[2]
    assert (load.device, [name for name, _ in load.further]) == ("cpu:1", ["cpu:2"]), "where no model has to leave"
    assert ("pair", "cold", "loading") in node.states
    node.loaded("pair")
    assert node.running[request].device == "cpu:1", "the first one by name leads"
    view = node.view("pair")
    assert (view.device, view.devices) == ("cpu:1+cpu:2", ("cpu:1", "cpu:2"))
    assert held(node, "pair") == {"cpu:1": 22, "cpu:2": 22}
    assert node.scheduler.history("pair")[0].device == "cpu:1+cpu:2"
    assert any("placement 2 on cpu:1+cpu:2" in line for line in node.scheduler.why("pair"))
    node.cancel(request)
    assert of_kind(node.log, actions.AbortInEngine)[0].device == "cpu:1"  # type: ignore[attr-defined]


def test_never_a_carve_out_nor_two_kinds() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:0/org/x": 100, "cuda:0": 100})
    node.register(pair())
    assert node.state("pair") == "refused"
    reason = node.view("pair").reason
    for part in (
        "split over 2 devices",
        "(parallel)",
        "48.0 MiB",
        "cpu:0/org/x is set aside",
        "a share fits on 1 of kind cpu, 1 of",
    ):
        assert part in reason


MIXED = {"cpu:0": 100, "cuda:0": 100, "cpu:1": 100, "cuda:1": 100}


@pytest.mark.parametrize(("taken", "devices"), [((), ["cpu:0", "cpu:1"]), (("cpu:0",), ["cuda:0", "cuda:1"])])
def test_gpus_hold_a_model_together_and_kinds_never_mix(taken: tuple[str, ...], devices: list[str]) -> None:
    """Not even where a device of each kind is free, as when another model is on one of either."""
    node = FakeNode(MIXED)
    node.register(*(facts(f"on-{name}", 60, devices=(name,)) for name in taken), pair())
    for name in taken:
        node.bring_up(f"on-{name}")
    node.arrive("pair")
    assert members_of(node.loads[len(taken) + 1]) == devices
    node.loaded("pair")
    assert node.view("pair").devices == tuple(devices)


def test_a_model_leaves_before_two_kinds_share() -> None:
    node = FakeNode(MIXED)
    node.register(*(facts(f"on-{name}", 60, devices=(name,)) for name in ("cpu:0", "cuda:1")), pair())
    for name in ("cpu:0", "cuda:1"):
        node.bring_up(f"on-{name}")
    node.arrive("pair")
    left = of_kind(node.log, actions.Evict)
    assert [action.model for action in left] == ["on-cpu:0"]  # type: ignore[attr-defined]
    node.evicted("on-cpu:0")
    assert members_of(node.loads[3]) == ["cpu:0", "cpu:1"]


def test_two_gpus_lose_a_model_together() -> None:
    node = FakeNode({"cuda:0": 100, "cuda:1": 100})
    node.register(pair(devices=("cuda:0", "cuda:1")))
    request = node.arrive("pair")
    node.loaded("pair")
    assert node.running[request].device == "cuda:0"
    assert held(node, "pair") == {"cuda:0": 22, "cuda:1": 22}
    node.engine_down("cuda:1")
    assert [members_of(action) for action in of_kind(node.log, actions.Evict)] == [["cuda:0"]]  # type: ignore[arg-type]


def test_too_large_a_share_and_too_few_devices_are_refused_until_there_are_more() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:1": 40})
    node.register(pair())
    refusal = node.refusals[node.arrive("pair")]
    assert refusal.code == "model_too_large"
    assert "cpu:1 has 41943040 bytes (40.0 MiB): 8388608 bytes (8.0 MiB) too little" in refusal.message
    node.budgets["cpu:2"] = 60 * MIB
    node.engine_up("cpu:2")
    assert node.state("pair") == "cold"
    node.arrive("pair")
    assert members_of(node.loads[1]) == ["cpu:0", "cpu:2"]


def test_a_refusal_ends_with_what_the_facts_say_of_it() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:1": 40})
    node.register(facts("a", 200, if_too_large="two halves would fit"))
    assert node.view("a").reason.endswith("too little; two halves would fit")
    node.register(facts("a", if_too_large="not told of a model that fits"))
    assert "not told" not in node.view("a").reason


# ---- room


def test_victims_on_both_devices_leave_first() -> None:
    node = FakeNode(TWO)
    node.register(facts("a", 60, devices=("cpu:0",)), facts("b", 60, devices=("cpu:1",)), pair())
    node.bring_up("a", "b")
    request = node.arrive("pair")
    assert {evict.model for evict in node.evicts.values()} == {"a", "b"}
    node.evicted("b")
    assert not node.loads, "half of its room is no room"
    node.evicted("a")
    node.loaded("pair")
    assert request in node.running


def test_a_busy_pair_drains_and_leaves_both_devices_for_one() -> None:
    node = serving()
    node.register(facts("a", 60, devices=("cpu:1",)))
    waiting = node.arrive("a")
    node.sleep(11)
    assert node.state("pair") == "draining"
    node.finish(1)
    assert members_of(node.evicts[1]) == ["cpu:0", "cpu:1"]
    evict = node.evicts[1]
    assert dict(evict.further)["cpu:1"] < evict.lease_chunks, "the room of cpu:0 is KV for others, that of cpu:1 is promised"
    node.evicted("pair")
    node.loaded("a")
    assert waiting in node.running
    assert held(node, "pair") == {}


def test_it_is_paused_with_its_streams_open_and_comes_back() -> None:
    node = serving()
    node.register(facts("a", 60, devices=("cpu:1",)))
    node.arrive("a")
    node.sleep(30)
    assert node.state("pair") == "draining"
    assert node.paused == (1,)
    node.evicted("pair")
    assert node.state("pair") == "paused"
    node.loaded("a")
    node.finish()
    node.finish_all()
    assert node.ends == {1: "finished", 2: "finished"}


def test_its_shares_are_kept_in_host_memory() -> None:
    """Each device has as many slots as a share has chunks; KV is not saved."""
    node = FakeNode(TWO, host_tier_slots=100)
    node.register(pair(), facts("a", 60))
    node.arrive("pair")
    (load,) = node.loads.values()
    assert len(load.keep_slots) == 2 * load.weights_chunks == 40
    node.loaded("pair")
    node.note_kv("cpu:0", "pair", 2 * MIB)
    node.command("unload", "pair", to="warm")
    assert node.evicts[1].save_slots == ()
    node.evicted("pair")
    assert node.scheduler.host_tier().slots["weights"] == 40
    (again,) = node.loads.values()
    assert (again.source_slots, again.checksums, again.keep_slots) == (load.keep_slots, (CHECKSUM, CHECKSUM), ())
    assert "from host memory" in node.view("pair").reason
    node.loaded("pair", rejected="checksum differs (rank 1)")
    assert node.scheduler.host_tier().slots["free"] == 100, "a copy with one bad share is dropped"


def test_shares_that_are_more_than_host_memory_are_not_kept() -> None:
    node = FakeNode(TWO, host_tier_slots=39)
    node.register(pair())
    node.arrive("pair")
    assert next(iter(node.loads.values())).keep_slots == ()
    node.loaded("pair")


@pytest.mark.parametrize(("changes", "stays"), [({}, True), ({"expert_parts": 2}, False), ({"num_stages": 2}, False)])
def test_shares_in_host_memory_are_of_one_division(changes: dict[str, int], stays: bool) -> None:
    """Another division of the same files gives other shares of the same size."""
    node = FakeNode(TWO, host_tier_slots=100)
    node.register(pair())
    node.bring_up("pair")
    node.command("unload", "pair", to="warm")
    node.evicted("pair")
    assert node.state("pair") == "warm"
    node.register(pair(**changes))
    assert node.state("pair") == ("warm" if stays else "cold")


def test_shares_on_other_hosts_are_not_kept() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:0@b": 100}, host_tier_slots=100)
    node.register(pipe())
    node.arrive("pipe")
    (load,) = node.loads.values()
    assert members_of(load) == ["cpu:0", "cpu:0@b"]
    assert load.keep_slots == ()
    node.loaded("pipe")


def test_files_that_become_a_pairs_leave_host_memory() -> None:
    node = FakeNode(TWO, host_tier_slots=100)
    node.register(facts("x"))
    node.bring_up("x")
    node.command("unload", "x", to="warm")
    node.evicted()
    assert node.state("x") == "warm"
    node.register(pair("x"))
    assert node.state("x") == "cold"
    node.bring_up("x")
    assert node.view("x").device == "cpu:0+cpu:1"
    node.register(facts("x"))
    assert node.view("x").device == "cpu:0+cpu:1", "the copy stays as it is"
    node.command("unload", "x")
    node.evicted()
    node.bring_up("x")
    assert node.view("x").device in TWO


def test_it_does_not_load_before_a_large_work_space_has_left() -> None:
    node = FakeNode(TWO)
    idle = facts("idle", 30, work_space_bytes=30 * MIB, devices=("cpu:0",))
    node.register(idle, facts("busy", 80, devices=("cpu:1",)), facts("a", 40, devices=("cpu:0",)), pair(weights_mib=26))
    node.bring_up("idle")
    running = node.arrive("busy")
    node.loaded("busy")
    node.arrive("pair")
    node.sleep(11)
    assert node.state("busy") == "draining"
    node.arrive("a")
    assert node.state("idle") == "draining", "it leaves for a, in the room that the pair does not need"
    node.finish(running)
    node.evicted("busy")
    assert not node.loads, "34 + 44 + 30 MiB of work space are too much"
    assert any("waits for another load or eviction" in line for line in node.scheduler.why("pair"))
    node.evicted("idle")
    node.loaded()
    node.loaded()
    assert len(node.running) == 2


def test_its_waiting_requests_make_no_idle_model_leave() -> None:
    node = serving(max_sequences=2)
    node.register(facts("idle", 20, devices=("cpu:0",)))
    node.bring_up("idle")
    for _ in range(3):
        node.arrive("pair")
    bytes_of = {"pair": (2 * MIB, 0)}
    node.post(events.KVNoted, device="cpu:0", kv_bytes=bytes_of, waiting={"pair": 3})
    assert not node.evicts, "KV that is not reserved for it is of no use to it"


# ---- one at a time


def test_a_load_occupies_the_loaders_of_both_devices() -> None:
    node = FakeNode(TWO)
    node.register(facts("a", 20, devices=("cpu:1",)), pair(weights_mib=30), pair("other", 30), facts("b", 20, devices=("cpu:0",)))
    node.arrive("a")
    node.arrive("pair")
    node.arrive("b")
    assert {load.model for load in node.loads.values()} == {"a", "b"}, "cpu:1 loads, and cpu:0 need not wait for that"
    node.loaded("b")
    node.loaded("a")
    assert [load.model for load in node.loads.values()] == ["pair"]
    node.arrive("other")
    assert len(node.loads) == 1
    node.loaded("pair")
    node.loaded("other")
    assert len(node.running) == 4


def test_an_overdue_pair_is_not_kept_waiting_by_devices_that_are_free_by_turns() -> None:
    node = FakeNode(TWO, overdue_after_s=5.0)
    singles = [facts(f"{name}{at}", 4, devices=(f"cpu:{at}",)) for at in (0, 1) for name in "abcdefgh"]
    node.register(pair(weights_mib=10), *singles)
    node.arrive("a0")
    node.arrive("a1")
    request = node.arrive("pair")
    for name in "bcdefgh":
        for at in (0, 1):  # the loads of the two devices overlap, so that one of them is always under way
            node.sleep(1.5)
            node.arrive(f"{name}{at}")
            if any(load.device == f"cpu:{at}" for load in node.loads.values()):
                node.loaded(next(load.model for load in node.loads.values() if load.device == f"cpu:{at}"))
    assert request in node.running or "pair" in {load.model for load in node.loads.values()}
    node.finish_all()
    assert set(node.ends.values()) == {"finished"}


def test_a_device_that_is_held_says_for_whom() -> None:
    node = FakeNode(TWO, overdue_after_s=1.0)
    node.register(facts("a", 20, devices=("cpu:0",)), facts("b", 20, devices=("cpu:1",)), pair(), facts("late", 4))
    node.arrive("a")
    node.arrive("b")
    node.arrive("pair")
    node.sleep(2)
    node.loaded("a")
    waiting = node.arrive("late")
    assert not any(load.model == "late" for load in node.loads.values())
    assert "cpu:0: pair waits for it and for other devices" in node.scheduler.why(f"req-{waiting}")
    node.cancel(3)
    assert [load.model for load in node.loads.values()] == ["b", "late"], "nobody waits for both any more"


def test_two_pairs_that_overlap_take_turns() -> None:
    node = FakeNode(THREE, overdue_after_s=1.0)
    overlapping = enumerate([("cpu:0", "cpu:1"), ("cpu:1", "cpu:2"), ("cpu:0", "cpu:2")])
    node.register(*(pair(f"p{at}", 80, devices=names) for at, names in overlapping))
    for at in (0, 1, 2, 0, 1, 2):
        node.arrive(f"p{at}")
    node.finish_all()
    assert set(node.ends.values()) == {"finished"}
    assert len(node.ends) == 6


# ---- deaths


@pytest.mark.parametrize("dead", ["cpu:0", "cpu:1"])
def test_a_death_takes_the_other_share_with_it(dead: str) -> None:
    node = serving()
    other = ({*TWO} - {dead}).pop()
    done = node.engine_down(dead, running=(1,))
    (evict,) = of_kind(done, actions.Evict)
    assert isinstance(evict, actions.Evict)
    assert (members_of(evict), evict.reason) == ([other], "share_lost")
    assert held(node, "pair") == {other: 22}, "until its engine has answered"
    assert node.view("pair").device == other
    assert node.state("pair") == "draining"
    node.engine_up(dead)
    assert not node.loads, "its old share is there still"
    node.evicted("pair")
    assert members_of(node.loads[2]) == ["cpu:0", "cpu:1"]
    node.loaded("pair")
    assert 1 in node.running
    node.engine_down(other, running=(1,))
    assert node.ends[1] == "crashed_twice", "whichever engine died"


def test_it_comes_back_where_its_shares_are_left() -> None:
    """Other devices have more room. First one share is left, on the device that survived; later one by an engine that died."""
    node = FakeNode({**THREE, "cpu:3": 100})
    node.register(pair(), facts("a", 20, devices=("cpu:1",)))
    node.arrive("pair")
    assert members_of(node.loads[1]) == ["cpu:0", "cpu:1"]
    node.loaded("pair")
    node.arrive("a")
    node.loaded("a")
    node.engine_down("cpu:0")
    node.evicted("pair")
    (load,) = node.loads.values()
    assert members_of(load) == ["cpu:1", "cpu:2"]
    assert "from disk and what was left there" in node.view("pair").reason
    node.loaded("pair", seconds=0.01, adopted=True)
    assert "loaded, with weights that were left on its devices, in 0.01 s" in node.view("pair").reason
    node.command("unload", "pair")
    node.engine_up("cpu:0", left=("pair",))
    node.evicted("pair")
    (load,) = node.loads.values()
    assert "cpu:0" in members_of(load)
    assert "cpu:1" not in members_of(load), "it was evicted to make room"


def test_the_second_death_while_the_share_leaves() -> None:
    node = serving()
    node.engine_down("cpu:0")
    node.engine_down("cpu:1")
    assert (node.state("pair"), node.view("pair").devices) == ("cold", ())
    node.engine_up("cpu:0")
    assert not node.loads
    assert any("2 devices must have it at once" in line for line in node.scheduler.why("req-1"))
    node.engine_up("cpu:1")
    node.loaded("pair")
    assert 1 in node.running


def test_a_death_while_both_shares_leave() -> None:
    node = serving()
    node.command("unload", "pair")
    done = node.engine_down("cpu:1")
    assert not of_kind(done, actions.Evict), "the first device was told already"
    assert held(node, "pair") == {"cpu:0": 22}
    node.engine_up("cpu:1")
    node.evicted("pair")
    node.loaded("pair")
    assert 1 in node.running


def test_a_death_while_it_loads_is_the_loads_fault() -> None:
    node = FakeNode(TWO)
    node.register(pair(), facts("a", 20, devices=("cpu:0",)))
    node.arrive("pair")
    node.engine_down("cpu:1")
    waiting = node.arrive("a")
    assert not node.loads, "cpu:0 has a load to give up first"
    node.engine_up("cpu:1")
    node.evicted("pair")
    assert [load.model for load in node.loads.values()] == ["a"]
    node.loaded("a")
    node.sleep(1.1)
    node.loaded("pair")
    assert sorted(node.running) == [1, waiting]
    assert any("load failed (the engine of cpu:1 killed)" in line for line in node.scheduler.why("pair"))


def test_a_death_while_victims_drain_spares_those_elsewhere() -> None:
    node = FakeNode(TWO)
    node.register(facts("a", 60, devices=("cpu:0",)), facts("b", 60, devices=("cpu:1",)), pair())
    for name in "ab":
        node.arrive(name)
        node.loaded(name)
    node.arrive("pair")
    node.sleep(11)
    assert node.state("a") == node.state("b") == "draining"
    node.engine_down("cpu:1")
    assert node.state("a") == "ready", "nobody needs its room for now"
    assert node.state("b") == "cold"
    node.finish_all()
    assert set(node.ends.values()) == {"finished"}


def test_a_lost_share_of_a_victim_makes_its_room_sooner() -> None:
    node = serving()
    node.register(facts("a", 60, devices=("cpu:1",)))
    waiting = node.arrive("a")
    node.sleep(11)
    assert node.state("pair") == "draining"
    node.engine_down("cpu:0")
    assert members_of(node.evicts[1]) == ["cpu:1"]
    node.evicted("pair")
    node.loaded("a")
    assert waiting in node.running


def test_an_eviction_without_answer_restarts_both_engines() -> None:
    node = serving()
    node.command("unload", "pair")
    node.sleep(11)
    assert node.restarts == ["cpu:0", "cpu:1"]
    node.finish_all()
    assert node.ends == {1: "finished"}


def test_a_load_past_its_deadline_is_rolled_back_on_both() -> None:
    node = FakeNode(TWO, load_deadline_s=5.0)
    node.register(pair())
    request = node.arrive("pair")
    node.sleep(6)
    assert node.ends[request] == "load_timeout"
    assert members_of(node.evicts[1]) == ["cpu:0", "cpu:1"]
    node.sleep(11)
    assert [problem[:5] for problem in node.scheduler.health()] == ["cpu:0", "cpu:1"]
    for device in TWO:
        node.engine_down(device)
        node.engine_up(device)
    assert node.scheduler.health() == []
    assert held(node, "pair") == {}


# ---- pins and commands


def test_a_pin_keeps_room_on_each_device_of_its_home() -> None:
    node = FakeNode(THREE)
    node.register(pair(weights_mib=60), facts("a", 60), facts("b", 60))
    node.command("pin", "pair")
    node.loaded("pair")
    assert node.view("pair").device == "cpu:0+cpu:1"
    node.bring_up("a")
    assert node.view("a").device == "cpu:2"
    node.command("pin", "a")
    refusal = node.refusals[node.arrive("b")]
    assert refusal.code == "would_not_fit"
    assert "cpu:1 has 104857600 bytes (100.0 MiB), of which pinned models (pair) take" in refusal.message
    node.command("unpin", "a")
    node.engine_down("cpu:1")
    node.evicted("pair")
    assert members_of(next(iter(node.evicts.values()))) == ["cpu:2"], "the pair moves where the other, which is idle, was"
    node.evicted("a")
    node.loaded("pair")
    assert node.view("pair").device == "cpu:0+cpu:2"


def test_a_pin_that_cannot_be_says_what_it_needs() -> None:
    node = FakeNode(TWO)
    node.register(pair(weights_mib=60), facts("a", 60))
    node.command("pin", "a")
    refusal = node.answers[node.command("pin", "pair")]
    assert refusal is not None
    assert "on each of 2 devices of one kind (parallel)" in refusal.message


def test_the_home_of_a_share_that_leaves_may_shrink() -> None:
    node = FakeNode(THREE)
    node.register(pair(weights_mib=60, pinned=True))
    node.loaded("pair")
    node.engine_down("cpu:1")
    node.budgets["cpu:1"] = 50 * MIB
    node.engine_up("cpu:1")
    node.evicted("pair")
    node.loaded("pair")
    assert node.view("pair").device == "cpu:0+cpu:2"


def test_a_dry_run_says_what_a_load_would_do() -> None:
    node = FakeNode(THREE)
    node.register(facts("a", 60, devices=("cpu:0",)), facts("b", 60, devices=("cpu:1",)), pair())
    node.bring_up("a", "b")
    node.arrive("b")
    said = node.scheduler.plan_load("pair", node.now)
    assert said is not None
    assert (said.verdict, said.device, said.reason) == ("evicts", "cpu:0+cpu:2", "cpu:0+cpu:2: a would leave")
    assert {each.device: each.verdict for each in said.devices} == {"cpu:0": "evicts", "cpu:1": "waits", "cpu:2": "evicts"}
    node.arrive("pair")
    node.evicted("a")
    assert members_of(next(iter(node.loads.values()))) == ["cpu:0", "cpu:2"]
    there = node.scheduler.plan_load("pair", node.now)
    assert there is not None
    assert (there.verdict, there.device) == ("there", "cpu:0+cpu:2")


def test_a_load_ahead_begins_at_once_or_not() -> None:
    node = FakeNode(TWO)
    node.register(facts("a", 60, devices=("cpu:1",)), pair())
    node.bring_up("a")
    refusal = node.answers[node.command("warm", "pair")]
    assert refusal is not None
    assert "cpu:0+cpu:1: it would take the place of a" in refusal.message
    node.arrive("a")
    node.finish()
    command = node.command("warm", "pair")
    node.evicted("a")
    node.loaded("pair")
    assert node.answers[command] is None


def test_an_idle_pair_leaves_after_its_keep_alive() -> None:
    node = serving(keep_alive_s=5.0)
    node.finish(1)
    node.sleep(6)
    assert (members_of(node.evicts[1]), node.evicts[1].reason) == (["cpu:0", "cpu:1"], "idle")
    node.evicted()
    assert node.state("pair") == "cold"


def test_a_failed_load_leaves_both_devices() -> None:
    node = FakeNode(TWO)
    node.register(pair())
    request = node.arrive("pair")
    node.load_fails()
    assert held(node, "pair") == {}
    node.sleep(1.1)
    node.loaded("pair")
    assert request in node.running


def test_a_split_model_whose_device_is_dead_lets_others_force_busy_ones_out() -> None:
    node = serving(weights_mib=20)
    node.register(facts("busy", 60, devices=("cpu:0",)), facts("late", 60, devices=("cpu:0",)))
    node.engine_down("cpu:1")
    node.evicted("pair")
    node.bring_up("busy")
    busy = node.arrive("busy")
    node.sleep(15)
    assert node.state("busy") == "ready", "the pair is overdue, and no victim on cpu:0 helps it"
    node.arrive("late")
    node.sleep(11)
    assert node.state("busy") == "draining"
    node.finish(busy)
    node.evicted("busy")
    node.loaded("late")
    node.engine_up("cpu:1")
    node.finish_all()
    assert set(node.ends.values()) == {"finished"}, "the pair's as well"


def test_a_death_lets_the_next_in_line_force_busy_ones_out() -> None:
    node = FakeNode(TWO)
    node.register(*(facts(name, 60, devices=("cpu:0",)) for name in ("busy", "late")), pair("pair", 80))
    node.register(facts("stream", 60, devices=("cpu:1",)))
    node.bring_up("busy")
    node.arrive("busy")
    node.arrive("stream")
    node.loaded("stream", seconds=20.0)  # it may stay for 40 s
    node.arrive("pair")
    node.sleep(5)
    node.arrive("late")
    node.sleep(15)
    assert node.state("busy") == "ready"
    node.engine_down("cpu:1")
    assert node.state("busy") == "draining"
    assert node.scheduler.history()[-1].model == "late"
