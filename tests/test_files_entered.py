"""benchmarks.files_entered counts in every process of a node: in the daemon, its text worker, and the engine, which is forked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests import kernel_cache
from tests.e2e.checkpoints import make_model

# What a chat enters around the steps. A step's own files depend on the processor, and on what has been recorded.
OF_STEPS = ("engine/cpu/", "engine/host/", "engine/layers/", "engine/models/", "engine/ops/")
# What watches of files, the engine's regular Stats and its work in idle time enter, if they run during each of the chats.
AT_TIMES = {
    "config/settings_files.py",
    "daemon/http/tls.py",
    "daemon/operate/named_files.py",
    "daemon/process/file_signature.py",
    "daemon/process/file_watch.py",
    "daemon/process/long_tasks.py",
    "daemon/scanning/folder_watch.py",
    "daemon/upstreams/keys.py",
    "engine/loop/idle_work.py",
    "scheduler/batch/adapters.py",
    "scheduler/node/engines.py",
}
MOST_FILES = 111


def test_a_chat_and_a_load_are_traced(tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path / "models" / "m")
    kernel_cache.warm()
    command = [sys.executable, "-m", "benchmarks.files_entered", "--chats", "3", "--list"]
    command += ["--checkpoint", str(checkpoint), "--cache-dir", kernel_cache.CACHE_DIR]
    done = subprocess.run(command, cwd=kernel_cache.ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr
    counted, *listed = done.stdout.splitlines()
    figures = json.loads(counted)
    assert {"daemon/api/bodies/chat.py", "daemon/text/worker.py", "engine/loop/worker.py", "engine/cpu/model.py"} <= set(listed)
    assert figures["files"] == listed.index("")
    entered = [file for file in listed[: listed.index("")] if not file.startswith(OF_STEPS) and file not in AT_TIMES]
    assert len(entered) <= MOST_FILES, f"a chat enters more files than it did: {entered}"
    assert figures["times_in_a_row"] <= 2, listed
    assert 1 <= figures["folder_changes_of_a_weight"] <= 4, listed
