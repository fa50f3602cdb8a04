"""Puts the parts of a node together and reports on it: rows for `ps`, status, health, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from config import credentials
from config.provenance import Sources
from config.schema import DeviceBudget, NodeConfig
from config.units import format_bytes
from daemon.access.keys import Keys
from daemon.access.quotas import Quotas
from daemon.api import background, response_store
from daemon.api.background import BackgroundRuns
from daemon.api.endpoints.registry import BODY_MODULES
from daemon.api.response_store import ResponseStore
from daemon.contracts import Resident
from daemon.engines.carve_outs import divide
from daemon.engines.engine_events import EngineEvents
from daemon.engines.engine_rounds import EngineRounds
from daemon.engines.exchange_memory import exchange_memory
from daemon.engines.fork_client import ForkServer, threads_per_engine
from daemon.engines.host_account import HostAccount
from daemon.engines.host_memory import HostMemory
from daemon.engines.kept_device import KeptDevice
from daemon.engines.kernels import Kernels
from daemon.engines.left_memory import LeftMemory
from daemon.engines.workers import EngineSpec, EngineWorker, LentBy
from daemon.errors import BadRequest, HearthError, from_refusal
from daemon.gpu.driver import Driver
from daemon.gpu.inventory import GpuFault, Inventory, rows_of, why_no_memory
from daemon.gpu.question import GpuQuestion
from daemon.gpu.watch import GpuWatch
from daemon.http.tls import Tls
from daemon.metrics.counters import Metrics
from daemon.models.entry import ModelEntry
from daemon.models.registered import all_kernels
from daemon.models.registry import Registry
from daemon.node.live_settings import LiveSettings
from daemon.node.loaded_adapters import LoadedAdapters
from daemon.node.reloads import Reloads
from daemon.node.warming import Warming
from daemon.process import moment
from daemon.process.fd_store import FdStore
from daemon.process.kept_records import KeptRecords
from daemon.process.logs import fields
from daemon.process.long_tasks import LongTasks
from daemon.process.loop_watch import LoopWatch
from daemon.process.version import VERSION
from daemon.record.audit_log import AuditLog
from daemon.record.event_ring import EventRing
from daemon.record.state import NodeState
from daemon.record.state_keeper import StateKeeper
from daemon.record.usage_file import DayUsage, UsageFile
from daemon.requests.dispatcher import Dispatcher
from daemon.scanning.rescans import Rescans
from daemon.scanning.scanner import ModelScanner
from daemon.text.service import TextService
from daemon.traces.traces import Traces
from daemon.upstreams.upstream import Upstream
from daemon.upstreams.upstreams import Upstreams
from engine.protocol import PROTOCOL_VERSION
from loader.models.catalog import Checkpoint
from scheduler.node import events, residency
from scheduler.node.node_scheduler import NodeScheduler
from scheduler.node.settings import SchedulerSettings
from scheduler.node.views import ModelView

log = logging.getLogger("hearthd")
_READINESS = {True: "ready", False: "not ready"}
POST_AT_A_TIME = 25  # registrations posted before the event loop does other work


def scheduler_settings(config: NodeConfig) -> SchedulerSettings:
    return SchedulerSettings(
        chunk_bytes=int(config.chunk_bytes),
        load_deadline_s=config.load_deadline_s,
        overdue_after_s=config.overdue_after_s,
        max_wait_s=config.max_wait_s,
        max_queued_per_model=config.max_queued_per_model,
        max_queued_per_tenant=config.max_queued_per_tenant,
        host_tier_slots=int(config.host_tier_bytes or 0) // int(config.chunk_bytes),
        preempt_after_s=config.preempt_after_s,
        drain_timeout_s=config.drain_timeout_s,
    )


class NodeParts:
    """Makes and connects all parts of one node, and reports on them. Must be made on the event loop. `reload` is set by the
    lifecycle."""

    def __init__(
        self,
        config: NodeConfig,
        devices: Sequence[DeviceBudget],
        state: NodeState,
        inventory: Inventory | None = None,
        scanner: ModelScanner | None = None,
        checkpoints: Mapping[str, Checkpoint] | None = None,
        store: FdStore | None = None,
        sources: Sources | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        """config: the node's settings. devices: its devices and their budgets. state: the operator's decisions. inventory: lists
        the GPUs. scanner: reads the models folder. checkpoints: the content of the models folder, for the carve-outs of isolated
        models. store: keeps memory over a restart of the daemon; None: nothing does. sources: where the settings are set; None:
        nowhere. forks: the fork server, if it was started ahead."""
        loop = asyncio.get_running_loop()
        division = divide(config, devices, state, checkpoints or {})
        self.devices = devices = division.devices
        self.inventory = inventory or Driver()
        self._gpus = GpuQuestion(self.inventory)
        self.tasks = LongTasks()
        self.state_keeper = StateKeeper(state, self.tasks)
        self.settings = LiveSettings(config, sources or Sources(None, {}))
        self.ring, self.metric = EventRing(), Metrics()
        self.watch = LoopWatch(loop, config.loop_watch_ms / 1e3)
        budgets = {device.name: device.budget_bytes for device in devices}
        settings = scheduler_settings(config)
        self.scheduler = NodeScheduler(settings, budgets)
        self._store = store
        self.host_memory = HostMemory(settings.host_tier_slots, settings.chunk_bytes, store)
        self.scanner = scanner or ModelScanner()
        self.rescans = Rescans(self.rescan, self.scanner)
        self.registry = Registry(config, devices, state, division.problems, self.scanner.scan, self.scanner.signature_of)
        self.registry.refused, self.registry.turned_away = self._refused, self._turned_away
        self.dispatcher = Dispatcher(self.scheduler, config, self.registry.source, self.ring, self.metric, self.watch)
        self._host_account: HostAccount | None = None
        if self.host_memory.account is not None:
            size_bytes, layout_of = settings.chunk_bytes, self.registry.layout_id
            self._host_account = HostAccount(self.host_memory.account, size_bytes, self.scheduler, layout_of)
        self.kernels = Kernels(self.ring)
        self.exchange = exchange_memory(devices)
        self.engine_events = EngineEvents(self.dispatcher, budgets, self.kernels, self.exchange)
        self.engine_events.chosen_copies = self._chosen_copies
        self.dispatcher.why_slow = self.kernels.sentence
        threads = threads_per_engine(config, devices)
        threads_of = {device.name: config.threads if device.host else threads for device in devices}  # other hosts know their cores
        self._left = {device.name: self._left_memory(device) for device in devices}
        if forks is not None and forks.threads != threads:  # isolated models have engines, too
            forks.give_up()
            forks = None
        self.forks = forks or ForkServer(config.runner, config.cache_dir, threads)
        self.workers = {
            device.name: EngineWorker(
                device.name,
                threads_of[device.name],
                self._spec_of(device, threads_of[device.name]),
                self.engine_events,
                self.tasks,
                -1 if device.host else self.host_memory.fd,
                device.uuid,
                partial(why_no_memory, self.inventory, device),
                self._left[device.name],
                self.exchange,
                self.forks if device.is_local("cpu") else None,
                self._lent_by(device),
            )
            for device in devices
        }
        stall_s, post = lambda: self.config.engine_stall_s, self.dispatcher.post
        self.engine_rounds = EngineRounds(self.workers, stall_s, self.ring, self.metric, post)
        self.gpu_watch = GpuWatch(self.inventory, devices, self._gpu_fault)
        self.dispatcher.engines = dict(self.workers)
        self.text = TextService(
            self.tasks, stall_s=lambda: self.config.text_stall_s, num_deaths=self.metric.text_deaths, preload=BODY_MODULES
        )
        self.dispatcher.load_begins = self._open_text
        self.stored = ResponseStore(int(config.stored_responses_bytes), KeptRecords.of(store, response_store.NAME))
        self.background = BackgroundRuns(self.stored, KeptRecords.of(store, background.NAME))
        self.upstreams = Upstreams(self._upstream_changed)
        self.warming = Warming(lambda: self.config, self.dispatcher, self.tasks, self.ring)
        self.adapters = LoadedAdapters(self.registry, self.scheduler, self.dispatcher, self.state_keeper, self.ring)
        self.reload: Callable[[], Awaitable[dict[str, Any]]] | None = None
        self.url = ""
        self.keys: Keys | None = None  # None: no keys are set
        self.tls: Tls | None = None  # None: the listeners speak HTTP without TLS
        self.quotas = Quotas(self.metric.tenants.over_limit)
        self.usage_file = UsageFile(config.state_dir, self._usage_today)
        self.quotas.restore(*self.usage_file.load())
        self.audit = AuditLog()
        self.traces = Traces(self.tasks)
        self.dispatcher.tracer = lambda: self.traces.tracer
        self.reloads = Reloads(self.metric.reloads, self.audit)
        self.listening = False
        self.started_unix_s = time.time()
        self._unix_offset_s = time.time() - time.monotonic()

    @property
    def config(self) -> NodeConfig:
        return self.settings.config

    def _usage_today(self) -> DayUsage | None:
        tenants = self.keys.tenants.values() if self.keys is not None else ()
        if all(tenant.limits.tokens_per_day is None for tenant in tenants):
            return None
        now = moment.now()
        return DayUsage(self.quotas.day(now), self.quotas.used_today(now))

    def _spec_of(self, device: DeviceBudget, threads: int) -> Callable[[], EngineSpec]:
        def spec() -> EngineSpec:
            models = self.registry.models.values()
            usable = [one for one in models if one.entry is not None and device.name in (one.facts.devices or [device.name])]
            if device.host:
                usable = [one for one in usable if one.facts.num_stages > 1]
            facts = [one.facts for one in usable]
            fitting = [one.work_space_bytes for one in facts if one.weights_bytes + one.work_space_bytes < device.budget_bytes]
            kernels = all_kernels(usable)
            num_slots = 0 if device.host else self.host_memory.num_slots
            return EngineSpec(device, max(fitting, default=0), self.config, threads, kernels, num_slots)

        return spec

    def _lent_by(self, device: DeviceBudget) -> LentBy | None:
        if not device.host:
            return None
        host = self.config.hosts[device.host]
        key_file = credentials.path_of(host.key_file, f"hosts.{device.host}.key_file")
        return LentBy(device.host, host.address, key_file, device.hardware, self.config.models_dir)

    def _left_memory(self, device: DeviceBudget) -> LeftMemory | None:
        is_host = device.is_local("cpu")
        wanted = not is_host if self.config.adopt_weights is None else self.config.adopt_weights
        if not wanted or self.config.runner != "torch" or device.host:
            return None
        usable = self._store is not None and self._store.usable
        kept = KeptDevice(self._store, device.name, self.registry.layout_id) if self._store is not None and usable else None
        return LeftMemory(device.name, is_host, kept)

    def take_up_kept(self) -> None:
        """Takes over the models' copies that an earlier daemon left in memory through the service manager's FD store: those in the
        host tier and, where engines can use them, those in devices' memory. From then on the store is kept up to date. Called once,
        after the first scan and before engines get their configuration."""
        for left in self._left.values():
            if left is not None:
                left.take_up()
        if self._host_account is not None:
            found = tuple(self._host_account.found())
            self.dispatcher.post(events.HostCopiesFound(now=time.monotonic(), cause="boot", copies=found))
            if used := self.scheduler.host_copies():
                num_bytes, names = sum(copy.num_bytes for _, copy in used), sorted({model for model, _ in used})
                log.info("%s are in host memory from before the restart: %s", format_bytes(num_bytes), ", ".join(names))
                self.ring.add("kept", models=names, bytes=num_bytes)
            self.dispatcher.note_decisions = self._host_account.look
            self._host_account.look()
        if self._store is not None:
            self._store.drop_rest()

    def _open_text(self, entry: ModelEntry) -> None:
        """Tells the text service to parse a model's tokenizer while the model's weights load, if the model generates text."""
        if entry.generates_text:
            self.text.open_ahead(entry)

    def _gpu_fault(self, device: DeviceBudget, fault: GpuFault) -> None:
        """Logs and counts a fault that the driver has reported for the GPU of a device. A fatal fault restarts the device's engine,
        because that may wait for the GPU for ever; other engines go on."""
        log.error("GPU %s: %s", device.uuid, fault, extra=fields(device=device.name))
        self.ring.add("gpu_fault", device=device.name, uuid=device.uuid, xid=fault.xid, fatal=fault.is_fatal)
        self.metric.gpu_faults[device.name, str(fault.xid)] += 1
        if fault.is_fatal:
            self.workers[device.name].restart(f"was ended: {fault} on {device.uuid}", distrust_memory=True)

    async def gpu_rows(self) -> list[dict[str, Any]]:
        """Returns the rows of `hearth gpus`, one for each GPU of the machine. Raises NoGpus if the driver cannot be asked."""
        return rows_of(await self._gpus.ask(), self.devices, self.gpu_watch.xids)

    # ---- models

    async def rescan(self, config: NodeConfig | None = None) -> None:
        """Reads the models folder again, and tells the scheduler which models are new, changed or gone. config: new settings to
        apply to the models; None: those in use. Raises OSError if the folder cannot be read."""
        changes = await self.registry.rescan(config)
        for at, change in enumerate(changes):
            self.dispatcher.post(change)
            self._tell(change)
            if isinstance(change, events.ModelRegistered) and (copies := self._chosen_copies(change.facts.name)) is not None:
                self.dispatcher.post(copies)
            if at % POST_AT_A_TIME == POST_AT_A_TIME - 1:
                await asyncio.sleep(0)

    def _chosen_copies(self, model: str) -> events.CopiesChosen | None:
        return self.registry.chosen_copies(model, self.dispatcher.metrics.experts.of_layers)

    def _tell(self, change: events.Event) -> None:
        if isinstance(change, events.ModelRemoved):
            log.info("%s: its folder is gone", change.model)
            self.ring.add("removed", model=change.model)
        elif isinstance(change, events.ModelRegistered):
            name = change.facts.name
            if name in self.registry.models:
                line = self.registry.describe(name)
                if (refusal := self._refused(name)) is not None:
                    line = f"{name}: refused: {refusal.details['arithmetic']}"
                log.info("%s", line)
                self.ring.add("registered", model=name, text=line)

    def _refused(self, name: str) -> HearthError | None:
        arithmetic = self.scheduler.too_large(name)  # called for each request
        if not arithmetic:
            return None
        message = f"The model {name!r} can never be loaded on this node: {arithmetic}"
        return BadRequest("model_too_large", message, param="model", details={"arithmetic": arithmetic})

    def _turned_away(self, name: str, tenant: str) -> HearthError | None:
        """Returns the error with which a request of the tenant for the model `name` would be refused if it arrived now; None if it
        would be accepted."""
        if name in self.registry.upstreams:
            return self.upstreams.refusal(name, tenant)
        refusal = self.scheduler.refusal(name, tenant)
        return None if refusal is None else from_refusal(refusal)

    def _upstream_changed(self, upstream: Upstream) -> None:
        self.ring.add("upstream", model=upstream.name, host=upstream.address.host, state=upstream.state, reason=upstream.reason)

    # ---- views

    def _view(self, name: str) -> ModelView | None:
        return self.scheduler.model(name)

    def state_of(self, name: str) -> str:
        view = self._view(name)
        return view.state if view is not None else "absent"

    def unix_s(self, monotonic_s: float) -> float:
        return round(monotonic_s + self._unix_offset_s, 3)

    @property
    def draining(self) -> bool:
        return self.scheduler.draining

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of `hearth models`, sorted by name: one for each model, and one for each further replica whose state is
        not cold."""
        kv_bytes = self._kv_bytes()
        rows = []
        for view in sorted(self.scheduler.snapshot(), key=lambda view: view.name):
            model = self.registry.model_of(view.name)
            if model != view.name and view.state == residency.COLD:
                continue
            row: dict[str, Any] = {
                "name": view.name,
                "kind": "local",
                "state": view.state,
                "device": view.device,
                "devices": list(view.devices),
                "num_ranks": view.num_ranks,
                "weights_bytes": view.weights_bytes * view.num_shares,
                "kv_bytes": kv_bytes.get(view.name, 0) * view.num_shares,
                "active": view.active,
                "queued": view.queued,
                "pinned": view.pinned,
                "last_used": None if view.last_used is None else self.unix_s(view.last_used),
                "reason": view.reason,
                "host_bytes": view.kept_bytes,
                "saved_kv_tokens": view.saved_kv_tokens,
                "keep_alive_s": None if view.keep_alive_s == inf else view.keep_alive_s,
                "leaves": None if view.leaves_at is None else self.unix_s(view.leaves_at),
            }
            if model != view.name:
                row["replica_of"] = model
            if (found := self.registry.models.get(model)) is not None and found.entry is not None:
                row["task"] = found.entry.task
                row["held_as"], row["bits_per_weight"] = found.held_as, found.bits_per_weight
                unreadable = self.text.unreadable(found.entry) if found.has_tokenizer else ""  # the notes say that it is missing
                if notes := [*found.notes, *([unreadable] if unreadable else [])]:
                    row["notes"] = notes
            if drafted := self.metric.drafted_tokens.get(view.name, 0):
                row["drafted_tokens"], row["accepted_tokens"] = drafted, self.metric.accepted_tokens.get(view.name, 0)
            if view.closed:
                row["drained"] = True
            if view.expert_copies:
                row["expert_copies"] = view.expert_copies
            if not view.device and (not_warmed := self.warming.problems.get(view.name)) is not None:
                row["not_warmed"] = not_warmed
            if view.quarantined_until is not None:
                row["quarantined_until"] = round(view.quarantined_until + self._unix_offset_s, 3)
            if compiling := [told for device in view.devices if (told := self.kernels.row(device)) is not None]:
                row["kernels"] = compiling[0]
            if view.progress is not None:
                row["bytes_done"], row["bytes_total"] = view.progress
            rows.append(row)
        return sorted([*rows, *others], key=lambda row: row["name"]) if (others := self.upstreams.rows()) else rows

    def adapter_rows(self) -> list[dict[str, Any]]:
        """Returns a row for each LoRA adapter, sorted by name. The row of an adapter that is in a device's memory names the device
        and the adapter's bytes there."""
        held = [(device, stats.adapters) for device, stats in self.engine_events.stats.items() if stats.adapters]
        rows = []
        for name, record in sorted(self.registry.adapters.items()):
            row = record.row()
            for device, by_base in held:
                for replica in self.registry.replicas(record.base):
                    if (num_bytes := by_base.get(replica, {}).get(name)) is not None:
                        row["device"], row["weights_bytes"] = device, num_bytes
            rows.append(row)
        return rows

    def adapters_in_memory(self) -> dict[str, dict[str, int]]:
        """Returns the LoRA adapters that are in a device's memory: name of the base model -> name of the adapter -> its bytes."""
        loaded = (each for stats in self.engine_events.stats.values() for each in stats.adapters.items())
        found: dict[str, dict[str, int]] = {}
        for replica, adapters in loaded:
            found.setdefault(self.registry.model_of(replica), {}).update(adapters)
        return found

    def residents(self) -> dict[str, Resident]:
        """Returns the models that are in a device's memory and can run, by name, with their bytes and the time when they leave.
        Models that are still loading are left out."""
        found = {}
        kv_bytes = self._kv_bytes()
        for view in self.scheduler.snapshot():
            if view.state in residency.RUNNING:
                size_bytes = (view.weights_bytes + kv_bytes.get(view.name, 0)) * view.num_shares
                gpu_bytes = size_bytes if view.device.startswith("cuda") else 0
                leaves = self.unix_s(view.leaves_at) if view.leaves_at is not None else inf
                if view.leaves_at is None and not view.pinned and (view.active or view.queued):
                    leaves = time.time() + view.keep_alive_s  # at the earliest: it is busy now
                found[view.name] = Resident(size_bytes, gpu_bytes, leaves)
        return found

    def _kv_bytes(self) -> dict[str, int]:
        """Returns the bytes of KV that each model uses, by name. For a model that is split over devices, these are the bytes on one
        of the devices."""
        return {name: counts[0] for stats in self.engine_events.stats.values() for name, counts in stats.models.items()}

    def queue_rows(self) -> list[dict[str, Any]]:
        """Returns the rows of `hearth queue`: one for each request in the scheduler's queue, then one for each job of a text worker
        that takes long, whose request is not in that queue yet."""
        now = time.monotonic()
        rows = []
        for view in self.scheduler.queue():
            generation = self.dispatcher.open.by_id.get(view.request_id)
            rows.append(
                {
                    "for": "turn",
                    "request": view.request_id,
                    "id": generation.public_id if generation is not None else "",
                    "model": view.model,
                    "tenant": view.tenant,
                    "position": view.position,
                    "waiting_s": round(now - view.arrived, 3),
                    "resubmission": view.resubmission,
                }
            )
        no_request = {"for": "text", "request": None, "id": "", "position": 0, "resubmission": False}
        return rows + [no_request | work for work in self.text.rows()]

    def device_rows(self) -> list[dict[str, Any]]:
        views = {view.name: view for view in self.scheduler.devices()}
        rows = []
        for device in self.devices:
            worker, view = self.workers[device.name], views.get(device.name)
            problem = self.engine_rounds.problem(device.name) or worker.problem or self.kernels.problem(device.name)
            row: dict[str, Any] = {
                "name": device.name,
                "up": worker.up,
                "pid": worker.pid,
                "restarts": worker.restarts,
                "budget_bytes": device.budget_bytes,
                "uuid": device.uuid,
                "problem": problem,
                "kernels": self.kernels.row(device.name),
            }
            if view is not None:
                row |= {
                    "work_space_bytes": view.work_space_chunks * view.chunk_bytes,
                    "held_bytes": sum(view.held.values()) * view.chunk_bytes,
                    "lease_bytes": view.lease_chunks * view.chunk_bytes,
                    "loading": view.loading,
                    "problem": view.problem or problem,
                }
            rows.append(row)
        return rows

    def host_tier_row(self) -> dict[str, int]:
        """Returns the size of the host tier in bytes ("bytes"), and the bytes of each kind of content, such as "weights_bytes" and
        "free_bytes"."""
        view = self.scheduler.host_tier()
        return {"bytes": view.num_slots * view.slot_bytes} | {
            f"{kind}_bytes": num * view.slot_bytes for kind, num in view.slots.items()
        }

    def num_open(self) -> int:
        return len(self.dispatcher.open.by_id)

    def version(self) -> dict[str, Any]:
        return {"version": VERSION, "protocol": PROTOCOL_VERSION, "python": platform.python_version()}

    def status(self) -> dict[str, Any]:
        healthy, _ = self.health()
        ready, body = self.ready()
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "url": self.url,
            "control": self.config.control,
            "settings_files": self.settings.sources.files,
            "models_dir": self.config.models_dir,
            "models_dir_is_model": self.scanner.is_model,
            "cache_dir": self.config.cache_dir,
            "state_dir": self.config.state_dir,
            "uptime_s": round(time.time() - self.started_unix_s, 1),
            "healthy": healthy,
            "problems": [*self._problems(), *self.text.problems(), *self.audit.problems(), *self.traces.problems()],
            "ready": ready,
            "reason": body.get("reason", ""),
            "draining": self.draining,
            "requests": self.num_open(),
            "keys": self.keys is not None,
            "tenants": 0 if self.keys is None else len(self.keys.tenants),
            "num_keys": 0 if self.keys is None else self.keys.num_keys,
            "tls": None if self.tls is None else self.tls.row(),
            "reload_refused": self.reloads.row(),
            "state_not_saved": self.state_keeper.row(),
            "audit_dropped": self.audit.num_dropped,
            "output_tokens": sum(self.metric.generated_tokens.values()),
            "engine_restarts": sum(self.metric.engine_restarts.values()),
            "devices": self.device_rows(),
            "host_tier": self.host_tier_row(),
            "names": self.registry.names.rows(),
            "event_loop_stall_max_s": round(self.watch.stall_s, 6),
        }

    def why(self, name: str) -> dict[str, Any]:
        """Returns the history of a model or a request for `hearth why`, as {"name", "lines"}: the name under which it was found,
        and lines of text. name: a model's name, or a request's id. Raises HearthError not_found (404)."""
        request_id = self.dispatcher.open.request_id(name)
        asked = f"req-{request_id}" if request_id is not None else name
        lines = self.scheduler.why(asked)
        if not lines:
            lead, adapter = self.registry.names.lead(name), self.registry.names.adapter(name)
            if adapter is not None:
                lines, asked = adapter.lines(), adapter.base or name
            elif lead is not None:
                lines = lead.lines(name)
                asked = lead.chosen.name if lead.chosen is not None else name
            else:
                with contextlib.suppress(HearthError):
                    asked = self.registry.canonical(name)
            lines = [*lines, *(self.upstreams.why(asked) or self.scheduler.why(asked))]
        if lines:
            lines = [*lines, *self.warming.lines(asked)]
        if not lines:
            raise BadRequest("not_found", f"There is no model and no request {name!r}.", status=404, details={"name": name})
        if slow := self.kernels.sentence():
            lines = [*lines, slow]
        return {"name": asked, "lines": lines}

    # ---- health

    def health(self) -> tuple[bool, dict[str, object]]:
        """Returns whether the node is healthy, and the body of /healthz. A failed task that was started again is listed as a
        problem, but does not make the node unhealthy."""
        healthy, problems = not self.scheduler.health(), self._problems()
        return healthy, {"status": "failing" if not healthy else "degraded" if problems else "ok", "problems": problems}

    def _problems(self) -> list[str]:
        return [*self.scheduler.health(), *self.tasks.problems(), *self.rescans.problems()]

    def problem(self) -> str:
        """Returns why the node must be restarted, so that systemd's watchdog is not notified; "" if it is sound."""
        return "; ".join(map(str, self.scheduler.health()))

    def ready(self) -> tuple[bool, dict[str, object]]:
        engines = {name: "up" if worker.up else "down" for name, worker in self.workers.items()}
        if not self.listening:
            reason = "not listening"
        elif self.draining:
            reason = "draining"
        elif not any(worker.up for worker in self.workers.values()):
            reason = "no engine is up: " + ", ".join(engines)
        else:
            reason = ""
        return not reason, {"status": _READINESS[not reason], "reason": reason, "engines": engines}

    async def probe(self, limit_s: float) -> tuple[bool, dict[str, object]]:
        """Returns whether the node is ready and the body of the answer, as `ready` does, but also asks every engine that is up to
        compute a token. The node is ready only if at least one engine answers within limit_s."""
        good, body = self.ready()
        if not good:
            return good, body
        asked = [name for name, worker in self.workers.items() if worker.up]
        answers = await self.engine_events.probes.ask(asked, limit_s)
        good = any(milliseconds is not None for milliseconds in answers.values())
        reason = "" if good else f"no engine answered a probe within {limit_s:g} s: {', '.join(asked)}"
        return good, {**body, "status": _READINESS[good], "reason": reason, "probe_ms": answers}
