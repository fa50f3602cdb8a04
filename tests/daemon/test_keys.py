"""The keys file: what it lets in, and what it says of its own mistakes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from config.load import ConfigError
from daemon.access import keys
from tests.e2e.node import ROOT


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return str(path)


GOOD = f"""
[tenants.search]
keys = ["{keys.hash_key("one")}", "{keys.hash_key("two").upper().replace("SHA256", "sha256")}"]
weight = 2
models = ["meta/*", "qwen?"]

[tenants.ops]
keys = ["{keys.hash_key("three")}"]
"""


def test_keys_and_tenants(tmp_path: Path) -> None:
    found = keys.load(write(tmp_path, GOOD))
    for key, name in (("one", "search"), ("two", "search"), ("three", "ops")):
        tenant = found.find(key)
        assert tenant is not None
        assert tenant.name == name
    for wrong in ("", "four", "ONE", "one ", keys.hash_key("one"), "\udcff"):
        assert found.find(wrong) is None
    search, ops = found.tenants["search"], found.tenants["ops"]
    assert (search.weight, ops.weight) == (2.0, 1.0)
    allowed = [name for name in ("meta/a", "meta/a/b", "qwen3", "qwen", "qwen33", "xmeta/a", "Meta/a") if search.may_use(name)]
    assert allowed == ["meta/a", "meta/a/b", "qwen3"]
    assert ops.may_use("anything/at/all")


def test_no_models_is_none_at_all(tmp_path: Path) -> None:
    found = keys.load(write(tmp_path, f'[tenants.a]\nkeys = ["{keys.hash_key("k")}"]\nmodels = []\n'))
    assert not found.tenants["a"].may_use("")
    assert not found.tenants["a"].may_use("m")


def test_any_key_watches_until_there_is_an_admin(tmp_path: Path) -> None:
    found = keys.load(write(tmp_path, GOOD))
    assert all(found.may_watch(tenant) for tenant in found.tenants.values())
    found = keys.load(write(tmp_path, GOOD + "admin = true\n"))
    assert [tenant.name for tenant in found.tenants.values() if found.may_watch(tenant)] == ["ops"]


@pytest.mark.parametrize("text", ["", "# nobody\n", "[tenants]\n", "[tenants.a]\nkeys = []\n"])
def test_a_file_without_a_key_lets_nobody_in(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, text)
    found = keys.load(path)
    assert found.num_keys == 0
    assert found.find("") is None
    assert found.find("k") is None
    found.warn_if_empty(path)
    assert f"{path} has no key: every request is refused with 401" in caplog.text


SUM = keys.hash_key("k")
WRONG = [
    ("[tenants.a\n", 1, "is not valid TOML"),
    ("tenants = 1\n", 1, "tenants: must be tables [tenants.NAME]"),
    ("keys = []\n", 1, "keys: unknown key; the file holds tables [tenants.NAME] only"),
    ("[tenants.a]\nweight = 1\n", 1, "tenants.a.keys: missing; a list of \"sha256:\""),
    (f'[tenants.a]\nkeys = "{SUM}"\n', 2, "must be a list of"),
    (f'[tenants.a]\nkeys = ["{SUM}", "sk-secret-in-the-clear"]\n', 2, "tenants.a.keys: number 2, a text of 22 characters, must be"),
    (f'[tenants.a]\nkeys = ["{SUM}"]\n[tenants.b]\nkeys = ["{SUM}"]\n', 4, "tenants.b.keys: number 1 is also a key of tenant 'a'"),
    (f'[tenants.a]\nkeys = ["{SUM}"]\nweight = 0\n', 3, "tenants.a.weight: 0 must be a number above 0 and at most 1000"),
    (f'[tenants.a]\nkeys = ["{SUM}"]\nweight = nan\n', 3, "tenants.a.weight: nan must be"),
    (f'[tenants.a]\nkeys = ["{SUM}"]\nmodles = []\n', 3, "tenants.a.modles: unknown key; did you mean models?"),
    (f'[tenants.a]\nkeys = ["{SUM}"]\nmodels = [""]\n', 3, "tenants.a.models: number 1, '', must be a model's name"),
    (f'[tenants.a]\nkeys = ["{SUM}"]\nadmin = 1\n', 3, "tenants.a.admin: 1 must be true or false"),
    (f'[tenants."a b"]\nkeys = ["{SUM}"]\n', 1, 'tenants."a b": a name is 1 to 64 letters'),
    (f'[tenants.other]\nkeys = ["{SUM}"]\n', 1, "not the word other"),
    ("tenants.a = 1\n", 1, "tenants.a: must be a table [tenants.a]"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "words"), WRONG)
def test_mistakes_are_named(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        keys.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert words in message
    assert "sk-secret" not in message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: keys cannot be read: No such file"):
        keys.load(str(tmp_path / "none.toml"))


def test_a_systemd_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(ConfigError, match="LoadCredential="):
        keys.load("credential:keys.toml")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert set(keys.load("credential:keys.toml").tenants) == {"search", "ops"}
    for bad in ("credential:", "credential:../keys.toml", "credential:.."):
        with pytest.raises(ConfigError, match="must be credential:NAME"):
            keys.load(bad)


def test_new_keys_are_long_and_differ() -> None:
    one, two = keys.new_key(), keys.new_key()
    assert one != two
    assert len(one) >= 43
    assert keys.hash_key(one) == "sha256:" + hashlib.sha256(one.encode()).hexdigest()


def test_the_reference_shows_a_file_that_works(tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/keys.md").read_text()
    example = page.split("```toml\n")[1].split("```")[0]
    found = keys.load(write(tmp_path, example))
    assert (found.tenants["search"].weight, found.tenants["ops"].admin) == (2.0, True)
    rows = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert rows == list(keys.FIELDS)
