"""A node played for the scheduler: carries its actions out in its own time and checks, as engines would, that they make sense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scheduler.node import actions, events, leave_rules
from scheduler.node.events import ModelFacts, RequestFacts
from scheduler.node.groups import host_of, kind_of
from scheduler.node.node_scheduler import NodeScheduler, SchedulerSettings
from scheduler.node.views import DeviceView, ModelView

MIB = 1024 * 1024
CHECKSUM = 4711
COMMANDS = {
    "load": events.LoadRequested,
    "warm": events.WarmRequested,
    "unload": events.UnloadRequested,
    "pin": events.PinRequested,
    "unpin": events.UnpinRequested,
    "enable": events.EnableRequested,
    "disable": events.DisableRequested,
    "drain": events.DrainRequested,
    "resume": events.ResumeRequested,
}


def facts(name: str, weights_mib: int = 40, **others: Any) -> ModelFacts:
    """Weights as given, 2 MiB of reserved KV (and a chunk), 4 MiB of work space."""
    defaults: dict[str, Any] = {
        "kv_bytes_per_token": 1024,
        "work_space_bytes": 4 * MIB,
        "max_model_len": 2048,
        "max_sequences": 4,
        "fingerprint": "1",
    }
    return ModelFacts(name, weights_mib * MIB, **{**defaults, **others})


def replicas_of(model: ModelFacts, number: int, at: int = 0) -> list[ModelFacts]:
    """The model and its further replicas, as the registry registers them. at: replica_at of these."""
    further = [replace(model, name=f"{model.name}#{k}", replica_of=model.name, replica_at=at) for k in range(2, number + 1)]
    return [model, *(replace(one, pinned=False) for one in further)]


def members_of(action: actions.Load | actions.Evict) -> list[str]:
    """All devices of a load or an eviction, the leader first."""
    return [action.device, *(device for device, _ in action.further)]


def check_ranks(model: ModelFacts, devices: list[str]) -> None:
    """Checks what engines rely on: each stage is on devices of one host and one kind, and the last one, which leads, is here."""
    size = model.num_ranks // model.num_stages
    hosts = [host_of(device) for device in devices]
    stages = [hosts[at : at + size] for at in range(0, model.num_ranks, size)]
    assert all(len(set(stage)) == 1 for stage in stages), f"a stage of {model.name} is on several hosts: {devices}"
    assert set(stages[0]) == {""}, f"the last stage of {model.name} is elsewhere: {devices}"
    assert model.num_ranks == 1 or len(set(map(kind_of, devices))) == 1, f"{model.name} is on several kinds: {devices}"


class FakeNode:
    """`devices`: name -> MiB. Loads, evictions and requests stay pending until the test lets them go on."""

    def __init__(self, devices: Mapping[str, int] | None = None, *, up: bool = True, **settings: Any) -> None:
        self.budgets = {name: mib * MIB for name, mib in (devices or {"cpu:0": 100}).items()}
        self.scheduler = NodeScheduler(SchedulerSettings(**settings), self.budgets)
        self.now = 100.0
        self.num_requests = 0
        self.num_commands = 0
        self.up: set[str] = set()
        self.registered: dict[str, ModelFacts] = {}
        self.loads: dict[int, actions.Load] = {}  # under way
        self.streaming: set[int] = set()  # placements of loads that take requests
        self.copies: dict[tuple[str, str], actions.Load] = {}  # (device that leads, model) -> its load, done
        self.evicts: dict[int, actions.Evict] = {}  # under way
        self.memory: dict[int, dict[str, int]] = {}  # placement -> device -> chunks; until its eviction is answered
        self.lease: dict[str, int] = {}
        self.host: dict[int, tuple[str, str, str]] = {}  # slot of the host tier -> kind, model, fingerprint: what was written last
        self.writing: dict[int, tuple[int, ...]] = {}  # placement -> slots it may write
        self.fingerprints: dict[int, str] = {}  # of what each placement loaded
        self.num_saved_slots = 2  # an eviction saves at most so many slots of KV
        self.paused: tuple[int, ...] = ()  # requests, once for each time
        self.restarts: list[str] = []  # devices whose restart was ordered and not yet done
        self.running: dict[int, actions.Submit] = {}
        self.open: dict[int, str] = {}  # requests without an end -> model
        self.ends: dict[int, str] = {}  # "finished", "cancelled" or a refusal's code
        self.refusals: dict[int, actions.Refusal] = {}
        self.asked: dict[str, str] = {}  # commands without an answer
        self.answers: dict[str, actions.Refusal | None] = {}
        self.states: list[tuple[str, str, str]] = []
        self.log: list[actions.Action] = []
        if up:
            for name in self.budgets:
                self.engine_up(name)

    # ---- events

    def post(self, kind: type[events.Event], cause: str = "test", **fields: Any) -> list[actions.Action]:
        done = self.scheduler.handle(kind(now=self.now, cause=cause, **fields))
        for action in done:
            self.carry_out(action, kind, fields)
        views = self.device_views()
        for device in self.up:
            self.check_memory(views[device])
        self.scheduler.validate()
        return done

    def register(self, *models: ModelFacts) -> None:
        for model in models:
            self.registered[model.name] = model
            self.post(events.ModelRegistered, facts=model)

    def remove(self, name: str) -> list[actions.Action]:
        return self.post(events.ModelRemoved, model=name)

    def arrive(self, model: str, tenant: str = "", **facts: Any) -> int:
        """facts: further fields of RequestFacts."""
        self.num_requests += 1
        request_id = self.num_requests
        self.open[request_id] = model
        request = RequestFacts(request_id, model, 10, 20, tenant=tenant, **facts)
        self.post(events.RequestArrived, f"req-{request_id}", request=request)
        return request_id

    def expect(self, model: str, tenant: str = "") -> str:
        """Returns the name of the expectation, for `over`."""
        self.num_commands += 1
        cause = f"expected-{self.num_commands}"
        self.post(events.RequestExpected, cause, model=model, tenant=tenant)
        return cause

    def over(self, model: str, expectation: str) -> list[actions.Action]:
        return self.post(events.ExpectationOver, expectation, model=model, expectation=expectation)

    def arrive_whole(self, model: str, num_sequences: int, tenant: str = "") -> list[int]:
        """One client's request of several sequences. As the API does: with the first one refused, none is left."""
        first = self.arrive(model, tenant)
        if first in self.refusals:
            return [first]
        return [first, *(self.arrive(model, tenant, part_of=first) for _ in range(num_sequences - 1))]

    def finish(self, *request_ids: int) -> list[actions.Action]:
        """All that run, when none is named."""
        done = []
        for request_id in request_ids or tuple(self.running):
            del self.running[request_id]
            self.end(request_id, "finished")
            done += self.post(events.RequestFinished, request_id=request_id)
        return done

    def cancel(self, request_id: int) -> list[actions.Action]:
        self.end(request_id, "cancelled")
        done = self.post(events.RequestCancelled, request_id=request_id)
        assert request_id not in self.running, "cancelled and still in the engine"
        return done

    def loaded(
        self,
        model: str | None = None,
        seconds: float = 0.5,
        rejected: str = "",
        kernels_s: float = 0.0,
        read_as: str = "",
        adopted: bool = False,
    ) -> list[actions.Action]:
        """The load under way (of that model) is done. adopted: its weights were on the device, so nothing is kept that was not."""
        load = next(load for load in self.loads.values() if model in (None, load.model))
        del self.loads[load.placement_id]
        self.copies[load.device, load.model] = load
        for slot in self.writing.pop(load.placement_id, ()):
            self.host[slot] = ("weights", load.model, load.fingerprint)
        assert not (adopted and load.keep_slots), "slots were taken from others for nothing"
        kept = bool(load.keep_slots or load.source_slots) and not rejected
        return self.post(
            events.LoadFinished,
            placement_id=load.placement_id,
            seconds=seconds,
            kept=kept,
            checksums=(CHECKSUM,) * (1 + len(load.further)) if kept else (),
            copy_s=seconds if load.source_slots and not (rejected or adopted) else 0.0,
            adopted=adopted,
            source_rejected=rejected,
            read_as=read_as,
            kernels_s=kernels_s,
        )

    def streams(self, model: str | None = None) -> list[actions.Action]:
        """The load under way (of that model) takes requests from now on. One of several devices never does."""
        load = next(load for load in self.loads.values() if model in (None, load.model))
        if load.further:
            return []
        self.streaming.add(load.placement_id)
        return self.post(events.LoadStreams, placement_id=load.placement_id)

    @property
    def stepping(self) -> list[int]:
        """Requests that may have had tokens: their models are loaded."""
        return sorted(request for request, submit in self.running.items() if (submit.device, submit.model) in self.copies)

    def forget_behind(self, load: actions.Load) -> None:
        """The load comes to nothing, and its engine drops without a word what was computed behind it."""
        self.running = {request: submit for request, submit in self.running.items() if submit.model != load.model}

    def note_kv(self, device: str, model: str, running_bytes: int, cached_bytes: int = 0) -> None:
        """The engine tells what the model holds in KV."""
        self.post(events.KVNoted, device=device, kv_bytes={model: (running_bytes, cached_bytes)})

    def load_fails(self, reason: str = "read error", permanent: bool = False) -> list[actions.Action]:
        placement_id = next(iter(self.loads))
        self.forget_behind(self.loads[placement_id])
        del self.loads[placement_id], self.memory[placement_id]
        self.writing.pop(placement_id, None)
        return self.post(events.LoadFailed, placement_id=placement_id, reason=reason, permanent=permanent)

    def evicted(self, model: str | None = None) -> list[actions.Action]:
        """The evictions under way (of that model) are done."""
        done = []
        for evict in [evict for evict in self.evicts.values() if model in (None, evict.model)]:
            del self.evicts[evict.placement_id], self.memory[evict.placement_id]
            self.writing.pop(evict.placement_id, None)
            used = evict.save_slots[: self.num_saved_slots]
            for slot in used:
                self.host[slot] = ("kv", evict.model, self.fingerprints[evict.placement_id])
            done += self.post(
                events.EvictFinished,
                placement_id=evict.placement_id,
                kv_slots=used,
                kv_index=b"index" if used else b"",
                saved_kv_tokens=1000 * len(used),
            )
        return done

    def command(self, verb: str, model: str = "", **fields: Any) -> str:
        """Returns its cause, to be looked up in `answers`."""
        self.num_commands += 1
        cause = f"cli-{self.num_commands}"
        self.asked[cause] = verb
        self.post(COMMANDS[verb], cause, model=model, **fields)
        return cause

    def engine_up(self, device: str, left: tuple[str, ...] = ()) -> list[actions.Action]:
        self.up.add(device)
        return self.post(events.EngineUp, device=device, budget_bytes=self.budgets[device], left=left)

    def running_on(self, device: str) -> list[int]:
        """Requests in the engine, or in that of another device which leads a model that is there, too."""
        loads = [*self.loads.values(), *self.copies.values()]
        keys = {(load.device, load.model) for load in loads if device in members_of(load)}
        return [request for request, submit in self.running.items() if (submit.device, submit.model) in keys]

    def engine_down(self, device: str, running: tuple[int, ...] = (), reason: str = "killed") -> list[actions.Action]:
        """Other engines that hold a share of a model drop its requests and wait for its eviction. An eviction under way is answered
        by those that are left."""
        self.up.discard(device)
        for placement in [placement for placement, held in self.memory.items() if device in held]:
            self.writing.pop(placement, None)
            del self.memory[placement][device]
        self.restarts = [name for name in self.restarts if name != device]
        for request in self.running_on(device):
            del self.running[request]
        self.memory = {placement: held for placement, held in self.memory.items() if held}
        self.loads = {placement: load for placement, load in self.loads.items() if device not in members_of(load)}
        self.evicts = {placement: evict for placement, evict in self.evicts.items() if placement in self.memory}
        self.copies = {key: load for key, load in self.copies.items() if device not in members_of(load)}
        return self.post(events.EngineDown, device=device, running=running, reason=reason)

    def sleep(self, seconds: float) -> list[actions.Action]:
        """Time passes, with a TimePassed at each deadline on the way."""
        done: list[actions.Action] = []
        end = self.now + seconds
        for _ in range(100_000):
            deadline = self.scheduler.next_deadline()
            if deadline is None or deadline > end:
                self.now = end
                return done
            self.now = max(self.now, deadline)
            done += self.post(events.TimePassed)
        raise AssertionError(f"time stands still at {self.now}")

    # ---- actions

    def carry_out(self, action: actions.Action, kind: type[events.Event], fields: dict[str, Any]) -> None:
        self.log.append(action)
        match action:
            case actions.Load():
                self.check_load(action)
                self.check_host(action)
                self.loads[action.placement_id] = action
                self.fingerprints[action.placement_id] = action.fingerprint
                self.memory[action.placement_id] = dict.fromkeys(
                    members_of(action), action.weights_chunks + action.kv_reserved_chunks
                )
                self.lease.update({action.device: action.lease_chunks, **dict(action.further)})
            case actions.Evict():
                assert set(members_of(action)) <= self.up, "evicts on a dead device"
                assert action.placement_id in self.memory, f"evicts what is not there: {action}"
                assert members_of(action) == list(self.memory[action.placement_id]), (
                    f"evicts a part, or what is not there: {action}"
                )
                assert action.placement_id not in self.evicts, f"evicts twice: {action}"
                if action.placement_id in self.loads:
                    self.forget_behind(self.loads[action.placement_id])
                runs = [request for request, submit in self.running.items() if submit.model == action.model]
                assert not runs, f"rule 3: {action.model} evicted under requests {runs}"
                assert action.reason in leave_rules.EVICT_REASONS
                self.host_grants(action.placement_id, action.save_slots)
                self.loads.pop(action.placement_id, None)
                self.copies.pop((action.device, action.model), None)
                self.evicts[action.placement_id] = action
                self.lease.update({action.device: action.lease_chunks, **dict(action.further)})
            case actions.RequestsPaused():
                for request in action.request_ids:
                    assert self.running.pop(request).model == action.model
                self.paused += action.request_ids
            case actions.GrantLease():
                assert action.device in self.up
                self.lease[action.device] = action.lease_chunks
            case actions.Submit():
                behind = any(load.model == action.model and load.placement_id in self.streaming for load in self.loads.values())
                assert behind or (action.device, action.model) in self.copies, f"submitted to a model that is not there: {action}"
                assert self.open[action.request_id] == (self.registered[action.model].replica_of or action.model)
                assert action.request_id not in self.running, f"submitted twice: {action}"
                self.running[action.request_id] = action
            case actions.Reject():
                assert action.refusal.code in actions.REFUSAL_CODES
                assert action.refusal.message
                self.running.pop(action.request_id, None)
                self.refusals[action.request_id] = action.refusal
                self.end(action.request_id, action.refusal.code)
            case actions.AbortInEngine():
                assert self.running.pop(action.request_id).device == action.device
            case actions.RestartEngine():
                assert action.device in self.up
                self.restarts.append(action.device)
            case actions.CommandDone():
                assert action.cause in self.asked, f"answered twice, or never asked: {action}"
                del self.asked[action.cause]
                self.answers[action.cause] = action.refusal
            case actions.StateChanged():
                self.states.append((action.model, action.old, action.new))
            case _:
                raise AssertionError(f"unknown action {action}")

    def check_load(self, load: actions.Load) -> None:
        members = members_of(load)
        assert len(set(members)) == len(members) == self.registered[load.model].num_ranks, (
            f"loads too many shares or too few: {load}"
        )
        check_ranks(self.registered[load.model], members)
        assert set(members) <= self.up, f"loads on a dead device: {load}"
        occupied = {device for other in self.loads.values() for device in members_of(other)}
        assert not occupied & set(members), f"two loads on one device: {load}"
        assert all(other.model != load.model for other in self.copies.values()), f"loads twice: {load}"
        assert all(evict.model != load.model for evict in self.evicts.values()), f"loads while its old copy leaves: {load}"
        views = self.device_views()
        for device, lease_chunks in ((load.device, load.lease_chunks), *load.further):
            view = views[device]
            held = sum(held.get(device, 0) for held in self.memory.values())
            needed = held + load.weights_chunks + load.kv_reserved_chunks + view.work_space_chunks + lease_chunks
            assert needed <= view.total_chunks, f"overdraws {device}: {needed} of {view.total_chunks} chunks"
        assert load.deadline_s > 0
        assert not load.further or not load.kv_slots, f"KV of shares in host memory: {load}"

    def check_host(self, load: actions.Load) -> None:
        """What is to be read was written, and nobody else writes it."""
        if load.source_slots:
            assert len(load.source_slots) == load.weights_chunks * len(load.leases)
            assert not load.keep_slots
            assert {self.host.get(slot) for slot in load.source_slots} == {("weights", load.model, load.fingerprint)}
            assert load.checksums == (CHECKSUM,) * len(load.leases)
        for slot in load.kv_slots:
            assert self.host.get(slot) == ("kv", load.model, load.fingerprint), f"{load.model} is given {self.host.get(slot)}"
        reading = {slot for other in self.loads.values() for slot in (*other.source_slots, *other.kv_slots)}
        assert not reading & set(load.keep_slots), "slots are written while a load reads them"
        self.host_grants(load.placement_id, load.keep_slots)

    def host_grants(self, placement_id: int, slots: tuple[int, ...]) -> None:
        reading = {slot for other in self.loads.values() for slot in (*other.source_slots, *other.kv_slots)}
        written = {slot for some in self.writing.values() for slot in some}
        assert not (reading | written) & set(slots), "slots are granted that are read or written"
        for slot in slots:
            self.host.pop(slot, None)
        if slots:
            self.writing[placement_id] = slots

    def check_memory(self, view: DeviceView) -> None:
        """What the engine was last told is all it may use, once what it was told to evict is gone."""
        held = sum(held.get(view.name, 0) for placement, held in self.memory.items() if placement not in self.evicts)
        assert held + view.work_space_chunks + self.lease[view.name] <= view.total_chunks, f"{view.name} is overdrawn"

    def end(self, request_id: int, how: str) -> None:
        assert request_id in self.open, f"request {request_id} ends twice: {self.ends.get(request_id)} and {how}"
        del self.open[request_id]
        self.ends[request_id] = how

    # ---- looking

    def device_views(self) -> dict[str, DeviceView]:
        """Returns what the scheduler tells of each device, by name."""
        return {view.name: view for view in self.scheduler.devices()}

    def view(self, name: str) -> ModelView:
        view = self.scheduler.model(name)
        assert view is not None, f"no model {name}"
        return view

    def state(self, name: str) -> str:
        return self.view(name).state

    def bring_up(self, *names: str) -> None:
        """Loads models by command, all at rest afterwards."""
        for name in names:
            self.command("load", name)
            self.evicted()
            self.loaded(name)

    def finish_all(self, max_steps: int = 20_000) -> None:
        """The engines behave: everything asked for is done. Fails when something accepted never ends."""
        for device in self.budgets:
            if device not in self.up:
                self.engine_up(device)
        for _ in range(max_steps):
            if self.restarts:
                device = self.restarts[0]
                self.engine_down(device)
                self.engine_up(device)
            elif self.evicts:
                self.evicted()
            elif self.loads:
                self.loaded()
            elif self.running:
                self.finish(next(iter(self.running)))
            elif not self.open and not self.asked:
                return
            else:
                deadline = self.scheduler.next_deadline()
                assert deadline is not None, f"stuck: requests {self.open}, commands {self.asked}"
                self.now = max(self.now, deadline)
                self.post(events.TimePassed)
        raise AssertionError(f"no end: requests {self.open}, commands {self.asked}")
