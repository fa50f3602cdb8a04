"""Restarts that no client notices, and what systemd keeps meanwhile."""

from __future__ import annotations

import http.client
import time

from tests.vm.guest import clients, disturbed, service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.clients import Prober
from tests.vm.guest.service import UNIT, hearth, show, systemctl


@check("systemctl restart under streams: they go on, no new connection is refused, idle connections stay open")
def streams() -> str:
    idle = http.client.HTTPConnection(clients.HOST, clients.PORT, timeout=service.SAFETY_S)
    idle.request("GET", "/v1/models")
    idle.getresponse().read()
    address = idle.sock.getsockname()
    running, prober = disturbed.streams_under("the restart")
    pid = service.main_pid()
    cursor = service.journal_end()
    begin = time.monotonic()
    systemctl("restart", UNIT)
    took_s = time.monotonic() - begin
    seen = disturbed.go_on("the restart", pid, running, prober)
    idle.request("GET", "/v1/models")
    expect(idle.getresponse().status == 200, "the idle connection")
    expect(idle.sock is not None and idle.sock.getsockname() == address, "the idle connection was opened anew")
    idle.close()
    expect(show("NRestarts") == "0", f"{show('NRestarts')} restarts by systemd")
    told = [line for line in service.told_since(cursor).splitlines() if "connection" in line and "request:" not in line]
    return f"{seen}; restart {took_s:.1f} s; {'; '.join(told[:2])}"


@check("the FD store: filled while it runs, kept over a restart, its models warm afterwards, empty after a stop")
def store() -> str:
    hearth("load", "fast")
    hearth("unload", "fast", "--to", "warm")
    expect(service.model_state("fast") == "warm", service.model_state("fast"))
    stored = int(show("NFileDescriptorStore"))
    expect(stored > 0, "nothing is stored")
    systemctl("restart", UNIT)
    service.wait_active()
    expect(service.model_state("fast") == "warm", f"the weights did not outlive the restart: {service.model_state('fast')}")
    limit = int(show("FileDescriptorStoreMax"))
    expect(0 < int(show("NFileDescriptorStore")) <= limit, show("NFileDescriptorStore"))
    systemctl("stop", UNIT)
    expect(show("NFileDescriptorStore") == "0", f"after the stop: {show('NFileDescriptorStore')}")
    return f"{stored} of {limit} descriptors"


@check("kill -9 of hearthd: systemd starts it again, the socket answers all new connections, host memory is kept")
def killed() -> str:
    hearth("load", "fast")
    hearth("unload", "fast", "--to", "warm")
    prober = Prober()
    pid = service.main_pid()
    engine = service.engine_pid()
    begin = time.monotonic()
    systemctl("kill", "--kill-whom=main", "--signal=KILL", UNIT)
    service.wait_active(pid)
    took_s = time.monotonic() - begin
    time.sleep(1)
    prober.stop_now()
    broken = [one for one in prober.problems if "refused" in one.lower()]
    expect(not broken, f"new connections were refused: {broken[:3]}")
    expect(len(prober.problems) <= 1, f"more than the request that was under way broke: {prober.problems}")
    expect(show("NRestarts") == "1", f"{show('NRestarts')} restarts")
    expect(not service.is_there(engine), "the old engine is still there")
    expect(service.model_state("fast") == "warm", service.model_state("fast"))
    return f"active again after {took_s:.1f} s; {prober.num_answers} requests answered, {len(prober.problems)} broke off"
