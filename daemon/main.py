"""The command line of `hearthd`. Exit codes: 0 stopped when told to, 1 could not start, 2 wrong flags or configuration."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from config import host_tier, reference
from config import load as config_load
from config.devices import device_budgets
from config.schema import NodeConfig
from config.settings_files import present_files
from config.units import format_bytes, machine_memory_bytes
from daemon.engines.fork_client import ForkServer
from daemon.errors import EXIT_OK, EXIT_USAGE
from daemon.gpu.driver import Driver
from daemon.gpu.inventory import Inventory, memories, remarks
from daemon.process import installation
from daemon.process.arguments import ArgumentParser
from daemon.process.version import VERSION
from engine.host.processor import UnknownFeature, this_processor
from loader.files import open_files

FEW_OPEN_FILES = 1024  # each connection takes one
_METAVARS = {
    "models_dir": "DIR",
    "listen": "HOST:PORT",
    "control": "SOCKET",
    "status_socket": "SOCKET",
    "keys_file": "FILE",
    "audit_log": "FILE",
    "admin_listen": "HOST:PORT",
    "tls_certificate": "FILE",
    "tls_key": "FILE",
    "tls_client_ca": "FILE",
    "allowed_hosts": "NAME",
    "device": "NAME=BUDGET",
}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, with a flag for every key of the node's settings that is not a table. Values of flags
    stay text; config.load converts them."""
    parser = ArgumentParser(prog="hearthd", description="Serves the models of one folder over the OpenAI API.")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file; the files conf.d/*.toml beside it win over it, and flags over both"
    )
    parser.add_argument("--check-config", action="store_true", help="check flags and file, print what would run, and end")
    parser.add_argument("--version", action="version", version=f"hearthd {VERSION}")
    for name, default, unit, _, description in reference.fields(NodeConfig):
        if name in reference.TABLES:
            continue
        text = description.replace("%", "%%")
        if isinstance(default, bool):
            parser.add_argument(config_load.flag_name(name), dest=name, action="store_true", default=None, help=text)
            continue
        if default not in ("", None, []):
            text += f" (default: {default}{' ' + unit if unit and not isinstance(default, str) else ''})"
        action = "append" if isinstance(default, list) else "store"
        metavar = _METAVARS.get(name, unit.upper() if unit else "VALUE")
        parser.add_argument(config_load.flag_name(name), dest=name, action=action, metavar=metavar, help=text)
    return parser


def main(argv: Sequence[str] | None = None, inventory: Inventory | None = None) -> int:
    """Runs `hearthd` with these command-line arguments (None: those of the process) and returns the exit code: 0 stopped when told
    to, 1 could not start, 2 wrong flags or configuration. inventory: reports the GPUs; None: the driver does."""
    inventory = inventory or Driver()
    options: dict[str, Any] = vars(make_parser().parse_args(argv))
    path, check = options.pop("config"), options.pop("check_config")
    flags = {key: value for key, value in options.items() if value is not None}
    source = path or "flags"
    forks: ForkServer | None = None
    try:
        config = config_load.load(path, flags)
        devices = device_budgets(config, machine_memory_bytes(), source, partial(memories, inventory))
        config = host_tier.resolved(config, devices, machine_memory_bytes(), source)
        if not config.models_dir:
            raise config_load.ConfigError(source, "models_dir", "missing; name the models folder with --models DIR")
        if not os.path.isdir(config.models_dir):
            wrong = config_load.ConfigError(source, "models_dir", f"{config.models_dir!r} is no folder")
            raise config_load.located_setting(wrong)
        if not check:
            forks = ForkServer.ahead(config, devices)
        # what needs more than a few milliseconds to import comes after that
        from daemon.http import listeners
        from daemon.models import models_check
        from daemon.operate import named_files

        files = named_files.read(config, path, flags)
        listeners.check(config, files.keys is not None, source)
        if check:
            listeners.check_control(config, source)
        processor = this_processor()
        warnings = models_check.check(config, source) if check else []
        if check and files.tls is not None and (ending := files.tls.certificate.warning(time.time())):
            warnings.append(ending)
    except (config_load.ConfigError, UnknownFeature) as error:
        print(f"hearthd: {error}", file=sys.stderr)
        if forks is not None:
            forks.give_up()
        return EXIT_USAGE
    lacking = installation.of_devices([device.name for device in devices]) if config.runner == "torch" else []
    if check:
        for warning in [*warnings, *lacking]:
            print(f"hearthd: warning: {warning}", file=sys.stderr)
        named = ", ".join(f"{device.name} {format_bytes(device.budget_bytes)}" for device in devices)
        settings = f", settings {', '.join(present_files(path))}" if path else ""
        print(f"ok: models {config.models_dir}, listen {config.listen}, control {config.control}, devices {named}{settings}")
        return EXIT_OK
    from daemon import lifecycle
    from daemon.process import logs

    logs.set_up(config.log_level, config.log_format)
    for one in lacking:
        logs.log.log(logging.ERROR if one.stops else logging.WARNING, "%s", one)
    if files.keys is not None:
        logs.log.info("%s: tenants with keys: %d", config.keys_file, len(files.keys.tenants))
        files.keys.warn_if_empty(config.keys_file)
    elif config.insecure:
        logs.log.warning("no keys and --insecure: anybody who reaches %s may use the models", config.listen)
    limit = open_files.raise_limit()
    if limit < FEW_OPEN_FILES:
        logs.log.warning(
            "open files: at most %d; connections beyond them are answered 503; raise it with LimitNOFILE= or `ulimit -n`", limit
        )
    if any(device.is_local("cpu") for device in devices):
        logs.log.info("processor: %s", processor.describe())
    for remark in remarks(inventory, devices):
        logs.log.warning("%s", remark)
    if not config.device:
        logs.log.info("no --device: cpu:0 gets %s, half of the machine's memory", format_bytes(devices[0].budget_bytes))
    return lifecycle.serve(config, devices, path, flags, files, inventory, forks)
