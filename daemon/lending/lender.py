"""Listens for proxies of daemons on other hosts, and runs an engine for each device that a proxy borrows."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from daemon.engines.exchange_memory import ExchangeMemory
from daemon.lending.lent_engine import LentDevice, LentEngine
from daemon.lending.regions import LentRegions
from engine.protocol import PROTOCOL_VERSION
from engine.remote.frames import Borrow, Lent, Refused, ToLender
from engine.remote.wire import Wire, WireClosed
from loader.threads import Thread

MOST_CONNECTIONS = 256  # of which each has a thread
ACCEPT_AGAIN_S = 0.5  # after an error, as where descriptors are short
STOP_LIMIT_S = 15.0
FREE_LIMIT_S = 5.0  # how long a new connection waits until the engine of the last one has ended


class Lender:
    """Lends devices of this host, each to one daemon at a time. key: the secret that daemons must know to borrow a device.
    models_dir: this host's models folder. cache_dir: the folder for compiled kernels and measurements. log: gets lines for
    operators."""

    def __init__(
        self, devices: Sequence[LentDevice], key: bytes, models_dir: str, cache_dir: str, log: Callable[[str], None]
    ) -> None:
        self._devices = {device.name: device for device in devices}
        self._in_use = {device.name: threading.Lock() for device in devices}
        self._users: dict[str, str] = {}  # device -> the address of the daemon that has it
        self._regions = LentRegions(ExchangeMemory(list(self._devices)))
        self._key, self._models_dir, self._cache_dir, self._log = key, models_dir, cache_dir, log
        self._wires: set[Wire] = set()
        self._threads: set[Thread] = set()
        self._stopping = False

    def serve(self, listener: socket.socket) -> None:
        """Accepts connections until `stop` is called."""
        while not self._stopping:
            try:
                sock, address = listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                self._log(f"a connection could not be accepted: {error}")
                time.sleep(ACCEPT_AGAIN_S)
                continue
            thread = Thread(target=self._connection, args=(sock, address[0]), name="connection")
            self._threads.add(thread)
            try:
                if len(self._threads) > MOST_CONNECTIONS:
                    raise MemoryError(f"there are {MOST_CONNECTIONS} already")
                thread.start()
            except MemoryError as error:
                self._log(f"{address[0]}: the connection is closed: {error}")
                self._threads.discard(thread)
                sock.close()

    def stop(self, listener: socket.socket) -> None:
        """Ends all engines and connections, makes `serve` return, and waits until the threads of the connections have ended, but no
        longer than STOP_LIMIT_S for engines that do not end."""
        self._stopping = True
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for wire in list(self._wires):
            wire.shut()
        until_s = time.monotonic() + STOP_LIMIT_S
        for thread in list(self._threads):
            with contextlib.suppress(RuntimeError):  # it has not begun, and will lend nothing
                thread.join(max(0.0, until_s - time.monotonic()))

    def _connection(self, sock: socket.socket, peer: str) -> None:
        """Serves one connection from a proxy until it ends: checks that the proxy knows the key, then lends it the device that it
        asks for. Failures are logged. peer: the proxy's address, for the log."""
        wire = Wire(sock, ToLender)
        self._wires.add(wire)
        try:
            if self._stopping:  # `stop` may have shut the others already
                return
            wire.prove(self._key, asks_first=True)
            asked = wire.receive()
            if isinstance(asked, Borrow):
                self._lend(asked, wire, peer)
        except WireClosed as error:
            self._log(f"{peer}: {error}")
        except (OSError, MemoryError) as error:
            self._log(f"{peer}: an engine could not be started: {error}")
        finally:
            self._wires.discard(wire)
            wire.close()
            self._threads.discard(threading.current_thread())

    def _lend(self, asked: Borrow, wire: Wire, peer: str) -> None:
        device = self._devices.get(asked.device)
        if asked.version != PROTOCOL_VERSION:
            versions = f"the daemon's is {asked.version}, the lender's is {PROTOCOL_VERSION}"
            return self._refuse(wire, peer, f"the two run different versions of hearthd: {versions}")
        if device is None:
            return self._refuse(wire, peer, f"{asked.device} is not lent here; lent are {', '.join(self._devices)}")
        if not self._in_use[device.name].acquire(timeout=FREE_LIMIT_S):
            return self._refuse(wire, peer, f"{device.name} is in use by {self._users.get(device.name, 'another daemon')}")
        try:
            self._users[device.name] = peer
            wire.send(Lent())
            self._log(f"{device.name}: lent to {peer}")
            engine = LentEngine(device, wire, asked.leader, self._regions, self._models_dir, self._cache_dir, self._log)
            self._log(f"{device.name}: no longer lent to {peer}: {engine.run()}")
        finally:
            self._in_use[device.name].release()

    def _refuse(self, wire: Wire, peer: str, reason: str) -> None:
        self._log(f"{peer}: refused: {reason}")
        wire.send(Refused(reason))
