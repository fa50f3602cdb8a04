"""Stopping: streams may end, the time is bounded, and nothing is left."""

from __future__ import annotations

import time

from tests.vm.guest import service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.clients import Stream
from tests.vm.guest.service import SOCKET, UNIT, show, systemctl


def _stop(expected: str = "success") -> float:
    """Seconds that systemctl stop took. Nothing may be left."""
    everything = service.pids()
    begin = time.monotonic()
    systemctl("stop", UNIT, SOCKET)
    took_s = time.monotonic() - begin
    expect(show("ActiveState") == "inactive" and show("Result") == expected, f"{show('ActiveState')} {show('Result')}")
    left = [service.command_line(pid) for pid in everything if service.is_there(pid)]
    expect(not left and not service.pids(), f"left: {left}")
    for name in ("control.sock", "status.sock"):
        expect(not service.Path("/run/hearthd", name).exists(), f"{name} is left")
    return took_s


def _streaming(tokens: int) -> Stream:
    stream = Stream("slow", tokens, seed=1)
    service.wait_for("the stream flows", lambda: stream.num_tokens > 3 or stream.problem)
    return stream


@check("an idle service stops at once, with all its processes and sockets")
def idle() -> str:
    expect(len(service.pids()) >= 2, service.pids())
    return f"{_stop():.1f} s"


@check("a stop lets a stream end")
def drain() -> str:
    stream = _streaming(200)  # 5 s
    took_s = _stop()
    expect(not (problem := stream.end()), problem)
    return f"{took_s:.1f} s; {stream.num_tokens} events"


@check("what has not ended after drain_timeout_s gets server_restarting; it stops within TimeoutStopSec")
def limit() -> str:
    service.write_settings("drain_timeout_s = 3\n")
    systemctl("reload", UNIT)
    stream = _streaming(1500)
    took_s = _stop()
    expect(3 <= took_s < 40, f"{took_s:.1f} s")
    stream.end()
    expect("server_restarting" in stream.problem, stream.problem or "no error in the stream")
    return f"drain_timeout_s = 3: {took_s:.1f} s"


@check("a drain_timeout_s beyond TimeoutStopSec: systemd waits as long as the drain needs")
def extended() -> str:
    service.write_drop_in("[Service]\nTimeoutStopSec=6\n")
    service.write_settings("drain_timeout_s = 60\n")
    systemctl("reload", UNIT)
    stream = _streaming(700)  # 17 s and more
    took_s = _stop()
    expect(not (problem := stream.end()), problem)
    expect(took_s > 8, f"the stream was over after {took_s:.1f} s: nothing is shown")
    return f"TimeoutStopSec=6: {took_s:.1f} s, the stream ended whole"
