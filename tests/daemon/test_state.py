import errno
import os
from pathlib import Path

import pytest

from daemon.record.state import NodeState


def test_what_was_written_is_read(tmp_path: Path) -> None:
    state = NodeState(str(tmp_path / "deep" / "state"))
    state.load()
    state.pinned["org/a"], state.enabled["b"] = True, False
    state.write(state.snapshot())
    again = NodeState(str(tmp_path / "deep" / "state"))
    again.load()
    assert (again.pinned, again.enabled) == ({"org/a": True}, {"b": False})
    assert [path.name for path in state.path.parent.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("{", "it is no valid JSON: line 1, column 2: Expecting property name"),
        ("[]", "it holds no JSON object, {...}"),
        ("{}", "key version: missing"),
        ("[" * 100_000, "it is no valid JSON"),
        ("1" * 10_000, "it is no valid JSON"),
        (
            '{"version": 2, "pinned": {}, "enabled": {}}',
            "key version: 2, and this hearthd reads 1: another version of hearthd wrote it",
        ),
        ('{"version": 1, "enabled": {}}', "key pinned: missing"),
        ('{"version": 1, "pinned": {}, "enabled": ["a"]}', "key enabled: must be an object"),
        ('{"version": 1, "pinned": {"org/a": 1}, "enabled": {}}', 'key pinned."org/a": must be true or false'),
        ('{"version": 1, "pinned": {}, "enabled": {}, "adapters": {"a": 1}}', 'key adapters."a": must be a text, the path of'),
        ('{"version": 1, "pinned": {"a": true}, "enabled": {}, "adapters": null}', "key adapters: must be an object"),
        ("\xff", "it is no valid JSON"),
    ],
)
def test_an_unreadable_file_is_kept_aside(tmp_path: Path, text: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(text.encode("latin-1"))
    state = NodeState(str(tmp_path))
    state.load()
    assert (state.pinned, state.enabled, state.adapters) == ({}, {}, {})
    (aside,) = tmp_path.glob("state.json.bad-*")
    assert aside.read_bytes() == text.encode("latin-1")
    assert not path.exists()
    (message,) = caplog.messages
    assert message.startswith(f"{path} cannot be used: {said}")
    end = f"; kept as {aside}, and hearthd starts without pins, switched-off models and loaded adapters"
    assert message.endswith(end)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = NodeState(str(tmp_path))
    state.pinned["a"] = True
    state.write(state.snapshot())
    state.pinned["b"] = True

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        state.write(state.snapshot())
    monkeypatch.undo()
    again = NodeState(str(tmp_path))
    again.load()
    assert again.pinned == {"a": True}


@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    state = NodeState(str(tmp_path))
    state.pinned["a"] = True
    real_close = os.close

    def full(fd: int, *_: object) -> None:
        if call == "close":
            real_close(fd)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        state.write(state.snapshot())
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    state.write(state.snapshot())
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_write_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = NodeState(str(tmp_path))
    state.pinned["a"] = True
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:7]))
    state.write(state.snapshot())
    monkeypatch.undo()
    assert state.path.read_bytes() == state.snapshot()


def test_what_a_cut_off_write_left_is_removed_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "state.json.new").write_bytes(b'{"vers')
    NodeState(str(tmp_path)).load()
    assert list(tmp_path.iterdir()) == []
