"""The dispatcher with the real node scheduler and an engine that only notes what it is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import structs

from config.schema import ModelConfig, NodeConfig
from daemon.contracts import Generation
from daemon.engines.engine_events import EngineEvents
from daemon.engines.kernels import Kernels
from daemon.errors import BadRequest, HearthError, NotNow
from daemon.metrics.counters import Metrics
from daemon.models.entry import LoadSource, ModelEntry
from daemon.process.loop_watch import LoopWatch
from daemon.record.event_ring import EventRing
from daemon.requests.dispatcher import Dispatcher
from engine import protocol
from engine.protocol import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, SamplingParams
from scheduler.node import events
from scheduler.node.node_scheduler import NodeScheduler
from scheduler.node.settings import SchedulerSettings

MIB = 1 << 20


class Engine:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.restarted = ""

    def send(self, message: protocol.Message) -> None:
        self.sent.append(message)

    def restart_stuck(self, reason: str) -> None:
        self.restarted = reason

    def take(self, kind: type) -> list[Any]:
        found = [message for message in self.sent if type(message) is kind]
        self.sent = [message for message in self.sent if type(message) is not kind]
        return found


class Sink:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.finish = 0
        self.error: HearthError | None = None
        self.on_tokens: Any = None

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        assert not self.finish, "tokens after the end"
        self.ids += ids
        self.finish = finish
        if self.on_tokens is not None:
            self.on_tokens()

    def failed(self, error: HearthError) -> None:
        assert self.error is None
        self.error = error


class Harness:
    """One device, or several; models a and b that fit together unless said otherwise. `engine` is that of the first device."""

    def __init__(
        self,
        config: NodeConfig | None = None,
        budget_bytes: int = 64 * MIB,
        weights_bytes: int = 8 * MIB,
        max_wait_s: float = 60.0,
        devices: Sequence[str] = ("cpu:0",),
    ) -> None:
        config = config or NodeConfig(request_timeout_s=60.0)
        budgets = dict.fromkeys(devices, budget_bytes)
        self.scheduler = NodeScheduler(SchedulerSettings(chunk_bytes=MIB, max_wait_s=max_wait_s), budgets)
        self.entries = {name: entry(name) for name in ("a", "b")}
        self.metrics = Metrics()
        self.ring = EventRing()
        self.dispatcher = Dispatcher(
            self.scheduler,
            config,
            lambda name: LoadSource("/models/" + name, "float32", self.entries[name]) if name in self.entries else None,
            self.ring,
            self.metrics,
            LoopWatch(asyncio.get_running_loop()),
        )
        kernels = Kernels(self.ring)
        self.told = EngineEvents(self.dispatcher, budgets, kernels)
        self.dispatcher.why_slow = kernels.sentence
        self.engines = {device: Engine() for device in devices}
        self.engine = self.engines[devices[0]]
        self.dispatcher.engines = dict(self.engines)
        for name in self.entries:
            facts = events.ModelFacts(
                name=name, weights_bytes=weights_bytes, kv_bytes_per_token=1024, work_space_bytes=MIB, max_model_len=2048
            )
            self.dispatcher.post(events.ModelRegistered(now=0.0, cause="scan", facts=facts))
        for device in devices:
            self.up(device)

    def up(self, device: str = "cpu:0") -> None:
        self.told.engine_up(device, protocol.EngineReady(pid=1, version=1, num_chunks=64))

    def message(self, message: protocol.Message) -> None:
        self.told.engine_message("cpu:0", message)

    def loaded(self) -> protocol.LoadModel:
        (load,) = self.engine.take(protocol.LoadModel)
        self.message(protocol.LoadDone(load.placement_id, load.model, 0.1, 1))
        return load  # type: ignore[no-any-return]

    def request(self, model: str = "a", max_tokens: int = 8, prompt: Sequence[int] = (1, 2, 3)) -> tuple[Generation, Sink]:
        sink = Sink()
        generation = Generation(self.entries[model], list(prompt), SamplingParams(max_tokens=max_tokens, seed=7), sink)
        self.dispatcher.submit(generation)
        return generation, sink

    def step(
        self,
        ids: dict[int, list[int]],
        finish: dict[int, int] | None = None,
        cached: dict[int, int] | None = None,
        **told: Any,
    ) -> None:
        flat = [token for tokens in ids.values() for token in tokens]
        counts = [] if all(len(tokens) == 1 for tokens in ids.values()) else [len(tokens) for tokens in ids.values()]
        ends = [finish.get(request, 0) for request in ids] if finish else []
        self.message(protocol.TokensOut("a", 1, 0.001, list(ids), flat, counts, ends, cached or {}, **told))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def entry(name: str) -> ModelEntry:
    return ModelEntry(name, "/models/" + name, (), 2048, 300, (2,), 1, 0, "f-" + name)


async def test_a_request_loads_its_model_and_streams() -> None:
    node = Harness()
    one, sink = node.request()
    two, _ = node.request()
    load = node.loaded()
    assert (load.model, load.path, load.dtype, load.fingerprint, load.eos_token_ids) == ("a", "/models/a", "float32", "f-a", [2])
    assert [message.request_id for message in node.engine.take(protocol.Submit)] == [one.request_id, two.request_id]
    node.step({one.request_id: [10], two.request_id: [11]}, cached={one.request_id: 2})
    node.step({one.request_id: [12, 13], two.request_id: [14]})
    assert (one.output, sink.ids, one.num_cached) == ([10, 12, 13], [10, 12, 13], 2)
    node.step({one.request_id: [15], two.request_id: [16]}, finish={one.request_id: FINISH_STOP})
    assert sink.finish == FINISH_STOP
    assert len(node.dispatcher.open.by_id) == 1
    node.step({two.request_id: [17]}, finish={two.request_id: FINISH_LENGTH})
    assert len(node.dispatcher.open.by_id) == 0
    view = node.scheduler.model("a")
    assert view is not None
    assert (view.active, view.queued, view.state) == (0, 0, "ready")
    assert node.metrics.requests == {("a", "stop"): 1, ("a", "length"): 1}
    assert node.metrics.generated_tokens["a"] == 8
    assert sum(node.metrics.ttft["a"].counts) == 2
    node.scheduler.validate()


async def test_refused_at_once_raises_and_tells_the_sink_nothing() -> None:
    node = Harness(budget_bytes=64 * MIB, weights_bytes=100 * MIB)
    with pytest.raises(HearthError) as caught:
        node.request()
    assert (caught.value.code, caught.value.status) == ("model_too_large", 400)
    assert len(node.dispatcher.open.by_id) == 0


async def test_refused_later_tells_the_sink() -> None:
    node = Harness()
    _, sink = node.request()
    node.dispatcher.post(events.ModelRemoved(now=0.0, cause="scan", model="a"))
    load = node.engine.take(protocol.LoadModel)[0]
    node.message(protocol.LoadDone(load.placement_id, "a", 0.1, 1))
    assert sink.error is not None
    assert (sink.error.code, sink.error.status) == ("model_removed", 404)


async def test_who_has_waited_too_long_is_told_that_kernels_are_being_compiled() -> None:
    node = Harness(max_wait_s=0.05)
    node.message(protocol.KernelsTold("bfloat16", 7, 20, 12.3))
    _, sink = node.request()
    async with asyncio.timeout(30):
        while sink.error is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert sink.error.code == "wait_exceeded"
    said = "cpu:0: kernels for bfloat16 are being compiled (7 of 20, about 12 s left); until then models are slower."
    assert sink.error.message.endswith(f". {said}")


@pytest.mark.parametrize(("has_replicas", "cached"), [(True, (("a", 128),)), (False, ())])
async def test_where_a_prompt_is_cached_is_told_of_models_with_replicas(
    monkeypatch: pytest.MonkeyPatch, has_replicas: bool, cached: tuple[tuple[str, int], ...]
) -> None:
    node = Harness()
    node.entries["a"].has_replicas = has_replicas
    first, _ = node.request(prompt=[3] * 100)
    node.loaded()
    node.step({first.request_id: [3] * 28}, finish={first.request_id: FINISH_STOP})
    arrived: list[events.Event] = []
    handle = node.scheduler.handle
    monkeypatch.setattr(node.scheduler, "handle", lambda event: (arrived.append(event), handle(event))[1])
    node.request(prompt=[3] * 150)
    assert [event.request.cached for event in arrived if isinstance(event, events.RequestArrived)] == [cached]


async def test_the_speed_of_prompts_is_measured_by_the_engine() -> None:
    """The daemon does not see how long a request waits in the engine for a place in the batch."""
    node = Harness()
    first, second = (node.request(prompt=[1] * 100)[0].request_id for _ in range(2))
    node.loaded()
    measured = node.scheduler._node.devices["cpu:0"].costs.prefill_tokens_per_s
    node.step({first: [10]})
    assert measured == {}, "the engine has not told it"
    node.step({first: [11], second: [10]}, cached={second: 36}, prompt_s={second: 0.25})
    assert measured == {"a": (100 - 36) / 0.25}


async def test_cancel_is_idempotent_and_aborts_once() -> None:
    node = Harness()
    generation, sink = node.request()
    node.loaded()
    node.dispatcher.cancel(generation)
    node.dispatcher.cancel(generation)
    assert [message.request_ids for message in node.engine.take(protocol.Abort)] == [[generation.request_id]]
    node.step({generation.request_id: [5]})  # was on its way already
    assert sink.ids == []
    node.scheduler.validate()


async def test_aborts_of_one_step_go_out_together() -> None:
    """Stop strings match inside the sink, in the middle of a step's rows."""
    node = Harness()
    both = [node.request(), node.request()]
    node.loaded()
    for generation, sink in both:
        sink.on_tokens = lambda generation=generation: node.dispatcher.cancel(generation)
    node.step({generation.request_id: [5] for generation, _ in both})
    (abort,) = node.engine.take(protocol.Abort)
    assert abort.request_ids == [generation.request_id for generation, _ in both]


async def test_after_a_crash_the_request_goes_on_with_what_it_has() -> None:
    node = Harness()
    generation, sink = node.request()
    node.loaded()
    node.engine.sent.clear()
    node.step({generation.request_id: [10]})
    node.step({generation.request_id: [11]})
    node.told.engine_down("cpu:0", (generation.request_id,), "was ended by SIGKILL")
    assert len(node.dispatcher.open.by_id) == 1
    assert node.engine.sent == []
    node.up()
    node.loaded()
    (submit,) = node.engine.take(protocol.Submit)
    assert (submit.prompt, submit.output, submit.params.seed) == ([1, 2, 3], [10, 11], 7)
    node.step({generation.request_id: [12]}, finish={generation.request_id: FINISH_STOP})
    assert sink.ids == [10, 11, 12]
    assert node.metrics.resubmitted == 1


async def test_two_crashes_in_its_steps_end_a_request() -> None:
    node = Harness()
    generation, sink = node.request()
    _, other_sink = node.request()
    for _ in range(2):
        node.loaded()
        node.told.engine_down("cpu:0", (generation.request_id,), "died")
        node.up()
    assert sink.error is not None
    assert sink.error.code == "crashed_twice"
    assert other_sink.error is None
    assert len(node.dispatcher.open.by_id) == 1


async def test_a_fault_of_one_request_is_its_own() -> None:
    node = Harness()
    (bad, bad_sink), (good, good_sink) = node.request(), node.request()
    node.loaded()
    node.message(protocol.RequestFailed(bad.request_id, "nan_logits", "logits are not finite"))
    assert bad_sink.error is not None
    assert (bad_sink.error.code, bad_sink.error.status) == ("nan_logits", 500)
    node.step({good.request_id: [4]}, finish={good.request_id: FINISH_STOP})
    assert good_sink.finish == FINISH_STOP
    node.scheduler.validate()


async def test_a_request_that_no_token_is_left_for_is_refused_by_its_field() -> None:
    for field, value in (("allowed_token_ids", [7]), ("bad_words", [[7]])):
        node = Harness()
        generation, sink = node.request()
        generation.params = structs.replace(generation.params, **{field: value})
        node.loaded()
        node.message(protocol.RequestFailed(generation.request_id, "no_token_left", "model m: nothing may follow"))
        assert isinstance(sink.error, BadRequest)
        assert (sink.error.code, sink.error.status, sink.error.param) == ("no_token_left", 400, field)
        assert sink.error.message == f"{field}: model m: nothing may follow"


async def test_an_abort_nobody_asked_for_is_an_error_and_never_silence() -> None:
    node = Harness()
    generation, sink = node.request()
    node.loaded()
    node.step({generation.request_id: []}, finish={generation.request_id: FINISH_ABORT})
    assert sink.error is not None
    assert sink.error.code == "unloaded"
    assert len(node.dispatcher.open.by_id) == 0


async def test_request_timeout() -> None:
    node = Harness(NodeConfig(request_timeout_s=0.05))
    generation, sink = node.request()
    node.loaded()
    await until(lambda: sink.error is not None)
    assert sink.error is not None
    assert (sink.error.code, sink.error.status) == ("request_timeout", 503)
    assert node.engine.take(protocol.Abort)[0].request_ids == [generation.request_id]


async def test_a_timeout_that_ends_another_sequence_counts_each_once() -> None:
    """The first sequence of a client request (n = 2) that fails cancels the others, whose time is up as well."""
    node = Harness()
    both = [node.request()[0] for _ in range(2)]

    class Response(Sink):
        def failed(self, error: HearthError) -> None:
            super().failed(error)
            for generation in both:
                node.dispatcher.cancel(generation)

    response = Response()
    for generation in both:
        generation.sink = response
        generation.arrived_s -= 1000.0
    node.dispatcher.open._check_timeouts()
    assert response.error is not None
    assert node.metrics.requests == {("a", "timeout"): 1, ("a", "cancelled"): 1}
    assert not node.dispatcher.open.by_id
    assert node.dispatcher.open._timer is None
    node.scheduler.validate()


async def test_commands_are_answered() -> None:
    node = Harness()
    loading = node.dispatcher.command(lambda now, cause: events.LoadRequested(now=now, cause=cause, model="b"))
    assert not loading.done()
    node.loaded()
    assert await loading is None
    unknown = node.dispatcher.command(lambda now, cause: events.LoadRequested(now=now, cause=cause, model="zzz"))
    refusal = await unknown
    assert refusal is not None
    assert refusal.code == "model_not_found"


async def test_load_of_a_folder_that_is_gone_fails_the_waiting() -> None:
    node = Harness()
    del node.entries["b"]
    sink = Sink()
    generation = Generation(entry("b"), [1], SamplingParams(max_tokens=1), sink)
    with pytest.raises(HearthError) as caught:
        node.dispatcher.submit(generation)
    assert caught.value.code == "model_failed"
    assert "folder is gone" in caught.value.message


async def test_another_requests_refusal_is_not_that_of_the_one_that_arrives() -> None:
    node = Harness(max_wait_s=0.01)
    _, waiting = node.request()
    time.sleep(0.02)  # noqa: ASYNC251 -- no timer sees its deadline before the next request does
    node.request()
    assert waiting.error is not None
    assert waiting.error.code == "wait_exceeded"
    assert len(node.dispatcher.open.by_id) == 1


async def test_a_scheduler_fault_fails_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Harness()
    handle = node.scheduler.handle

    def broken(event: events.Event) -> Any:
        if isinstance(event, events.RequestArrived) and event.request.request_id == 1:
            raise ZeroDivisionError
        return handle(event)

    monkeypatch.setattr(node.scheduler, "handle", broken)
    with pytest.raises(HearthError) as caught:
        node.request()
    assert (caught.value.status, caught.value.code) == (500, "internal")
    node.request()
    assert len(node.dispatcher.open.by_id) == 1
    assert node.metrics.scheduler_errors == 1


async def test_drain_and_fail_all() -> None:
    node = Harness()
    generation, sink = node.request()
    node.loaded()
    for stopping, code in ((False, "node_draining"), (True, "server_restarting")):
        node.dispatcher.post(events.DrainRequested(now=0.0, cause="cli-1", stopping=stopping))
        with pytest.raises(HearthError) as caught:
            node.request()
        assert (caught.value.status, caught.value.code) == (503, code)
        with pytest.raises(HearthError) as caught:  # one that another server would answer
            node.dispatcher.forward(generation)
        assert (caught.value.status, caught.value.code) == (503, code)
    empty = node.dispatcher.open.when_empty()
    assert not empty.done()
    assert node.dispatcher.fail_all(NotNow("server_restarting", "again")) == 1
    assert empty.done()
    assert sink.error is not None
    assert node.engine.take(protocol.Abort)[0].request_ids == [generation.request_id]


async def test_deadlines_are_kept() -> None:
    """A load that never answers: its deadline leads to a roll-back without any other event."""
    node = Harness()
    node.scheduler.reconfigure(SchedulerSettings(chunk_bytes=MIB, load_deadline_s=0.05))
    node.request()
    await until(lambda: bool(node.engine.take(protocol.EvictModel)))


async def test_priority_becomes_weight() -> None:
    node = Harness(NodeConfig(models={"a": ModelConfig(priority=3.0)}))
    node.request()
    node.loaded()
    assert node.engine.take(protocol.Submit)[0].weight == 3.0


async def test_a_stop_string_counts_as_stop_and_a_lost_client_as_cancelled() -> None:
    node = Harness()
    (one, sink), (two, _) = node.request(), node.request()
    node.loaded()
    sink.on_tokens = lambda: node.dispatcher.cancel(one)
    node.step({one.request_id: [5], two.request_id: [5]})
    node.dispatcher.cancel(two)
    assert node.metrics.requests == {("a", "stop"): 1, ("a", "cancelled"): 1}


async def test_request_ids_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.requests.open_requests.PUBLIC_IDS", 2)
    node = Harness()
    made = []
    for name in ("x", "y", "z"):
        made.append(Generation(node.entries["a"], [1], SamplingParams(max_tokens=1), Sink(), public_id=name))
        node.dispatcher.submit(made[-1])
        node.dispatcher.cancel(made[-1])
    assert [node.dispatcher.open.request_id(name) for name in ("x", "y", "z")] == [None, made[1].request_id, made[2].request_id]


@pytest.mark.parametrize("finish", [{}, {1: FINISH_STOP}, {2: FINISH_LENGTH}])
async def test_a_broken_sink_costs_no_other_stream_a_token(finish: dict[int, int]) -> None:
    node = Harness()
    (one, broken), (two, sink) = node.request(), node.request()
    node.loaded()

    def fault() -> None:
        raise ZeroDivisionError

    broken.on_tokens = fault
    node.step({one.request_id: [5], two.request_id: [6]}, finish=finish)
    assert broken.error is not None
    assert broken.error.status == 500
    assert sink.ids == [6]
    assert one.request_id not in node.dispatcher.open.by_id
    view = node.scheduler.model("a")
    assert view is not None
    assert view.active == (0 if finish.get(2) else 1)
    node.scheduler.validate()


async def test_a_load_begins_while_its_request_is_being_read() -> None:
    node = Harness()
    told: list[str] = []
    node.dispatcher.load_begins = lambda entry: told.append(entry.name)
    expectation = node.dispatcher.expect(node.entries["a"])
    assert told == ["a"]
    sink = Sink()
    generation = Generation(node.entries["a"], [1, 2, 3], SamplingParams(max_tokens=8), sink, request_id=expectation.request_id)
    node.dispatcher.submit(generation)
    expectation.over()
    assert generation.request_id == expectation.request_id
    assert [line.split()[2] for line in node.dispatcher.scheduler.why("a")[-4:-2]] == [f"req-{generation.request_id}"] * 2
    node.loaded()
    assert [each.request_id for each in node.engine.take(protocol.Submit)] == [generation.request_id]
    node.step({generation.request_id: [5]}, {generation.request_id: FINISH_STOP})
    assert (sink.ids, sink.finish) == ([5], FINISH_STOP)
    assert node.dispatcher.expect(node.entries["a"]).request_id == 0
    assert not node.engine.take(protocol.LoadModel), "it is there"


async def test_a_model_that_is_expected_in_vain_is_loaded_once() -> None:
    """The load goes on, as that of a request whose client goes away."""
    node = Harness()
    expectation = node.dispatcher.expect(node.entries["a"])
    expectation.over()
    expectation.over()
    node.loaded()
    assert node.scheduler.state("a") == "ready"
    assert not node.engine.take(protocol.EvictModel)
