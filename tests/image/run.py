"""Builds the image of Containerfile and tries it: python -m tests.image.run

It needs podman or docker, and ends with 2 where neither answers or the image cannot be built. The image stays, as hearthd-test, so
that the next build is short; containers and volumes go. Ends with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import http.client
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.clone import ROOT
from tests.e2e.checkpoints import make_model
from tests.image.checks import CHECKS, Wrong
from tests.image.engine import ENGINES, NAME, Engine, Failed, documented_build, found
from tests.vm.documents import NotFound
from tests.vm.results import Result, table


def tried(name: str, engine: Engine) -> Result:
    why, check = CHECKS[name]
    begin = time.monotonic()
    try:
        ok, detail = True, check(engine)
    except (Wrong, Failed, NotFound, OSError, http.client.HTTPException) as error:
        ok, detail = False, str(error)
    result = Result(name, name, why, ok, time.monotonic() - begin, detail)
    print(result.line(), flush=True)
    return result


def build(engine: Engine, flags: list[str]) -> bool:
    command = engine.translated(documented_build(engine.program))
    argv = [*command[:-1], *flags, command[-1]]
    print(f"$ {shlex.join(argv)}", flush=True)
    return subprocess.run(argv, cwd=ROOT).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="", help="podman or docker; default: the first of them that answers")
    parser.add_argument("--build-flags", default="", help="more flags for the engine's build")
    parser.add_argument("--run-flags", default="", help="more flags for each of the engine's runs")
    options = parser.parse_args()
    program = found(options.engine)
    if not program:
        print(
            f"No container engine answers here: {options.engine or ' or '.join(ENGINES)} info. Debian has podman:", file=sys.stderr
        )
        print("  apt install --no-install-recommends podman crun catatonit netavark iptables", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the container goes
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        models = Path(folder) / "models"
        Path(folder).chmod(0o755)  # the container's user is another one
        make_model(models / "oak", dtype="bfloat16", hidden_size=64, num_layers=4, max_position_embeddings=16384)
        engine = Engine(program, free.getsockname()[1], models, tuple(shlex.split(options.run_flags)))
        free.close()
        if not build(engine, shlex.split(options.build_flags)):
            print("The image could not be built: what the engine says is above.", file=sys.stderr)
            return 2
        engine.remove_all()
        try:
            results = [tried(name, engine) for name in CHECKS]
        finally:
            engine.remove_all()
    version = engine.call("--version").strip()
    size_bytes = int(engine.call("image", "inspect", NAME, "--format", "{{.Size}}"))
    print(f"\n{version}, {time.strftime('%Y-%m-%d')}; the image has {size_bytes / 1e9:.2f} GB\n\n{table(results)}")
    return int(any(one.ok is False for one in results))


if __name__ == "__main__":
    sys.exit(main())
