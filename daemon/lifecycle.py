"""Runs the daemon from start to stop: the order in which its parts start, signals, draining and reloading."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from config import host_tier
from config import load as config_load
from config import reload as config_reload
from config.devices import device_budgets
from config.provenance import Sources
from config.schema import DeviceBudget, NodeConfig
from config.settings_files import folder_of, present_files
from config.units import format_bytes, machine_memory_bytes
from daemon.access.admission import Access
from daemon.access.cors import Cors
from daemon.access.expiry import ExpiryLog
from daemon.api.app import make_app, make_runner
from daemon.contracts import Guarded
from daemon.engines.carve_outs import isolated_models
from daemon.engines.fork_client import ForkServer
from daemon.errors import BadRequest, NotNow
from daemon.gpu.driver import Driver
from daemon.gpu.inventory import Inventory, memories
from daemon.http import handed_over, listeners, sockets, tls
from daemon.http.acceptor import Acceptor, Crowd, Room
from daemon.http.client_addresses import ClientAddresses, too_many
from daemon.http.connection import Runner
from daemon.http.last_bytes import LastBytes
from daemon.http.serving import listen, refuse_request
from daemon.node.node import NodeParts, scheduler_settings
from daemon.operate import handover, named_files
from daemon.operate.control import make_control_runner
from daemon.operate.health import NodeHealth
from daemon.operate.named_files import NamedFiles
from daemon.operate.overload import refuse_command
from daemon.operate.page_snapshot import snapshot
from daemon.page.feed import PageFeed
from daemon.process import logs, passed_descriptors
from daemon.process.fd_store import FdStore
from daemon.process.file_signature import Signature, signature
from daemon.process.file_watch import FileWatch, folders_of, settled
from daemon.process.stall_report import StallReport
from daemon.process.systemd_notify import Notifier
from daemon.process.version import VERSION
from daemon.record import state_lock
from daemon.record.state import NodeState
from daemon.scanning.folder_watch import FolderWatch
from daemon.scanning.scanner import ModelScanner
from loader.files import open_files
from loader.models.catalog import Checkpoint
from loader.ready_threads import ReadyThreads
from scheduler.node import events

log = logging.getLogger("hearthd")
GC_AFTER_OBJECTS = 20_000  # new objects between two garbage collections; each collection visits only these
SWITCH_INTERVAL_S = 0.0005  # a thread that reads headers must not keep the loop waiting for Python's default 5 ms
FLUSH_LIMIT_S = 2.0  # how long handlers may take to write their last bytes
SEND_LIMIT_S = 10.0  # how long clients may take to read their last bytes, but not beyond the time that is left of the drain
JUST_NOW_S = 10.0
RESTART_SIGNAL = signal.SIGUSR2  # the unit's RestartKillSignal: a stop that another start follows at once
TEAR_DOWN_S = 10.0  # how long the stop may take beyond drain_timeout_s
# Kinds of calls in threads, besides those for an engine, that a dead disk or driver may keep for ever. Of each kind, and for each
# engine, one call is made at a time. They save the state or the day's tokens, register models, reload, ask for GPUs, start the text
# helper, wait for the end of the last one, or start a scanning process.
MAY_HANG = 8
NUM_FREE = 4  # threads for calls that return
WORK_END_S = 5.0  # how long work beside the loop may go on after the last step of the stop


class DaemonRun:
    """One run of the daemon, from its start to its stop. devices: the node's devices, with their budgets. config_path: the settings
    file; None: there is none. flags: the values given on the command line, which also count at each reload. files: the contents of
    the files that the settings name, such as keys and certificates. inventory: reports the GPUs. forks: the fork server of engines,
    if it has been started already."""

    def __init__(
        self,
        config: NodeConfig,
        devices: Sequence[DeviceBudget],
        config_path: str | None,
        flags: Mapping[str, Any],
        files: NamedFiles,
        inventory: Inventory | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        self._inventory, self._forks = inventory or Driver(), forks
        self._config, self._devices, self._config_path, self._flags = config, devices, config_path, flags
        self._named = files  # contents at the start
        self._keys, self._tls = files.keys, files.tls
        self._certificate_log = tls.CertificateLog()
        self._acceptors: list[Acceptor] = []
        self._accesses: list[Access] = []  # the rules of the listeners that require keys
        self._stop = asyncio.Event()
        self._stop_signal = ""
        self._stop_now = asyncio.Event()
        self._last_bytes: LastBytes | None = None  # at a stop that is no restart
        self._last_bytes_due_s = 0.0  # by the loop's clock
        self._reload_lock = asyncio.Lock()
        self._notify = Notifier()
        self._watch: FileWatch | None = None
        self._folder_watch: FolderWatch | None = None
        self._own_sockets: list[str] = []  # paths to remove at the end; systemd removes those that it made
        self._read = self._present()  # the files at the last reading
        self._expiries = ExpiryLog()
        self._by_itself: tuple[float, list[str]] = (-JUST_NOW_S, [])  # time and keys of the last automatic reload

    async def run(self) -> int:
        """Starts all parts, serves until a signal stops the daemon, and stops the parts. Returns the exit code 0. Raises
        sockets.SocketError or OSError if the daemon cannot start."""
        loop = asyncio.get_running_loop()
        state = NodeState(self._config.state_dir)
        state.load()
        passed_fds = passed_descriptors.take()
        store = FdStore(self._notify, passed_fds)
        left = handed_over.take(store)
        passed = sockets.inherited(passed_fds)
        try:
            control_sockets = self._control_sockets(passed)
            http = listeners.bind(self._config, passed, self._keys is not None)
            state_lock.lock(self._config.state_dir)
        except (sockets.SocketError, OSError):
            self._remove_sockets()
            raise
        scanner = ModelScanner()
        checkpoints = await self._checkpoints_to_isolate(scanner)
        sources = Sources(self._config_path, self._flags)
        node = self._node = NodeParts(
            self._config, self._devices, state, self._inventory, scanner, checkpoints, store, sources, self._forks
        )
        node.reload = self.reload_as_asked
        node.keys, node.tls = self._keys, self._tls
        node.audit.use(self._config.audit_log, self._config.audit_requests)
        node.traces.use(self._config.traces, self._named.trace_headers)
        for number in (signal.SIGTERM, signal.SIGINT, RESTART_SIGNAL):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        for worker in node.workers.values():
            worker.start()  # engines import their libraries while the models folder is read
        node.gpu_watch.start()
        node.engine_rounds.start()
        feed = PageFeed(lambda: snapshot(node), node.ring)
        api = self._http(node, feed, self._config.listen, lambda endpoint: not (http.admin and endpoint.for_operators))
        admin = self._http(
            node,
            feed,
            self._config.admin_listen,
            lambda endpoint: endpoint.for_operators or endpoint.open or endpoint.watching,
            ask=http.admin_asks_key,
            cors=False,
        )
        control = make_control_runner(node, FLUSH_LIMIT_S)
        status = make_control_runner(node, FLUSH_LIMIT_S, read_only=True)
        node.upstreams.use(self._config, self._named.upstream_keys)
        node.tasks.start("looking at other servers", node.upstreams.watch)
        node.tasks.start("looking for keys that expire", lambda: self._expiries.run(lambda: self._keys))
        node.tasks.start("looking for the certificate's end", self._look_at_certificate)
        node.tasks.start("saving what tenants used", node.usage_file.run)
        node.tasks.start("the watchdog's task", lambda: self._notify.watchdog(node.problem))
        try:
            self._folder_watch = FolderWatch(node.rescans.changed)
            scanner.looked_into = self._folder_watch.look_at
            node.adapters.changed = node.rescans.changed
            await node.rescan()
            node.registry.unknown_models()
            node.take_up_kept()
            for worker in node.workers.values():
                worker.configure()
            node.tasks.start("looking for models", node.rescans.run)
            node.tasks.start("watching the models folder", self._folder_watch.run)
            await self._follow_files()
            room, refuse = Room(open_files.limit()), refuse_request(node.metric.count_answer)
            listening = self._acceptors
            listening += await listen(control, control_sockets[sockets.CONTROL], 64, room.operators, refuse_command)
            listening += await listen(status, control_sockets[sockets.STATUS], 64, room.watchers, refuse_command)
            # where only this machine reaches the second listener, it asks for no key and needs no TLS
            secured = self._tls_context if http.admin_asks_key else lambda: None
            listening += await listen(admin, http.admin, 64, room.watchers, refuse, tls=secured)
            addresses = ClientAddresses(lambda: node.settings.config.max_connections_per_address)
            crowd = Crowd(addresses, refuse_request(node.metric.count_answer, too_many))
            main = await listen(api, http.main, sockets.BACKLOG, room.clients, refuse, crowd, self._tls_context)
            listening += main
            await handover.go_on(node, left, {"main": (api, addresses), "admin": (admin, None)})
            node.url = sockets.url_of(http.main[0], "http" if self._tls is None else "https")
            node.listening = True
            self._announce(node)
            node.tasks.start("loading models ahead", node.warming.run)
            node.audit.write("start", version=VERSION, pid=os.getpid(), url=node.url, config=self._config_path)
            # what exists now lives to the end, so the garbage collector need not walk it while streams run
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_AFTER_OBJECTS, 20, 20)
            gc.enable()  # hearthd.commands.hearthd turned it off for the start
            await self._stop.wait()
            self._notify.stopping(self._config.drain_timeout_s + TEAR_DOWN_S)
            if sockets.HTTP in passed:
                for acceptor in main:  # systemd keeps the sockets open, so new connections wait for the next hearthd
                    acceptor.stop()
            if self._stop_signal == RESTART_SIGNAL.name and store.usable:
                log.info("%s: restarting", self._stop_signal)
                for acceptor in main:
                    await acceptor.connected(handover.FLUSH_S)
                if self._tls is not None:  # TLS keys exist only here, so these answers cannot be handed over
                    node.background.hold()  # background responses have no connection, so the stop does not wait for them
                    await self._let_end(node)
                await handover.hand_over(node, store, {"main": api, "admin": admin})
                self._fail_rest(node)
            else:
                log.info("%s: draining for at most %g s", self._stop_signal, self._config.drain_timeout_s)
                self._last_bytes = LastBytes([api, admin])
                drained_by_s = loop.time() + self._config.drain_timeout_s
                await self._drain(node)
                feed.close()
                left_s = min(SEND_LIMIT_S, max(FLUSH_LIMIT_S, drained_by_s - loop.time()))
                self._last_bytes_due_s = loop.time() + left_s
                await self._wait_for_clients()
        finally:
            node.listening = False
            feed.close()
            node.audit.write("stop", signal=self._stop_signal)
            await self._tear_down(node, {"http": api, "admin": admin, "control": control, "status": status})
        store.stopped_in_order()
        log.info("stopped")
        return 0

    def _announce(self, node: NodeParts) -> None:
        for device in node.devices:
            alone = f", set aside for {device.model}" if device.model else ""
            log.info("device %s: %s for weights, KV and work space%s", device.name, format_bytes(device.budget_bytes), alone)
        if self._tls is not None:
            certificate = self._tls.certificate
            log.info("TLS: certificate %s, %d days left", certificate.shown, certificate.days_left(time.time()))
        with contextlib.suppress(BrokenPipeError):
            print(f"hearthd {VERSION} serves {node.url} control {self._config.control}", flush=True)
        self._notify.ready(f"serves {node.url}")

    def _http(
        self,
        node: NodeParts,
        feed: PageFeed,
        listen: str,
        serves: Callable[[Guarded], bool],
        *,
        ask: bool = True,
        cors: bool = True,
    ) -> Runner:
        """Returns the runner of the HTTP application of one listener. listen: its HOST:PORT. serves: tells whether the listener
        serves an endpoint. ask: whether it requires keys, if any are set. cors: whether pages of other sites may use it as far as
        the settings allow."""
        rules = Cors(node.settings) if cors else None
        access = Access(self._keys if ask else None, node.settings, listen, node.metric.count_refused, rules)
        if access.keys is not None:
            self._accesses.append(access)
        app = make_app(
            node.dispatcher,
            node.registry,
            node.text,
            node.settings,
            NodeHealth(node),
            access,
            serves,
            feed,
            node.metric.count_answer,
            node.stored,
            node.quotas,
            node.audit,
            lambda: node.traces.tracer,
            node.upstreams,
            node.adapters,
            node.background,
        )
        return make_runner(app, FLUSH_LIMIT_S)

    def _control_sockets(self, passed: Mapping[str, list[socket.socket]]) -> dict[str, list[socket.socket]]:
        """Returns the listening control and status sockets by name: those that systemd passed, or else new ones at the configured
        paths. passed: sockets by their FileDescriptorName=. Raises SocketError."""
        found = {}
        for name, path, mode in (
            (sockets.CONTROL, self._config.control, 0o660),
            (sockets.STATUS, self._config.status_socket, 0o666),
        ):
            found[name] = passed.get(name, [])
            if not found[name] and path:
                found[name] = [sockets.bind_control(path, mode)]
                self._own_sockets.append(path)
        return found

    def _remove_sockets(self) -> None:
        for path in self._own_sockets:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    async def _checkpoints_to_isolate(self, scanner: ModelScanner) -> dict[str, Checkpoint]:
        """Returns the checkpoints in the models folder by name, from whose files the carve-outs of isolated models are sized; {} if
        no model is isolated. A folder that cannot be read counts as empty here; the first regular scan reports it."""
        if isolated_models(self._config):
            with contextlib.suppress(OSError):
                return await scanner.scan(self._config.models_dir, {})
        return {}

    # ---- reload

    def _files(self) -> list[str]:
        """Returns the paths of the files that a reload reads: settings, and the files that they name."""
        settings_files = present_files(self._config_path) if self._config_path else []
        return [*settings_files, *named_files.paths(self._config)]

    def _present(self) -> tuple[list[str], Signature]:
        """Returns the files that a reload reads and their signature. The value differs from an earlier one if a file was added,
        removed or changed. Blocks while a disk hangs, so that it is called in a thread once the daemon runs."""
        files = self._files()
        return files, signature(files)

    def _folders(self) -> frozenset[str]:
        """Returns the folders of the files that a reload reads, among them conf.d once it exists. Blocks, as `_present` does."""
        folders = folders_of(self._files())
        if self._config_path and os.path.isdir(folder := folder_of(self._config_path)):
            folders |= {os.path.abspath(folder), os.path.realpath(folder)}
        return folders

    async def _follow_files(self) -> None:
        """Watches the folders of the files that a reload reads, so that a changed file makes the daemon reload. An earlier watch is
        replaced if the folders differ."""
        folders = await asyncio.to_thread(self._folders)
        if self._stop.is_set():
            return
        old = self._watch
        if old is None or old.is_stale or old.folders != folders:
            self._watch = FileWatch(folders, self._on_file_changed)
            if old is not None:
                self._node.tasks.once("ending a watch of files", asyncio.to_thread(old.stop))

    def _on_file_changed(self) -> None:
        if not self._stop.is_set():
            self._node.tasks.once("reloading", self._reload_changed())

    async def _reload_changed(self) -> None:
        """Reloads if a file has changed that a reload reads, once it stays as it is."""
        async with self._reload_lock:
            await self._follow_files()
        if await self._has_changed():
            await settled(partial(asyncio.to_thread, self._present))
            if await self._has_changed() and not self._stop.is_set():  # else a reload on request has read it already
                await self._reload_logged()

    async def _has_changed(self) -> bool:
        """Returns whether a file that a reload reads has changed since the last reload. Waits for one that is under way."""
        async with self._reload_lock:
            return await asyncio.to_thread(self._present) != self._read

    def _tls_context(self) -> ssl.SSLContext | None:
        return self._tls.context if self._tls is not None else None

    async def _look_at_certificate(self) -> None:
        """Periodically warns if the TLS certificate expires soon, and reloads if a file of the settings has changed. The second is
        needed for some network mounts, where the kernel reports no changes."""
        while True:
            self._certificate_log.tell(self._tls, time.time())
            await asyncio.sleep(tls.LOOK_EVERY_S)
            self._on_file_changed()

    def _on_hangup(self) -> None:
        self._node.tasks.once("reloading", self._reload_logged())

    async def _reload_logged(self) -> None:
        with contextlib.suppress(BadRequest):  # reload() has logged it
            if applied := (await self.reload())["applied"]:
                self._by_itself = time.monotonic(), applied

    async def reload_as_asked(self) -> dict[str, Any]:
        """Reloads on an operator's request, and returns the result of `reload`. If the daemon has already reloaded by itself within
        the last seconds and nothing has changed since, the result lists what that reload has applied. The reload goes on even if
        the caller is cancelled, because one that ends in the middle has told the scheduler of some of the changed models only."""
        result = await asyncio.shield(asyncio.ensure_future(self.reload()))
        at, applied = self._by_itself
        if not result["applied"] and time.monotonic() - at < JUST_NOW_S:
            result["applied"] = applied
        return result

    async def reload(self) -> dict[str, Any]:
        """Reads the settings and the files that they name again, and applies them. Returns the lists `applied` and `needs_restart`
        of dotted keys, `unknown_models`, and `hidden_names`: aliases and entries of [names] that equal a model's own name. Raises
        HearthError invalid_config, which names file and key, if anything is not valid; then nothing has changed."""
        async with self._reload_lock:
            node = self._node
            if node.listening:
                self._notify.reloading()
            try:
                return await self._reload(node)
            finally:
                if not self._stop.is_set():
                    await self._follow_files()
                    if node.listening:
                        self._notify.ready(f"serves {node.url}")

    async def _reload(self, node: NodeParts) -> dict[str, Any]:
        # in threads, because a disk may hang, and a driver may never answer while a GPU has a fault
        self._read = await asyncio.to_thread(self._present)
        source = self._config_path if self._config_path and "device" not in self._flags else "flags"
        try:
            new = await asyncio.to_thread(config_load.load, self._config_path, self._flags)
            gpus = partial(memories, self._inventory)
            devices = await asyncio.to_thread(device_budgets, new, machine_memory_bytes(), source, gpus)
            new = host_tier.resolved(new, devices, machine_memory_bytes(), source)
            plan = config_reload.plan(node.config, new)
            files = await asyncio.to_thread(named_files.read, plan.effective, self._config_path, self._flags)
            if files.tls is None:
                await asyncio.to_thread(named_files.read_tls, new, self._config_path, self._flags)  # a restart will want it
        except config_load.ConfigError as error:
            raise node.reloads.refuse(error) from None
        try:
            await node.rescan(plan.effective)
        except OSError as error:
            folder = plan.effective.models_dir
            refused = config_load.ConfigError(source, "models_dir", f"{folder} cannot be read: {error.strerror}")
            raise node.reloads.refuse(config_load.located_setting(refused)) from None
        node.settings.config = node.dispatcher.config = self._config = plan.effective
        node.settings.sources = Sources(self._config_path, self._flags)
        node.settings.needs_restart = plan.needs_restart
        known, pair = files.keys, files.tls
        if pair is not None and self._tls is not None and pair.digest != self._tls.digest:
            plan.applied.append(f"the certificate {pair.certificate.shown}")
            self._tls = node.tls = pair  # for new connections; those that are open go on with theirs
        node.scheduler.reconfigure(scheduler_settings(plan.effective))
        node.upstreams.use(plan.effective, files.upstream_keys)
        changed_keys = known.changes_from(self._keys) if known is not None and self._keys is not None else []
        if changed_keys:
            plan.applied.append("the content of keys_file")
        self._keys = node.keys = known
        for access in self._accesses:
            access.keys = known
        node.reloads.applied()
        logs.set_up(plan.effective.log_level)
        log.info("reloaded; applied: %s", ", ".join(plan.applied) or "nothing changed")
        if known is not None:
            known.warn_if_empty(plan.effective.keys_file)
        self._expiries.tell(known, time.time())
        self._certificate_log.tell(self._tls, time.time())
        if plan.needs_restart:
            log.warning("these keys need a restart: %s", ", ".join(plan.needs_restart))
        node.audit.write("reload", applied=plan.applied, needs_restart=plan.needs_restart, tenants=changed_keys)
        node.audit.use(plan.effective.audit_log, plan.effective.audit_requests)
        node.traces.use(plan.effective.traces, files.trace_headers)
        node.ring.add("reload", applied=plan.applied, needs_restart=plan.needs_restart)
        unknown = node.registry.unknown_models()
        about = {"unknown_models": unknown, "hidden_names": list(node.registry.names.hidden)}
        return {"ok": True, "applied": plan.applied, "needs_restart": plan.needs_restart} | about

    # ---- stop

    def _on_stop_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop.is_set():
            log.warning("%s again: stopping at once", name)
            self._stop_now.set()
        else:
            self._stop_signal = name
            self._stop.set()

    async def _drain(self, node: NodeParts) -> None:
        """Accepts no new requests and waits for the open ones, at most drain_timeout_s seconds or until a second stop signal.
        Requests that are still open after that fail with server_restarting."""
        await self._let_end(node)
        self._fail_rest(node)

    async def _let_end(self, node: NodeParts) -> None:
        """Accepts no new requests, and waits until the open ones have ended, but at most drain_timeout_s seconds and not beyond a
        second stop signal."""
        self._take_no_more(node)
        empty = node.dispatcher.open.when_empty()
        now = asyncio.ensure_future(self._stop_now.wait())
        either: list[asyncio.Future[Any]] = [empty, now]
        await asyncio.wait(either, timeout=self._config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()

    def _take_no_more(self, node: NodeParts) -> None:
        node.dispatcher.post(events.DrainRequested(now=time.monotonic(), cause="shutdown", stopping=True))

    def _fail_rest(self, node: NodeParts) -> None:
        """Fails all open requests with server_restarting. Requests whose prompts are still being tokenized are refused when they
        arrive."""
        self._take_no_more(node)
        error = NotNow("server_restarting", "The server is restarting; send the request again.", retry_after_s=5.0)
        num_cut = node.dispatcher.fail_all(error)
        if num_cut:
            log.warning("%d requests did not end in time and were told server_restarting", num_cut)

    async def _wait_for_clients(self) -> None:
        """Waits at a stop until the clients have received what was written for them. Ends early at the time _last_bytes_due_s (the
        event loop's time) or at a second stop signal."""
        if self._last_bytes is None:
            return
        num_cut = await self._last_bytes.wait(self._last_bytes_due_s - asyncio.get_running_loop().time(), self._stop_now)
        if num_cut:
            log.warning("%d connections still had unsent bytes when the stop no longer waited for them", num_cut)

    async def _tear_down(self, node: NodeParts, servers: Mapping[str, web.AppRunner]) -> None:
        """Stops every part of the daemon, the HTTP server of the API first. If stopping one part fails or takes too long, the
        others are stopped all the same. servers: the HTTP servers by name, that of the API first."""
        node.engine_rounds.stop()
        for acceptor in self._acceptors:
            acceptor.stop()
        steps = [(name, server.cleanup()) for name, server in servers.items()]
        steps[1:1] = [("engines", self._stop_engines(node))]
        steps += [("connections to other servers", node.upstreams.close())]
        steps += [("text", node.text.close()), ("scanning", node.scanner.close()), ("state", node.state_keeper.close())]
        steps += [("the fork server", node.forks.end())]
        steps += [("what tenants used", node.usage_file.save()), ("the audit log", node.audit.close())]
        steps += [("traces", node.traces.close())]
        for name, step in steps:
            try:
                async with asyncio.timeout(2 * FLUSH_LIMIT_S + 4):
                    await step
            except Exception:
                log.exception("stopping %s failed", name)
        await self._wait_for_clients()  # for what was written as the servers closed
        if self._last_bytes is not None:
            self._last_bytes.end()
        for worker in node.workers.values():
            worker.kill_now()
        node.watch.close()
        node.gpu_watch.stop()
        node.host_memory.close()
        if node.exchange is not None:
            node.exchange.close()
        node.tasks.cancel()
        for watch in (self._folder_watch, self._watch):
            if watch is not None:
                await asyncio.to_thread(watch.stop)
        self._remove_sockets()

    async def _stop_engines(self, node: NodeParts) -> None:
        if self._stop_now.is_set():
            for worker in node.workers.values():
                worker.kill_now()
        await asyncio.gather(*(worker.stop() for worker in node.workers.values()))


def serve(
    config: NodeConfig,
    devices: Sequence[DeviceBudget],
    config_path: str | None,
    flags: Mapping[str, Any],
    files: NamedFiles,
    inventory: Inventory | None = None,
    forks: ForkServer | None = None,
) -> int:
    """Runs the daemon until it is told to stop, and returns the exit code: 0 if it stopped when told to, 1 if it could not start.
    config_path: the settings file; None: there is none. files: the contents of the files that the settings name. inventory: reports
    the GPUs. forks: the fork server of engines, if it has been started already."""
    import uvloop

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    faulthandler.enable()  # at a watchdog's SIGABRT the log shows where each thread was

    async def main() -> int:
        num_engines = len(devices) + len(isolated_models(config))
        threads = ReadyThreads("work beside the loop", num_engines + MAY_HANG + NUM_FREE)
        asyncio.get_running_loop().set_default_executor(threads)
        with contextlib.closing(StallReport()):
            code = await DaemonRun(config, devices, config_path, flags, files, inventory, forks).run()
        # their end gives back the memory for the thread that the runner starts to end a loop's executor
        if num_hung := threads.end(WORK_END_S):
            log.error("calls of a disk, a driver or another process that do not return: %d; hearthd ends without them", num_hung)
            os._exit(code)  # all else has been stopped, and only the end of the process ends such a call
        return code

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    except (sockets.SocketError, OSError) as error:
        print(f"hearthd: {error}", file=sys.stderr)
        return 1
    finally:
        if forks is not None:  # if the node was never made, nothing else stops the fork server
            forks.give_up()
