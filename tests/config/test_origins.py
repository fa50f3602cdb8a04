"""Origins in the settings: how they are written, and what is told of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from config import load, reload
from config.load import ConfigError
from config.origins import parse_origin


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("https://chat.example.org", "https://chat.example.org"),
        ("HTTPS://Chat.Example.org:443", "https://chat.example.org"),
        ("http://localhost:80", "http://localhost"),
        ("http://localhost:443", "http://localhost:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("tauri://localhost", "tauri://localhost"),
    ],
)
def test_origins_as_browsers_write_them(text: str, meant: str) -> None:
    assert parse_origin(text) == meant


WRONG = (
    "chat.example.org", "https://", "https://a/", "https://a/b", "https://a:b", "https://a:0", "https://a:65536", "https://a:",
    "null", "", "https://*.example.org", "https://me@a", "https://a b", "https://a\r\nX: y", "https://a\n", "://a", "https:a",
)  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_an_error_names_the_key_and_the_origin(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load.load(None, {"allowed_origins": [text]})
    assert caught.value.key == "--allowed-origins"
    assert repr(text) in str(caught.value)
    assert "scheme://host[:port]" in str(caught.value)


def test_any_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('allowed_origins = ["*"]\n')
    assert load.load(str(path)).allowed_origins == ["*"]
    path.write_text('allowed_origins = [\n"*", "https://a"]\n')
    with pytest.raises(ConfigError, match=r"allowed_origins: .*alone"):
        load.load(str(path))


def test_they_apply_at_a_reload() -> None:
    plan = reload.plan(load.load(None), load.load(None, {"allowed_origins": ["https://a"]}))
    assert (plan.applied, plan.needs_restart, plan.effective.allowed_origins) == (["allowed_origins"], [], ["https://a"])
