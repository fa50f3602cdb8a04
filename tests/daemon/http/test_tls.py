"""The certificate and its key: which pairs are taken and why others are refused; clients that do not shake hands."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from config.load import ConfigError
from config.reload import plan
from config.schema import NodeConfig
from daemon.http import acceptor, tls
from daemon.http.acceptor import Acceptor, Crowd, Refusal
from daemon.http.client_addresses import ClientAddresses
from daemon.http.tls import Certificate, CertificateLog, Tls
from tests.daemon.certificates import Authority, needs_openssl
from tests.daemon.test_acceptor import ENOUGH, NONE_SERVED, SAFETY_S, TOO_MANY, Holder, Listener, until

pytestmark = needs_openssl
DAY_S = 86400.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> tuple[Path, Path]:
    return authority.issue("one")


def loaded(certificate: Path, key: Path, **settings: str) -> Tls:
    made = tls.load(NodeConfig(tls_certificate=str(certificate), tls_key=str(key), **settings), "flags")  # type: ignore[arg-type]
    assert made is not None
    return made


def refusal(certificate: Path, key: Path, **settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(certificate, key, **settings)
    return str(caught.value)


# ---- which pairs are taken


def test_what_a_certificate_says(authority: Authority, pair: tuple[Path, Path]) -> None:
    assert tls.load(NodeConfig(), "flags") is None
    made = loaded(*pair, tls_min_version="1.3", tls_client_ca=str(authority.ca))
    assert made.certificate.shown == "CN=one, O=Example"
    assert made.certificate.names == ("localhost", "127.0.0.1")
    assert made.certificate.days_left(time.time()) in (3649, 3650)
    assert made.certificate.warning(time.time()) == ""
    row = made.row()
    assert (row["subject"], row["min_version"], row["client_certificates"]) == ("CN=one, O=Example", "1.3", True)
    assert made.context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert loaded(*pair).digest == loaded(*pair).digest
    assert loaded(*pair).digest not in (made.digest, loaded(*authority.issue("other")).digest)


def test_an_expired_certificate_is_a_warning(authority: Authority) -> None:
    made = loaded(*authority.issue("old", days=-1))
    assert made.certificate.days_left(time.time()) < 0
    assert "CN=old, O=Example has expired at 20" in made.certificate.warning(time.time())


def test_why_a_pair_is_refused(authority: Authority, pair: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = pair
    _, other = authority.issue("two")
    rsa, encrypted, gone = authority.rsa_key(), authority.encrypted(key), tmp_path / "gone"
    broken, swapped, pipe, no_key = (tmp_path / name for name in ("broken.pem", "swapped.pem", "pipe", "no.key"))
    broken.write_text(certificate.read_text().replace("MII", "???", 1))
    swapped.write_bytes(authority.ca.read_bytes() + certificate.read_bytes())
    no_key.write_text("-----BEGIN PRIVATE KEY-----\nnone\n-----END PRIVATE KEY-----\n")
    os.mkfifo(pipe)
    for wrong in (other, rsa):
        assert refusal(certificate, wrong) == f"flags: tls_key: {wrong} is not the key of the first certificate in {certificate}"
    assert refusal(swapped, key) == f"flags: tls_key: {key} is not the key of the first certificate in {swapped}"
    assert refusal(certificate, encrypted).startswith(f"flags: tls_key: {encrypted} is encrypted, and nobody is there")
    assert refusal(certificate, no_key).startswith(
        f"flags: tls_key: {no_key} cannot be used with the certificate in {certificate}: "
    )
    assert refusal(gone, key) == f"flags: tls_certificate: {gone} cannot be read: No such file or directory"
    assert refusal(certificate, gone) == f"flags: tls_key: {gone} cannot be read: No such file or directory"
    assert refusal(pipe, key) == f"flags: tls_certificate: {pipe} cannot be read: is a named pipe, not a regular file"
    assert refusal(key, key).startswith(f"flags: tls_certificate: {key} holds no certificate in PEM form")
    assert refusal(certificate, certificate).startswith(f"flags: tls_key: {certificate} holds no private key in PEM form")
    assert refusal(broken, key).startswith(f"flags: tls_certificate: {broken} ")
    assert refusal(*pair, tls_client_ca=str(key)).startswith(f"flags: tls_client_ca: {key} holds no certificate in PEM form")


def test_an_error_names_the_line_of_the_settings(pair: tuple[Path, Path], tmp_path: Path) -> None:
    from config.load import load

    path = tmp_path / "node.toml"
    (tmp_path / "conf.d").mkdir()
    path.write_text(f"tls_certificate = '{pair[0]}'\n")
    with pytest.raises(ConfigError, match=r"node\.toml:1: tls_certificate: needs tls_key beside it"):
        load(str(path))
    (tmp_path / "conf.d" / "key.toml").write_text("\ntls_key = 'gone.key'\n")
    with pytest.raises(ConfigError) as caught:
        tls.load(load(str(path)), str(path))
    assert str(caught.value).startswith(f"{tmp_path}/conf.d/key.toml:2: tls_key: {tmp_path}/conf.d/gone.key cannot be read")


def test_a_credential(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = NodeConfig(tls_certificate=str(pair[0]), tls_key="credential:one.key")
    with pytest.raises(ConfigError, match="tls_key: there are no credentials here"):
        tls.load(settings, "flags")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(pair[1].parent))
    assert tls.files(settings) == list(map(str, pair))
    assert tls.load(settings, "flags") is not None


def test_a_reload_changes_the_files_but_does_not_switch_tls() -> None:
    plain, one, two = NodeConfig(), NodeConfig(tls_certificate="a", tls_key="b"), NodeConfig(tls_certificate="c", tls_key="b")
    assert plan(one, two).applied == ["tls_certificate"]
    assert plan(one, two).effective == two
    for running, new in ((plain, one), (one, plain)):
        result = plan(running, new)
        assert (result.applied, result.needs_restart) == ([], ["tls_certificate", "tls_key"])
        assert result.effective == running


def test_the_log_warns_once_a_day(caplog: pytest.LogCaptureFixture) -> None:
    made = Tls(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Certificate("CN=x", (), 0.0, 100 * DAY_S), b"", "1.2", False)
    certificates = CertificateLog()
    for hour in range(24 * 101 + 1):
        certificates.tell(made, 3600.0 * hour)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 15
    assert texts[0] == "the TLS certificate CN=x expires in 13 days, at 1970-04-11T00:00:00Z"
    assert texts[-1] == "the TLS certificate CN=x has expired at 1970-04-11T00:00:00Z; clients refuse it"
    certificates.tell(None, 0.0)


# ---- connections


class Secured:
    """An acceptor that speaks TLS. addresses: counts the connections of each client."""

    def __init__(self, listener: Listener, pair: tuple[Path, Path], limit: int = 0, served: bool = True) -> None:
        self.context = loaded(*pair).context
        self.addresses = ClientAddresses(lambda: limit)
        crowd = Crowd(self.addresses, lambda closed: Refusal(TOO_MANY, closed))
        bounds = ENOUGH if served else NONE_SERVED
        self.acceptor = Acceptor(listener, Holder, lambda closed: Refusal(TOO_MANY, closed), bounds, crowd, lambda: self.context)

    async def __aenter__(self) -> Secured:
        self.acceptor.start(16)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.acceptor.stop()
        await self.num_open(0)

    async def num_open(self, number: int) -> None:
        await until(lambda: self.addresses.num_open() == number)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


Pair = tuple[Path, Path]


async def test_these_run_on_the_loop_of_the_daemon() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


async def test_a_client_that_says_nothing_is_counted_and_closed(
    listener: Listener, pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with Secured(listener, pair) as one, asyncio.timeout(SAFETY_S):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await one.num_open(1)
        writer.close()  # before the handshake
        await one.num_open(0)
        with socket.create_connection(listener.getsockname()) as gone:
            await one.num_open(1)
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it is reset when it is closed
        await one.num_open(0)
        monkeypatch.setattr(acceptor, "HANDSHAKE_LIMIT_S", 0.05)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
        writer.close()
    told = [record.getMessage() for record in caplog.records if record.name == "hearthd"]
    assert len(told) == 3
    assert told[2].endswith("SSL handshake is taking longer than 0.05 seconds: aborting the connection")
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", bytes(2000)])
async def test_a_client_without_tls_is_closed_with_a_line(
    listener: Listener, pair: Pair, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with Secured(listener, pair) as one, asyncio.timeout(SAFETY_S):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(data)
        writer.write_eof()
        await reader.read()
        writer.close()
        await one.num_open(0)
    (told,) = [record for record in caplog.records if record.name == "hearthd"]
    assert told.getMessage().startswith("a connection ended as it was accepted: ")
    assert told.levelno == logging.DEBUG
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


async def test_silent_clients_fill_the_bound_and_the_next_reads_why(
    listener: Listener, authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    async with Secured(listener, pair, limit=1) as one, asyncio.timeout(SAFETY_S):
        _, silent = await asyncio.open_connection(*listener.getsockname())
        await one.num_open(1)
        reader, writer = await asyncio.open_connection(
            *listener.getsockname(), ssl=authority.trusting(), server_hostname="localhost"
        )
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.readexactly(len(TOO_MANY)) == TOO_MANY
        writer.close()
        silent.close()


async def test_a_refused_client_is_answered_over_tls(listener: Listener, authority: Authority, pair: Pair) -> None:
    async with Secured(listener, pair, served=False), asyncio.timeout(SAFETY_S):
        reader, writer = await asyncio.open_connection(
            *listener.getsockname(), ssl=authority.trusting(), server_hostname="localhost"
        )
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.readexactly(len(TOO_MANY)) == TOO_MANY
        writer.close()
