"""Tenants on a real node: what one does is not seen by another, nor does it keep the other waiting; keys and listeners as processes
see them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import string
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from daemon.access.keys import hash_key
from tests.daemon.test_main import hearthd
from tests.e2e import processes
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

KEYS = {name: f"sk-{name}-0123456789abcdefghij" for name in ("ann", "bob")}
PROMPT_TOKENS = 1200


def keys_text(**extra: str) -> str:
    return "".join(f'[tenants.{name}]\nkeys = ["{hash_key(key)}"]\n{extra.get(name, "")}\n' for name, key in KEYS.items())


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def text(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters, k=PROMPT_TOKENS))


# ---- the prefix cache


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("tenants")
    make_model(folder / "models" / "m", weights_bytes=8 << 20)
    (folder / "keys.toml").write_text(keys_text())
    flags = ["--dtype", "float32", "--threads", "1", "--keys-file", str(folder / "keys.toml")]
    with Node(folder, devices=["cpu=192MiB"], runner="torch", flags=flags) as running:
        first(running, "ann", "warm up")
        yield running


def first(node: Node, name: str, prompt: str) -> tuple[float, int]:
    """Returns (seconds that the node computes up to the first token, prompt tokens said to be cached)."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", **bearer(name)}
    request = urllib.request.Request(node.url + "/v1/completions", json.dumps(body | {"ignore_eos": True}).encode(), headers)
    assert node.process is not None
    spent = processes.Spent(node.process.pid)
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [response.readline()]
        seconds = spent.computed_s()
        lines += response.readlines()
    usage = next(value["usage"] for line in lines if line.startswith(b"data: {") and (value := json.loads(line[6:])).get("usage"))
    assert usage["prompt_tokens"] >= len(prompt)
    return seconds, usage["prompt_tokens_details"]["cached_tokens"]


def test_no_tenant_sees_anothers_cache(node: Node) -> None:
    """Neither by the count in the answer nor by the clock: a prompt that another tenant has just sent takes as long as a new one.
    The same clock does tell a tenant's own second sending, so it would tell the other's. It is that of the node's processes, which
    a client's follows where nobody else computes."""
    rng = random.Random(1)
    own, probes, fresh = [], [], []
    for _ in range(5):
        secret = text(rng)
        assert first(node, "ann", secret)[1] == 0
        seconds, cached = first(node, "ann", secret)
        assert cached >= PROMPT_TOKENS - 16
        own.append(seconds)
        seconds, cached = first(node, "bob", secret)
        assert cached == 0
        probes.append(seconds)
        seconds, cached = first(node, "bob", text(rng))
        assert cached == 0
        fresh.append(seconds)
    hit, probe, miss = (statistics.median(times) for times in (own, probes, fresh))
    assert hit < 0.5 * miss, "the clock must be able to tell a hit"
    assert probe > hit + 0.6 * (miss - hit), f"another tenant's prompt: {probe:.3f} s, a new one {miss:.3f} s, a hit {hit:.3f} s"


def test_a_tenant_has_its_own_cache(node: Node) -> None:
    prompt = text(random.Random(2))
    for name in KEYS:
        assert [first(node, name, prompt)[1] > 0 for _ in range(2)] == [False, True]


# ---- shares and limits


def test_a_flood_keeps_nobody_waiting(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "m")
    config = "[models.m]\nmax_sequences = 2\nmax_queued = 20\n"
    (tmp_path / "keys.toml").write_text(keys_text())
    flags = ["--keys-file", str(tmp_path / "keys.toml")]
    with Node(tmp_path / "n", config=config, null_step_ms=25, flags=flags) as node, ThreadPoolExecutor(40) as pool:
        assert Stream(node, "m", "x", 2, key=KEYS["ann"]).join().error == ""
        done: list[str] = []

        def run(name: str) -> str:
            stream = Stream(node, "m", "x", 40, key=KEYS[name]).join()
            done.append("refused" if stream.error else name)
            return stream.error

        flood = [pool.submit(run, "ann") for _ in range(30)]
        node.wait_for(lambda: "refused" in done, "a queue full of ann's")
        assert {row["tenant"] for row in node.json("queue")} == {"ann"}
        (engine,) = node.engine_pids()
        os.kill(engine, signal.SIGSTOP)  # nobody gets a place before bob's are there
        late = [pool.submit(run, "bob") for _ in range(2)]
        node.wait_for(lambda: [row["tenant"] for row in node.json("queue")].count("bob") == 2, "bob's requests in the queue")
        num_before = len([name for name in done if name == "ann"])
        os.kill(engine, signal.SIGCONT)
        assert [each.result() for each in late] == ["", ""]
        errors = [error for each in flood if (error := each.result())]
    # 4 places in the engine and 10 in the queue are ann's; bob's two are next, whenever a place is free
    assert errors
    assert all("requests of ann wait for m; 10 may" in error for error in errors)
    served = [name for name in done if name != "refused"][num_before:]
    assert served[:9].count("bob") == 2, served


def test_a_flood_of_streams_leaves_another_tenant_its_share_of_each_step(tmp_path: Path) -> None:
    """A step takes 5 ms and 2.5 ms for each of its tokens: with all of ann's 30 sequences in it bob's one would wait 82 ms for each
    token. Half the device is bob's, so a step is at most twice as long as with bob alone: three of ann's beside it."""
    num_flood, num_tokens = 30, 30
    make_model(tmp_path / "n" / "models" / "m", hearthd_null={"token_ms": 2.5})
    (tmp_path / "keys.toml").write_text(keys_text())
    flags = ["--keys-file", str(tmp_path / "keys.toml")]
    with Node(tmp_path / "n", config="[models.m]\nmax_sequences = 40\n", null_step_ms=5, flags=flags) as node:
        flood = [Stream(node, "m", "x", 1000, key=KEYS["ann"]) for _ in range(num_flood)]
        for stream in flood:
            stream.wait_for_chunks(2)
        bob = Stream(node, "m", "x", num_tokens, key=KEYS["bob"])
        bob.wait_for_chunks(num_tokens // 3)  # by then it is known what a step of so few costs
        before = [stream.num_chunks for stream in flood]
        assert bob.join().error == ""
        counts = [stream.num_chunks - was for stream, was in zip(flood, before, strict=True)]
        assert all(stream.alive for stream in flood)
        assert {stream.hang_up().error for stream in flood} == {""}
    # bob's last 20 tokens: 3 of ann's with each, fewer where the machine makes steps longer, but not 30
    assert 10 <= sum(counts) < num_flood * num_tokens * 2 // 3 // 3, counts
    assert max(counts) - min(counts) <= 4, "all of the flood go on, by turns"


# ---- keys as the process sees them


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("keys")
    make_model(folder / "models" / "m")
    (folder / "keys.toml").write_text(keys_text())
    with Node(folder, flags=["--keys-file", str(folder / "keys.toml")]) as running:
        yield running


@pytest.fixture
def keyed(started: Node) -> Node:
    """A node with everybody's keys, which are in `keys.toml` of its folder."""
    replace(started.folder / "keys.toml", keys_text())
    assert started.json("reload")["ok"] is True
    return started


def test_keys_are_read_again_and_a_broken_file_changes_nothing(keyed: Node) -> None:
    node, path = keyed, keyed.folder / "keys.toml"
    path.write_text(keys_text(bob='models = ["other/*"]'))
    assert node.json("reload")["ok"] is True
    names = {name: [each["id"] for each in node.get("/v1/models", bearer(name))[1]["data"]] for name in KEYS}
    assert names == {"ann": ["m"], "bob": []}
    told = node.cli("status").stdout
    assert "keys are set, tenants: 2" in told
    assert not [key for key in KEYS.values() if key in told or hash_key(key) in node.cli("status", "--json").stdout]
    assert node.get("/v1/models")[0] == 401
    path.write_text(keys_text(bob='weight = "high"'))
    refused = node.cli("reload")
    assert refused.returncode == 2
    where = f"{path}:6: tenants.bob.weight: 'high' must be a number above 0 and at most 1000"
    assert where in refused.stderr
    node.wait_for(lambda: where in node.log_text(), "the log's word")
    assert node.get("/v1/models", bearer("bob"))[1]["data"] == [], "the old keys stay"
    path.write_text(keys_text())  # the file is watched
    node.wait_for(lambda: len(node.get("/v1/models", bearer("bob"))[1]["data"]) == 1, "bob's new models")
    path.write_text(keys_text().partition("[tenants.bob]")[0])
    assert node.json("reload")["ok"] is True
    assert node.get("/v1/models", bearer("bob"))[0] == 401
    status = node.json("status")
    assert (status["keys"], status["tenants"]) == (True, 1)
    for key in KEYS.values():
        assert key not in node.log_text()


def replace(path: Path, text: str) -> None:
    """In one step: hearthd must not read half of it."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def test_an_emptied_keys_file_revokes_every_key(keyed: Node) -> None:
    node, path = keyed, keyed.folder / "keys.toml"
    assert node.get("/v1/models", bearer("ann"))[0] == 200
    replace(path, "[tenants.ann]\nkeys = []\n")
    assert node.json("reload")["ok"] is True
    assert [node.get("/v1/models", bearer(name))[0] for name in KEYS] == [401, 401]
    assert node.get("/v1/models")[0] == 401
    assert node.get("/readyz")[0] == 200
    assert "the keys file has no key: nobody gets in" in node.cli("status").stdout
    assert f"{path} has no key" in node.log_text()
    replace(path, keys_text())
    node.wait_for(lambda: node.get("/v1/models", bearer("ann"))[0] == 200, "the keys being back")
    replace(path, "")
    node.wait_for(lambda: node.get("/v1/models", bearer("ann"))[0] == 401, "the emptied file in use")


def test_a_refused_file_shows_until_it_is_right(keyed: Node) -> None:
    """Nobody asked for the reading: the file is watched, and the log is not where an operator looks first."""
    node, path = keyed, keyed.folder / "keys.toml"
    assert node.json("status")["reload_refused"] is None
    assert "\nhearth_config_reload_failing 0.0\n" in node.get("/metrics", bearer("ann"))[1]
    replace(path, keys_text(bob="weight = 0"))
    refused = node.wait_for(lambda: node.json("status")["reload_refused"], "the refusal in the status")
    assert (refused["file"], refused["line"], refused["key"]) == (str(path), 6, "tenants.bob.weight")
    assert f"{path}:6: tenants.bob.weight: 0 must be a number above 0" in refused["message"]
    assert abs(time.time() - refused["since"]) < 600
    told = node.cli("status").stdout
    assert f"older settings are in use: {refused['message']}" in told
    assert "\nhearth_config_reload_failing 1.0\n" in node.get("/metrics", bearer("ann"))[1]
    assert node.cli("reload").returncode == 2
    assert node.json("status")["reload_refused"]["since"] == refused["since"], "it stands since the first refusal"
    replace(path, keys_text())
    assert node.json("reload")["ok"] is True
    assert node.json("status")["reload_refused"] is None
    assert "\nhearth_config_reload_failing 0.0\n" in node.get("/metrics", bearer("ann"))[1]


def test_an_admin_listener_takes_the_metrics_over_and_keys_open_the_other_to_other_machines(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "m")
    (tmp_path / "keys.toml").write_text(keys_text())
    with socket.create_server(("127.0.0.1", 0)) as free:
        admin = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--listen", "0.0.0.0:0", "--keys-file", str(tmp_path / "keys.toml"), "--admin-listen", admin]
    with Node(tmp_path / "n", flags=flags) as node:
        assert node.get("/v1/models")[0] == 401
        assert node.get("/v1/models", bearer("ann") | {"Host": "gpu1.example.org"})[0] == 200
        assert node.get("/metrics", bearer("ann"))[0] == 404
        assert node.get("/readyz")[0] == 200
        own, node.url = node.url, f"http://{admin}"
        assert node.get("/metrics")[0] == 200
        assert node.get("/m/m/metrics")[0] == 200
        assert node.get("/readyz")[1]["engines"] == {"cpu:0": "up"}
        assert node.get("/v1/models")[0] == 404
        assert node.get("/metrics", {"Host": "evil.example"})[0] == 403
        node.url = own


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--listen", "0.0.0.0:0"], 2),
        (["--admin-listen", "[::]:0"], 2),
        (["--listen", "0.0.0.0:0", "--insecure"], 0),
    ],
)
def test_beyond_this_machine_only_with_keys(tmp_path: Path, flags: list[str], code: int) -> None:
    result = hearthd("--models", str(tmp_path), "--check-config", *flags)
    assert result.returncode == code, result.stderr
    if code:
        assert "--keys-file FILE, or --insecure" in result.stderr
        assert flags[1] in result.stderr


def test_a_broken_keys_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("[tenants.a]\nkeys = [1]\n")
    result = hearthd("--models", str(tmp_path), "--keys-file", str(tmp_path / "keys.toml"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"hearthd: {tmp_path}/keys.toml:2: tenants.a.keys: number 1, a value that is no text, must be")
