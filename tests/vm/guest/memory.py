"""Limits of the control group's memory."""

from __future__ import annotations

from pathlib import Path

from tests.vm.guest import clients, service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.service import UNIT, main_pid, show, systemctl

GROUP = Path("/sys/fs/cgroup/system.slice") / UNIT


def _events(name: str) -> int:
    return int(dict(line.split() for line in (GROUP / "memory.events").read_text().splitlines())[name])


@check("MemoryMax=: the kernel kills an engine that has grown too large; hearthd lives on, its requests too (OOMPolicy=continue)")
def maximum() -> str:
    """The engine is made the one that the kernel takes, as one with a model's weights would be; the null runner's is small."""
    pid, engine = main_pid(), service.engine_pid()
    Path(f"/proc/{engine}/oom_score_adj").write_text("1000")
    stream = clients.Stream("slow", 100, seed=1)
    service.wait_for("the stream flows", lambda: stream.num_tokens > 3 or stream.problem)
    systemctl("set-property", "--runtime", UNIT, f"MemoryMax={_used()}")
    limit = _used()
    while service.is_there(engine):
        expect(limit > 16 << 20, f"nothing was killed at {limit} bytes")
        limit -= 1 << 20
        systemctl("set-property", "--runtime", UNIT, f"MemoryMax={limit}")
    systemctl("set-property", "--runtime", UNIT, "MemoryMax=infinity")
    expect(_events("oom_kill") >= 1, (GROUP / "memory.events").read_text())
    expect(
        main_pid() == pid and show("ActiveState") == "active" and show("NRestarts") == "0", f"{show('Result')} {show('NRestarts')}"
    )
    service.wait_for("another engine", lambda: service.engine_pid() not in (0, engine))
    expect(not (problem := stream.end()), problem)
    return f"killed at MemoryMax={limit >> 20}M: oom_kill {_events('oom_kill')}; the stream went on"


@check("MemoryHigh= with a fifth of room above what is used: nothing is killed, chats are answered")
def high() -> str:
    """Below what hearthd holds the kernel slows it until the watchdog ends it, as operations.md says; that is not tried here."""
    expect(clients.chat()[0] == 200, "no chat")  # so that the process of the model's texts is there
    pid, killed = main_pid(), _events("oom_kill")
    limit = _used() * 6 // 5
    systemctl("set-property", "--runtime", UNIT, f"MemoryHigh={limit}")
    try:
        for _ in range(3):
            status, body = clients.chat()
            expect(status == 200, (status, body))
    finally:
        systemctl("set-property", "--runtime", UNIT, "MemoryHigh=infinity")
    expect(main_pid() == pid and _events("oom_kill") == killed, (GROUP / "memory.events").read_text())
    return f"MemoryHigh={limit >> 20}M"


def _used() -> int:
    return int((GROUP / "memory.current").read_text())
