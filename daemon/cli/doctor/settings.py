"""Finds the settings to check: those that the running daemon reports, or else the configuration with which it would start."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from config import host_tier, load, paths
from config.device_names import host_of, is_local
from config.devices import NoGpus, device_budgets
from config.schema import NodeConfig
from config.settings_files import SUFFIX, folder_of, present_files
from config.units import parse_device
from daemon.cli.client import Client, CommandError
from daemon.cli.doctor.finding import OK, WARN, Finding
from daemon.errors import EXIT_USAGE
from daemon.gpu.inventory import Inventory, memories
from daemon.http import tls


@dataclass(slots=True, frozen=True)
class Settings:
    """The settings to check, and what the running daemon reports about itself.

    source: where the settings come from. pid: the running daemon's process id, 0 if none runs. models_dir: "" if unset. budgets:
    device -> bytes. uuids: cuda device -> UUID of its GPU. wants_gpu: whether cuda devices are configured, even if there is no
    driver. files: the settings files that were read, in order. tls: the certificate as in `hearth status`, or {"problem": why it
    cannot be used}; None: no certificate is set. hosts: the settings of other hosts that lend devices, by name; {} if a daemon
    runs. state_dir: "" if the daemon's version does not report it.

    The following are empty if no daemon runs. refused: why the daemon does not use the files' current content, "" if it does. lent:
    the daemon's status rows of the devices that other hosts lend it. problems: the problems that the daemon reports of itself.
    not_saved: why it cannot save pins and the like, "" if it can. audit_dropped: the number of acts since its start that its audit
    log lacks."""

    source: str
    pid: int
    models_dir: str
    budgets: dict[str, int]
    host_tier_bytes: int
    listen: str
    cache_dir: str
    uuids: dict[str, str] = field(default_factory=dict)
    wants_gpu: bool = False
    files: list[str] = field(default_factory=list)
    refused: str = ""
    tls: dict[str, Any] | None = None
    hosts: dict[str, dict[str, str]] = field(default_factory=dict)
    lent: list[dict[str, Any]] = field(default_factory=list)
    state_dir: str = ""
    problems: list[str] = field(default_factory=list)
    not_saved: str = ""
    audit_dropped: int = 0


def settings(client: Client, path: str, memory_bytes: int, inventory: Inventory) -> Settings:
    """Returns the settings to check. path: a configuration file to read them from; "": the running daemon is asked, and if there is
    none, the service's file or else the defaults are taken. memory_bytes: the machine's memory. Raises CommandError for a
    configuration that is not valid."""
    if not path:
        try:
            return of_status(client.get("/control/v1/status"))
        except CommandError:
            path = paths.SERVICE_CONFIG if os.path.exists(paths.SERVICE_CONFIG) else ""
    try:
        config = load.load(path or None)
        without_gpus = [text for text in config.device if not is_local(parse_device(text)[0], "cuda")]
        wants_gpu = len(without_gpus) < len(config.device)
        devices = []
        named = config.device if not wants_gpu or _told(inventory) else without_gpus  # a missing driver is a finding, not an error
        if named or not wants_gpu:
            known = msgspec.structs.replace(config, device=named)
            devices = device_budgets(known, memory_bytes, path or "defaults", partial(memories, inventory))
        tier_bytes = host_tier.resolved(config, devices, memory_bytes, path or "defaults").host_tier_bytes
    except load.ConfigError as error:
        details = {"code": "invalid_config", "message": f"{error}; correct it first", "details": {}}
        raise CommandError(EXIT_USAGE, details) from None
    assert isinstance(tier_bytes, int)
    budgets = {device.name: device.budget_bytes for device in devices}
    uuids = {device.name: device.uuid for device in devices if device.uuid}
    return Settings(
        path or "defaults",
        0,
        config.models_dir,
        budgets,
        tier_bytes,
        config.listen,
        config.cache_dir,
        uuids,
        wants_gpu,
        present_files(path) if path else [],
        tls=_tls(config, path or "defaults"),
        hosts={name: msgspec.structs.asdict(host) for name, host in config.hosts.items()},
        state_dir=config.state_dir,
    )


def _tls(config: NodeConfig, source: str) -> dict[str, Any] | None:
    try:
        pair = tls.load(config, source)
    except load.ConfigError as error:
        return {"problem": str(error)}
    return None if pair is None else pair.row()


def _told(inventory: Inventory) -> bool:
    try:
        inventory.gpus()
    except NoGpus:
        return False
    return True


def of_status(status: dict[str, Any]) -> Settings:
    """Returns the settings of the running daemon. status: its answer to `hearth status --json`."""
    return Settings(
        source=f"hearthd {status['version']}, pid {status['pid']}",
        pid=status["pid"],
        models_dir=status.get("models_dir", ""),
        budgets={row["name"]: row["budget_bytes"] for row in status["devices"]},
        host_tier_bytes=status["host_tier"]["bytes"],
        listen=status["url"],
        cache_dir=status.get("cache_dir") or paths.cache_dir(),
        uuids={row["name"]: row["uuid"] for row in status["devices"] if row.get("uuid")},
        wants_gpu=any(row.get("uuid") for row in status["devices"]),
        files=status.get("settings_files", []),
        tls=status.get("tls"),
        refused=(status.get("reload_refused") or {}).get("message", ""),
        lent=[row for row in status["devices"] if host_of(row["name"])],
        state_dir=status.get("state_dir", ""),
        problems=status.get("problems", []),
        not_saved=(status.get("state_not_saved") or {}).get("message", ""),
        audit_dropped=status.get("audit_dropped", 0),
    )


def find_problems(against: Settings) -> list[Finding]:
    """Returns a finding for each problem that the running daemon reports of itself, such as an audit log that cannot be written. If
    the audit log can be written again but lacks entries since the daemon's start, there is a finding on that, too."""
    found = [Finding("hearthd", WARN, problem, "see `hearth status` and hearthd's log") for problem in against.problems]
    if against.audit_dropped and not any(problem.startswith("audit_log ") for problem in against.problems):
        missing = f"{against.audit_dropped} acts are missing in it since hearthd's start; it is written now"
        found.append(Finding("audit log", WARN, missing, "its lines `dropped` say where, hearthd's log why"))
    return found


def find_files(against: Settings) -> Finding:
    """Returns the finding on the settings files: which files are read, which files of the folder conf.d are not, and whether the
    running daemon has refused their current content."""
    if against.refused:
        return Finding("settings", WARN, f"older ones are in use: {against.refused}", "correct it; it is read again by itself")
    if not against.files:
        return Finding("settings", OK, "no file is read")
    unread: list[str] = []
    with contextlib.suppress(OSError):
        folder = folder_of(against.files[0])
        unread = [name for name in sorted(os.listdir(folder)) if os.path.join(folder, name) not in against.files]
    others = f"; not read, as their names do not end in {SUFFIX} or are hidden: {', '.join(map(ascii, unread))}" if unread else ""
    return Finding("settings", OK, ", ".join(against.files) + others)
