"""`hearth plan`, `evict`, `history` and `top` against a real daemon with the null runner."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.daemon.test_control import MIB, control
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("n")
    for name in ("a", "org/b", "c"):  # two fit
        make_model(folder / "models" / name, weights_bytes=20 * MIB)
    make_model(folder / "models" / "huge", weights_bytes=80 * MIB)
    with Node(folder, devices=["cpu=84MiB"], null_step_ms=2, config='[models."org/b"]\naliases = ["bee"]\n') as running:
        yield running


def test_what_is_planned_is_what_happens(node: Node) -> None:
    assert node.cli("history").stdout == "nothing was placed since hearthd started\n"
    assert node.json("plan", "a")["verdict"] == "fits"
    for name in ("a", "bee"):
        assert node.cli("load", name).returncode == 0
    Stream(node, "org/b", "x", 3).join()
    said = node.json("plan", "c")
    assert said["verdict"] == "evicts"
    (device,) = said["devices"]
    assert [one["name"] for one in device["candidates"] if one["victim"]] == ["a"]
    shown = node.cli("plan", "c").stdout
    assert "c is cold; it would be loaded: cpu:0: a would leave" in shown
    assert "leaves: idle, least to lose" in shown
    assert {row["name"] for row in node.ps() if row["device"]} == {"a", "org/b"}  # asking has done nothing
    assert node.cli("load", "c").returncode == 0
    last = node.json("history")[-1]
    assert (last["model"], last["outcome"], last["source"], last["forced"]) == ("c", "ready", "disk", False)
    assert [victim["name"] for victim in last["victims"]] == ["a"]
    assert last["load_s"] > 0
    assert [row["model"] for row in node.json("history", "bee")] == ["org/b"]
    assert [row["model"] for row in node.json("history", "a")] == ["a", "c"]
    assert "ready, " in node.cli("history").stdout


def test_plans_of_what_cannot_be(node: Node) -> None:
    assert node.json("plan", "huge")["verdict"] == "refused"
    assert "cannot be loaded: huge can never fit" in node.cli("plan", "huge").stdout
    for verb in ("plan", "history"):
        missing = node.cli(verb, "nobody")
        assert missing.returncode == 3
        assert "There is no model 'nobody'." in missing.stderr
    assert control(node, "POST", "/control/v1/plan/a")[0] in (400, 404)


def test_evict(node: Node) -> None:
    node.cli("load", "c")
    dry = node.json("evict", "--dry-run", "c")
    assert (dry["name"], dry["device"], dry["active"]) == ("c", "cpu:0", 0)
    assert "c would free " in node.cli("evict", "--dry-run", "c").stdout
    node.cli("load", "bee")
    assert node.json("evict", "--dry-run", "bee")["name"] == "org/b"
    assert node.json("evict", "--dry-run", "--bytes", "50MiB")[0]["verdict"] == "evicts"
    assert "c" in {row["name"] for row in node.ps()}
    assert node.cli("evict", "c").stdout.startswith("c is unloaded")
    assert "c" not in {row["name"] for row in node.ps()}
    for args, exit_code, message in (
        (("--dry-run", "c"), 3, "c is on no device: it is cold"),
        (("--dry-run", "nobody"), 3, "There is no model 'nobody'."),
        ((), 2, "which model?"),
        (("--bytes", "1GiB"), 2, "--bytes needs --dry-run"),
        (("c", "--bytes", "1GiB", "--dry-run"), 2, "give NAME or --bytes, not both"),
        (("--dry-run", "--bytes", "x"), 2, "bytes: 'x' must be a number of bytes"),
        (("--dry-run", "--bytes", "1", "--device", "cpu:7"), 3, "There is no device 'cpu:7'; this node has cpu:0."),
        (("--dry-run", "--bytes", "1GiB", "--device", "cpu:0"), 4, "--bytes 1GiB: what is idle on cpu:0 does not free so much"),
    ):
        result = node.cli("evict", *args)
        assert result.returncode == exit_code, args
        assert result.stderr.startswith(f"hearth: {message}"), args


def test_room_that_cannot_be_made_is_no_success(node: Node) -> None:
    plain, told = (node.cli("evict", "--dry-run", "--bytes", "1GiB", *more) for more in ((), ("--json",)))
    assert (plain.returncode, told.returncode) == (4, 4)
    assert "are free now" in plain.stdout, "what stands on the device is still told"
    error = json.loads(told.stdout)
    assert error["code"] == "would_not_fit"
    assert [device["verdict"] for device in error["details"]["devices"]] == ["waits"]


def test_top(node: Node) -> None:
    node.cli("load", "a")
    stream = Stream(node, "a", "x", 1500)
    stream.wait_for_chunks(3)
    value = node.json("top")
    assert sum(part["bytes"] for part in value["devices"][0]["parts"]) == value["devices"][0]["budget_bytes"]
    assert value["tokens"]["a"] > 0
    shown = node.cli("top", "--once").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "hearthd ready | 1 open" in shown
    rate = next(int(line.split()[-1]) for line in shown.splitlines() if line[3:].startswith("a "))
    assert rate > 50  # of about 500
    assert "a on cpu:0" in shown
    stream.join()
    assert node.cli("top", "--every", "0").returncode == 2
    assert json.loads(node.cli("top", "--json").stdout)["time"] >= value["time"]
