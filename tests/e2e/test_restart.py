"""What a restart of the daemon costs under a service manager: no weights are read again, however the daemon ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from daemon.process.fd_store import MOST_QUICK_STARTS
from tests.daemon.service_manager import NotifySocket
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import program_with
from tests.e2e.service_node import ServiceNode
from tests.e2e.test_host_tier import MIB, loads

FLAGS = ["--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "128", "--drain-timeout-s", "5"]
FLAGS += ["--load-deadline-s", "80", "--max-wait-s", "80"]  # the first load waits for kernels to be compiled
ENDS = (signal.SIGTERM, signal.SIGKILL)  # one after the other on one node, because each start of it costs four seconds


def node_of(folder: Path, notify: NotifySocket, *flags: str, runner: str = "torch") -> ServiceNode:
    for seed, name in enumerate(("ash", "birch")):
        make_model(folder / "models" / name, seed=seed, weights_bytes=12 * MIB)
    return ServiceNode(folder, notify, devices=["cpu:0=96MiB"], runner=runner, flags=[*FLAGS, *flags])


def test_host_memory_outlives_the_daemon(tmp_path: Path, notify: NotifySocket) -> None:
    """Twice, because the second restart finds what the first one has handed on."""
    with node_of(tmp_path / "n", notify, "--host-tier-bytes", "64MiB") as node:
        expected = {name: Stream(node, name, "once upon a time", 30).join().text for name in ("ash", "birch")}
        for end in ENDS:
            node.restart(end)
            assert {row["name"]: row["state"] for row in node.ps()} == {"ash": "warm", "birch": "warm"}
            assert {name: Stream(node, name, "once upon a time", 30).join().text for name in expected} == expected
            assert [event["bytes_read"] for event in loads(node)] == [0, 0]
        assert "are in host memory from before the restart: ash, birch" in node.log_text()
        assert "there from before the restart" in node.cli("why", "ash").stdout


def test_weights_on_the_device_outlive_the_daemon(tmp_path: Path, notify: NotifySocket) -> None:
    with node_of(tmp_path / "n", notify, "--adopt-weights", "true") as node:
        expected = {name: Stream(node, name, "once upon a time", 30).join().text for name in ("ash", "birch")}
        node.restart(ENDS[0])
        assert {name: Stream(node, name, "once upon a time", 30).join().text for name in expected} == expected
        assert [(event["adopted"], event["bytes_read"]) for event in loads(node)] == [(True, 0)] * 2
        node.cli("unload", "ash")
        node.restart(ENDS[1])
        assert Stream(node, "ash", "once upon a time", 30).join().text == expected["ash"]
        (event,) = loads(node)
        assert (event["adopted"], event["bytes_read"] >= 12 * MIB) == (False, True), "what was evicted is not offered"
        assert Stream(node, "birch", "once upon a time", 30).join().text == expected["birch"]
        assert loads(node)[-1]["adopted"]


def test_memory_that_means_something_else_now_is_not_used(tmp_path: Path, notify: NotifySocket) -> None:
    """Another dtype of one model, other files of another: both are read anew."""
    with node_of(tmp_path / "n", notify, "--host-tier-bytes", "64MiB", "--adopt-weights", "true") as node:
        for name in ("ash", "birch"):
            assert Stream(node, name, "once upon a time", 30).join().error == ""
        node.config.write_text('[models."ash"]\ndtype = "bfloat16"\n')
        make_model(node.models / "birch", seed=77, weights_bytes=12 * MIB)
        node.restart()
        for name, why in (("ash", "float32 as it was kept is no bfloat16"), ("birch", "the files are others")):
            assert Stream(node, name, "once upon a time", 30).join().error == ""
            last = loads(node)[-1]
            assert (last["model"], last["bytes_read"] >= 12 * MIB) == (name, True), why


def test_host_memory_of_another_size_is_given_up(tmp_path: Path, notify: NotifySocket) -> None:
    with node_of(tmp_path / "n", notify, "--host-tier-bytes", "64MiB", runner="null") as node:
        assert Stream(node, "ash", "once upon a time", 30).join().error == ""
        node.flags[node.flags.index("64MiB")] = "32MiB"
        node.restart()
        assert node.ps() == []
        assert "host memory of before the restart is given up: its size was not host_tier_bytes" in node.log_text()
        node.flags[node.flags.index("32MiB")] = "0"
        node.restart()
        notify.read()
        names = {name for name, _ in notify.stored}
        assert names == {"kept-starts", "kept-responses", "kept-background"}, "nothing is held that nobody uses"
        assert "host-tier, kept by the previous hearthd, is not used by this one" in node.log_text()


def test_a_daemon_that_crashes_again_and_again_starts_without_what_was_kept(tmp_path: Path, notify: NotifySocket) -> None:
    node = node_of(tmp_path / "n", notify, "--host-tier-bytes", "64MiB", runner="null")
    node.program = list(program_with({"daemon.process.fd_store.QUICK_S": 600.0}))
    with node:
        assert Stream(node, "ash", "once upon a time", 30).join().error == ""
        for _ in range(MOST_QUICK_STARTS - 1):
            node.restart(signal.SIGKILL)
        assert [row["state"] for row in node.ps()] == ["warm"]
        node.restart(signal.SIGKILL)
        assert node.ps() == []
        assert f"hearthd was started {MOST_QUICK_STARTS + 1} times within 600 s: what is kept of earlier ones is given up" in (
            node.log_text()
        )
        assert Stream(node, "ash", "once upon a time", 30).join().error == ""
        assert loads(node)[-1]["bytes_read"] >= 12 * MIB


def test_each_replica_s_weights_outlive_the_daemon(tmp_path: Path, notify: NotifySocket) -> None:
    make_model(tmp_path / "n" / "models" / "ash", seed=1, weights_bytes=12 * MIB)
    config = '[models."ash"]\nreplicas = 2\n'
    devices = ["cpu:0=48MiB", "cpu:1=56MiB"]  # by its room alone the model would go to the second
    flags = [*FLAGS, "--adopt-weights", "true"]
    with ServiceNode(tmp_path / "n", notify, devices=devices, runner="torch", config=config, flags=flags) as node:

        def there() -> dict[str, str]:
            """Returns the device of each replica once both are ready, and what the next daemon needs of them is in the store."""
            assert Stream(node, "ash", "once upon a time", 2).join().error == ""
            notify.read()  # a socket that nobody reads takes ten messages, and two devices have more to say
            accounts = [os.pread(fd, 1 << 20, 0) for name, fd in notify.stored if name.endswith("-account")]
            found = {row["name"]: row["device"] for row in node.ps() if row["state"] == "ready"}
            return found if len(found) == 2 and sum(b"ash" in each for each in accounts) == 2 else {}

        before = node.wait_for(there, "both replicas")
        node.restart(signal.SIGKILL)
        assert node.wait_for(there, "both replicas") == before
        assert [(event["adopted"], event["bytes_read"]) for event in loads(node)] == [(True, 0)] * 2
