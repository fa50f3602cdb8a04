"""A request whose model is taken from under it: what the daemon keeps of it, and what it tells the client."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from config.schema import NodeConfig
from daemon.api.generation.usage import usage_of
from engine import protocol
from engine.protocol import FINISH_LENGTH, FINISH_STOP
from scheduler.node import events
from scheduler.node.host_tier import HostTierAccount
from scheduler.node.replica_names import further
from tests.daemon.test_dispatcher import MIB, Harness, until

DEVICES = ("cpu:0", "cpu:1")


class Contended(Harness):
    """One device with room for one of the models a and b."""

    def __init__(self, config: NodeConfig | None = None) -> None:
        super().__init__(config, budget_bytes=24 * MIB, weights_bytes=12 * MIB)

    def unload(self) -> None:
        """`a` is taken from the device under what runs."""
        self.dispatcher.command(lambda now, cause: events.UnloadRequested(now=now, cause=cause, model="a"))

    def evicted(self, **told: Any) -> None:
        (evict,) = self.engine.take(protocol.EvictModel)
        self.message(protocol.Evicted(evict.placement_id, evict.model, **told))


async def test_a_paused_request_goes_on_with_what_it_has_and_its_usage_says_so() -> None:
    node = Contended()
    generation, sink = node.request()
    node.loaded()
    node.step({generation.request_id: [10]})
    node.engine.sent.clear()
    assert "hearth" not in usage_of([generation], 1)
    node.unload()
    assert generation.num_pauses == 1
    node.step({generation.request_id: [11]})  # was on its way already
    node.evicted()
    node.loaded()
    (submit,) = node.engine.take(protocol.Submit)
    assert submit.output == [10, 11]
    message = protocol.TokensOut("a", 9, 0.01, [generation.request_id], [12], resumed={generation.request_id: (4, 1)})
    node.message(message)
    node.step({generation.request_id: [13]}, finish={generation.request_id: FINISH_STOP})
    assert sink.ids == [10, 11, 12, 13]
    assert usage_of([generation], 4)["hearth"] == {"preemptions": 1, "restored_tokens": 4, "recomputed_tokens": 1}
    assert node.metrics.swaps.kv_tokens == {("a", "saved"): 0, ("a", "restored"): 4, ("a", "recomputed"): 1}
    assert node.metrics.swaps.paused_requests == {"a": 1}
    node.scheduler.validate()


class Replicated(Harness):
    """Model a has a replica a#2. Each of the two devices has room for one of a, a#2 and b; b may only use the second one."""

    def __init__(self) -> None:
        super().__init__(budget_bytes=24 * MIB, weights_bytes=12 * MIB, devices=DEVICES)
        self.entries["a#2"] = self.entries["a"]
        model = self.scheduler._node.models["a"].facts
        alone = replace(self.scheduler._node.models["b"].facts, devices=DEVICES[1:])
        for facts in (*further(model, 2, by_load=False), alone):
            self.dispatcher.post(events.ModelRegistered(now=0.0, cause="scan", facts=facts))

    def load_both(self) -> None:
        for device, model in zip(DEVICES, ("a", "a#2"), strict=True):
            (load,) = self.engines[device].take(protocol.LoadModel)
            assert load.model == model
            self.told.engine_message(device, protocol.LoadDone(load.placement_id, load.model, 0.1, 1))

    def tokens(self, device: str, request_id: int, ids: list[int], **told: Any) -> None:
        """Reports the tokens of one step of the device's replica of model a."""
        message = protocol.TokensOut("a" if device == DEVICES[0] else "a#2", 1, 0.001, [request_id], ids, **told)
        self.told.engine_message(device, message)


@pytest.mark.parametrize("late", [{"ids": [12]}, {"ids": [12, 13], "counts": [2]}, {"ids": [12], "finish": [FINISH_LENGTH]}])
async def test_a_step_that_a_paused_replica_ends_late_is_computed_again_elsewhere(late: dict[str, Any]) -> None:
    """The engine of a paused replica learns of its eviction after the daemon has sent the sequences to another replica. It may end
    steps meanwhile, whose tokens are not the sequences' next ones by the time they arrive."""
    node = Replicated()
    requests = [node.request(max_tokens=3)]
    node.load_both()
    requests += [node.request(max_tokens=3) for _ in range(2)]
    generation, sink = next(request for request in requests if request[0].replica == "a#2")
    request_id = generation.request_id
    node.tokens("cpu:1", request_id, [10])
    node.tokens("cpu:1", request_id, [11])
    node.engine.sent.clear()
    node.request("b")
    node.dispatcher.post(events.TimePassed(now=time.monotonic() + 9, cause="time"))  # a#2 may drain no longer
    assert node.engines["cpu:1"].take(protocol.EvictModel)
    (submit,) = node.engine.take(protocol.Submit)
    assert (submit.request_id, submit.output, generation.submitted_device) == (request_id, [10, 11], "cpu:0")
    node.tokens("cpu:1", request_id, **late)
    node.told.engine_message("cpu:1", protocol.RequestFailed(request_id, "invalid", "a late failure"))
    assert (sink.ids, sink.finish, sink.error) == ([10, 11], 0, None)
    node.tokens("cpu:0", request_id, [12], finish=[FINISH_LENGTH])
    assert (sink.ids, sink.finish) == ([10, 11, 12], FINISH_LENGTH)
    node.scheduler.validate()


async def test_pauses_do_not_count_for_the_request_timeout() -> None:
    node = Contended(NodeConfig(request_timeout_s=0.4))
    paused, paused_sink = node.request()
    node.loaded()
    node.unload()
    await asyncio.sleep(0.6)  # longer than it may live
    _, other_sink = node.request()
    assert paused_sink.error is None, "its pause counted"
    node.evicted()
    node.loaded()
    node.engine.sent.clear()
    assert paused.paused_s > 0.5
    await until(lambda: paused_sink.error is not None)
    assert paused_sink.error is not None
    assert paused_sink.error.code == "request_timeout"
    assert other_sink.error is None or other_sink.error.code == "request_timeout"
    await until(lambda: other_sink.error is not None)
    assert len(node.dispatcher.open.by_id) == 0
    assert node.dispatcher.open._timer is None


async def test_a_pause_counts_for_the_request_timeout_while_no_engine_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Contended(NodeConfig(request_timeout_s=1000.0))
    paused, sink = node.request()
    node.loaded()
    node.unload()
    paused.arrived_s, paused.paused_since_s = paused.arrived_s - 5100.0, paused.paused_since_s - 5000.0
    node.told.engine_down("cpu:0", (), "lost")
    assert paused.lived_s(time.monotonic() + 800.0) == pytest.approx(100.0 + 800.0, abs=60.0)
    node.up()
    assert paused.lived_s(time.monotonic() + 5000.0) == pytest.approx(100.0, abs=60.0), "its model may come back now"
    node.told.engine_down("cpu:0", (), "lost")
    paused.arrived_s -= 950.0
    node.dispatcher.open._check_timeouts()
    assert sink.error is not None
    assert sink.error.code == "request_timeout"
    assert not node.dispatcher.open.by_id


async def test_a_copy_of_files_that_have_just_changed_is_not_asked_for() -> None:
    """The registry knows before the scheduler is told."""
    node = Harness()
    node.scheduler._node.host = HostTierAccount(100)
    _, sink = node.request()
    load = node.engine.take(protocol.LoadModel)[0]
    assert load.keep_slots
    node.message(protocol.LoadDone(load.placement_id, "a", 0.1, 1, kept=True, checksums=[5]))
    node.dispatcher.command(lambda now, cause: events.UnloadRequested(now=now, cause=cause, model="a", to="warm"))
    node.entries["a"].fingerprint = "f-new"
    (evict,) = node.engine.take(protocol.EvictModel)
    node.message(protocol.Evicted(evict.placement_id, "a"))
    assert not node.engine.take(protocol.LoadModel)
    assert any("changed just now" in line for line in node.scheduler.why("a"))
    assert sink.error is None
