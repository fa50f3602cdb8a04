"""After a reboot: what was enabled is there. And taking it away."""

from __future__ import annotations

import pwd
from pathlib import Path

from tests.clone import ROOT
from tests.vm.guest import clients, service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.service import SOCKET, UNIT, run, shell, show, systemctl


@check("enabled, it is there after the boot: socket with sockets.target, service by itself, no unit failed", as_it_is=True)
def booted() -> str:
    if systemctl("is-enabled", UNIT, code=None).returncode:  # this part alone was asked for
        systemctl("enable", "--now", SOCKET, UNIT)
    service.wait_active()
    expect(clients.chat(model="fast")[0] == 200, "no chat")
    failed = [line for line in systemctl("--failed", "--plain", "--no-legend").stdout.splitlines() if "hearthd" in line]
    expect(not failed, failed)
    expect(show("ActiveState", SOCKET) == "active", show("ActiveState", SOCKET))
    return next((line.strip() for line in run("systemd-analyze", "blame").stdout.splitlines() if UNIT in line), "")


@check("make uninstall stops it and takes away program and units; settings, models and user stay", as_it_is=True)
def uninstall() -> str:
    told = shell(f"cd {ROOT} && make uninstall").stdout
    expect(not Path("/opt/hearthd").exists() and not Path("/usr/local/lib/systemd/system", UNIT).exists(), told)
    expect(not service.pids(), service.pids())
    expect(systemctl("status", UNIT, code=None).returncode == 4, "systemd still knows the unit")
    expect(Path("/etc/hearthd/node.toml").exists() and Path("/var/lib/hearthd/models/fast").exists(), "settings or models are gone")
    pwd.getpwnam("hearthd")
    return told.strip().splitlines()[-1]
