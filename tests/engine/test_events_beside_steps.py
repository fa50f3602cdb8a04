"""Events that are not messages of the daemon, while a step is under way: the engine's loop takes in all steps that it has launched
before it goes by what a job's thread or a grammar process has reported."""

from __future__ import annotations

import gc
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.contracts.loads import KernelNews
from engine.grammar.messages import Broken, Open, Opened, Start, row_bytes
from engine.loop.worker import Engine
from engine.null import runner as null
from engine.protocol import (
    JOURNAL_BYTES,
    KernelsTold,
    LoadDone,
    Message,
    RequestFailed,
    SamplingParams,
    Shutdown,
    Submit,
    TokensOut,
    encode,
)
from engine.serve import constraints
from engine.serve.channel import Channel
from tests.engine.engine_process import load_message, null_checkpoint, null_configure

WHOLE, GRAMMAR = 1, 2  # ids of the requests
EVENT_BEHIND = 5  # the event comes right behind the launch of this step


class LaunchedSteps:
    """Counts the steps of null models that were launched and whose results were not taken, and calls `event` behind a launch."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_launched = self.num_taken = 0
        self.event: Callable[[], None] = lambda: None
        launch, wait = null.AheadNullModel.launch, null.PacedStep.wait

        def launched(model: null.AheadNullModel, *step: Any) -> null.PacedStep:
            made = launch(model, *step)
            self.num_launched += 1
            if self.num_launched == EVENT_BEHIND:
                self.event()
            return made

        def taken(step: null.PacedStep) -> Any:
            self.num_taken += 1
            return wait(step)

        patch.setattr(null.AheadNullModel, "launch", launched)
        patch.setattr(null.PacedStep, "wait", taken)

    @property
    def under_way(self) -> int:
        return self.num_launched - self.num_taken


class Runner(null.NullRunner):
    """A runner whose kernels are still compiling."""

    def watch_kernels(self, tell: Callable[[KernelNews], None]) -> None:
        self.tell = tell


class Port:
    """Stands in for a grammar process: it opens at once, and answers a request when a test says so. key: of the last request.
    seen: the steps that were under way whenever an answer to a request was received, and when the process was killed."""

    pid = 0

    def __init__(self, steps: LaunchedSteps, vocab_size: int, num_rows: int) -> None:
        self.masks, self.locked = np.zeros((num_rows, 1, row_bytes(vocab_size) // 4), np.uint32), None
        self.backlog_bytes = 0
        self.key, self.seen = -1, list[int]()
        self._steps, self._answers = steps, deque[object]()
        self._ours, self._theirs = socket.socketpair()

    def fileno(self) -> int:
        return self._ours.fileno()

    def send(self, message: object) -> None:
        if isinstance(message, Open):
            self.answer(Opened(""))
        elif isinstance(message, Start):
            self.key = message.key

    def answer(self, message: object) -> None:
        self._answers.append(message)
        self._theirs.send(b".")

    def wait(self, seconds: float) -> bool:
        return bool(self._answers)

    def receive(self) -> list[object]:
        answers = [self._answers.popleft() for _ in self._ours.recv(100)]
        self.seen += [self._steps.under_way for answer in answers if not isinstance(answer, Opened)]
        return answers

    def close(self) -> None:
        self.seen.append(self._steps.under_way)
        self._ours.close()
        self._theirs.close()


class ToDaemon(Channel):
    """The engine's end of its channel, which also answers as the daemon: it submits `asked` when the model is loaded, and shuts the
    engine down when request WHOLE has ended. sent: all messages of the engine."""

    def __init__(self, asked: list[Submit]) -> None:
        ours, self._daemon = socket.socketpair()
        super().__init__(ours)
        self._asked, self.sent = asked, list[Message]()

    def send(self, message: Message) -> None:
        self.sent.append(message)
        if isinstance(message, LoadDone):
            self._daemon.sendall(b"".join(map(encode, self._asked)))
        elif isinstance(message, TokensOut) and any(message.finish):
            self._daemon.sendall(encode(Shutdown()))

    def close(self) -> None:
        self._sock.close()
        self._daemon.close()

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def run(channel: ToDaemon, runner: Runner, folder: Path) -> None:
    """Runs the engine's loop in this thread until request WHOLE has ended."""
    configure = null_configure(null_step_ms=0.0)
    engine = Engine(channel, mmap.mmap(-1, JOURNAL_BYTES), configure, runner, None)
    try:
        engine.run([load_message(null_checkpoint(folder, launches_ahead=True))])
    finally:
        gc.enable()  # the engine's loop switches it off
        engine.constraints.close("m")
        os.close(engine.lifecycle.fileno())
        channel.close()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> LaunchedSteps:
    return LaunchedSteps(monkeypatch)


def test_what_a_thread_reports_waits_for_the_step_under_way(steps: LaunchedSteps, tmp_path: Path) -> None:
    """News of kernels change which kernels a step calls, so none may be under way."""
    runner, found = Runner(null_configure(null_step_ms=0.0)), list[int]()
    news = KernelNews(KernelsTold("bfloat16", 1, 2, 3.0), lambda: found.append(steps.under_way))
    channel = ToDaemon([Submit(WHOLE, "m", [5], SamplingParams(max_tokens=40, seed=1))])
    behind = list[int]()

    def event() -> None:
        behind.append(steps.under_way)
        runner.tell(news)

    steps.event = event
    run(channel, runner, tmp_path)
    assert behind == [2], "the step before is read once the next one is launched"
    assert found == [0]
    assert channel.of(KernelsTold) == [news.told]


def test_what_a_grammar_process_answers_waits_for_the_step_under_way(
    steps: LaunchedSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a request gives its row of masks to another one, so no step may be under way."""
    ports = list[Port]()

    def opened(vocab_size: int, num_rows: int, *_: object) -> Port:
        ports.append(Port(steps, vocab_size, num_rows))
        return ports[-1]

    monkeypatch.setattr(constraints, "GrammarPort", opened)
    constrained = SamplingParams(max_tokens=40, seed=2, grammar="root ::= x")
    channel = ToDaemon(
        [Submit(GRAMMAR, "m", [6], constrained), Submit(WHOLE, "m", [5], SamplingParams(max_tokens=40, seed=1))],
    )
    steps.event = lambda: ports[0].answer(Broken(ports[0].key, "there is no rule x"))
    run(channel, Runner(null_configure(null_step_ms=0.0)), tmp_path)
    assert [port.seen for port in ports] == [[0, 0]]
    (failed,) = channel.of(RequestFailed)
    assert (failed.request_id, failed.error) == (GRAMMAR, "model m: there is no rule x")


def test_a_grammar_process_that_hangs_is_killed_while_no_step_is_under_way(
    steps: LaunchedSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the moment of a step on, no time at all is allowed for an answer. The request fails at the second process."""
    ports = list[Port]()

    def opened(vocab_size: int, num_rows: int, *_: object) -> Port:
        ports.append(Port(steps, vocab_size, num_rows))
        return ports[-1]

    monkeypatch.setattr(constraints, "GrammarPort", opened)
    constrained = SamplingParams(max_tokens=40, seed=2, grammar="root ::= x")
    channel = ToDaemon(
        [Submit(GRAMMAR, "m", [6], constrained), Submit(WHOLE, "m", [5], SamplingParams(max_tokens=40, seed=1))],
    )
    steps.event = lambda: monkeypatch.setattr(constraints, "STALL_S", 0.0)
    run(channel, Runner(null_configure(null_step_ms=0.0)), tmp_path)
    assert [port.seen for port in ports] == [[0], [0]]
    (failed,) = channel.of(RequestFailed)
    assert failed.error == "model m: following this grammar ended or stalled the grammar process twice"
