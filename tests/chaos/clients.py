"""Clients that send requests without a pause and compare each answer with the one that an undisturbed node gave."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from daemon.process.fd_store import MOST_QUICK_STARTS, QUICK_S

BUSY = (429, 503)
PATIENCE_S = 180.0  # a request that was refused so long is lost; an engine may hang for 110 s
SOCKET_LIMIT_S = 200.0
PROMPTS = ("once upon a time", "why not")
MAX_TOKENS = (20, 90)
IN_BACKGROUND = 0.15  # so many of the requests are
KILLED = "kill -9 of the daemon"
# Refusals that only acts upon files and memory may bring about: elsewhere they are no reason to try again.
OF_FILES = ("adapter_unavailable", "model_incomplete")
# What a request for an adapter may be told: where there is no memory to read it, where another daemon takes over a request whose
# adapter is another one by then, while its files are being changed, while they are broken, and while they are not there. A response
# in the background has one code for all.
NO_MEMORY = frozenset({"adapter_unavailable", "server_error"})
CRASHED = frozenset({"crashed_twice", "model_failed"})  # what a request may be told whose engines end one after the other
ANOTHER_CODE = "model_changed"
ANOTHER = frozenset({ANOTHER_CODE, "server_error"})
CHANGING = NO_MEMORY | ANOTHER | {"model_incomplete"}
BROKEN = CHANGING | {"adapter_unusable", "model_unusable"}
MISSING = CHANGING | {"model_not_found"}


class Request(NamedTuple):
    """One of the requests that clients draw from. Equal requests have equal answers. is_background: it is a response that is made
    without a client waiting, and fetched when it is done."""

    model: str
    prompt: str
    max_tokens: int
    seed: int
    is_chat: bool
    is_stream: bool
    is_background: bool = False

    @property
    def path(self) -> str:
        if self.is_background:
            return "/v1/responses"
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def body(self) -> bytes:
        if self.is_background:
            asked = {"input": self.prompt, "max_output_tokens": self.max_tokens, "temperature": 0}
            return json.dumps({"model": self.model, **asked, "background": True, "ignore_eos": True, "seed": 1}).encode()
        text = {"messages": [{"role": "user", "content": self.prompt}]} if self.is_chat else {"prompt": self.prompt}
        settings = {"max_tokens": self.max_tokens, "seed": self.seed, "temperature": 0.8 * (self.seed % 2), "ignore_eos": True}
        return json.dumps({"model": self.model, **text, **settings, "stream": self.is_stream}).encode()

    @property
    def asks_the_same(self) -> Request:
        """The request whose answer has the same text: streamed or not makes no difference."""
        return self._replace(is_stream=False)


def drawn(draw: random.Random, models: Sequence[str]) -> Request:
    model, prompt, max_tokens = draw.choice(models), draw.choice(PROMPTS), draw.choice(MAX_TOKENS)
    if draw.random() < IN_BACKGROUND:
        return Request(model, prompt, max_tokens, 0, False, False, is_background=True)
    return Request(model, prompt, max_tokens, draw.randrange(2), draw.random() < 0.5, draw.random() < 0.7)


def all_requests(models: Sequence[str]) -> list[Request]:
    """Returns one request for each different answer."""
    in_background = [
        Request(model, prompt, max_tokens, 0, False, False, is_background=True)
        for model in models
        for prompt in PROMPTS
        for max_tokens in MAX_TOKENS
    ]
    return in_background + [
        Request(model, prompt, max_tokens, seed, is_chat, False)
        for model in models
        for prompt in PROMPTS
        for max_tokens in MAX_TOKENS
        for seed in (0, 1)
        for is_chat in (False, True)
    ]


class Told(Exception):
    """Raised for an answer that tells of an error. code: the error's, or ""."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class Refused(Told):
    """Raised for an answer of 429 or 503, before anything was computed. seconds: its Retry-After."""

    def __init__(self, seconds: float, text: str, code: str) -> None:
        super().__init__(text, code)
        self.seconds = seconds


class Broken(Told):
    """Raised for an answer that a client could not use."""


class Gone(Told):
    """Raised for a response in the background that was accepted and is not there, or was not made."""


@dataclass
class Change:
    """What requests for models of these names may be told until a time. codes: of errors. others: models whose texts are right as
    well. why: what was done, in words."""

    why: str
    names: Set[str]
    codes: Set[str]
    others: Sequence[str]
    end_s: float = math.inf


def ask(url: str, request: Request) -> str:
    """Returns the text of an answer. Raises Refused, Broken, or OSError and http.client.HTTPException for a lost connection."""
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=SOCKET_LIMIT_S)) as connection:
        connection.request("POST", request.path, request.body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status == 200 and request.is_background:
            return _fetched(url, json.loads(answer.read())["id"])
        if answer.status != 200:
            text = answer.read().decode(errors="replace")
            code = code_of(text)
            if answer.status in BUSY and (wait := answer.getheader("Retry-After")):
                raise Refused(float(wait), text[:300], code)
            raise Broken(f"status {answer.status}: {text[:300]}", code)
        return _stream_text(answer) if request.is_stream else _text(json.loads(answer.read()))


def code_of(text: str) -> str:
    """Returns the code of an error that an answer's body tells of, or ""."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["code"])
    return ""


def _fetched(url: str, public_id: str) -> str:
    """Returns the text of a response in the background once it is made, whatever becomes of connections meanwhile. Raises Gone."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with (
            contextlib.suppress(OSError, http.client.HTTPException, ValueError),
            contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=SOCKET_LIMIT_S)) as connection,
        ):
            connection.request("GET", f"/v1/responses/{public_id}")
            answer = connection.getresponse()
            told = json.loads(answer.read())
            if answer.status not in (200, *BUSY):
                raise Gone(f"{public_id}: status {answer.status}: {told}")
            if told.get("status") == "incomplete":  # max_output_tokens, as asked for
                return "".join(part["text"] for item in told["output"] for part in item["content"])
            if told.get("status") not in (None, "queued", "in_progress"):
                raise Gone(f"{public_id}: {told['status']}: {told['error']}", (told["error"] or {}).get("code", ""))
        time.sleep(0.05)
    raise Gone(f"{public_id} was not made within {PATIENCE_S:g} s")


def _stream_text(answer: http.client.HTTPResponse) -> str:
    text, finish = "", ""
    for line in answer:
        event = line.removeprefix(b"data: ").strip()
        if event == b"[DONE]":
            if finish != "length":
                raise Broken(f"the stream ended with finish_reason {finish!r}")
            return text
        if event.startswith(b"{"):
            told = json.loads(event)
            if "error" in told:
                raise Broken(f"an error in the stream: {told['error']}", told["error"].get("code") or "")
            for choice in told["choices"]:
                text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                finish = choice["finish_reason"] or finish
    raise Broken(f"the stream ended after {len(text)} characters")


def _text(answer: Any) -> str:
    (choice,) = answer["choices"]
    if choice["finish_reason"] != "length":
        raise Broken(f"finish_reason {choice['finish_reason']!r}")
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


class Clients:
    """Threads that send requests until `stop`. faults: what became of requests that the node lost, in words. counts: how many ended
    how. running: when the requests in progress began, by thread. longest_s: the longest time a request took, refusals included."""

    def __init__(
        self,
        url: str,
        models: Sequence[str],
        expected: Mapping[Request, str],
        draw: random.Random,
        number: int,
    ) -> None:
        self.url, self._models, self.expected = url, models, expected
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.running: dict[str, float] = {}
        self.longest_s = 0.0
        self._cuts: list[tuple[float, float, str]] = []
        self._changes: list[Change] = []
        self._restarted_s = 0.0  # when a daemon has begun the last time that takes over what the one before had
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(draw.random()),), name=f"client {at}", daemon=True)
            for at in range(number)
        ]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def cut(self, why: str) -> Iterator[None]:
        """A context in which the connections of clients end. why: what ends them."""
        self._cuts.append((time.monotonic(), math.inf, why))
        yield
        self._cuts[-1] = (self._cuts[-1][0], time.monotonic(), why)

    @contextlib.contextmanager
    def changed(self, why: str, names: Set[str], codes: Set[str], others: Sequence[str] = ()) -> Iterator[None]:
        """A context in which requests for models of these names may be told these errors, and may get the texts of the others."""
        change = Change(why, names, codes, others)
        self._changes.append(change)
        yield
        change.end_s = time.monotonic()

    @contextlib.contextmanager
    def handed_over(self) -> Iterator[None]:
        """A context in which one daemon hands its connections over to another, which ends a stream that has begun if what it came
        from has changed: no other status can be sent, and no error in a form that it may not have."""
        self._restarted_s = math.inf
        yield
        self._restarted_s = time.monotonic()

    def wait_for_running(self, before_s: float, limit_s: float = SOCKET_LIMIT_S) -> None:
        """Waits until the requests that were sent before this time have ended."""
        end = time.monotonic() + limit_s
        while any(began < before_s for began in list(self.running.values())):
            if time.monotonic() > end:
                self._lose(f"requests did not end within {limit_s:g} s: {self.running}")
                return
            time.sleep(0.02)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * SOCKET_LIMIT_S)
            if thread.is_alive():
                self._lose(f"{thread.name} hangs")

    def _run(self, draw: random.Random) -> None:
        while not self._stopping.is_set():
            request = drawn(draw, self._models)
            begun_s = time.monotonic()
            self.one(request)
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            if draw.random() < 0.2:
                time.sleep(draw.random())

    def one(self, request: Request, as_model: str = "") -> None:
        """Sends a request until it is answered, and counts how that ends. as_model: whose text is right; "": that of the model
        that is asked."""
        begun_s = self.running[threading.current_thread().name] = time.monotonic()
        right = request.asks_the_same._replace(model=as_model or request.model)
        try:
            while not self._is_over(request, right, begun_s):
                pass
        finally:
            self.running.pop(threading.current_thread().name)

    def _is_over(self, request: Request, right: Request, begun_s: float) -> bool:
        """Sends a request once. Returns whether that was the end of it. right: the request whose text is right."""
        try:
            text = ask(self.url, request)
        except Refused as refused:
            if refused.code in OF_FILES and not self._changes_told(request, begun_s, refused.code):
                self._lose(f"{request} was refused though nobody had changed a file: {refused}")
            elif time.monotonic() - begun_s > PATIENCE_S:
                self._lose(f"{request} was refused for {PATIENCE_S:g} s: {refused}")
            else:
                self._count("refused")
                time.sleep(min(refused.seconds, 1.0))
                return False
        except Gone as gone:
            if changes := self._changes_told(request, begun_s, gone.code):
                self._count(f"told {gone.code}: {changes[-1].why}")
            elif self._was_given_up():
                self._count("given up after three crashes within a minute")
            else:
                self._lose(f"{request}: {gone}")
        except (OSError, http.client.HTTPException, ValueError, Broken) as error:
            code = error.code if isinstance(error, Broken) else ""
            cuts = [why for begin, end, why in self._cuts if begin < time.monotonic() and begun_s < end]
            if changes := self._changes_told(request, begun_s, code):
                self._count(f"told {code}: {changes[-1].why}")
            elif not code and self._was_another(request, begun_s):
                self._count("ended by a restart: its adapter had changed")
            elif cuts:
                self._count(f"cut by {cuts[-1]}")
            else:
                self._lose(f"{request}: {type(error).__name__}: {error}")
        else:
            others = [other for change in self._changes_of(request, begun_s) for other in change.others]
            if text == self.expected[right]:
                self._count("answered")
            elif text in [self.expected[right._replace(model=other)] for other in others]:
                self._count("answered as another version")
            else:
                self._lose(f"{request}: another text: {text[:60]!r}, not {self.expected[right][:60]!r}")
        return True

    def _was_another(self, request: Request, begun_s: float) -> bool:
        """Returns whether a stream may have ended because a daemon took it over whose adapter of that name is another one."""
        is_taken_over = request.is_stream and begun_s < self._restarted_s
        return is_taken_over and bool(self._changes_told(request, begun_s, ANOTHER_CODE))

    def _changes_of(self, request: Request, begun_s: float) -> list[Change]:
        """Returns the changes that a request met that began at this time and ends now."""
        return [change for change in list(self._changes) if request.model in change.names and begun_s < change.end_s]

    def _changes_told(self, request: Request, begun_s: float, code: str) -> list[Change]:
        return [change for change in self._changes_of(request, begun_s) if code in change.codes]

    def _was_given_up(self) -> bool:
        """Returns whether a daemon that was killed so often so soon has given up what was kept for it."""
        since_s = time.monotonic() - PATIENCE_S
        kills = sorted(end for _, end, why in self._cuts if why == KILLED and end > since_s)
        return any(last - first < QUICK_S for first, last in zip(kills, kills[MOST_QUICK_STARTS - 1 :], strict=False))

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _lose(self, why: str) -> None:
        self._count("lost")
        self.faults.append(why)


def hang_up(url: str, request: Request, num_bytes: int) -> None:
    """Sends a request, reads some bytes of its answer, and closes the connection."""
    with contextlib.suppress(OSError), _connected(url) as connection:
        connection.sendall(_head(request.path, len(request.body)) + request.body)
        connection.recv(num_bytes)


def send_garbage(url: str, draw: random.Random) -> None:
    """Sends what no HTTP client would."""
    pieces: list[Callable[[], bytes]] = [
        lambda: draw.randbytes(draw.randrange(1, 5000)),
        lambda: b"GET /" + b"a" * draw.randrange(1, 60000) + b" HTTP/1.1\r\n\r\n",
        lambda: _head("/v1/completions", 100) + b'{"model": "ash", "prom',
        lambda: _head("/v1/completions", 9) + b"[[[[[[[[[",
        lambda: b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        lambda: b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    ]
    with contextlib.suppress(OSError), _connected(url) as connection:
        connection.sendall(draw.choice(pieces)())
        connection.settimeout(0.3)  # the rest of a body is waited for
        connection.recv(1000)


def _connected(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), 3)


def _head(path: str, num_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n".encode()
    )
