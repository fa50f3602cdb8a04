"""Runs `hearth doctor`, with or without a running daemon."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from daemon.cli.client import Client
from daemon.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from daemon.cli.doctor.finding import Finding
    from daemon.cli.doctor.settings import Settings


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        default="",
        help="check against this file (default: what the daemon runs with, else the service's)",
    )
    parser.add_argument("--models", metavar="DIR", default="", help="look at this models folder")


def doctor(client: Client, options: argparse.Namespace) -> int:
    from config.units import machine_memory_bytes
    from daemon.cli.doctor.finding import FAIL
    from daemon.cli.doctor.settings import settings
    from daemon.gpu.driver import Driver

    memory_bytes = machine_memory_bytes()
    against = settings(client, options.config, memory_bytes, Driver())
    findings = examined(against, os.path.abspath(options.models) if options.models else against.models_dir, memory_bytes)
    if options.json:
        print(json.dumps({"settings": asdict(against), "findings": [asdict(one) for one in findings]}, indent=1))
    else:
        print(f"checked against {against.source}\n{text(findings)}")
    return EXIT_FAILED if any(one.level == FAIL for one in findings) else EXIT_OK


def text(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{one.level:4} · {one.check}: {one.found}" + (f" · {one.change}" if one.change else "") for one in findings)


def examined(against: Settings, models_dir: str, memory_bytes: int) -> list[Finding]:
    """Runs all checks and returns their findings, in the order in which they are shown. against: the settings to check. models_dir:
    the models folder to look at. memory_bytes: the machine's memory."""
    from daemon.cli.doctor import gpu, hosts, memory, network, packages, settings, storage, system
    from daemon.cli.doctor.finding import OK, Finding
    from daemon.gpu.driver import Driver

    limits, whose = _limits(against.pid)
    devices = [*against.budgets, *(["cuda:0"] if against.wants_gpu else [])]  # without a driver there are no budgets for GPUs
    return [
        settings.find_files(against),
        *settings.find_problems(against),
        *packages.find_packages(devices),
        system.kernel(os.uname().release),
        system.find_processor(system.environment_of(against.pid or os.getpid())),
        gpu.find_driver(against.wants_gpu),
        *gpu.find_devices(Driver(), against.uuids, against.budgets, is_running=bool(against.pid)),
        system.find_compiler(against.wants_gpu),
        system.find_cache_folder(against.cache_dir, checks_writing=not against.pid),
        *([storage.find_state_folder(against.state_dir, against.not_saved)] if against.state_dir else []),
        memory.budgets(against.budgets, against.host_tier_bytes, memory_bytes),
        memory.find_service_limit(against.budgets, against.host_tier_bytes, against.pid, len(os.sched_getaffinity(0))),
        memory.find_huge_pages(),
        system.locked_memory(limits, whose, against.wants_gpu),
        system.open_files(limits, whose),
        *storage.find_storage(models_dir),
        network.certificate(against.tls),
        *map(hosts.told, against.lent),
        *(hosts.find(name, **host) for name, host in against.hosts.items()),
        Finding("HTTP address", OK, f"hearthd serves {against.listen}") if against.pid else network.find_port(against.listen),
    ]


def _limits(pid: int) -> tuple[dict[str, int], str]:
    """Returns the limits of the running daemon, and words that say whose limits they are. The limits are soft limits by name, as
    from soft_limits, except that for open files it is the hard limit. pid: the daemon's process id. If it is 0, or the daemon's
    limits may not be read, they are the limits of this process, which a daemon started from the same shell would have."""
    from daemon.cli.doctor.system import hard_open_files, soft_limits

    known = {f"/proc/{pid}/limits": "hearthd's"} if pid else {}
    for path, whose in {**known, "/proc/self/limits": "this shell's; the service's unit has its own"}.items():
        try:
            with open(path, encoding="ascii") as file:
                text = file.read()
            return soft_limits(text) | {"Max open files": hard_open_files(text)}, whose
        except OSError:
            continue
    return {}, "unknown"
