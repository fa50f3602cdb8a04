"""Clients over a restart under a service manager: streams go on where they were, and nobody has to send a request again."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon.service_manager import NotifySocket
from tests.e2e.checkpoints import make_model
from tests.e2e.node import SAFETY_S, Node, without_drafts
from tests.e2e.raw_stream import Event, RawStream
from tests.e2e.service_node import ServiceNode

RESTART = signal.SIGUSR2
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CHAT: dict[str, Any] = {"model": "ash", "messages": [{"role": "user", "content": "once upon a time"}]}
LONG = {"max_tokens": 120, "ignore_eos": True}
STREAM = {"stream": True}
_TEXTS = {"text", "content", "delta", "arguments", "partial_json", "token_logprobs"}  # fields whose values add up
_ENDS = {
    "finish_reason",
    "stop_reason",
    "done_reason",
    "status",
    "completion_tokens",
    "output_tokens",
    "eval_count",
}  # the last counts

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"model": "ash", "prompt": "once upon a time", "seed": 7, **LONG, **STREAM}),
    "chat": ("/v1/chat/completions", {**CHAT, "seed": 8, **LONG, **STREAM, "stream_options": {"include_usage": True}}),
    "choices": ("/v1/chat/completions", {**CHAT, "seed": 9, "n": 3, **LONG, **STREAM}),
    "logprobs": ("/v1/completions", {"model": "ash", "prompt": "once", "seed": 10, "logprobs": 2, **LONG, **STREAM}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 120, "ignore_eos": True, **STREAM}),
    "responses": (
        "/v1/responses",
        {"model": "ash", "input": "once upon a time", "max_output_tokens": 120, "ignore_eos": True, **STREAM},
    ),
    "ollama": ("/api/chat", {**CHAT, "options": {"num_predict": 120, "seed": 11}, "ignore_eos": True}),
    "forced call": (
        "/v1/chat/completions",
        {
            **CHAT,
            "seed": 12,
            "max_tokens": 120,
            **STREAM,
            "tools": [{"type": "function", "function": WEATHER}],
            "tool_choice": "required",
        },
    ),
}

SEEDLESS = ("messages", "responses")  # endpoints where a request cannot name a seed


@contextlib.contextmanager
def started(folder: Path, notify: NotifySocket, weights_bytes: int = 0, **options: Any) -> Iterator[ServiceNode]:
    """Yields a node on a listener that a service manager holds. Without options its model makes 20 tokens a second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        make_model(folder / "n" / "models" / "ash", seed=1, weights_bytes=weights_bytes)
        made = ServiceNode(folder / "n", notify, **{"null_step_ms": 50.0, "flags": ["--drain-timeout-s", "5"], **options})
        made.listeners = [("http", listener)]
        with made:
            yield made


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceNode]:
    """A node of which tests restart only the daemon, as often as they like."""
    folder = tmp_path_factory.mktemp("restarts")
    notify = NotifySocket(folder)
    try:
        with started(folder, notify) as made:
            yield made
    finally:
        notify.close()


def all_told(streams: Mapping[Any, RawStream]) -> dict[Any, Any]:
    return {name: told(stream.join().events) for name, stream in streams.items()}


def handed_over(node: ServiceNode) -> list[int]:
    """Returns for each restart how many requests in progress were handed over."""
    return [int(num) for num in re.findall(r"handed over to the next hearthd, (\d+) of them with a request", node.log_text())]


def told(events: list[Event]) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Returns what a client makes of events, however many tokens each of them has: texts of the same place put together, the last
    values of what ends an answer, and the shapes of the events, repeated ones once."""
    texts: dict[str, Any] = {}
    ends: dict[str, Any] = {}
    shapes = [_shape(event) for event in events]
    for place, name, value in (found for event in events for found in _values(event, event.get("type", ""))):
        if name in _TEXTS:
            texts[place] = texts[place] + value if place in texts else value
        elif name in _ENDS and value is not None:
            ends[place] = value
    return texts, ends, [shape for at, shape in enumerate(shapes) if at == 0 or shape != shapes[at - 1]]


def _values(value: Any, place: str) -> Iterator[tuple[str, str, Any]]:
    """Yields place, name and value of all strings, numbers and lists of numbers in an object."""
    if isinstance(value, dict):
        index = value.get("index", value.get("output_index", ""))
        for name, each in value.items():
            if isinstance(each, dict) or (isinstance(each, list) and name not in _TEXTS):
                yield from _values(each, f"{place}/{index}{name}")
            elif not isinstance(each, list) or not any(isinstance(one, dict) for one in each):
                yield f"{place}/{index}{name}", name, each
            else:
                yield from _values(each, f"{place}/{index}{name}")
    elif isinstance(value, list):
        for each in value:
            yield from _values(each, place)


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shape(each) for name, each in value.items() if name != "logprobs"}
    return [_shape(each) for each in value[:1]] if isinstance(value, list) else None


def test_every_kind_of_stream_goes_on(node: ServiceNode) -> None:
    expected = all_told({name: RawStream(node, *request) for name, request in STREAMS.items()})
    running = {name: RawStream(node, *request) for name, request in STREAMS.items()}
    for stream in running.values():
        stream.wait_for_events(10)
    node.restart(RESTART)
    assert handed_over(node)[-1] == len(running), "some had ended before the restart"
    for name, stream in running.items():
        events = stream.join().events
        texts, ends, shapes = told(events)
        if name == "responses":
            assert texts["response.output_text.done/0text"] == texts["response.output_text.delta/0delta"]
        if name in SEEDLESS:  # the null device's text follows from the seed
            texts = expected[name][0]
        assert (texts, ends, shapes) == expected[name], name
        assert len({event["id"] for event in events if "id" in event}) <= 1, name
        numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
        assert numbers == sorted(set(numbers)), name
    assert "Traceback" not in node.log_text()


def test_streams_whose_model_is_another_one_end_with_that_error(tmp_path: Path, notify: NotifySocket) -> None:
    with started(tmp_path, notify) as node:
        running = {name: RawStream(node, *request) for name, request in STREAMS.items()}
        for stream in running.values():
            stream.wait_for_events(10)
        make_model(node.models / "ash", seed=2)
        node.restart(RESTART)
        for name, stream in running.items():
            stream.join()
            assert "that name leads to another model now" in json.dumps(stream.events[-1]), name
        assert "Traceback" not in node.log_text()


def test_texts_are_the_ones_a_model_would_have_made(tmp_path: Path, notify: NotifySocket) -> None:
    """In float32, greedy and sampled, with a grammar and without: the KV is computed anew from the tokens that were made."""
    flags = ["--dtype", "float32", "--threads", "1", "--load-deadline-s", "80", "--max-wait-s", "80"]
    with started(
        tmp_path, notify, 12 << 20, devices=["cpu:0=96MiB"], runner="torch", config=without_drafts("ash"), flags=flags
    ) as node:
        requests = {
            name: (path, {**body, "temperature": 0.7 * (at % 2)}) for at, (name, (path, body)) in enumerate(STREAMS.items())
        }
        for name in SEEDLESS:
            requests[name][1]["temperature"] = 0
        requests = {name: longer(request) for name, request in requests.items() if name != "ollama"}
        expected = all_told({name: RawStream(node, *request) for name, request in requests.items()})
        running = {name: RawStream(node, *request) for name, request in requests.items()}
        for stream in running.values():
            stream.wait_for_events(10)
        node.restart(RESTART)
        for name, stream in running.items():
            assert without_numbers(told(stream.join().events)) == without_numbers(expected[name]), name
        assert handed_over(node) > [0], "all had ended before the restart"


def without_numbers(answer: tuple[dict[str, Any], dict[str, Any], list[Any]]) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Returns an answer without log-probabilities, whose last digits depend on what else is in a step."""
    texts, ends, shapes = answer
    return {place: text for place, text in texts.items() if isinstance(text, str)}, ends, shapes


def longer(request: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    path, body = request
    return path, {name: 400 if name in ("max_tokens", "max_output_tokens") else value for name, value in body.items()}


def test_fifty_streams_over_two_restarts(node: ServiceNode) -> None:
    body = {"model": "ash", "prompt": "once upon a time", "max_tokens": 250, "ignore_eos": True, **STREAM}
    expected = all_told({seed: RawStream(node, "/v1/completions", {**body, "seed": seed}) for seed in (0, 1)})
    running = [RawStream(node, "/v1/completions", {**body, "seed": at % 2}) for at in range(50)]
    for _ in range(2):
        before = [len(stream.events) for stream in running]
        for stream, num in zip(running, before, strict=True):
            stream.wait_for_events(num + 10)
        node.restart(RESTART)
    assert handed_over(node)[-2:] == [50, 50]
    for at, stream in enumerate(running):
        assert told(stream.join().events) == expected[at % 2]
    assert node.get("/metrics")[0] == 200
    assert node.log_text().count("50 of 50 connections of before the restart go on") == 2


def test_an_answer_in_one_piece_and_requests_that_wait(tmp_path: Path, notify: NotifySocket) -> None:
    """They keep what was made of them, and no queue is too full for them."""
    with started(tmp_path, notify, config='[models."ash"]\nmax_sequences = 2\nmax_queued = 4\n') as node:
        bodies = [
            {**CHAT, "max_tokens": 60, "ignore_eos": True, "seed": seed, "n": 2, "logprobs": True, "top_logprobs": 2}
            for seed in range(3)
        ]
        expected = [RawStream(node, "/v1/chat/completions", body).join().events for body in bodies]
        running = [RawStream(node, "/v1/chat/completions", body) for body in bodies]
        node.wait_for(lambda: node.get("/load")[1]["server_load"] >= 6, "requests")
        time.sleep(0.5)  # some tokens
        node.restart(RESTART)
        for stream, whole in zip(running, expected, strict=True):
            (answer,) = stream.join().events
            assert stream.status == 200
            assert answer["choices"] == whole[0]["choices"]
            assert answer["usage"]["completion_tokens"] == 120


def test_connections_without_a_request_and_with_a_part_of_one(node: ServiceNode) -> None:
    body = json.dumps({"model": "ash", "prompt": "once", "max_tokens": 3}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: mine\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    address = ("127.0.0.1", int(node.url.rpartition(":")[2]))
    whole = head + body
    with contextlib.ExitStack() as stack:
        used = http.client.HTTPConnection(*address, timeout=SAFETY_S)
        stack.callback(used.close)
        used.request("GET", "/v1/models")
        assert used.getresponse().read()
        parts = [0, 10, len(head), len(head) + 20, len(whole) - 1]
        open_ones = [stack.enter_context(socket.create_connection(address, SAFETY_S)) for _ in parts]
        for connection, part in zip(open_ones, parts, strict=True):
            connection.sendall(whole[:part])
        assert node.process is not None
        daemon = psutil.Process(node.process.pid)
        node.wait_for(lambda: len(daemon.net_connections()) >= len(parts) + 2, "connections")  # and the listener
        node.restart(RESTART)
        for connection, part in zip(open_ones, parts, strict=True):
            connection.sendall(whole[part:])
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            told_back = json.loads(answer.read())
            assert (answer.status, answer.getheader("X-Request-Id")) == (200, "mine"), part
            assert told_back["usage"]["completion_tokens"] == 3
        used.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert used.getresponse().status == 200


def test_more_connections_than_half_of_the_open_files(tmp_path: Path, notify: NotifySocket) -> None:
    limit, refused_from = 240, 150  # a quarter is kept for the daemon's own work, an eighth for refusals
    program = f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))"
    program += "; from daemon.main import main; sys.exit(main())"
    with started(tmp_path, notify, program=["-P", "-c", program]) as node, contextlib.ExitStack() as stack:
        assert node.process is not None
        daemon = psutil.Process(node.process.pid)
        clients = list[http.client.HTTPConnection]()
        while (num_open := daemon.num_fds()) < refused_from - 8:
            client = http.client.HTTPConnection(*node.listeners[0][1].getsockname(), timeout=SAFETY_S)
            stack.callback(client.close)
            client.request("GET", "/healthz")
            assert client.getresponse().read()
            clients.append(client)
            assert client.sock is not None, "it was refused"
        assert limit < num_open + len(clients)
        node.restart(RESTART)
        for client in clients:
            assert client.sock is not None, "it was closed, and would connect again"
            client.request("GET", "/healthz")
            assert client.getresponse().read()


def test_responses_that_others_follow_are_kept(node: ServiceNode) -> None:
    body = {"model": "ash", "input": "once upon a time", "max_output_tokens": 5}
    (first,) = RawStream(node, "/v1/responses", body).join().events
    node.restart(RESTART)
    status, shown = node.get(f"/v1/responses/{first['id']}")
    assert (status, shown["output"]) == (200, first["output"])
    follow = RawStream(node, "/v1/responses", {**body, "previous_response_id": first["id"], "max_output_tokens": 120, **STREAM})
    follow.wait_for_events(8)
    node.restart(RESTART)
    assert follow.join().events[-1]["type"] == "response.incomplete"


def test_without_a_store_it_stops_as_ever(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "ash", seed=1)
    with ServiceNode(tmp_path / "n", None, null_step_ms=20.0, flags=["--drain-timeout-s", "30"]) as node:
        stream = RawStream(node, *STREAMS["chat"])
        stream.wait_for_events(10)
        node.signal(RESTART)
        assert stream.join().events[-1]["usage"]["completion_tokens"] == 120


def test_requests_that_arrive_at_that_moment_lose_nothing(node: ServiceNode) -> None:
    """Connections that are being made and requests whose handlers have not begun are handed over, or wait for the next hearthd."""
    for _ in range(4):
        streams: list[RawStream] = []
        opening = threading.Thread(target=open_many, args=(node, streams))
        opening.start()
        node.restart(RESTART)
        opening.join()
        for stream in streams:
            events = stream.join().events
            assert stream.status == 200, (stream.status, events)
            assert events[-1]["choices"][0]["finish_reason"] == "length"


def open_many(node: Node, streams: list[RawStream]) -> None:
    """Opens a stream every millisecond, for as long as a test may take to send a signal."""
    body = {"model": "ash", "prompt": "once", "max_tokens": 20, "ignore_eos": True, **STREAM}
    for _ in range(60):
        streams.append(RawStream(node, "/v1/completions", body))
        time.sleep(0.001)
