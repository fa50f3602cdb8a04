"""Hostile model folders beside a node that serves: nobody waits, nothing grows, the next model is found."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path

import psutil

from tests.e2e import processes
from tests.e2e.checkpoints import make_model
from tests.e2e.hostile_folders import is_to_be_listed, make_hostile
from tests.e2e.node import Node
from tests.loader.checkpoints import write_checkpoint

NUM_FOLDERS = 150
SCANNING = "daemon.scanning"  # a word of the scanning process's command line


def _resident_bytes(daemon: psutil.Process) -> int:
    """Adds up the daemon and all processes below it but its engines."""
    num_bytes = 0
    for process in (daemon, *daemon.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            num_bytes += 0 if process.name().startswith(("engine ", "fork server")) else process.memory_info().rss
    return num_bytes


def test_folders_that_hurt_harm_nobody(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "good")
    write_checkpoint(tmp_path / "template")
    ended, texts, resident = threading.Event(), [], []
    with Node(tmp_path / "n", null_step_ms=5, forked=False) as node:  # its memory is measured
        assert node.process is not None
        daemon = psutil.Process(node.process.pid)

        def talk() -> None:
            with node.openai() as client:
                while not ended.is_set():
                    answer = client.chat.completions.create(
                        model="good", messages=[{"role": "user", "content": "hello"}], max_tokens=50, seed=1
                    )
                    texts.append(answer.choices[0].message.content)

        def watch() -> None:
            while not ended.wait(0.05):
                resident.append(_resident_bytes(daemon))

        talking, watching = threading.Thread(target=talk), threading.Thread(target=watch)
        talking.start()
        try:
            node.wait_for(lambda: texts, "the first answer")
            before = _resident_bytes(daemon) - sum(scan.memory_info().rss for scan in processes.with_word(daemon.pid, SCANNING))
            watching.start()
            for number in range(NUM_FOLDERS):
                make_hostile(node.models / f"bad-{number:04}", tmp_path / "template", number)
            make_model(node.models / "last")
            node.wait_for(lambda: node.state("last") == "cold", "the model behind them")
            num_answers = len(texts)
            node.wait_for(lambda: len(texts) > num_answers, "another answer")
        finally:
            ended.set()
            talking.join(60)
            watching.join(60)
        assert len(set(texts)) == 1, "the neighbour's answers stay the same"
        assert max(resident) - before < 64 << 20, "the daemon, its helpers and the scanning process"
        rows = {row["name"]: row for row in node.json("models")}
        assert {"good", "last"} <= set(rows)
        for name, row in rows.items():
            assert name.isprintable()
            if row["state"] in ("incomplete", "refused"):
                assert row["reason"], name
                assert len(row["reason"]) < 2000
                assert row["reason"].isprintable(), name
        listed = {name.split("/")[0] for name in rows}
        made = [node.models / f"bad-{number:04}" for number in range(NUM_FOLDERS)]
        assert [folder.name for folder in made if is_to_be_listed(folder) and folder.name not in listed] == []
        assert node.get("/healthz") == (200, {"status": "ok", "problems": []})
        assert node.cli("reload").returncode == 0
        assert "Traceback" not in node.log_text()
        begin_s = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - begin_s < 30


def test_a_node_starts_beside_them(tmp_path: Path) -> None:
    """What took 15 GB or ended the start."""
    node = Node(tmp_path)
    make_model(node.models / "good")
    make_model(node.models / "deep")
    (node.models / "deep" / "config.json").write_text("[" * 200_000)
    make_model(node.models / "layers")
    config = json.loads((node.models / "layers" / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    (node.models / "layers" / "config.json").write_text(json.dumps(config))
    make_model(node.models / "pipe")
    (node.models / "pipe" / "model.safetensors").unlink()
    os.mkfifo(node.models / "pipe" / "model.safetensors")
    with node:
        rows = {row["name"]: row for row in node.json("models")}
        assert rows["good"]["state"] == "cold"
        assert rows["deep"]["reason"] == "config.json: not valid JSON: lists or objects lie in each other too deeply"
        assert "num_hidden_layers: 1000000000 is out of range" in rows["layers"]["reason"]
        assert "is a named pipe, not a regular file" in rows["pipe"]["reason"]
        make_model(node.models / "later")
        node.wait_for(lambda: node.state("later") == "cold", "a model that comes later")
