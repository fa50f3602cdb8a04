"""What `hearth doctor` says of other hosts that lend devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.cli.doctor import hosts
from daemon.cli.doctor.finding import FAIL, OK, WARN
from tests.engine.other_host import KEY, OtherHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[OtherHost]:
    one = OtherHost(tmp_path)
    yield one
    one.close()


def key_file(folder: Path, key: str) -> str:
    (file := folder / "key").write_text(key)
    return str(file)


def test_one_that_answers(host: OtherHost, tmp_path: Path) -> None:
    found = hosts.find("b", host.address, key_file(tmp_path, KEY))
    assert (found.level, found.found) == (OK, f"b at {host.address} answers and has the same key")


def test_one_with_another_key(host: OtherHost, tmp_path: Path) -> None:
    found = hosts.find("b", host.address, key_file(tmp_path, "another key, which differs"))
    assert (found.level, found.found) == (FAIL, f"b at {host.address}: the keys differ")
    assert "hearth lend" in found.change


def test_one_where_nothing_listens(tmp_path: Path) -> None:
    host = OtherHost(tmp_path)
    host.close()
    found = hosts.find("b", host.address, key_file(tmp_path, KEY))
    assert (found.level, found.found) == (FAIL, f"b at {host.address}: Connection refused")


def test_a_key_that_cannot_be_read(tmp_path: Path) -> None:
    found = hosts.find("b", "10.0.0.2:7100", str(tmp_path / "nothing"))
    assert (found.level, found.found) == (WARN, f"b: {tmp_path}/nothing: No such file or directory")


def test_what_a_running_daemon_knows() -> None:
    up = {"name": "cpu:0@b", "up": True, "problem": ""}
    assert hosts.told(up).level == OK
    down = hosts.told(up | {"up": False, "problem": "the engine ended: Connection refused"})
    assert (down.level, down.found) == (WARN, "cpu:0@b: the engine ended: Connection refused")
