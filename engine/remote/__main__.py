"""`python -P -m engine.remote --channel-fd N --journal-fd M --exchange-fd X --engine-number E --doorbell-fds A,B,… --device cpu:0
--host b --address ADDRESS:PORT --key-file FILE --models DIR` runs one proxy: the process that takes the place, on the daemon's
host, of an engine that runs on another host."""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import signal
import socket
import sys

from engine.exchange import Exchange, Membership
from engine.host.orphan import end_with
from engine.host.process import name_process
from engine.protocol import JOURNAL_BYTES, PROTOCOL_VERSION, EngineFault
from engine.remote.frames import Borrow, ToProxy
from engine.remote.wire import Wire, WireClosed, connect, read_key
from engine.serve.channel import Channel, ChannelClosed

EXIT_FAULT = 70


def main() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in engines
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="engine.remote")
    for name in ("channel-fd", "journal-fd", "exchange-fd", "engine-number"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("doorbell-fds", "device", "host", "address", "key-file", "models"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    name_process(f"engine {options.device}@{options.host}")
    channel = Channel(socket.socket(fileno=options.channel_fd))
    end_with(options.channel_fd)
    try:
        _run(options, channel)
    except ChannelClosed:
        return 0
    except Exception as error:
        try:
            channel.send(EngineFault("fault", str(error)))
        except ChannelClosed:
            return 0
        return EXIT_FAULT
    return 0


def _run(options: argparse.Namespace, channel: Channel) -> None:
    """Connects to the lender (which runs the engine on the other host) and runs the proxy. Raises ChannelClosed when the daemon has
    ended, and other exceptions, with a text for operators, when the engine can no longer be reached."""
    wire = _connect(options)
    from engine.remote.proxy import Proxy  # imported here, because a proxy that finds no lender is started again and again

    doorbells = [int(fd) for fd in options.doorbell_fds.split(",")]
    exchange = Exchange(options.exchange_fd, doorbells)
    journal = mmap.mmap(options.journal_fd, JOURNAL_BYTES)
    wire.send(Borrow(options.device, f"{socket.gethostname()}/{os.fstat(exchange.fd).st_ino}", PROTOCOL_VERSION))
    membership = Membership(exchange, options.engine_number, doorbells[options.engine_number])
    Proxy(wire, options.host, options.models, channel, journal, membership).run()


def _connect(options: argparse.Namespace) -> Wire:
    address, _, port = options.address.rpartition(":")
    try:
        return connect(address.strip("[]"), int(port), read_key(options.key_file), ToProxy)
    except WireClosed as error:
        raise OSError(f"host {options.host} at {options.address}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
