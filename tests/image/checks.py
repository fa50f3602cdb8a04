"""Checks of the image, in the order in which they run: some look at the container that the one before has left."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from tests.image.engine import NAME, Engine, documented, documented_run

ASK = {"model": "oak", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 16, "temperature": 0, "ignore_eos": True}

# The image's Python runs this. It finds compiled files that each start would compile again, as this user may not write them.
_STALE = """
import importlib.util, os, struct
stale, num = [], 0
for folder, _, files in os.walk("/opt/hearthd/lib"):
    for path in (os.path.join(folder, name) for name in files if name.endswith(".py")):
        cached = importlib.util.cache_from_source(path)
        if os.path.exists(cached):
            num += 1
            its, there = struct.unpack("<II", open(cached, "rb").read(16)[8:]), os.stat(path)
            if its != (int(there.st_mtime) & 0xFFFFFFFF, there.st_size & 0xFFFFFFFF):
                stale.append(path)
print(f"{len(stale)} of {num} compiled files are stale", *stale[:3])
"""
_WRITABLE = "find /opt /usr /etc -xdev -writable ! -type l 2>/dev/null | head -3"
_LEFT = "ls -d /src /root/.cache /tmp/* /var/lib/apt/lists/*_* 2>/dev/null || true"
_ZOMBIES = "grep -l '^State:.Z' /proc/[0-9]*/status || true"
_KILL_ENGINE = "for one in /proc/[0-9]*; do grep -qs '^engine ' $one/comm && kill -9 ${one#/proc/} && echo killed; done; true"


class Wrong(Exception):
    """Raised if a check finds something else than it should; the message says what."""


def ask(engine: Engine, path: str, body: dict[str, object] | None = None) -> tuple[int, str]:
    """Returns status and text of an answer. Raises OSError or HTTPException if there is none."""
    with closing(http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)) as connection:
        connection.request("GET" if body is None else "POST", path, json.dumps(body) if body else None)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def until_ready(engine: Engine) -> float:
    """Waits until requests are taken and returns after how many seconds they were. Raises Wrong."""
    begin = time.monotonic()
    while time.monotonic() < begin + 120:
        try:
            if ask(engine, "/readyz")[0] == 200:
                return time.monotonic() - begin
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    raise Wrong(f"not ready after 120 s: {engine.log()[-2000:]}")


def chat(engine: Engine) -> str:
    """Returns the text of an answer. Raises Wrong."""
    status, text = ask(engine, "/v1/chat/completions", ASK)
    answer = json.loads(text)
    if status != 200 or answer["usage"]["completion_tokens"] != 16:
        raise Wrong(f"a chat: {status} {text}")
    return str(answer["choices"][0]["message"]["content"])


def expect(is_right: bool, seen: str, wrong: str = "") -> str:
    """Returns what was seen. wrong: how a failure is told of instead. Raises Wrong."""
    if not is_right:
        raise Wrong(wrong or seen)
    return seen


def contents(engine: Engine) -> str:
    writable = engine.one_off("--entrypoint", "sh", NAME, "-c", _WRITABLE).split()
    expect(not writable, f"its user may write to {writable}")
    left = engine.one_off("--user", "0", "--entrypoint", "sh", NAME, "-c", _LEFT).split()
    expect(not left, f"left of the build: {left}")
    user = engine.one_off("--entrypoint", "id", NAME, "-u").strip()
    expect(user == "10001", f"it runs as {user}")
    stale = engine.one_off("--entrypoint", "python3", NAME, "-c", _STALE).strip()
    expect(stale.startswith("0 of "), stale)
    return f"{stale}; {engine.one_off('--entrypoint', 'pip', NAME, 'check').strip()}"


def refusal(engine: Engine) -> str:
    said = engine.one_off(NAME, "--device", "cpu=1GiB", status=2, both=True).strip().splitlines()[-1]
    return expect("--keys-file FILE, or --insecure" in said, said)


def ahead(engine: Engine) -> str:
    return engine.do(engine.translated(documented("docker run --rm ")), limit_s=1200).strip().splitlines()[-1]


def as_documented(engine: Engine) -> str:
    run, looks = documented_run()
    engine.do(engine.translated(run))
    took_s = until_ready(engine)
    said = [engine.do(engine.translated(look)) for look in looks]
    expect("\nok   · models: 1 of 1" in said[0], said[0])
    return f"ready after {took_s:.1f} s; hearth doctor and hearth ps answer"


def chats(engine: Engine) -> str:
    first = chat(engine)
    expect(chat(engine) == first, "two greedy chats differ")
    listed = engine.inside("hearth", "ps")
    expect("oak " in listed and " ready " in listed, listed)
    log = engine.log()
    return expect("are being compiled" not in log, "none is compiled", "kernels are compiled again")


def health(engine: Engine) -> str:
    if engine.program == "podman":
        engine.call("healthcheck", "run", NAME)
        return "podman healthcheck run ends with 0"
    for _ in range(60):
        if (status := engine.call("inspect", NAME, "--format", "{{.State.Health.Status}}").strip()) == "healthy":
            return status
        time.sleep(0.5)
    raise Wrong(status)


def killed_engine(engine: Engine) -> str:
    before = chat(engine)
    expect(engine.inside("sh", "-c", _KILL_ENGINE).strip() == "killed", "no engine was found")
    expect(chat(engine) == before, "the answer is another one")
    zombies = engine.inside("sh", "-c", _ZOMBIES)
    return expect(not zombies, "no process is left unreaped", f"not reaped: {zombies}")


def killed_container(engine: Engine) -> str:
    before = chat(engine)
    engine.inside("hearth", "pin", "oak")
    engine.call("kill", "-s", "KILL", NAME)
    engine.call("start", NAME)
    took_s = until_ready(engine)
    expect(chat(engine) == before, "the answer is another one")
    listed = engine.inside("hearth", "ps")
    return expect(" yes " in listed, f"ready again after {took_s:.1f} s; hearth ps: {listed.splitlines()[1]}")


def stopped(engine: Engine) -> str:
    """Stops the container under a stream that is long enough to be under way when the signal comes, which the order of the log
    shows. The stream is read meanwhile, because the stop waits for a client that does not read for a bounded time only."""
    body = {"model": "oak", "prompt": "a", "max_tokens": 12000, "stream": True, "ignore_eos": True}
    with closing(http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)) as connection, ThreadPoolExecutor(1) as pool:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        answer.readline()
        begin = time.monotonic()
        stopping = pool.submit(engine.call, "stop", NAME)
        rest = answer.read().decode()
        stopping.result()
        took_s = time.monotonic() - begin
    expect(rest.endswith("data: [DONE]\n\n"), f"the stream broke off: {rest[-200:]}")
    status = engine.call("inspect", NAME, "--format", "{{.State.ExitCode}}").strip()
    expect(status == "0", f"exit status {status}")
    log = engine.log()
    drained, ended = log.rfind("SIGTERM: draining"), log.rfind("request: completions")
    seen = f"the stream ends whole behind SIGTERM; stopped after {took_s:.1f} s with status 0"
    return expect(0 < drained < ended, seen, f"the stream was over before SIGTERM came: {log[-1000:]}")


def memory(engine: Engine) -> str:
    engine.remove()
    run = engine.translated(documented_run()[0])
    engine.do([*run[: run.index(NAME, run.index("--name") + 2)], "--memory", "3g", NAME, "--insecure"])
    until_ready(engine)
    lines = [line for line in engine.inside("hearth", "doctor").splitlines() if "· memory" in line]
    return expect("cpu:0 1.5 GiB of 3.0 GiB" in lines[0] and "may take 3.0 GiB" in lines[1], "; ".join(lines))


def read_only(engine: Engine) -> str:
    engine.remove()
    run = engine.translated(documented_run()[0])
    at = run.index(NAME, run.index("--name") + 2)
    engine.do([*run[:at], *documented("--read-only ").split(), *run[at:]])
    until_ready(engine)
    chat(engine)
    engine.inside("hearth", "ps")
    engine.call("stop", NAME)
    status = engine.call("inspect", NAME, "--format", "{{.State.ExitCode}}").strip()
    return expect(status == "0", f"a chat and hearth ps are answered; ended with {status}")


CHECKS: dict[str, tuple[str, Callable[[Engine], str]]] = {
    "contents": ("it runs as user 10001, who may write nowhere in it; nothing is left of the build or compiled again", contents),
    "refusal": ("without keys or --insecure it does not serve, ends with 2 and says why", refusal),
    "ahead": ("kernels are compiled into the volume before the first start", ahead),
    "run": ("the commands of docs/install.md for hosts without GPUs", as_documented),
    "chat": ("chats are answered by way of the published port, with the kernels of the volume", chats),
    "health": ("the image's health check succeeds", health),
    "engine": ("after kill -9 of the engine a chat gets the same answer", killed_engine),
    "container": ("after kill -9 of the container and a start, too, and the volume has kept the pin", killed_container),
    "stop": ("stop under a stream", stopped),
    "memory": ("with --memory the budget goes by it, and hearth doctor tells of it", memory),
    "read-only": ("it needs no root that can be written to, no capability and no new privileges", read_only),
}
