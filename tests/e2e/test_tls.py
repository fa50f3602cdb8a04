"""TLS on a real node: the official client, certificates that change under running streams, bad pairs, and restarts."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import signal
import socket
import ssl
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon.certificates import Authority, needs_openssl, subject_of
from tests.daemon.service_manager import NotifySocket
from tests.daemon.test_main import hearthd
from tests.e2e.checkpoints import make_model
from tests.e2e.node import SAFETY_S, Node
from tests.e2e.raw_stream import RawStream
from tests.e2e.service_node import ServiceNode

pytestmark = needs_openssl
CONFIG = "tls_certificate = 'live.pem'\ntls_key = 'live.key'\nlog_level = 'debug'\n"
LONG = {"model": "ash", "prompt": "once", "stream": True, "max_tokens": 1200, "ignore_eos": True}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def put(pair: tuple[Path, Path], folder: Path) -> None:
    """Puts a pair where the node reads it, the key after the certificate, as certbot does."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, name in zip(pair, ("live.pem", "live.key"), strict=True):
        shutil.copy(source, folder / "new")
        (folder / "new").replace(folder / name)


@pytest.fixture(scope="module")
def node(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("tls") / "n"
    put(authority.issue("first"), folder)
    make_model(folder / "models" / "ash", seed=1)
    made = Node(folder, config=CONFIG)
    made.trusted = authority.trusting()
    with made:
        yield made


def address(node: Node) -> tuple[str, int]:
    host, _, port = node.url.removeprefix("https://").partition(":")
    return host, int(port)


def test_the_official_client_streams(node: Node) -> None:
    assert node.url.startswith("https://127.0.0.1:")
    options: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    with httpx.Client(verify=node.trusted) as trusting, node.openai(http_client=trusting) as client:
        chunks = list(client.chat.completions.create(model="ash", stream=True, **options))
        whole = client.chat.completions.create(model="ash", **options)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len(chunks) > 2
    assert whole.usage.completion_tokens == 8


def test_what_it_speaks(node: Node, authority: Authority) -> None:
    for name, speaks in (("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)):
        context = authority.trusting()
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.set_alpn_protocols(["h2", "http/1.1"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that of 1.1
            context.minimum_version = context.maximum_version = ssl.TLSVersion[name]
        with socket.create_connection(address(node), timeout=SAFETY_S) as plain:
            try:
                with context.wrap_socket(plain, server_hostname="localhost") as secured:
                    assert secured.selected_alpn_protocol() == "http/1.1"
                    assert speaks
            except OSError:
                assert not speaks


def test_http_without_tls_is_closed_with_one_line(node: Node) -> None:
    before = node.log_text()
    plain = http.client.HTTPConnection(*address(node), timeout=SAFETY_S)
    with contextlib.closing(plain):
        plain.request("GET", "/v1/models")
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            plain.getresponse()
    node.wait_for(lambda: "HTTP_REQUEST" in node.log_text()[len(before) :], "the line")
    lines = node.log_text()[len(before) :].splitlines()
    assert len([line for line in lines if "accepted" in line or " error " in line or "HTTP_REQUEST" in line]) == 1, lines
    assert "Traceback" not in node.log_text()


def test_a_malformed_request_is_answered(node: Node) -> None:
    """TLS connections cannot be closed on one side, which the answers to broken HTTP do elsewhere."""
    with (
        socket.create_connection(address(node), timeout=SAFETY_S) as plain,
        node.trusted.wrap_socket(plain, server_hostname="localhost") as secured,  # type: ignore[union-attr]
    ):
        secured.sendall(b"GET / HTTP/1.1\r\nbroken\r\n\r\n")
        response = http.client.HTTPResponse(secured)
        response.begin()
        assert response.status == 400
        assert b"invalid_http" in response.read()
    assert "eof_received" not in node.log_text()
    assert "Traceback" not in node.log_text()


def test_commands_go_by_the_unix_socket(node: Node) -> None:
    row = node.json("status")["tls"]
    assert (row["subject"], row["names"], row["warning"]) == ("CN=first, O=Example", ["localhost", "127.0.0.1"], "")
    assert row["days_left"] > 3000
    assert "TLS 1.2 or newer, certificate CN=first, O=Example: 36" in node.cli("status").stdout
    found = {one["check"]: one for one in node.json("doctor")["findings"]}["TLS"]
    assert (found["level"], found["found"].startswith("certificate CN=first, O=Example, 36")) == ("ok", True)
    status, text = node.get("/metrics")
    assert status == 200
    (line,) = [line for line in text.splitlines() if line.startswith("hearth_tls_certificate_expiry_time_seconds ")]
    assert float(line.split()[1]) == row["expires"]


def test_a_new_pair_is_taken_under_a_running_stream_and_a_bad_one_is_not(node: Node, authority: Authority) -> None:
    context = authority.trusting()
    stream = RawStream(node, "/v1/completions", LONG)
    stream.wait_for_events(1)
    assert subject_of(context, address(node)) == "first"
    put(authority.issue("second"), node.folder)  # nobody asks for a reload
    node.wait_for(lambda: subject_of(context, address(node)) == "second", "the new certificate")
    third = authority.issue("third", days=9)
    shutil.copy(third[0], node.folder / "live.pem")
    refused = node.cli("reload")
    assert refused.returncode == 2
    words = f"{node.config}:2: tls_key: {node.folder}/live.key is not the key of the first certificate in {node.folder}/live.pem"
    assert refused.stderr == f"hearth: The running settings stay: {words}\n"
    assert node.json("status")["reload_refused"]["line"] == 2
    assert subject_of(context, address(node)) == "second"
    (node.folder / "live.pem").unlink()
    assert f"{node.config}:1: tls_certificate: {node.folder}/live.pem cannot be read: No such" in node.cli("reload").stderr
    assert subject_of(context, address(node)) == "second"
    put(third, node.folder)
    node.json("reload")  # which the watch may have come before
    assert subject_of(context, address(node)) == "third"
    assert "warning the TLS certificate CN=third, O=Example expires in 8 days" in node.log_text()
    assert {one["check"]: one for one in node.json("doctor")["findings"]}["TLS"]["level"] == "warn"
    assert stream.join().events[-1]["choices"][0]["finish_reason"] == "length"


def test_client_certificates_and_the_switch_that_needs_a_restart(node: Node, authority: Authority) -> None:
    put(authority.issue("fourth"), node.folder)
    node.config.write_text(CONFIG + f"tls_client_ca = '{authority.ca}'\ntls_min_version = '1.3'\n")
    node.json("reload")  # which the watch may have come before
    assert node.json("status")["tls"]["client_certificates"]
    trusted, node.trusted = node.trusted, authority.trusting(authority.issue("client"))
    try:
        assert node.get("/v1/models")[0] == 200
        node.trusted = trusted
        with pytest.raises((OSError, http.client.HTTPException)):  # an alert, or closed
            node.get("/v1/models")
    finally:
        node.trusted = trusted
        node.config.write_text("log_level = 'debug'\n")
        told = node.json("reload")
    assert told["needs_restart"] == ["tls_certificate", "tls_key", "tls_min_version", "tls_client_ca"]
    assert subject_of(authority.trusting(authority.issue("client")), address(node)) == "fourth"
    node.config.write_text(CONFIG)
    assert node.json("reload")["needs_restart"] == []
    assert node.get("/v1/models")[0] == 200


def test_the_start_and_its_check_refuse_a_bad_pair(authority: Authority, tmp_path: Path) -> None:
    put((authority.issue("one")[0], authority.issue("two")[1]), tmp_path)
    (tmp_path / "node.toml").write_text(f"models_dir = '.'\n{CONFIG}")
    flags = ("--config", str(tmp_path / "node.toml"), "--device", "cpu=64MiB", "--state-dir", str(tmp_path / "s"))
    for refused in (hearthd("--check-config", *flags), hearthd(*flags)):
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"hearthd: {tmp_path}/node.toml:3: tls_key: {tmp_path}/live.key is not the key of")
    put(authority.issue("old", days=-1), tmp_path)
    checked = hearthd("--check-config", *flags)
    assert checked.returncode == 0
    assert "hearthd: warning: the TLS certificate CN=old, O=Example has expired at " in checked.stderr


def test_a_restart_waits_for_answers_that_it_cannot_hand_over(authority: Authority, tmp_path: Path, notify: NotifySocket) -> None:
    folder = tmp_path / "n"
    put(authority.issue("one"), folder)
    make_model(folder / "models" / "ash", seed=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = ServiceNode(folder, notify, null_step_ms=20.0, config=CONFIG)
        node.listeners, node.trusted = [("http", listener)], authority.trusting()
        with node:
            asked = {"model": "ash", "input": "once", "max_output_tokens": 2000, "background": True}
            (begun,) = RawStream(node, "/v1/responses", asked).join().events
            stream = RawStream(node, "/v1/completions", LONG | {"max_tokens": 50})
            stream.wait_for_events(1)
            since_s = time.monotonic()
            node.restart(signal.SIGUSR2)
            assert time.monotonic() - since_s < 25, "it waited drain_timeout_s for the response in the background"
            assert node.get(f"/v1/responses/{begun['id']}")[1]["status"] in ("queued", "in_progress")
            assert "1 responses in the background of before the restart go on" in node.log_text()
            events = stream.join().events
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert not any("error" in event for event in events)
            assert node.get("/v1/models")[0] == 200, "the next one speaks TLS on the same listener"
            node.config.write_text(CONFIG + "drain_timeout_s = 0\n")
            node.json("reload")
            stream = RawStream(node, "/v1/completions", LONG)
            stream.wait_for_events(1)
            assert node.stop(signal.SIGUSR2) == 0
            assert stream.join().events[-1]["error"]["code"] == "server_restarting"
            assert node.log_text().count("SIGUSR2: restarting") == 2
            assert "Traceback" not in node.log_text()
