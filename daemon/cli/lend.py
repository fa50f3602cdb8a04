"""Implements `hearth lend`, which lends devices of this host to a hearthd on another host, until the command is ended."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import threading
import time
from functools import partial
from queue import SimpleQueue

from daemon.cli.client import Client, CommandError
from daemon.cli.table import size
from daemon.errors import EXIT_OK, EXIT_USAGE

# options that are settings of hearthd, too -> the setting
FLAGS = {"device": "device", "models": "models_dir", "cache_dir": "cache_dir", "threads": "threads"}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--listen", metavar="ADDRESS:PORT", required=True, help="where the other host's hearthd connects, as in 10.0.0.2:7100")
    add("--key-file", metavar="FILE", required=True, help="its first line is the secret that both hosts share")
    add("--device", metavar="NAME=BUDGET", action="append", default=None, help="what is lent, as hearthd's --device; repeatable")
    add("--models", metavar="DIR", default=None, help="this host's models folder, with the same files as the other host's")
    add("--threads", metavar="N", default=None, help="threads of each engine of a cpu device (default: all cores, shared out)")
    add("--cache-dir", metavar="DIR", default=None, help="where compiled kernels are kept")
    add("--config", metavar="FILE", default=None, help="a settings file of hearthd, for what the options leave out")


def lend(client: Client, options: argparse.Namespace) -> int:
    """Runs `hearth lend`: lends the devices until SIGINT or SIGTERM, then returns the exit code. Raises CommandError for bad
    settings."""
    # imported here, because the other commands need none of it
    from config import load, units
    from config.devices import device_budgets
    from daemon.engines.fork_client import threads_per_engine
    from daemon.gpu.driver import Driver
    from daemon.gpu.inventory import memories
    from daemon.lending.lender import Lender
    from daemon.lending.lent_engine import LentDevice
    from engine.remote.wire import read_key

    flags = {setting: value for option, setting in FLAGS.items() if (value := getattr(options, option)) is not None}
    try:
        config = load.load(options.config, flags)
        budgets = device_budgets(config, units.machine_memory_bytes(), gpus=partial(memories, Driver()))
        key = read_key(options.key_file)
    except (load.ConfigError, ValueError) as error:
        raise _usage(str(error)) from None
    try:
        host, port = units.parse_listen(options.listen)
    except ValueError as error:
        raise _usage(f"--listen {options.listen!r} {error}") from None
    threads = threads_per_engine(config, budgets)
    devices = [LentDevice(one.name, one.budget_bytes, one.uuid, threads) for one in budgets]
    tell = partial(_tell, options.json)
    try:
        family = socket.AF_INET6 if ":" in host or not host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=not host and socket.has_dualstack_ipv6())
    except OSError as error:
        raise _usage(f"--listen {options.listen}: {error.strerror or error}") from None
    lender = Lender(devices, key, config.models_dir, config.cache_dir, tell)
    ended: SimpleQueue[None] = SimpleQueue()  # an Event takes a lock that the interrupted thread may hold
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.put(None))
    server = threading.Thread(target=lender.serve, args=(listener,), daemon=True)
    server.start()
    address = "{}:{}".format(*listener.getsockname()[:2])
    tell(f"{', '.join(f'{one.name} with {size(one.budget_bytes)}' for one in devices)}: to be borrowed at {address}")
    ended.get()
    tell("ends")
    lender.stop(listener)
    return EXIT_OK


def _tell(as_json: bool, text: str) -> None:
    if as_json:
        print(json.dumps({"unix_s": round(time.time(), 3), "text": text}), flush=True)
    else:
        print(f"hearth lend: {text}", file=sys.stderr, flush=True)


def _usage(message: str) -> CommandError:
    return CommandError(EXIT_USAGE, {"code": "invalid_config", "message": message, "details": {}})
