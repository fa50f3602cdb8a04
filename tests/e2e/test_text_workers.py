"""A text worker that hangs, and a text helper that is killed, in a running node: who notices, and what is told of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, wait_gone


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("text_workers")
    make_model(folder / "models" / "a")
    with Node(folder, config="text_stall_s = 10\n", null_step_ms=20) as running:
        yield running


def helper_of(node: Node) -> psutil.Process:
    assert node.process is not None
    return next(one for one in psutil.Process(node.process.pid).children() if "daemon.text" in one.cmdline())


def stop_workers(node: Node) -> list[int]:
    workers = helper_of(node).children()
    assert workers
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    return [worker.pid for worker in workers]


def test_a_text_worker_that_hangs_is_seen_killed_and_counted_and_streams_do_not_notice(node: Node) -> None:
    running = Stream(node, "a", "hello", 400)
    running.wait_for_chunks(3)
    workers = stop_workers(node)
    stuck = Stream(node, "a", "other", 2)
    (row,) = node.wait_for(lambda: node.json("queue"), "work that takes its time")
    assert (row["for"], row["model"], row["work"], row["request"]) == ("text", "a", "tokenizing", None)
    assert "(tokenizing, " in node.cli("queue").stdout
    assert "model a: the text of this request took longer than 10 s" in stuck.join().error
    wait_gone(workers)
    assert "problem: text worker of model a ended" in node.cli("status").stdout
    assert 'hearth_text_worker_deaths_total{cause="stalled"} 1.0' in node.get("/metrics")[1]
    assert Stream(node, "a", "again", 2).join().finish_reason == "length"
    assert running.join().finish_reason == "length"
    assert node.get("/healthz")[0] == 200


def test_a_killed_text_helper_costs_no_request_and_leaves_no_process(node: Node) -> None:
    assert Stream(node, "a", "hello", 2).join().finish_reason == "length"
    helper = helper_of(node)
    workers = stop_workers(node)
    streams = [Stream(node, "a", "hello", 2) for _ in range(4)]
    node.wait_for(lambda: node.json("queue"), "work that takes its time")
    os.kill(helper.pid, signal.SIGKILL)
    assert [stream.join().finish_reason for stream in streams] == ["length"] * 4
    assert f"the text helper (pid {helper.pid}) ended with -9" in node.log_text()
    wait_gone(workers)
    node.wait_for(lambda: not psutil.pid_exists(helper.pid), "the helper's end, not as a zombie")
