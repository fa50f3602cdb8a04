"""Checks who may do what: users at the sockets, the owners of folders, and what the service itself can reach."""

from __future__ import annotations

import os
import pwd
import re
import stat
from pathlib import Path

from tests.vm.guest import service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.service import UNIT, hearth, run


@check("hearth status answers root, a member of the group and anybody else; only members change something")
def users() -> str:
    for user in ("", "ada", "bob"):
        expect(hearth("status", user=user)["ready"], f"status as {user or 'root'}")
    expect(hearth("load", "fast", user="ada")["state"] == "ready", "a member of the group cannot load")
    refused = run("hearth", "unload", "fast", user="bob", code=6)
    expect(hearth("why", "fast", user="bob"), "why is for reading")
    return f"somebody else: {refused.stderr.strip()}"


@check("folders, sockets and processes have the owners and modes of operations.md")
def permissions() -> str:
    owner, group = pwd.getpwnam("hearthd")[2:4]
    for path, mode, uid in (
        ("/var/lib/hearthd", 0o750, owner),
        ("/var/lib/hearthd/models", 0o2775, 0),
        ("/var/cache/hearthd", 0o750, owner),
        ("/run/hearthd", 0o755, owner),
        ("/run/hearthd/control.sock", 0o660, owner),
        ("/run/hearthd/status.sock", 0o666, owner),
    ):
        found = os.stat(path)
        seen = (oct(stat.S_IMODE(found.st_mode)), found.st_uid, found.st_gid)
        expect(seen == (oct(mode), uid, group), f"{path}: {seen}, not {(oct(mode), uid, group)}")
    processes = service.pids()
    for pid in processes:
        status = Path(f"/proc/{pid}/status").read_text()
        uids, capabilities = re.search(r"Uid:\s+(.*)", status), re.search(r"CapEff:\s+(\w+)", status)
        expect(uids is not None and set(uids[1].split()) == {str(owner)}, f"{service.command_line(pid)}: {uids and uids[1]}")
        expect(capabilities is not None and int(capabilities[1], 16) == 0, f"{service.command_line(pid)}: capabilities")
        expect("NoNewPrivs:\t1" in status, f"{service.command_line(pid)}: NoNewPrivs")
    return f"{len(processes)} processes, none with a capability"


# what is tried as the service's user, where its processes are; what it shall end with
_TRIED = (
    ("touch /var/lib/hearthd/x && rm /var/lib/hearthd/x", True),
    ("touch /var/cache/hearthd/x && rm /var/cache/hearthd/x", True),
    ("touch /tmp/x && rm /tmp/x", True),
    ("cat /var/lib/hearthd/models/fast/config.json", True),
    ("touch /var/lib/hearthd/models/x", False),
    ("touch /etc/hearthd/x", False),
    ("touch /opt/hearthd/x", False),
    ("touch /var/log/x", False),
    ("ls /home/ada", False),
    ("head -c1 /dev/vda", False),
    ("head -c1 /proc/1/environ", False),
    ("ls -d /proc/1", False),
)


@check("inside it: own folders can be written to, models only read, the rest of the system neither; there is no network")
def reach() -> str:
    pid = service.main_pid()
    user = pwd.getpwnam("hearthd")
    where = ["nsenter", "-t", str(pid), "-m", "-n", "-i"]
    where += ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    wrong = []
    for line, may in _TRIED:
        done = run(*where, "sh", "-c", line, code=None)
        if (done.returncode == 0) != may:
            wrong.append(f"{line}: {done.returncode} {done.stderr.strip()}")
    expect(not wrong, "; ".join(wrong))
    interfaces = run("nsenter", "-t", str(pid), "-n", "ip", "-o", "link").stdout
    expect(len(interfaces.splitlines()) == 1 and "lo:" in interfaces, interfaces)
    routes = run("nsenter", "-t", str(pid), "-n", "ip", "route").stdout
    expect(not routes.strip(), routes)
    policy = service.show("DevicePolicy"), service.show("DeviceAllow")
    expect(policy[0] == "closed" and "nvidia" in policy[1], policy)
    return f"{len(_TRIED)} commands; DevicePolicy=closed, DeviceAllow={policy[1]}"


@check("systemd-analyze security of the loaded unit: no more than 0.7, and than operations.md says")
def exposure() -> str:
    promised = re.search(r"holds the figure at (\d+\.\d+) or less", service.page("operations.md"))
    assert promised is not None, "operations.md names no figure"
    text = run("systemd-analyze", "security", "--no-pager", UNIT).stdout
    found = re.search(r"Overall exposure level for hearthd\.service: (\d+\.\d+)", text)
    assert found is not None, text
    expect(float(found[1]) <= min(0.7, float(promised[1])), text[-300:])
    return f"{found[1]}; promised: {promised[1]}"
