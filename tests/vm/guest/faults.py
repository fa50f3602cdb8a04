"""Faults of the daemon and its engine, and what systemd does about them."""

from __future__ import annotations

import os
import signal
import time

from tests.vm.guest import clients, disturbed, service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.service import UNIT, show, systemctl


@check("SIGSTOP of hearthd: after WatchdogSec systemd ends it and starts it anew; connections of that time are answered")
def watchdog() -> str:
    limit_s = int(show("WatchdogUSec").removesuffix("s")) if show("WatchdogUSec").endswith("s") else 30
    pid = service.main_pid()
    cursor = service.journal_end()
    begin = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    status, _ = clients.request("GET", "/v1/models", timeout_s=4 * service.SAFETY_S)  # waits at the listener
    answered_s = time.monotonic() - begin
    after = service.wait_active(pid)
    expect(status == 200, status)
    expect(after != pid and show("NRestarts") == "1", f"{show('NRestarts')} restarts")
    told = service.told_since(cursor)
    expect("Watchdog timeout" in told and "watchdog" in told, told[-600:])
    return f"WatchdogSec={limit_s}; a request that came with the stop was answered after {answered_s:.0f} s"


@check("a watchdog's SIGABRT has hearthd log where its threads were, as operations.md says")
def abort() -> str:
    pid = service.main_pid()
    cursor = service.journal_end()
    systemctl("kill", "--kill-whom=main", "--signal=ABRT", UNIT)
    service.wait_active(pid)
    told = service.told_since(cursor)
    expect("Fatal Python error: Aborted" in told and "File " in told, told[-600:])
    expect(show("NRestarts") == "1", f"{show('NRestarts')} restarts")
    return ""


@check("kill -9 of the engine under streams: hearthd starts another one, the streams go on, systemd does nothing")
def engine() -> str:
    streams, prober = disturbed.streams_under("the kill")
    pid, engine = service.main_pid(), service.engine_pid()
    os.kill(engine, signal.SIGKILL)
    service.wait_for("another engine", lambda: service.engine_pid() not in (0, engine))
    seen = disturbed.judge(streams, prober)
    expect(service.main_pid() == pid and show("NRestarts") == "0", "hearthd itself was started again")
    return seen
