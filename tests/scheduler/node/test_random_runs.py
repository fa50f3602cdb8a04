"""Long runs of a busy node with everything in them, most often what happens most often: deeper than test_state_machine goes."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from scheduler.node import actions, events
from scheduler.node.groups import num_other_hosts
from scheduler.node.node import VICTIMS_DRAIN
from tests.scheduler.node.fake_node import MIB, FakeNode, members_of, replicas_of
from tests.scheduler.node.test_state_machine import DEVICES, MODELS, change

WEIGHTS = {
    "arrive": 40,
    "finish": 30,
    "loaded": 20,
    "streams": 10,
    "evicted": 15,
    "sleep": 12,
    "sleep long": 4,
    "cancel": 4,
    "command": 4,
    "engine up": 4,
    "crash": 2,
    "load fails": 2,
    "kv": 8,
    "folder": 1,
    "keep alive": 3,
    "expect": 3,
    "copies": 3,
}
NUM_RUNS, NUM_STEPS = 60, 250
NUM_REPLICAS = {"a": 2, "d": 3, "pair": 2, "pipe": 2}  # in every second run, from the start
REPLICA_AT = {"a": 3}
FOLDERS = [("no config", ""), ("", "another kind"), *[("", "")] * 8]  # why they are incomplete or unusable


def step(node: FakeNode, rng: random.Random, seen: Counter[str]) -> None:
    name = rng.choice(list(MODELS))
    match rng.choices(list(WEIGHTS), WEIGHTS.values())[0]:
        case "arrive":
            for _ in range(rng.randrange(1, 4)):
                node.arrive(name, rng.choice(["", "t1", "t2"]), weight=rng.choice([1.0, 3.0]))
            if rng.random() < 0.1:
                seen["more sequences than the queue takes"] += len(node.arrive_whole(name, 12, rng.choice(["", "t1", "t2"]))) > 1
        case "finish" if node.stepping:
            node.finish(rng.choice(node.stepping))
        case "streams" if node.loads:
            node.streams(node.loads[rng.choice(sorted(node.loads))].model)
            seen["computed behind a load"] += len(node.running) > len(node.stepping)
        case "loaded" if node.loads:
            rejected = "checksum" if rng.random() < 0.1 else ""
            node.loaded(node.loads[rng.choice(sorted(node.loads))].model, seconds=rng.choice([0.1, 1.0, 5.0]), rejected=rejected)
        case "evicted" if node.evicts:
            node.evicted(node.evicts[rng.choice(sorted(node.evicts))].model)
        case "sleep":
            node.sleep(rng.random())
        case "sleep long":
            node.sleep(rng.choice([5.0, 11.0, 11.0, 25.0]))
        case "cancel" if node.open:
            node.cancel(rng.choice(sorted(node.open)))
        case "command":
            verb = rng.choice(["load", "unload", "unload", "pin", "unpin", "unpin", "enable", "enable", "disable", "disable"])
            to = {"to": rng.choice(["cold", "warm"])} if verb == "unload" else {}
            node.command(verb, name, **to)
        case "keep alive":
            seconds = rng.choice([0.0, 2.0, 8.0, math.inf])
            if rng.random() < 0.5:
                node.arrive(name, keep_alive_s=seconds)
            else:
                node.post(events.KeepAliveSet, model=name, keep_alive_s=seconds)
        case "expect":
            expectation = node.expect(name)
            if rng.random() < 0.7:
                node.arrive(name)
            node.over(name, expectation)
        case "copies":
            number, split = rng.choice([1, 2]), rng.choice(["pair", "pipe"])
            more_bytes = number * rng.choice([3, 20]) * MIB
            copies = events.ExpertCopies(number, MODELS[split].weights_bytes + more_bytes, (((2,), (0,)),))
            node.post(events.CopiesChosen, model=split, copies=copies if rng.random() < 0.8 else None)
        case "engine up":
            for device in sorted(node.budgets.keys() - node.up):
                node.engine_up(device)
        case "crash":
            if node.up:
                device = rng.choice(sorted(node.up))
                running = node.running_on(device)
                node.engine_down(device, tuple(rng.choice([running, running[:2], []])))
        case "kv":
            for (device, model), _ in list(node.copies.items()):
                node.note_kv(device, model, rng.randrange(0, 8 * MIB))
            if node.copies:
                device, model = rng.choice(sorted(node.copies))
                node.post(events.PrefillMeasured, model=model, device=device, num_tokens=100, seconds=rng.choice([1e-6, 1.0]))
        case "load fails" if node.loads:
            node.load_fails(permanent=rng.random() < 0.2)
        case "folder":
            number = NUM_REPLICAS.get(name, 1)
            names = [one.name for one in replicas_of(MODELS[name], number)]
            if rng.random() < 0.3:
                for gone in rng.choice([names, names[1:]]):
                    node.remove(gone)
            node.register(*replicas_of(change(name, rng.choice("123"), *rng.choice(FOLDERS)), number, REPLICA_AT.get(name, 0)))


@pytest.mark.timeout(400)  # half a minute where processors are slow, and the suite runs several tests at once
def test_what_is_accepted_ends_whatever_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        rng = random.Random(seed)
        devices = DEVICES[seed % len(DEVICES)]
        host_tier_slots = (0, 30, 60)[seed % 3]
        node = FakeNode(devices, max_wait_s=40.0, failed_loads=2, quarantine_s=15.0, host_tier_slots=host_tier_slots)
        for name, model in MODELS.items():
            node.register(*replicas_of(model, NUM_REPLICAS.get(name, 1) if seed % 2 else 1, REPLICA_AT.get(name, 0)))
        for _ in range(NUM_STEPS):
            step(node, rng, seen)
            seen["two replicas at once"] += any(name.endswith("#2") for _, name in node.copies)
            seen["waits for busy victims"] += any(
                placement.stage == VICTIMS_DRAIN for placement in node.scheduler._node.placements.values()
            )
            seen["a device is held for a split model"] += any(device.held_for for device in node.scheduler._node.devices.values())
            seen["a disabled model is back for its streams"] += any(
                model.runs_out and any(request.resubmission for request in model.running.values())
                for model in node.scheduler._node.models.values()
            )
        node.finish_all()
        seen.update(type(action).__name__ for action in node.log)
        shares = [action for action in node.log if isinstance(action, actions.Load | actions.Evict)]
        seen.update(f"{type(action).__name__} on {len(members_of(action))}" for action in shares)
        seen.update(f"{type(action).__name__} on {num_other_hosts(members_of(action))} other hosts" for action in shares)
        seen["loaded with copies of experts"] += any(isinstance(action, actions.Load) and action.expert_copies for action in shares)
        seen["loaded without"] += any("loads without copies" in line for line in node.scheduler.why("pair"))
        seen.update(f"left: {action.reason}" for action in node.log if isinstance(action, actions.Evict))
        seen.update(f"loaded: {action.reason}" for action in node.log if isinstance(action, actions.Load))
        seen.update(node.ends.values())
        seen.update(f"{old} -> {new}" for _, old, new in node.states)
    # The runs are worth nothing if they don't go where it is difficult.
    expected = {
        *(kind.__name__ for kind in actions.Action.__subclasses__()),
        *("finished", "cancelled", "queue_full", "wait_exceeded", "load_timeout", "crashed_twice", "would_not_fit", "model_failed"),
        *("cold -> loading", "loading -> ready", "ready -> draining", "draining -> ready", "draining -> cold", "ready -> cold"),
        *("draining -> warm", "warm -> loading", "warm -> cold", "draining -> paused", "paused -> loading"),
        *("draining -> disabled", "loading -> failed", "failed -> cold", "waits for busy victims"),
        *("two replicas at once", "loaded: replica", "loaded with copies of experts", "loaded without"),
        *("computed behind a load", "left: idle", "left: room", "left: share_lost"),
        *("Load on 2", "Load on 3", "Evict on 2", "Evict on 3", "a device is held for a split model"),
        *("a disabled model is back for its streams",),
        *("Load on 1 other hosts", "Evict on 1 other hosts", "Load on 4"),
    }
    assert {what for what in expected if seen[what] < 5} == set()
