"""A new version by the commands of operations.md, and back to the old one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.clone import ROOT
from tests.vm import documents
from tests.vm.guest import disturbed, service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.service import hearth, page, shell
from tests.vm.image import PIP_ARGS

NEWER = "0.1.1"
VERSION = ROOT / "daemon" / "process" / "version.py"


@check("make install of a newer version and restart under streams, by the commands of operations.md: no stream is lost")
def newer() -> str:
    old = hearth("version")["hearthd"]
    lines = documents.commands(documents.block(page("operations.md"), "git pull"))
    VERSION.write_text(re.sub(r'VERSION = ".*"', f'VERSION = "{NEWER}"', VERSION.read_text()))  # what git pull would bring
    os.environ["PIP_ARGS"] = PIP_ARGS
    install = lines[0].removeprefix("git pull && ")
    told = shell(f"cd {ROOT} && {install}").stdout
    expect("hearthd runs the version it was started with until: systemctl restart hearthd" in told, told)
    expect(hearth("version") == {"hearth": NEWER, "hearthd": old}, hearth("version"))
    streams, prober = disturbed.streams_under("the upgrade")
    pid = service.main_pid()
    for line in lines[1:-1]:
        shell(line)
    seen = disturbed.go_on("the upgrade", pid, streams, prober)
    expect(hearth("version") == {"hearth": NEWER, "hearthd": NEWER}, hearth("version"))
    return f"{' && '.join(lines)}: {old} to {NEWER}; {seen}"


@check("back to the old version by the command of operations.md, under streams")
def back() -> str:
    (line,) = documents.commands(documents.block(page("operations.md"), "ln -sfn"))
    streams, prober = disturbed.streams_under("the way back")
    pid = service.main_pid()
    shell(line)
    seen = disturbed.go_on("the way back", pid, streams, prober)
    expect(hearth("version")["hearthd"] in line, hearth("version"))
    kept = sorted(path.name for path in Path("/opt/hearthd").iterdir())
    return f"{line}; {seen}; in /opt/hearthd: {', '.join(kept)}"
