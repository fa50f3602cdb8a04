"""The two ends of each carrier that benchmarks/carriers.py compares. The first sends plans, the second one answers with states.

`python -m benchmarks.carrier_ends first CARRIER FOLDER ADDRESS` runs a first end, which starts the second one. It reads lines such
as `{"num_bytes": 8192, "calls": 300}`, and answers each with the seconds of the calls. Without `calls` it calls until a call fails,
and tells when and how that was. FOLDER has the file `key`. ADDRESS: of Ray's first node.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from engine.remote.frames import States, Step, ToLender, ToProxy
from engine.remote.proxy import step_frame
from engine.remote.table_rows import TableReader
from engine.remote.wire import Wire, WireClosed, connect, read_key
from scheduler.batch.plan import BatchPlan, make_sequence_table

Bytes = npt.NDArray[np.uint8]
WIRE, GLOO, RAY, RAY_GLOO = "hearthd's wire", "gloo", "Ray actor", "Ray actor + gloo"
SIZES = {"8 KiB": 8 << 10, "128 KiB": 128 << 10, "4 MiB": 4 << 20}
ROWS, BLOCK_TOKENS, MAX_TOKENS = 16, 16, 8192
PLAN_BYTES = 4096  # gloo does not tell how long a message is, so a plan travels in a buffer of this size


class Plans:
    """The frames of consecutive steps of 16 decoding rows, as a proxy makes them."""

    def __init__(self) -> None:
        self._table = make_sequence_table(ROWS, MAX_TOKENS, MAX_TOKENS // BLOCK_TOKENS)
        random = np.random.default_rng(0)
        self._table.request_id[:] = range(1, ROWS + 1)
        self._table.tokens[:] = random.integers(0, 32000, (ROWS, MAX_TOKENS))
        self._table.block_tables[0][:] = random.permutation(ROWS * MAX_TOKENS // BLOCK_TOKENS).reshape(ROWS, -1)
        self._reader, self._number = TableReader(self._table, BLOCK_TOKENS), 0

    def next(self, num_bytes: int) -> Step:
        """Returns the next step's frame. Its placement id is the place in SIZES of the number of bytes to be answered."""
        self._number += 1
        position = min(self._number, MAX_TOKENS - 1)
        self._table.num_computed[:], self._table.num_tokens[:] = position, position + 1
        one, samples = np.ones(ROWS, np.int32), np.ones(ROWS, np.bool_)
        plan = BatchPlan(self._number, "", np.arange(ROWS, dtype=np.int32), one * position, one, samples, all_decode=True)
        return step_frame(list(SIZES.values()).index(num_bytes), self._number, plan, self._reader)


class Answers:
    """The states that a second end answers with: one array for each size, with the step's number at both ends."""

    def __init__(self) -> None:
        self.arrays: list[Bytes] = [np.ones(num_bytes, np.uint8) for num_bytes in SIZES.values()]

    def of(self, step: Step) -> Bytes:
        states = self.arrays[step.placement_id]
        states.view(np.int64)[[0, -1]] = step.number
        return states


class FirstEnd(Protocol):
    second_pid: int

    def call(self, step: Step, num_bytes: int) -> Bytes: ...


def _start_second(carrier: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.carrier_ends", "second", carrier, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


class OverWire:
    """The connection of engine/remote/wire.py, with the proof of the key. Copies the states to their place, as a proxy does."""

    def __init__(self, folder: str) -> None:
        key_file = f"{folder}/key"
        process = _start_second(WIRE, key_file)
        assert process.stdout is not None
        self._wire = connect("127.0.0.1", int(process.stdout.readline()), read_key(key_file), ToProxy)
        self._place: Bytes = np.zeros(max(SIZES.values()), np.uint8)
        self.second_pid = process.pid

    def call(self, step: Step, num_bytes: int) -> Bytes:
        self._wire.send(step)
        data = self._wire.receive().data
        self._place[: len(data)] = data
        return self._place[: len(data)]


def second_over_wire(key_file: str) -> None:
    answers, listener = Answers(), socket.create_server(("127.0.0.1", 0))  # kept open, as `hearth lend` keeps it
    print(listener.getsockname()[1], flush=True)
    wire = Wire(listener.accept()[0], ToLender)
    wire.prove(read_key(key_file), asks_first=True)
    while True:
        step = wire.receive()
        wire.send(States(step.placement_id, answers.of(step).data))


class Gloo:
    """One of two ranks of torch.distributed with gloo. port: of rank 0's store; 0 on rank 0, which makes the store."""

    def __init__(self, port: int) -> None:
        import torch  # here, because hearthd's connection and Ray alone do not need it

        torch.set_num_threads(1)
        self._dist: Any = importlib.import_module("torch.distributed")
        self._rank = int(port != 0)
        self._store = self._dist.TCPStore("127.0.0.1", port, 2, is_master=port == 0, wait_for_workers=False)
        self.port, self._from_numpy = self._store.port, torch.from_numpy

    def join(self) -> None:
        """Waits for the other rank."""
        self._dist.init_process_group("gloo", store=self._store, rank=self._rank, world_size=2)
        self._group = self._dist.group.WORLD

    def send(self, array: Bytes) -> None:
        self._group.send([self._from_numpy(array)], 1 - self._rank, 0).wait()

    def receive(self, array: Bytes) -> None:
        self._group.recv([self._from_numpy(array)], 1 - self._rank, 0).wait()


class OverGloo:
    def __init__(self) -> None:
        self._gloo, self._encoder = Gloo(0), msgspec.msgpack.Encoder()
        self.second_pid = _start_second(GLOO, str(self._gloo.port)).pid
        self._gloo.join()
        self._plan: Bytes = np.zeros(PLAN_BYTES, np.uint8)
        self._place: Bytes = np.zeros(max(SIZES.values()), np.uint8)

    def call(self, step: Step, num_bytes: int) -> Bytes:
        data = self._encoder.encode(step)
        self._plan[:8].view(np.int64)[0] = len(data)
        self._plan[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
        self._gloo.send(self._plan)
        self._gloo.receive(self._place[:num_bytes])
        return self._place[:num_bytes]


def second_over_gloo(port: str) -> None:
    answers, gloo, decoder = Answers(), Gloo(int(port)), msgspec.msgpack.Decoder(Step)
    gloo.join()
    plan: Bytes = np.zeros(PLAN_BYTES, np.uint8)
    while True:
        gloo.receive(plan)
        gloo.send(answers.of(decoder.decode(plan[8 : 8 + int(plan[:8].view(np.int64)[0])].data)))


class RaySecond:
    """The actor on Ray's second node."""

    def __init__(self) -> None:
        self._answers, self._decoder = Answers(), msgspec.msgpack.Decoder(Step)

    def pid(self) -> int:
        return os.getpid()

    def join(self, port: int) -> None:
        self._gloo = Gloo(port)
        self._gloo.join()

    def states(self, data: bytes) -> Bytes:
        return self._answers.of(self._decoder.decode(data))

    def send_states(self, data: bytes) -> None:
        self._gloo.send(self.states(data))


class OverRay:
    """An actor's method is called for each step. It returns the states, or sends them by gloo."""

    def __init__(self, address: str, by_gloo: bool) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._encoder = msgspec.msgpack.Encoder()
        self._ray.init(address=address, log_to_driver=False, logging_level="error")
        self._actor = self._ray.remote(num_cpus=0.1, resources={"second": 0.1})(RaySecond).remote()
        self.second_pid = self._ray.get(self._actor.pid.remote())
        self._gloo = Gloo(0) if by_gloo else None
        self._place: Bytes = np.zeros(max(SIZES.values()) if by_gloo else 0, np.uint8)
        self._called: Any = None
        if self._gloo is not None:
            self._called = self._actor.join.remote(self._gloo.port)
            self._gloo.join()

    def call(self, step: Step, num_bytes: int) -> Bytes:
        data = self._encoder.encode(step)
        if self._gloo is None:
            states: Bytes = self._ray.get(self._actor.states.remote(data))
            return states
        self._ray.get(self._called)  # of the call before, whose states have arrived
        self._called = self._actor.send_states.remote(data)
        self._gloo.receive(self._place[:num_bytes])
        return self._place[:num_bytes]


def _first_end(carrier: str, folder: str, address: str) -> FirstEnd:
    if carrier == WIRE:
        return OverWire(folder)
    return OverGloo() if carrier == GLOO else OverRay(address, carrier == RAY_GLOO)


def run_first(carrier: str, folder: str, address: str) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    end, plans = _first_end(carrier, folder, address), Plans()

    def timed(num_bytes: int) -> float:
        step = plans.next(num_bytes)
        begin_s = time.perf_counter()
        states = end.call(step, num_bytes)
        taken_s = time.perf_counter() - begin_s
        numbers = states.view(np.int64)
        if len(states) != num_bytes or numbers[0] != step.number or numbers[-1] != step.number:
            raise SystemExit(f"{carrier}: step {step.number} was answered with other states")
        return taken_s

    timed(SIZES["128 KiB"])
    plan_bytes = len(msgspec.msgpack.encode(plans.next(SIZES["8 KiB"])))
    print(json.dumps({"second_pid": end.second_pid, "plan_bytes": plan_bytes}), file=out)
    for line in sys.stdin:
        order = json.loads(line)
        if "calls" in order:
            print(json.dumps([timed(order["num_bytes"]) for _ in range(order["calls"])]), file=out)
            continue
        try:
            while True:
                timed(order["num_bytes"])
        except Exception as error:
            print(json.dumps({"at_s": time.monotonic(), "error": type(error).__name__}), file=out)
    os._exit(0)  # without waiting for the other end


def main() -> None:
    if sys.argv[1] == "first":
        run_first(*sys.argv[2:])
    with contextlib.suppress(WireClosed, RuntimeError):  # the first end has ended
        (second_over_wire if sys.argv[2] == WIRE else second_over_gloo)(sys.argv[3])


if __name__ == "__main__":
    importlib.import_module("benchmarks.carrier_ends").main()  # under this name Ray's workers find the actor's class, too
