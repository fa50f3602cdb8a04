"""Clients of the HTTP address: single requests, streams, and one that connects anew all the time."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any

from tests.vm.guest.service import SAFETY_S

HOST, PORT = "127.0.0.1", 8000


def request(
    method: str,
    path: str,
    body: object = None,
    *,
    host: str = HOST,
    port: int = PORT,
    headers: Mapping[str, str] | None = None,
    trusted: ssl.SSLContext | None = None,
    timeout_s: float = SAFETY_S,
) -> tuple[int, Any]:
    """(status, JSON or text). Raises OSError or http.client.HTTPException."""
    if trusted is None:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=trusted)
    try:
        connection.request(method, path, _json(body), {**_headers(body), **(headers or {})})
        answer = connection.getresponse()
        text = answer.read().decode()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text
    finally:
        connection.close()


def chat(model: str = "fast", tokens: int = 8, **more: Any) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": tokens}
    return request("POST", "/v1/chat/completions", {**body, "ignore_eos": True}, **more)


def completion(model: str, tokens: int, seed: int, stream: bool = False) -> dict[str, Any]:
    return {"model": model, "prompt": "once", "max_tokens": tokens, "seed": seed, "ignore_eos": True, "stream": stream}


class Stream(threading.Thread):
    """One streamed completion. text: so far. num_tokens: events with text. problem: "" while nothing is wrong."""

    def __init__(self, model: str, tokens: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._body = completion(model, tokens, seed, stream=True)
        self.text, self.num_tokens, self.finish, self.problem, self.is_done = "", 0, "", "", False
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection(HOST, PORT, timeout=SAFETY_S)
        try:
            connection.request("POST", "/v1/completions", _json(self._body), _headers(self._body))
            answer = connection.getresponse()
            if answer.status != 200:
                self.problem = f"status {answer.status}: {answer.read()[:300]!r}"
                return
            while line := answer.readline():
                if line.startswith(b"data: [DONE]"):
                    self.is_done = True
                elif line.startswith(b"data: "):
                    self._event(json.loads(line[6:]))
        except (OSError, http.client.HTTPException) as error:
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def _event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.problem = json.dumps(event["error"])
            return
        for choice in event.get("choices", []):
            self.text += choice["text"]
            self.num_tokens += bool(choice["text"])
            self.finish = choice["finish_reason"] or self.finish

    def end(self) -> str:
        """Waits for its end. Returns what is wrong with it, or ""."""
        self.join(SAFETY_S * 2)
        if self.is_alive():
            return f"it has not ended; {self.num_tokens} events"
        return self.problem or ("" if self.is_done and self.finish == "length" else f"it broke off after {self.num_tokens} events")


class Prober(threading.Thread):
    """Connects and asks for the models, again and again, until it is stopped. problems: connections that were refused or broke, and
    other answers than 200. longest_s: the slowest answer."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.problems: list[str] = []
        self.num_answers, self.longest_s = 0, 0.0
        self._stop_now = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stop_now.is_set():
            begin = time.monotonic()
            try:
                status, _ = request("GET", "/v1/models")
                if status != 200:
                    self.problems.append(f"status {status}")
                self.num_answers += 1
            except (OSError, http.client.HTTPException) as error:
                self.problems.append(f"{type(error).__name__}: {error}")
            self.longest_s = max(self.longest_s, time.monotonic() - begin)
            time.sleep(0.25)

    def stop_now(self) -> None:
        self._stop_now.set()
        self.join(SAFETY_S)

    def stop(self) -> str:
        """Returns what it has seen. Raises AssertionError if anything was refused."""
        self.stop_now()
        if self.problems:
            raise AssertionError(f"{len(self.problems)} requests on new connections failed: {self.problems[:3]}")
        return f"{self.num_answers} requests on new connections answered, the slowest after {self.longest_s:.1f} s"


def _json(body: object) -> bytes | None:
    return None if body is None else json.dumps(body).encode()


def _headers(body: object) -> dict[str, str]:
    return {} if body is None else {"Content-Type": "application/json"}
