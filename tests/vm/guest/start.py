"""Starting: by the command of the docs, and by the first connection."""

from __future__ import annotations

import threading
import time

from tests.vm import documents
from tests.vm.guest import clients, service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.service import SOCKET, UNIT, show, systemctl


@check("the command of operations.md enables and starts it; it is active when it says READY=1", as_it_is=True)
def enable() -> str:
    (service.SETTINGS / service.BASE_FILE).write_text(service.BASE)
    shown = documents.block(service.page("operations.md"), "enable --now")
    line = next(one for one in shown.splitlines() if "enable" in one).removeprefix("sudo ")
    begin = time.monotonic()
    service.shell(line)
    took_s = time.monotonic() - begin  # systemctl waits for READY=1
    expect(show("ActiveState") == "active", show("ActiveState"))
    expect(show("Type") == "notify", show("Type"))
    expect(show("StatusText").startswith("serves http"), f"StatusText={show('StatusText')}")
    for unit in (UNIT, SOCKET):
        expect(systemctl("is-enabled", unit).stdout.strip() == "enabled", unit)
    expect(show("NRestarts") == "0", f"{show('NRestarts')} restarts")
    service.wait_active()
    return f"{line}: {took_s:.1f} s; StatusText={show('StatusText')}"


@check("a chat is answered")
def chat() -> str:
    status, body = clients.chat(tokens=8)
    expect(status == 200, (status, body))
    expect(body["usage"]["completion_tokens"] == 8, body)
    expect(body["choices"][0]["message"]["content"], body)
    return ""


@check("the first connections start it, and all of them are answered")
def activation() -> str:
    systemctl("stop", UNIT)
    expect(show("ActiveState") == "inactive", show("ActiveState"))
    expect(show("ActiveState", SOCKET) == "active", "the socket went with the service")
    answers: list[tuple[int, object]] = []
    begin = time.monotonic()
    threads = [threading.Thread(target=lambda: answers.append(clients.chat(tokens=4)), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(service.SAFETY_S)
    took_s = time.monotonic() - begin
    expect([status for status, _ in answers] == [200] * 8, answers)
    expect(show("ActiveState") == "active", show("ActiveState"))
    return f"8 chats on 8 connections, answered within {took_s:.1f} s of the connection that started it"


_CONTROL = """
[Socket]
ListenStream=/run/hearthd-control.sock
SocketMode=0660
SocketGroup=hearthd
FileDescriptorName=control
Service=hearthd.service
"""


@check("a socket unit may pass the control socket, too (cli.md): the first command starts it and is answered")
def control_activation() -> str:
    (service.UNITS / "hearthd-control.socket").write_text(_CONTROL)
    systemctl("daemon-reload")
    systemctl("stop", UNIT, SOCKET)
    systemctl("start", "hearthd-control.socket", SOCKET)
    begin = time.monotonic()
    loaded = service.run("hearth", "--control", "/run/hearthd-control.sock", "load", "fast", "--json", user="ada").stdout
    took_s = time.monotonic() - begin
    expect('"ready"' in loaded, loaded)
    expect(show("ActiveState") == "active", show("ActiveState"))
    return f"hearth load, answered after {took_s:.1f} s"


@check("wrong settings: it ends with 2 and is not started again; once they are right it starts")
def wrong_settings() -> str:
    systemctl("stop", UNIT)
    cursor = service.journal_end()
    service.write_settings("max_wait_s = 'soon'\n")
    systemctl("start", UNIT, code=1)
    expect(show("ActiveState") == "failed", show("ActiveState"))
    expect(show("ExecMainStatus") == "2", show("ExecMainStatus"))
    time.sleep(3)  # RestartSec is 1
    expect(show("NRestarts") == "0", f"{show('NRestarts')} restarts")
    told = service.told_since(cursor)
    expect("90-check.toml:1" in told and "max_wait_s" in told, told[-600:])
    (service.SETTINGS / "90-check.toml").unlink()
    systemctl("start", UNIT)
    service.wait_active()
    expect(clients.chat()[0] == 200, "no chat afterwards")
    return next(line for line in told.splitlines() if "90-check.toml:1" in line)
