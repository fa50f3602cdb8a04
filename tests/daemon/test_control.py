"""`hearth` and the control API against a real daemon with the null runner: what scripts rely on."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.cli.client import Client, CommandError
from loader.models.catalog import scan_one
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_head, make_model
from tests.e2e.node import Node, environment
from tests.loader.adapters import adapter_tensors, modules_of, write_adapter

PS_KEYS = {"name", "state", "device", "weights_bytes", "kv_bytes", "active", "queued", "pinned", "last_used"}
PS_KEYS |= {"kind", "keep_alive_s", "leaves"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("n")
    # a, org/b and c take 28 MiB each beside 12 MiB of work space: two fit
    for name in ("a", "org/b", "c"):
        make_model(folder / "models" / name, weights_bytes=20 * MIB)
    make_model(folder / "models" / "slow", hearthd_null={"load_s": 1.0})
    make_model(folder / "models" / "bad", hearthd_null={"load_error": "model.safetensors: tensor x is damaged"})
    make_model(folder / "models" / "huge", weights_bytes=80 * MIB)
    (make_model(folder / "models" / "half") / "model.safetensors").unlink()
    make_head(folder / "models" / "head", folder / "models" / "c")
    config = make_model(folder / "models" / "foreign") / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "FalconForCausalLM"))
    with Node(folder, devices=["cpu=84MiB"], null_step_ms=2, config='[models."org/b"]\naliases = ["bee"]\n') as running:
        yield running


@pytest.fixture(autouse=True)
def _empty(node: Node) -> Iterator[None]:
    yield
    for row in node.ps():
        if row["pinned"]:
            node.cli("unpin", row["name"])
        if row["state"] == "ready":
            node.cli("unload", row["name"])


def control(node: Node, method: str, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(node.control)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        lines = [json.loads(line) for line in response.read().splitlines()]
        return response.status, lines if len(lines) > 1 else lines[0]
    finally:
        connection.close()


def test_ps_contract(node: Node) -> None:
    names = {row["name"] for row in node.ps()}
    assert "a" not in names, "a cold model in ps"
    before = time.time()
    Stream(node, "a", "hello", 3).join()
    (row,) = [row for row in node.ps() if row["name"] == "a"]
    assert set(row) == PS_KEYS
    assert (row["state"], row["device"], row["active"], row["queued"], row["pinned"]) == ("ready", "cpu:0", 0, 0, False)
    assert 20 * MIB <= row["weights_bytes"] < 24 * MIB
    assert before - 1 <= row["last_used"] <= time.time() + 1
    rows = node.json("models")
    assert [row["name"] for row in rows] == sorted(row["name"] for row in rows)
    assert all(set(row) >= PS_KEYS for row in rows)
    states = {row["name"]: row["state"] for row in rows}
    assert (states["huge"], states["foreign"], states["half"], states["c"]) == ("refused", "refused", "incomplete", "cold")


def test_ps_leaves_out_what_cannot_be_loaded_and_says_so(node: Node) -> None:
    assert not {"huge", "half", "foreign"} & {row["name"] for row in node.ps()}
    assert "cannot be loaded; `hearth models` says why" in node.cli("ps").stdout


def test_a_head_is_no_model_that_is_refused(node: Node) -> None:
    (row,) = [row for row in node.json("models") if row["name"] == "head"]
    drafts = "it drafts tokens for other models"
    assert (row["state"], row["reason"].startswith(drafts)) == ("head", True)
    listed = node.cli("models").stdout
    assert f"\nhead: {drafts}" in listed
    assert "head is refused" not in listed
    assert "head" not in {row["name"] for row in node.ps()}
    assert "\n3 cannot be loaded" in node.cli("ps").stdout, "half, foreign and huge"
    planned = node.cli("plan", "head").stdout
    assert planned.startswith(f"head is a head; it cannot be loaded: head cannot be served: {drafts}")
    assert planned.count("\n") == 1, "no sizes, which are not known, and nothing that it lacks as a model"
    assert node.cli("plan", "foreign").stdout.count("\n") == 1
    assert 'hearth_model_state{model="head",state="head"} 1.0' in node.get("/metrics")[1]
    assert f"head: draft head: {drafts}" in node.log_text()


def test_ps_shows_what_runs(node: Node) -> None:
    streams = [Stream(node, "a", "hello", 1900) for _ in range(3)]
    for stream in streams:
        stream.wait_for_chunks(20)

    def busy() -> bool:
        (row,) = [row for row in node.ps() if row["name"] == "a"]
        return bool(row["active"] == 3 and row["kv_bytes"] > 0)

    node.wait_for(busy, "three sequences and their KV")
    for stream in streams:
        stream.join()


def test_load_and_unload(node: Node) -> None:
    assert node.json("load", "org/b") == {"event": "result", "ok": True, "model": "org/b", "state": "ready"}
    assert node.state("org/b") == "ready"
    assert node.json("load", "bee")["model"] == "org/b"
    assert node.cli("unload", "org/b").returncode == 0
    assert node.state("org/b") == "cold"
    assert node.cli("unload", "org/b").returncode == 0, "unloading what is not loaded is done already"


def test_unloading_what_runs_says_that_it_comes_back(node: Node) -> None:
    stream = Stream(node, "a", "hello", 400)
    stream.wait_for_chunks(3)
    dry = node.cli("evict", "--dry-run", "a").stdout.splitlines()
    assert dry[1:] == ["requests would wait and bring it back: 1 that run, 0 that wait already"]
    told = node.cli("unload", "a").stdout
    assert re.fullmatch(r"a is unloaded; requests that wait for it bring it back \((loading|ready)\)\n", told)
    assert stream.join().error == ""


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        (("load", "nope"), 3, "model_not_found"),
        (("unload", "nope"), 3, "model_not_found"),
        (("why", "nope"), 3, "not_found"),
        (("drain", "nope"), 3, "model_not_found"),
        (("load", "huge"), 4, "model_too_large"),
        (("pin", "huge"), 4, "model_too_large"),
        (("load", "half"), 5, "model_incomplete"),
        (("load", "foreign"), 4, "model_unusable"),
        (("pin", "foreign"), 4, "model_unusable"),
    ],
)
def test_refused_commands(node: Node, args: tuple[str, ...], code: int, error: str) -> None:
    result = node.cli(*args, "--json")
    assert result.returncode == code
    value = json.loads(result.stdout)
    assert set(value) == {"code", "message", "details"}
    assert value["code"] == error
    plain = node.cli(*args)
    assert (plain.returncode, plain.stdout) == (code, "")
    hint = " `hearth models` lists all." if args[1] == "nope" else ""
    assert plain.stderr == f"hearth: {value['message']}{hint}\n"


def test_what_is_not_supported_is_told_with_what_is(node: Node) -> None:
    told = "config.json: key architectures: 'FalconForCausalLM' is not supported; supported: LlamaForCausalLM, MistralForCausalLM"
    assert told in node.cli("load", "foreign").stderr
    assert f"foreign is refused: {told}" in node.cli("models").stdout
    assert f"it cannot be loaded: foreign cannot be served: {told}" in node.cli("plan", "foreign").stdout


def test_a_name_with_a_line_break_is_a_name(node: Node) -> None:
    for method, path in (
        ("GET", "why/a%0Ab"),
        ("GET", "plan/a%0Ab"),
        ("GET", "experts/a%0Ab"),
        ("POST", "models/a%0Ab/load"),
        ("POST", "drain?model=a%0Ab"),
    ):
        status, told = control(node, method, f"/control/v1/{path}")
        assert (status, told["message"]) in (
            (404, "There is no model 'a\\nb'."),
            (404, "There is no model and no request 'a\\nb'."),
        )
    assert control(node, "POST", "/control/v1/models/a/lo%0Aad")[1]["message"].startswith("no command 'lo\\nad'; known: ")


@pytest.mark.parametrize(("name", "meant"), [("org/B", "org/b"), ("B", "org/b"), ("huuge", "huge"), ("haf", "half")])
def test_a_wrong_name_is_told_the_closest(node: Node, name: str, meant: str) -> None:
    assert node.cli("load", name).stderr.endswith(f" Is it {meant!r}?\n")


def test_a_model_whose_folder_is_gone_is_not_proposed_in_its_own_place(node: Node) -> None:
    folder = make_model(node.models / "leaving")
    node.wait_for(lambda: node.state("leaving") == "cold", "the whole new model")
    stream = Stream(node, "leaving", "x", 900)
    stream.wait_for_chunks(1)
    shutil.rmtree(folder)
    node.wait_for(lambda: node.state("leaving") == "draining", "the scan")
    told = node.cli("load", "leaving").stderr
    assert told == "hearth: There is no model 'leaving'. What is left of it is draining: its folder is gone.\n"
    stream.hang_up().join()


def test_a_model_named_as_the_models_folder_is_told(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    with Node(tmp_path / "n", models=folder) as running:
        assert f"{folder} is a model's folder itself; name the folder that holds it" in running.cli("models").stdout
        (folder / "more").mkdir()
        make_model(folder / "more" / "b")
        running.wait_for(lambda: running.json("models"), "a further scan")
        assert running.log_text().count("is a model's folder itself") == 1


def test_a_models_folder_that_cannot_be_read_is_told_until_it_can(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n") as running:
        aside = running.models.rename(tmp_path / "aside")
        running.wait_for(lambda: running.json("status")["problems"], "the problem")
        said = f"models_dir {running.models} cannot be read (No such file or directory): the models stay as they are"
        assert running.json("status")["problems"] == [said]
        with urllib.request.urlopen(running.url + "/healthz") as answer:
            assert json.load(answer) == {"status": "degraded", "problems": [said]}
        assert running.state("a") == "cold"
        make_model(aside / "b")
        aside.rename(running.models)
        running.wait_for(lambda: not running.json("status")["problems"], "the folder being read")
        assert {model["name"] for model in running.json("models")} == {"a", "b"}
        assert running.log_text().count("the models folder cannot be read") == 1


def test_status_codes_of_the_api_match_the_exit_codes(node: Node) -> None:
    for path, status in [("nope/load", 404), ("huge/load", 409), ("half/load", 503), ("a/frob", 404)]:
        got, body = control(node, "POST", f"/control/v1/models/{path}")
        assert got == status
        assert set(body) == {"code", "message", "details"}
    assert control(node, "GET", "/control/v1/frob")[0] == 404
    assert control(node, "GET", "/control/v1/drain")[0] == 400
    assert control(node, "GET", "/control/v1/version")[1]["version"]


def test_load_tells_progress_and_no_wait_does_not(node: Node) -> None:
    status, lines = control(node, "POST", "/control/v1/models/slow/load")
    assert status == 200
    assert lines[-1] == {"event": "result", "ok": True, "model": "slow", "state": "ready"}
    progress = [line for line in lines if line["event"] == "load_progress"]
    assert len(progress) >= 3
    assert all(line["model"] == "slow" and 0 <= line["bytes_done"] <= line["bytes_total"] for line in progress)
    assert [line["new"] for line in lines if line["event"] == "state"] == ["loading", "ready"]
    node.cli("unload", "slow")
    assert node.json("load", "slow", "--no-wait")["waiting"] is True
    assert node.state("slow") == "loading"
    node.wait_for(lambda: node.state("slow") == "ready", "slow loaded")


def test_a_pin_need_not_be_waited_for(node: Node) -> None:
    assert node.cli("pin", "slow", "--no-wait").stdout.startswith("slow is pinned")
    node.wait_for(lambda: node.state("slow") == "ready", "slow loaded")
    assert {row["name"] for row in node.ps() if row["pinned"]} == {"slow"}


def test_a_load_that_fails_says_why(node: Node) -> None:
    result = node.cli("load", "bad", "--json")
    assert result.returncode == 5
    value = json.loads(result.stdout)
    assert value["code"] == "model_failed"
    assert "tensor x is damaged" in value["message"]
    assert "tensor x is damaged" in node.cli("why", "bad").stdout


def test_pins(node: Node) -> None:
    assert node.json("pin", "a")["state"] == "ready"
    assert node.json("pin", "c")["ok"] is True
    result = node.cli("pin", "org/b", "--json")
    assert result.returncode == 4, result.stdout
    assert json.loads(result.stdout)["code"] == "would_not_fit"
    assert {row["name"] for row in node.ps() if row["pinned"]} == {"a", "c"}
    assert node.cli("unpin", "a").returncode == 0
    assert {row["name"] for row in node.ps() if row["pinned"]} == {"c"}


def test_enable_and_disable(node: Node) -> None:
    assert node.json("disable", "a")["ok"] is True
    assert node.state("a") == "disabled"
    with node.openai() as client:
        import openai

        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="a", prompt="x", max_tokens=1)
    assert caught.value.status_code == 503
    assert caught.value.body["code"] == "model_disabled"  # type: ignore[index]
    assert node.json("enable", "a")["ok"] is True
    assert Stream(node, "a", "x", 2).join().finish_reason == "length"


def test_drain_and_resume_one_model(node: Node) -> None:
    assert node.cli("drain", "a").returncode == 0
    assert "drain" in Stream(node, "a", "x", 2).join().error
    assert node.is_ready()
    told = "a takes no new requests (hearth drain); `hearth resume a` ends that"
    for command in ("ps", "models"):
        assert f"\n{told}\n" in node.cli(command).stdout
    assert "\ntakes no new requests; `hearth resume a` ends that\n" in node.cli("why", "a").stdout
    assert [row["name"] for row in node.json("models") if row.get("drained")] == ["a"]
    assert node.cli("resume", "a").returncode == 0
    assert told not in node.cli("models").stdout
    assert Stream(node, "a", "x", 2).join().error == ""


def test_drain_and_resume_the_node(node: Node) -> None:
    assert node.json("drain") == {"ok": True, "model": "", "draining": True}
    status, body = node.get("/readyz")
    assert (status, body["reason"]) == (503, "draining")
    assert node.get("/healthz")[0] == 200
    assert node.json("resume")["draining"] is False
    assert node.is_ready()


def test_why_of_a_model_and_a_request(node: Node) -> None:
    stream = Stream(node, "a", "x", 400)
    stream.wait_for_chunks(2)
    story = node.json("why", "a")
    assert story["name"] == "a"
    assert any("cold -> loading" in line for line in story["lines"])
    causes = [event["cause"] for event in events(node) if event["event"] == "state" and event["new"] == "loading"]
    assert causes[-1].startswith("req-"), "earlier loads may have been commands' (only the newest events are kept)"
    last = [event["cause"] for event in events(node) if event.get("model") == "a" and event.get("cause", "").startswith("req-")][-1]
    assert node.cli("why", last).returncode == 0
    stream.join()


def events(node: Node) -> list[dict[str, Any]]:
    return [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]


def test_queue_shows_who_waits(node: Node) -> None:
    assert node.json("queue") == []
    stream = Stream(node, "slow", "x", 2)
    rows = node.wait_for(lambda: node.json("queue"), "a queued request")
    assert rows[0]["model"] == "slow"
    assert set(rows[0]) == {"for", "request", "id", "model", "tenant", "position", "waiting_s", "resubmission"}
    assert "slow" in node.cli("why", f"req-{rows[0]['request']}").stdout
    assert stream.join().finish_reason == "length"
    assert node.cli("queue").stdout == "nothing waits\n"


def test_events_follow(node: Node) -> None:
    command = [sys.executable, "-P", "-m", "daemon.cli", "--control", node.control, "events", "-f", "--json"]

    def as_in_a_terminal() -> None:
        """A shell starts background jobs with SIGINT ignored, and what a job starts inherits that."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), preexec_fn=as_in_a_terminal) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"]
        node.cli("load", "c")
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "state" and event["model"] == "c" and event["new"] == "ready":
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_events_are_followed_over_a_restart_and_a_kill(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "a")
    command = [sys.executable, "-P", "-m", "daemon.cli", "--control", str(tmp_path / "c.sock"), "events", "-f", "--json"]
    with Node(tmp_path) as node, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["event"]
        for end in (node.stop, node.kill):
            end()
            assert process.stderr.readline() == "hearth: hearthd has ended; waiting for the next one\n"
            node.start()
            node.cli("load", "a")
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "state" and event["new"] == "ready":
                    break
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("is_running", [True, False], ids=["quiet", "daemon gone"])
def test_following_events_ends_with_its_reader(tmp_path: Path, is_running: bool) -> None:
    """Following ends when the pipe's reader is gone, while nothing happens on the node or no daemon comes back."""
    command = [sys.executable, "-P", "-m", "daemon.cli", "--control", str(tmp_path / "c.sock"), "events", "-f"]
    make_model(tmp_path / "models" / "a")
    with Node(tmp_path) as node, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        num_events = len(node.cli("events").stdout.splitlines())
        for _ in range(num_events):
            assert process.stdout.readline()
        if not is_running:
            node.stop()
            assert process.stderr.readline() == "hearth: hearthd has ended; waiting for the next one\n"
        process.stdout.close()
        try:
            assert process.wait(20) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_events_end_where_no_daemon_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.cli.client.BACK_LIMIT_S", 0.5)
    client = Client(str(tmp_path / "none"))
    with pytest.raises(CommandError, match="hearthd ended before it answered"):
        client.until_back(client.gone())
    other = CommandError(4, {"code": "model_not_found", "message": "what a restart does not cure", "details": {}})
    monkeypatch.setattr("daemon.cli.client.BACK_LIMIT_S", 3600.0)  # waiting once more would not end
    with pytest.raises(CommandError, match="does not cure"):
        client.until_back(other)


def test_folders_come_and_go(node: Node) -> None:
    make_model(node.models / "new" / "one")
    node.wait_for(lambda: node.state("new/one") == "cold", "the new model")
    assert Stream(node, "new/one", "x", 2).join().finish_reason == "length"
    shutil.rmtree(node.models / "new")
    node.wait_for(lambda: node.state("new/one") == "absent", "its end")
    assert "404" in Stream(node, "new/one", "x", 2).join().error


def test_an_adapter_is_shown_and_used_by_its_own_name(node: Node) -> None:
    shape = scan_one(node.models / "a").shape
    assert shape is not None
    folder = write_adapter(node.models / "me" / "lora", adapter_tensors(modules_of(shape)), base_model_name_or_path="hub/a")
    try:
        assert node.cli("reload").returncode == 0
        (row,) = [row for row in node.json("models") if row["name"] == "me/lora"]
        assert (row["kind"], row["state"], row["base"], row["rank"]) == ("adapter", "adapter", "a", 4)
        assert "adapter of a" in node.cli("models").stdout
        assert "me/lora is a LoRA adapter of a: rank 4" in node.cli("why", "a:lora").stdout
        refused = node.cli("load", "me/lora")
        assert refused.returncode == 2
        assert "'me/lora' is a LoRA adapter of a, and a is loaded in its place." in refused.stderr
        Stream(node, "a:lora", "hello", 3).join()
        states = {row["name"]: row["state"] for row in node.ps()}
        assert states["a"] == "ready"
        assert "me/lora" not in states, "null models take no adapters"
        assert "model=a adapter=me/lora asked=a:lora" in node.log_text()
    finally:
        shutil.rmtree(folder)
        node.cli("reload")
    assert node.cli("why", "me/lora").returncode == 3


def reloads(node: Node) -> list[tuple[list[str], list[str]]]:
    """What each reload so far applied and what it said needs a restart."""
    return [(event["applied"], event["needs_restart"]) for event in events(node) if event["event"] == "reload"]


def test_reload(node: Node) -> None:
    """The file is watched as well: whichever reads it first applies it, once."""
    good = node.config.read_text()
    node.config.write_text(good + "\n[models.a]\naliases = ['ay']\nmax_sequences = 7\n")
    assert node.json("reload")["needs_restart"] == ['models."a".max_sequences']
    assert [applied for applied, _ in reloads(node) if applied] == [['models."a".aliases']]
    assert Stream(node, "ay", "x", 2).join().error == ""
    node.config.write_text("\nmax_wait_s = [1]\n")
    result = node.cli("reload", "--json")
    assert result.returncode == 2
    value = json.loads(result.stdout)
    assert (value["code"], value["details"]) == ("invalid_config", {"file": str(node.config), "line": 2, "key": "max_wait_s"})
    assert f"{node.config}:2: max_wait_s: [1] must be a number" in value["message"]
    assert Stream(node, "ay", "x", 2).join().error == "", "the old settings were lost"
    refused = node.log_text().count("reload refused")
    node.signal(signal.SIGHUP)
    node.wait_for(lambda: node.log_text().count("reload refused") > refused, "the log's word on SIGHUP")
    node.config.write_text(good)
    assert node.json("reload")["ok"] is True
    assert [applied for applied, _ in reloads(node) if applied] == 2 * [['models."a".aliases']]
    assert "404" in Stream(node, "ay", "x", 2).join().error


def test_who_writes_the_file_and_asks_is_told_what_was_applied_by_itself(node: Node) -> None:
    good = node.config.read_text()
    count = len(reloads(node))
    node.config.write_text(good + "\n[models.aa]\npriority = 2.0\n")
    node.wait_for(lambda: len(reloads(node)) > count, "the file being read by itself")
    told = node.cli("reload").stdout
    assert 'applied: models."aa".priority' in told, "it was applied a moment ago, not 'nothing changed'"
    assert "the settings name models that are not there (yet): aa" in told
    assert 'settings for models."aa": there is no model of that name' in node.log_text()
    node.config.write_text(good)
    assert node.json("reload")["ok"] is True


def test_a_reload_tells_names_that_models_hide(node: Node) -> None:
    good, before = node.config.read_text(), node.log_text().count("is hidden by the model")
    node.config.write_text("[names]\nslow = 'a'\nfine = 'a'\n" + good + "\n[models.a]\naliases = ['c', 'ay']\n")
    try:
        assert node.json("reload")["hidden_names"] == ["c", "slow"]
        told = node.cli("reload").stdout
        assert "\nthese further names are hidden by models of the same names, which answer: c, slow\n" in told
        assert node.log_text().count("is hidden by the model") == before + 2, "told again at each scan"
    finally:
        node.config.write_text(good)
    assert node.json("reload")["hidden_names"] == []


def test_a_changed_file_is_read_by_itself(node: Node) -> None:
    good = node.config.read_text()
    count = len(reloads(node))
    replacement = node.config.with_suffix(".new")
    replacement.write_text("request_timeout_s = 7.5\n" + good)
    replacement.replace(node.config)  # as editors do
    try:
        node.wait_for(lambda: reloads(node)[count:] == [(["request_timeout_s"], [])], "the new file in use")
        refused = node.log_text().count("reload refused")
        with node.config.open("a") as file:
            file.write("\nfrob = 1\n")
        node.wait_for(lambda: node.log_text().count("reload refused") > refused, "the log's word on the broken file")
        assert "node.toml:" in node.log_text().rsplit("reload refused", 1)[1]
    finally:
        node.config.write_text(good)
    node.wait_for(lambda: reloads(node)[count + 1 :] == [(["request_timeout_s"], [])], "the old file in use again")


def test_reload_applies_limits_at_once(node: Node) -> None:
    good = node.config.read_text()
    node.config.write_text("request_timeout_s = 0.2\n" + good)
    try:
        assert node.json("reload")["ok"] is True
        assert "request_timeout_s (0.2 s)" in Stream(node, "a", "x", 1900).join().error
    finally:
        node.config.write_text(good)
        node.cli("reload")


def test_pins_and_switches_survive_a_restart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_model(tmp_path / "n" / "models" / name)
    node = Node(tmp_path / "n", config="[models.b]\npinned = true\n")
    with node:
        node.wait_for(lambda: node.state("b") == "ready", "b, which the file pins")
        assert [node.cli(*args).returncode for args in (("pin", "a"), ("unpin", "b"), ("disable", "b"))] == [0, 0, 0]
    with node:
        node.wait_for(lambda: node.state("a") == "ready", "a, pinned before")
        rows = {row["name"]: row for row in node.json("models")}
        assert (rows["a"]["pinned"], rows["b"]["pinned"], rows["b"]["state"]) == (True, False, "disabled")


def test_what_cannot_be_saved_is_done_and_told_until_it_is_saved(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    state, away = tmp_path / "n" / "state", tmp_path / "away"
    partial = state / "state.json.new"
    with Node(tmp_path / "n") as node:
        assert node.json("disable", "a")["saved"] is True
        assert node.json("status")["state_not_saved"] is None
        partial.symlink_to("/dev/full")  # where each write finds no space left
        full = node.cli("enable", "a")
        assert (full.returncode, full.stdout) == (7, "a is enabled (cold)\n")
        assert f"hearth: enable a: done, but not saved: state_dir {state}: No space left on device." in full.stderr
        assert not os.path.lexists(partial)
        state.rename(away)
        lost = node.cli("disable", "a", "--json")
        assert lost.returncode == 7
        result = json.loads(lost.stdout)
        assert (result["ok"], result["state"], result["saved"], result["status"]) == (True, "disabled", False, 507)
        assert (result["error"]["code"], result["error"]["details"]) == ("state_not_saved", {"state_file": f"{state}/state.json"})
        assert node.state("a") == "disabled"
        problem = f"state_dir {state}: No such file or directory"
        assert node.json("status")["state_not_saved"]["message"] == problem
        assert f"state not saved: {problem} (first " in node.cli("status").stdout
        assert "\nhearth_state_not_saved 1.0\n" in node.get("/metrics")[1]
        assert node.log_text().count(problem) == 1, "tried again without a line for each try"
        away.rename(state)
        node.wait_for(lambda: node.json("status")["state_not_saved"] is None, "the state being saved by itself")
        assert json.loads((state / "state.json").read_text())["enabled"] == {"a": False}
        assert "\nhearth_state_not_saved 0.0\n" in node.get("/metrics")[1]


def test_what_cannot_be_saved_is_audited_as_such(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    make_model(tmp_path / "n" / "models" / "bad", hearthd_null={"load_error": "model.safetensors: tensor x is damaged"})
    audit = tmp_path / "audit.log"
    with Node(tmp_path / "n", config=f'audit_log = "{audit}"\n') as node:
        (tmp_path / "n" / "state" / "state.json.new").symlink_to("/dev/full")
        assert node.cli("pin", "a").returncode == 7
        (tmp_path / "n" / "state" / "state.json.new").symlink_to("/dev/full")
        failed = node.cli("pin", "bad")
        assert "tensor x is damaged" in failed.stderr
        assert "pin bad: done, but not saved: " in failed.stderr
        node.wait_for(lambda: audit.read_text().count('"command"') >= 4, "the acts")
    acts = [json.loads(line) for line in audit.read_text().splitlines()]
    first, second = (act for act in acts if act["act"] == "command")
    assert (first["model"], first["result"]) == ("a", "state_not_saved")
    assert first["message"].startswith("pin a: done, but not saved: ")
    assert (second["model"], second["result"]) == ("bad", "model_failed")
    assert "pin bad: done, but not saved: " in second["message"]


def test_metrics(node: Node) -> None:
    Stream(node, "a", "abc", 5).join()
    text = node.get("/metrics")[1]
    for line in (
        'hearth_model_state{model="a",state="ready"} 1.0',
        'hearth_model_state{model="huge",state="refused"} 1.0',
        'hearth_device_budget_bytes{device="cpu:0"} 8.8080384e+07',
        "hearth_draining 0.0",
    ):
        assert line in text
    assert 'hearth_time_to_first_token_seconds_count{model="a"}' in text
    assert 'hearth_model_loads_total{model="a",outcome="done"}' in text


def test_permission(node: Node) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    # imports first: nobody may not even be able to read the virtual environment
    code = "import os, sys, shutil, encodings.idna; from daemon.cli.main import run; "
    code += "os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.exit(run())"
    command = [sys.executable, "-P", "-c", code, "--control", node.control, "ps"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert result.returncode == 6, result.stderr
    assert "permission" in result.stderr


def test_config_tells_where_settings_are_set(node: Node) -> None:
    before = node.config.read_text()
    try:
        node.config.write_text('max_wait_s = 77\nlog_format = "json"\n' + before)
        assert node.cli("reload").returncode == 0
        rows = {row["key"]: row for row in node.json("config", "--all")}
        assert (rows["max_wait_s"]["value"], rows["max_wait_s"]["source"]) == (77, f"{node.config}:1")
        assert (rows["log_format"]["value"], rows["log_format"]["waits"]) == ("auto", True)
        assert (rows["drain_timeout_s"]["value"], rows["drain_timeout_s"]["source"]) == (30, "")
        assert rows["listen"]["source"] == "--listen"
        assert rows['models."org/b".aliases']["value"] == ["bee"]
        text = node.cli("config").stdout
        assert "drain_timeout_s" not in text
        assert re.search(r'^log_format +"auto" \(\*\) ', text, re.MULTILINE)
        assert "(*) the file has another value, which needs a restart" in text
        assert "others have their defaults; `hearth config --all` shows them" in text
    finally:
        node.config.write_text(before)
        node.cli("reload")
    assert not any(row["waits"] for row in node.json("config"))
