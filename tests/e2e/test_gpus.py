"""A node on GPUs that are only described: one engine each, budgets, faults of one device. Engines have no model, or no GPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from daemon.lifecycle import MAY_HANG, NUM_FREE
from daemon.process.installation import BINDINGS, is_there
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, environment

GIB = 1 << 30
FIRST, SECOND = "GPU-3f1a-77", "GPU-3f1b-78"


def gpu(index: int, uuid: str, **more: Any) -> dict[str, Any]:
    return {"index": index, "uuid": uuid, "name": "H200", "total_bytes": 2 * GIB, "temperature_c": 41, **more}


def describe(path: Path, **more: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"gpus": [gpu(0, FIRST), gpu(1, SECOND, used_bytes=GIB)], **more}))
    part.replace(path)


def make_node(folder: Path, **options: Any) -> tuple[Node, Path]:
    folder.mkdir(exist_ok=True)
    described = folder / "gpus.json"
    describe(described)
    return Node(folder, program=["-m", "tests.e2e.scripted_gpus", str(described)], **options), described


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_each_engine_sees_its_own_gpu_and_a_fault_ends_one_of_them(tmp_path: Path) -> None:
    for name in "ab":
        make_model(tmp_path / "n" / "models" / name)
    config = '[models.a]\ndevices = ["cuda:0", "cuda:GPU-3f1b"]\n[models.b]\ndevices = ["cuda:GPU-3f1b"]\n'
    node, described = make_node(tmp_path / "n", devices=["cuda", "cuda:GPU-3f1b=50%"], null_step_ms=5, config=config)
    with node:
        rows = {row["name"]: row for row in node.json("status")["devices"]}
        assert {name: (row["budget_bytes"], row["uuid"]) for name, row in rows.items()} == {
            "cuda:0": (GIB // 2, FIRST),  # 1.5 GiB are left to the driver
            "cuda:GPU-3f1b": (GIB, SECOND),
        }
        assert {environment_of(row["pid"])["CUDA_VISIBLE_DEVICES"] for row in rows.values()} == {FIRST, SECOND}
        streams = [Stream(node, name, "x", 400) for name in "ab"]
        for stream in streams:
            stream.wait_for_chunks(5)
        hit = next(row["device"] for row in node.ps() if row["name"] == "a")
        other = next(name for name in rows if name != hit)

        describe(described, faults=[[rows[hit]["uuid"], 31], [rows[hit]["uuid"], 79], ["GPU-of-nobody", 79]])
        for stream in streams:
            assert (stream.join().error, stream.finish_reason) == ("", "length")
        node.wait_for(lambda: all(row["up"] for row in node.json("status")["devices"]), "both engines")
        after = {row["name"]: row for row in node.json("status")["devices"]}
        if hit != other:
            assert after[other]["pid"] == rows[other]["pid"], "a fault of one GPU ended the other's engine"
        assert (after[hit]["restarts"], after[other]["restarts"]) == (1, 0)
        events = [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]
        told = [(event["device"], event["xid"], event["fatal"]) for event in events if event["event"] == "gpu_fault"]
        assert told == [(hit, 31, False), (hit, 79, True)]
        assert f'hearth_gpu_faults_total{{device="{hit}",xid="79"}} 1.0' in node.get("/metrics")[1]

        shown = node.cli("gpus").stdout
        assert "Xid 31, 79" in shown
        assert "41 °C" in shown
        assert {row["uuid"]: row["device"] for row in node.json("gpus")} == {FIRST: "cuda:0", SECOND: "cuda:GPU-3f1b"}
        describe(described, no_driver="the driver is being replaced")
        refused = node.cli("gpus")
        assert (refused.returncode, refused.stderr) == (3, "hearth: No GPUs: the driver is being replaced.\n")


def test_a_device_that_fails_says_why_while_the_others_serve(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    # `runner` as a flag: no kernel is needed, so none is compiled beforehand
    node, _ = make_node(tmp_path / "n", devices=["cuda:0=1GiB", "cpu=256MiB"], flags=["--runner", "torch"])
    with node.start(ready=False):
        # there is no such GPU: its engine ends with what CUDA says of that
        node.wait_for(lambda: node.json("status")["devices"][0]["restarts"], "the engine's end")
        node.wait_for(lambda: node.json("status")["devices"][1]["up"], "the other engine, which may need longer than that")
        first, second = node.json("status")["devices"]
        assert (first["up"], second["up"]) == (False, True)
        assert "exit code 70: " in first["problem"]
        if not is_there(BINDINGS):
            assert "the Python package cuda is not installed; `hearth doctor` says how it is" in first["problem"]
            assert "cuda-bindings is not installed: cuda devices cannot be used; " in node.log_text()
            assert "Traceback" not in node.log_text()
        assert "cuda:0: the engine ended with exit code 70: " in node.cli("status").stdout
        assert node.json("plan", "a")["device"] == "cpu:0"
        assert node.get("/readyz")[1]["engines"] == {"cuda:0": "down", "cpu:0": "up"}


def test_a_cuda_device_without_a_driver_is_an_error_that_says_so(tmp_path: Path) -> None:
    node, described = make_node(tmp_path / "n", devices=["cuda:0"])
    describe(described, no_driver="NVIDIA's driver cannot be asked: Driver Not Loaded")
    ended = subprocess.run(node.command(), capture_output=True, text=True, timeout=60, env=environment())
    assert ended.returncode == 2
    assert "device: 'cuda:0': NVIDIA's driver cannot be asked: Driver Not Loaded" in ended.stderr


def test_a_driver_that_does_not_answer_keeps_nothing_else_waiting(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    node, described = make_node(tmp_path / "n", devices=["cuda:0"])
    os.mkfifo(pipe := tmp_path / "hangs")

    def reader_let_go() -> int:
        """Returns the pipe's other end as soon as somebody reads the pipe, who then waits for its close; else 0."""
        with contextlib.suppress(OSError):
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        return 0

    with node, ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        describe(described, hangs=str(pipe))
        reloading = pool.submit(node.cli, "reload")
        stack.callback(os.close, node.wait_for(reader_let_go, "a question to the driver"))
        stack.callback(describe, described)
        for _ in range(2 * (MAY_HANG + NUM_FREE)):  # more than there are threads
            asking = stack.enter_context(socket.socket(socket.AF_UNIX))
            asking.connect(node.control)
            asking.sendall(b"GET /control/v1/gpus HTTP/1.1\r\nHost: hearthd\r\n\r\n")
        pinned = pool.submit(node.cli, "pin", "a").result()  # which is saved in a thread
        assert pinned.returncode == 0, pinned.stderr
        assert node.get("/healthz")[0] == 200
        assert not reloading.done()
    assert reloading.result().returncode == 0


def test_fp8_kv_takes_what_it_is_sized_for(tmp_path: Path) -> None:
    """A quarter of float32's, and a scale a head: the daemon's sums, and what an engine keeps of the same conversation."""
    for name in ("plain", "small"):
        make_model(tmp_path / "n" / "models" / name, hidden_size=512, num_heads=4)  # heads of 128: 129 bytes instead of 512
    config = 'chunk_bytes = "1MiB"\n[models.small]\nkv_cache_dtype = "fp8"\n'
    node, _ = make_node(tmp_path / "n", devices=["cuda:0"], null_step_ms=1, config=config)
    with node:
        assert "small: float32, fp8 KV, max_model_len 2048, " in node.log_text()
        reserved = {name: float(found) for name, found in re.findall(r"(\w+): float32.*reserved KV ([\d.]+) ?MiB", node.log_text())}
        assert reserved["small"] < reserved["plain"] / 2  # whole chunks
        for name in ("plain", "small"):
            assert Stream(node, name, "x", 400).join().error == ""

        def kept() -> dict[str, int]:
            return {row["name"]: row["kv_cached_bytes"] for row in node.json("top")["models"]}

        node.wait_for(lambda: all(kept().values()), "cached prefixes")
        assert kept()["small"] * 512 == kept()["plain"] * 129
