"""A grammar process writes masks where the engine reads them, and the engine page-locks those of the first rows for as long as it
has the process. Low rows are given out first, so that the masks of a step lie close together."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.grammar.messages import Advance, Broken, Building, Draft, Forget, Open, Opened, Ready, Start, ToGrammar
from engine.grammar.row_masks import LockedMasks, RowMasks, holds_any
from engine.protocol import FrameReader, Message, SamplingParams, encode
from engine.serve import grammar_port
from engine.serve.constraints import STALL_S, Constraints, End, ModelGrammars
from engine.serve.grammar_port import GrammarPort
from scheduler.batch.plan import StepOutcome
from tests.e2e.checkpoints import END_ID, VOCAB_SIZE, make_model


class Locks:
    """Page-locks masks and notes which."""

    def __init__(self) -> None:
        self.locked, self.unlocked = list[LockedMasks](), list[LockedMasks]()

    def lock_masks(self, bits: Any) -> LockedMasks | None:
        self.locked.append(LockedMasks(bits))
        return self.locked[-1]

    def unlock_masks(self, locked: LockedMasks) -> None:
        self.unlocked.append(locked)


def answers(port: GrammarPort) -> list[object]:
    """Waits for the process's answer and returns it."""
    assert port.wait(60.0)
    return port.receive()


def model(name: str, max_sequences: int) -> Any:
    """Makes what a model in service has for its grammars, without a runner."""
    spec = SimpleNamespace(model=name, path=f"/{name}", eos_token_ids=[END_ID], max_sequences=max_sequences)
    scheduler = SimpleNamespace(drafts_masked=False, abort=lambda request_id: True)
    return SimpleNamespace(spec=spec, scheduler=scheduler, hosted=SimpleNamespace(vocab_size=VOCAB_SIZE))


def submit(constraints: Constraints, served: Any, request_id: int, grammar: str, tenant: str = "", priority: int = 0) -> None:
    request: Any = SimpleNamespace(request_id=request_id, constrained=False, tenant=tenant, weight=1.0, priority=priority)
    assert constraints.submit(served, request, SamplingParams(9, grammar=grammar), []) == []


@pytest.fixture
def locks() -> Locks:
    return Locks()


@pytest.fixture
def port(tmp_path: Path, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarPort]:
    monkeypatch.setattr(grammar_port, "MOST_LOCKED", 2)
    folder = make_model(tmp_path / "m")
    port = GrammarPort(VOCAB_SIZE, 3, 4, locks)
    port.send(Open(str(folder), VOCAB_SIZE, [END_ID], 3, 4))
    assert answers(port) == [Opened("")]
    yield port
    port.close()


def test_first_masks_lie_one_after_the_other_and_those_behind_drafts_behind_them(port: GrammarPort, locks: Locks) -> None:
    """The request in row 1 has masks of its own behind each drafted token."""
    for row, grammar in enumerate(("regex:[x-z]", "regex:[ab]cd[0-9]e", "regex:[lm]")):
        port.send(Start(row + 1, row, grammar, []))
        assert answers(port) == [Ready([row + 1], {})]
    port.send(Advance([2], [ord("a")], [], {}))
    assert answers(port) == [Ready([2], {2: Draft([ord("c"), ord("d")], [True, True])})]

    def letters(mask: Any) -> str:
        return "".join(chr(token) for token in range(128) if holds_any(mask, [token]))

    assert [letters(mask) for mask in port.masks[:, 0]] == ["xyz", "c", "lm"]
    assert [letters(mask) for mask in port.masks[1, :3]] == ["c", "d", "0123456789"]
    assert not port.masks[::2, 1:].any()
    (locked,) = locks.locked
    assert port.locked is locked
    assert [letters(mask) for mask in locked.bits] == ["xyz", "c"]
    assert locked.bits.ctypes.data == port.masks[0, 0].ctypes.data
    assert locked.bits.ctypes.data % 4096 == 0
    assert locked.bits.flags.c_contiguous


def test_masks_are_unlocked_once_the_process_is_gone(locks: Locks) -> None:
    port = GrammarPort(VOCAB_SIZE, 3, 1, locks)
    assert not locks.unlocked
    process = port._process
    locks.unlock_masks = lambda locked: locks.unlocked.append((locked, process.returncode is not None))  # type: ignore
    port.close()
    assert locks.unlocked == [(locks.locked[0], True)]


def test_low_rows_are_given_out_first() -> None:
    sent: list[Any] = []
    port: Any = SimpleNamespace(send=sent.append, backlog_bytes=0)
    served, constraints = model("m", 6), Constraints()
    constraints._models["m"] = ModelGrammars(served, port, list(range(6)), 0.0, opened=True)

    def rows_of(*request_ids: int) -> list[int]:
        sent.clear()
        for request_id in request_ids:
            submit(constraints, served, request_id, "regex:a")
        return [message.row for message in sent if isinstance(message, Start)]

    assert rows_of(1, 2, 3, 4) == [0, 1, 2, 3]
    for request_id in (3, 1, 2):
        constraints.drop("m", request_id)
    assert rows_of(5, 6, 7, 8) == [0, 1, 2, 4]


class ByHand:
    """Stands in for grammar processes: the other end of the port that was opened last. It reads and answers when a test says so. A
    port that blocked in a send would give up after a second, and its message would be cut off."""

    pid = 0

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._reader = FrameReader(ToGrammar)
        self.num_opened = self.num_killed = 0
        patch.setattr(grammar_port, "_spawn", self._spawn)

    def _spawn(self, masks_fd: int) -> tuple[socket.socket, ByHand]:
        ours, self._theirs = socket.socketpair()
        ours.settimeout(1.0)
        self._theirs.setblocking(False)
        self._reader = FrameReader(ToGrammar)
        self.num_opened += 1
        return ours, self

    def read(self) -> list[Any]:
        """Returns the messages that have become whole with what lies in the socket."""
        messages = list[Any]()
        while True:
            try:
                messages += self._reader.feed(self._theirs.recv(1 << 18))
            except BlockingIOError:
                return messages

    def answer(self, message: Message) -> None:
        self._theirs.sendall(encode(message))

    def kill(self) -> None:
        self.num_killed += 1
        self._theirs.close()

    def wait(self) -> None:
        pass


def has_something_to_do(constraints: Constraints) -> bool:
    poller = select.poll()
    poller.register(constraints.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def read_on(constraints: Constraints, process: ByHand) -> list[Any]:
    """Reads as the process and handles events as the engine's loop does, until neither has anything to do."""
    messages = process.read()
    while has_something_to_do(constraints):
        assert constraints.receive() == []
        messages += process.read()
    return messages


LARGE = "regex:" + "a" * (1 << 20)  # more than a socket holds


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> ByHand:
    return ByHand(monkeypatch)


class Clock:
    """Returns the time that a test has set, in seconds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def constraints(clock: Clock) -> Iterator[Constraints]:
    """The constraints of an engine; model m is closed at the end."""
    constraints = Constraints(clock=clock)
    yield constraints
    constraints.close("m")


def open_with_large(constraints: Constraints, process: ByHand) -> Any:
    """Submits request 1, with a large grammar, to a process that has opened and reads no more. Returns the model."""
    served = model("m", 2)
    submit(constraints, served, 1, LARGE)
    (opened,) = process.read()
    assert isinstance(opened, Open)
    process.answer(Opened(""))
    assert constraints.receive() == []
    return served


def test_a_process_that_does_not_read_blocks_nobody(constraints: Constraints, process: ByHand) -> None:
    """What it was sent arrives whole and in order once it reads again; until then the loop has nothing to do for it."""
    served = open_with_large(constraints, process)
    submit(constraints, served, 2, "regex:b")
    submit(constraints, served, 3, "regex:c")
    constraints.drop("m", 1)
    assert not has_something_to_do(constraints)
    messages = read_on(constraints, process)
    assert [type(message) for message in messages] == [Start, Forget, Start, Start]
    first, gone, *others = messages
    assert (first.grammar, gone.keys) == (LARGE, [first.key])
    assert sorted((message.row, message.grammar) for message in others) == [(0, "regex:b"), (1, "regex:c")]
    assert not has_something_to_do(constraints)
    process.answer(Broken(others[0].key, "no"))
    assert constraints.receive() == [End("m", 2, "no")]


def test_requests_that_come_and_go_add_nothing_to_what_waits_for_a_process(constraints: Constraints, process: ByHand) -> None:
    served = open_with_large(constraints, process)
    port = constraints._models["m"].port
    waiting = port.backlog_bytes
    assert waiting > 1 << 19
    for request_id in range(2, 9):
        submit(constraints, served, request_id, LARGE)
        constraints.drop("m", request_id)
    assert port.backlog_bytes == waiting
    assert [type(message) for message in read_on(constraints, process)] == [Start]


def test_a_process_that_dies_before_it_has_read_all_is_started_again(constraints: Constraints, process: ByHand) -> None:
    open_with_large(constraints, process)
    process.kill()
    assert has_something_to_do(constraints)
    assert constraints.receive() == []
    assert process.num_opened == 2
    (opened,) = process.read()
    assert isinstance(opened, Open)
    process.answer(Opened(""))
    assert constraints.receive() == []
    (start,) = read_on(constraints, process)
    assert start.grammar == LARGE


# ---- processes that cannot be started


def refuse(patch: pytest.MonkeyPatch, number: int) -> None:
    """Lets the system start no process."""

    def popen(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(grammar_port.subprocess, "Popen", popen)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
def test_a_process_that_cannot_be_started_fails_its_request_and_the_next_one_tries_again(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    served = model("m", 2)
    params = SamplingParams(9, grammar="regex:a", allowed_token_ids=[97])
    request: Any = SimpleNamespace(request_id=1, constrained=False, tenant="", weight=1.0, priority=0)
    why = f"the grammar process could not be started: {os.strerror(number)}"
    with monkeypatch.context() as patches:
        refuse(patches, number)
        assert constraints.submit(served, request, params, []) == [End("m", 1, why, "internal")]
    assert not constraints._limits
    assert not constraints.stalled()
    process = ByHand(monkeypatch)
    submit(constraints, served, 2, "regex:a")
    assert [start.grammar for start in open_again(constraints, process)] == ["regex:a"]


def test_a_process_that_cannot_be_started_again_fails_all_that_need_it(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests are running: one samples, one waits for its first mask and one waits for a row."""
    served = model("m", 2)
    served.scheduler = scheduler = Scheduler()
    with monkeypatch.context() as patches:
        process = ByHand(patches)
        for request_id in (1, 2, 3):
            submit(constraints, served, request_id, f"regex:{request_id}")
        first, _ = open_again(constraints, process)
        process.answer(Ready([first.key], {}))
        assert constraints.receive() == []
    constraints.sampled(served, RowMasks([1], np.zeros(1, np.intp), []), StepOutcome([1], [ord("1")]))
    process.kill()
    why = "the grammar process could not be started: Too many open files"
    with monkeypatch.context() as patches:
        refuse(patches, errno.EMFILE)
        assert constraints.ready(served) == [End("m", request_id, why, "internal") for request_id in (1, 2, 3)]
    assert scheduler.aborted == [1, 2, 3]
    assert constraints.ready(served) == constraints.receive() == constraints.restart_stalled() == []
    process = ByHand(monkeypatch)
    submit(constraints, served, 4, "regex:a")
    assert [start.grammar for start in open_again(constraints, process)] == ["regex:a"]


# ---- processes that hang

TWICE = "following this grammar ended or stalled the grammar process twice"


class Scheduler:
    """Stands in for a batch scheduler. submitted: ids of the requests that it was given. held: whether a request was held or let
    go, in the order of the calls. aborted: ids of the requests that were aborted."""

    drafts_masked = False

    def __init__(self) -> None:
        self.submitted, self.held, self.aborted = list[int](), list[bool](), list[int]()

    def __contains__(self, request_id: int) -> bool:
        return request_id in self.submitted

    def submit(self, request: Any) -> None:
        self.submitted.append(request.request_id)

    def hold(self, request_id: int, held: bool) -> None:
        self.held.append(held)

    def guess(self, request_id: int) -> None:
        """Guesses nothing."""

    def propose(self, request_id: int, *draft: Any) -> None:
        """Takes no drafts."""

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)


def hang(constraints: Constraints, clock: Clock) -> list[End]:
    """Lets as much time pass as a process may take for an answer; nothing happens before. Returns the ends of requests."""
    clock.now_s += STALL_S - 0.5
    assert constraints.stalled() == []
    assert constraints.restart_stalled() == []
    clock.now_s += 0.5
    assert constraints.stalled() == ["m"]
    return constraints.restart_stalled()


def open_again(constraints: Constraints, process: ByHand) -> list[Any]:
    """Opens the process that has just been started and returns what it is then asked."""
    (opened,) = process.read()
    assert isinstance(opened, Open)
    process.answer(Opened(""))
    assert constraints.receive() == []
    return read_on(constraints, process)


def receive_until(constraints: Constraints, is_done: Callable[[], Any]) -> None:
    """Handles the answers of a real process until `is_done`."""
    poller = select.poll()
    poller.register(constraints.fileno(), select.POLLIN)
    while not is_done():
        assert poller.poll(60e3), "no answer"
        assert constraints.receive() == []


def test_a_process_that_never_opens_is_killed_and_its_requests_fail_at_the_second_one(
    constraints: Constraints, process: ByHand, clock: Clock
) -> None:
    submit(constraints, model("m", 2), 1, "regex:a")
    assert hang(constraints, clock) == []
    assert (process.num_killed, process.num_opened) == (1, 2)
    assert hang(constraints, clock) == [End("m", 1, TWICE)]
    assert (process.num_killed, process.num_opened) == (2, 2)
    clock.now_s += 10 * STALL_S
    assert constraints.stalled() == []


def test_the_time_of_a_process_begins_with_the_first_request_that_waits_for_it(
    constraints: Constraints, process: ByHand, clock: Clock
) -> None:
    served = model("m", 2)
    submit(constraints, served, 1, "regex:a")
    constraints.drop("m", 1)
    clock.now_s += 10 * STALL_S
    assert constraints.stalled() == []
    submit(constraints, served, 2, "regex:a")
    assert hang(constraints, clock) == []


def test_each_grammar_that_is_built_gives_the_others_more_time_and_the_one_that_hangs_fails_alone(
    constraints: Constraints, process: ByHand, clock: Clock
) -> None:
    """Grammars are built one after the other, so a process hangs at the first one of which nothing is heard. Here the first process
    hangs at request 2, the next one at 3, which it builds before the others, and the third one at 2 again."""
    served = model("m", 8)
    served.scheduler = scheduler = Scheduler()
    for request_id in (1, 2, 3):
        submit(constraints, served, request_id, f"regex:{request_id}")
    starts = {start.grammar: start for start in open_again(constraints, process)}
    clock.now_s += STALL_S - 1
    process.answer(Ready([starts["regex:1"].key], {}))
    assert constraints.receive() == []
    assert hang(constraints, clock) == []
    assert [start.grammar for start in open_again(constraints, process)] == ["regex:3", "regex:2", "regex:1"]
    assert hang(constraints, clock) == []
    starts = {start.grammar: start for start in open_again(constraints, process)}
    for request_id in (3, 1):
        process.answer(Ready([starts[f"regex:{request_id}"].key], {}))
    assert constraints.receive() == []
    assert hang(constraints, clock) == [End("m", 2, TWICE)]
    assert scheduler.submitted == [1, 3]


def test_the_grammar_that_the_process_says_it_builds_is_the_one_it_hangs_at(
    constraints: Constraints, process: ByHand, clock: Clock
) -> None:
    """What one process said does not count for the next one."""
    served = model("m", 8)
    for request_id in (1, 2, 3):
        submit(constraints, served, request_id, f"regex:{request_id}")
    keys = {start.grammar: start.key for start in open_again(constraints, process)}
    process.answer(Building(keys["regex:2"]))
    assert constraints.receive() == []
    assert hang(constraints, clock) == []
    oldest, *_ = open_again(constraints, process)
    assert oldest.grammar == "regex:3"
    assert hang(constraints, clock) == []
    open_again(constraints, process)
    process.answer(Building(keys["regex:2"]))
    assert constraints.receive() == []
    assert hang(constraints, clock) == [End("m", 2, TWICE)]


def test_a_process_that_does_not_read_on_is_killed(constraints: Constraints, process: ByHand, clock: Clock) -> None:
    """The request whose grammar it has read in part is gone; another one waits behind it."""
    served = open_with_large(constraints, process)
    constraints.drop("m", 1)
    submit(constraints, served, 2, "regex:b")
    clock.now_s += STALL_S - 1
    process._theirs.recv(1 << 18)  # it does read a part
    while has_something_to_do(constraints):
        assert constraints.receive() == []
    assert hang(constraints, clock) == []
    (start,) = open_again(constraints, process)
    assert start.grammar == "regex:b"


def test_a_stopped_process_is_killed_and_the_next_one_follows_the_outputs_again(
    constraints: Constraints, clock: Clock, tmp_path: Path
) -> None:
    """A request whose next mask the stopped process owes goes on with that of the next process."""
    served = model("m", 2)
    served.spec.path = str(make_model(tmp_path / "m"))
    served.scheduler = scheduler = Scheduler()
    submit(constraints, served, 1, "regex:ab[xy]")
    receive_until(constraints, lambda: scheduler.submitted)
    stopped = constraints._models["m"].port.pid
    os.kill(stopped, signal.SIGSTOP)
    constraints.sampled(served, RowMasks([1], np.zeros(1, np.intp), []), StepOutcome([1], [ord("a")]))
    assert hang(constraints, clock) == []
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)
    receive_until(constraints, lambda: False in scheduler.held)
    assert scheduler.held == [True, False]
    (row,) = (each.row for each in constraints._models["m"].by_id.values())
    mask = constraints._models["m"].port.masks[row, 0]
    assert [token for token in range(128) if holds_any(mask, [token])] == [ord("b")]


# ---- turns of tenants

SLOW = 'json_schema:{"type":"integer","multipleOf":%d}'  # takes time in proportion to the number


def test_a_third_tenants_grammar_waits_for_no_more_than_one_of_each_other_tenant(constraints: Constraints, tmp_path: Path) -> None:
    served = model("m", 32)
    served.spec.path = str(make_model(tmp_path / "m"))
    served.scheduler = scheduler = Scheduler()
    submit(constraints, served, 1, "regex:a")
    receive_until(constraints, lambda: scheduler.submitted)
    pid = constraints._models["m"].port.pid
    os.kill(pid, signal.SIGSTOP)  # until it has all of them to choose from
    for request_id in range(2, 18, 2):
        submit(constraints, served, request_id, SLOW % (19990 + request_id), "hostile")
        submit(constraints, served, request_id + 1, SLOW % (19991 + request_id), "other")
    for request_id, priority in ((21, 0), (22, 0), (23, 1)):
        submit(constraints, served, request_id, "regex:b", "third", priority)
    os.kill(pid, signal.SIGCONT)
    receive_until(constraints, lambda: len(scheduler.submitted) == 20)
    assert scheduler.submitted[:6] == [1, 2, 3, 23, 21, 22]
    assert [each for each in scheduler.submitted if each % 2 == 0 and each < 18] == list(range(2, 18, 2))


def test_a_process_says_what_it_builds_where_that_is_not_the_oldest(port: GrammarPort) -> None:
    os.kill(port.pid, signal.SIGSTOP)
    for key, grammar, tenant in ((1, SLOW % 19991, 0), (2, SLOW % 19993, 0), (3, "regex:b", 1), (4, SLOW % 19997, 0)):
        port.send(Start(key, key % 3, grammar, [], tenant=tenant))
    port.send(Forget([4]))
    os.kill(port.pid, signal.SIGCONT)
    messages = list[object]()
    while Ready([2], {}) not in messages:
        messages += answers(port)
    assert messages == [Ready([1], {}), Building(3), Ready([3], {}), Ready([2], {})]


def test_rows_go_to_tenants_in_turns(constraints: Constraints, process: ByHand) -> None:
    served = model("m", 2)
    for request_id in range(1, 7):
        submit(constraints, served, request_id, f"regex:{request_id}", "hostile")
    submit(constraints, served, 7, "regex:7", "third")
    submit(constraints, served, 8, "regex:8", "third", priority=1)
    first, second = open_again(constraints, process)
    assert [first.grammar, second.grammar] == ["regex:1", "regex:8"]
    assert first.tenant != second.tenant
    assert (first.priority, second.priority) == (0, 1)
    process.kill()  # both keep their rows
    assert constraints.receive() == []
    assert {(start.key, start.row) for start in open_again(constraints, process)} == {(1, 0), (8, 1)}
    for request_id, expected in ((1, "regex:2"), (8, "regex:7"), (7, "regex:3")):
        constraints.drop("m", request_id)
        (_, start) = process.read()
        assert start.grammar == expected
    for request_id in (5, 3, 2):
        constraints.drop("m", request_id)
    assert [start.grammar for start in process.read() if isinstance(start, Start)] == ["regex:4", "regex:6"]
