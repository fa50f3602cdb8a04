"""The file with secret headers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from config.load import ConfigError
from config.schema import TracesConfig
from daemon.traces import headers


def test_file_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces").write_text("# for the collector\n\nAuthorization: Bearer a:b\nx-org:7\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    found = headers.load(TracesConfig(headers={"a": "b"}, headers_file="credential:traces"))
    assert found == {"a": "b", "Authorization": "Bearer a:b", "x-org": "7"}
    assert headers.load(TracesConfig(headers={"a": "b"})) == {"a": "b"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["cannot be read"]),
        (b"ok: 1\nsecret\n", [":2:", "NAME: VALUE"]),
        (b"a b: secret\n", [":1:", "'a b'"]),
        (b"a: secret\x01\n", [":1:", "'a'", "printable"]),
        (b"Content-Type: secret\n", ["hearthd's own"]),
        (b"a: \xff", ["UTF-8"]),
        (b"a: " + b"x" * headers.MAX_BYTES, ["longer than"]),
    ],
)
def test_one_that_cannot_be_used(tmp_path: Path, content: bytes | None, words: list[str]) -> None:
    path = tmp_path / "headers"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        headers.load(TracesConfig(headers_file=str(path)))
    for word in [str(path), "traces.headers_file", *words]:
        assert word in str(error.value)
    assert "secret" not in str(error.value)


def test_a_pipe_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "headers")
    with pytest.raises(ConfigError, match=r"traces\.headers_file: cannot be read: is a named pipe, not a regular file"):
        headers.load(TracesConfig(headers_file=str(tmp_path / "headers")))
