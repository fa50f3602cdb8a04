"""A text worker that hangs, and a text helper that is killed, in a running node: who notices, and what is told of it."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
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
    make_model(folder / "models" / "b")
    (folder / "templates").mkdir()
    (folder / "templates" / "b.jinja").write_text("old {{ messages[0].content }}")
    config = f'text_stall_s = 10\n[models.b]\nchat_template = "{folder}/templates/b.jinja"\n'
    with Node(folder, config=config, null_step_ms=20) as running:
        yield running


def shown(node: Node, model: str) -> str:
    """Returns the prompt that a chat with the message "x" has, as text; the tokenizer's ids are bytes."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "x"}]}).encode()
    request = urllib.request.Request(f"{node.url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(each for each in json.load(answer)["tokens"] if each < 256).decode()


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


@pytest.mark.parametrize(("model", "file"), [("a", "models/a/chat_template.jinja"), ("b", "templates/b.jinja")])
def test_an_edited_chat_template_is_used_while_the_model_is_loaded(node: Node, model: str, file: str) -> None:
    """The stream that runs meanwhile ends as it would have."""
    running = Stream(node, model, "hello", 100)
    running.wait_for_chunks(3)
    assert not shown(node, model).startswith("new ")
    (node.folder / file).write_text("new {{ messages[0].content }}")
    node.wait_for(lambda: shown(node, model) == "new x", "the new template")
    assert f"{model}: its files have changed" in node.log_text()
    assert running.join().finish_reason == "length"


def test_a_model_whose_text_cannot_be_read_says_so_in_the_list(node: Node) -> None:
    def notes() -> list[str]:
        (row,) = (row for row in node.json("models") if row["name"] == "c")
        return list(row.get("notes", ()))

    folder = make_model(node.models / "c")
    file = folder / "tokenizer.json"
    whole = file.read_text()
    node.wait_for(lambda: "c" in [row["name"] for row in node.json("models")], "the model")
    file.unlink()
    node.wait_for(notes, "the note that a file is missing")
    assert notes() == ["tokenizer.json is missing, so it can read and write no text: copy it there from where the model came from"]
    assert "tokenizer.json cannot be read" in Stream(node, "c", "x", 1).join().error
    assert len(notes()) == 1, "the request has found the same"
    assert "\nc: tokenizer.json is missing" in node.cli("models").stdout
    assert node.cli("unload", "c").returncode == 0
    file.write_text("{")
    node.wait_for(lambda: not notes(), "the file")
    assert node.cli("load", "c").returncode == 0
    node.wait_for(notes, "the note that it cannot be read")
    assert f"{file}: " in notes()[0]
    file.write_text(whole)
    node.wait_for(lambda: not notes(), "the whole file")
    assert shown(node, "c").endswith("x")


def test_grammars_follow_an_edited_tokenizer(node: Node) -> None:
    """The ids of x and y are swapped: a prompt of y has the id of x then, and an answer that must be of x has y's ids in the engine
    and is x again as text."""

    def answer() -> str:
        fields = {"model": "a", "messages": [{"role": "user", "content": "y"}], "max_tokens": 40}
        body = json.dumps(fields | {"structured_outputs": {"regex": "x{20}"}}).encode()
        request = urllib.request.Request(f"{node.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            text: str = json.load(response)["choices"][0]["message"]["content"]
        return text

    assert answer() == "x" * 20
    file = node.models / "a" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["x"], vocab["y"] = vocab["y"], vocab["x"]
    before = shown(node, "a")
    file.write_text(json.dumps(tokenizer))
    node.wait_for(lambda: shown(node, "a") == before.replace("x", "y"), "the new tokenizer")
    assert answer() == "x" * 20
