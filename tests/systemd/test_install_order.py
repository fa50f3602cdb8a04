"""`make install` on a machine with systemd, in a shell whose programs only note that they were called: kernels are compiled by the
new version, as the service's user, before anything can start the service.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKED = ("id", "runuser", "systemctl", "systemd-sysusers", "systemd-tmpfiles")
# Notes its call. As Python it makes an "environment" of itself; as `id` it tells that this is root.
FAKE = """#!/bin/sh
name=${0##*/}
echo "$name $*" >>"$CALLS"
case "$name $*" in
"id -u") echo 0 ;;
"python -m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"runuser "*) exit "$COMPILING" ;;
"systemctl -q is-active "*) exit 3 ;;
esac
"""


def install(folder: Path, compiling: int) -> tuple[list[str], str]:
    """Returns the calls of those programs in order, and what was printed. compiling: how the compilation ends."""
    programs = folder / "programs"
    programs.mkdir()
    for name in (*FAKED, "python"):
        (programs / name).write_text(FAKE)
        (programs / name).chmod(0o755)
    (folder / "run").mkdir()
    script = (ROOT / "systemd/install.sh").read_text()
    for written, instead in {
        'cd "$(dirname "$0")/.."': f"cd {ROOT}",
        "$destdir/usr/local": f"{folder}/local",
        "$destdir/etc": f"{folder}/etc",
        "-d /run/systemd/system": f"-d {folder}/run",
    }.items():
        assert written in script
        script = script.replace(written, instead)
    (folder / "install.sh").write_text(script)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "COMPILING": str(compiling),
        "PYTHON": str(programs / "python"),
        "PREFIX": str(folder / "opt"),
        "VERSION": "1.2.3",
    }
    command = ["sh", str(folder / "install.sh"), "install"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, check=True)
    return (folder / "calls").read_text().splitlines(), result.stdout


@pytest.mark.parametrize("compiling", [0, 1], ids=["all compile", "one fails"])
def test_kernels_are_compiled_before_the_service_can_start(tmp_path: Path, compiling: int) -> None:
    calls, told = install(tmp_path, compiling)
    of_system = [call for call in calls if not call.startswith(("python ", "id "))]
    assert of_system == [
        f"systemd-sysusers {tmp_path}/local/lib/sysusers.d/hearthd.conf",
        f"systemd-tmpfiles --create {tmp_path}/local/lib/tmpfiles.d/hearthd.conf",
        f"runuser -u hearthd -- {tmp_path}/opt/current/bin/python -P -m engine.warm /var/cache/hearthd",
        "systemctl daemon-reload",
        "systemctl -q is-active hearthd.service",
    ]
    assert (tmp_path / "opt/current/bin/python").exists()
    assert told.index("compiling the CPU kernels") < told.index("start: systemctl enable --now")
    assert ("the kernels are not all compiled; hearthd does it when it starts" in told) == bool(compiling)
