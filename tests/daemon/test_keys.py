"""The keys file: what it lets in, and what it says of its own mistakes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from config.load import ConfigError
from daemon.access import expiry, keys, tenant_table
from daemon.access.expiry import ExpiryLog
from daemon.access.tenant import Limits
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
        known = found.find(key)
        assert known is not None
        assert known.tenant.name == name
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
    ("[tenants.a]\nkeys = []\nrequests_per_minute = 0\n", 3, "requests_per_minute: 0 must be a whole number of 1 or more"),
    ("[tenants.a]\nkeys = []\ntokens_per_minute = 1.5\n", 3, "tenants.a.tokens_per_minute: 1.5 must be a whole number"),
    ("[tenants.a]\nkeys = []\ntokens_per_day = true\n", 3, "tenants.a.tokens_per_day: True must be a whole number"),
    ("[tenants.a]\nkeys = []\ntoken_per_day = 5\n", 3, "tenants.a.token_per_day: unknown key; did you mean tokens_per_day?"),
    ("[tenants.a]\nkeys = []\nexpires = 2027-01-31T12:00:00\n", 3,
     "tenants.a.expires: 2027-01-31T12:00:00 has no offset from UTC; write 2027-01-31T12:00:00Z, or"),
    ("[tenants.a]\nkeys = []\nexpires = \"2027-01-31\"\n", 3, "tenants.a.expires: '2027-01-31' must be a date such as 2027-01-31"),
    ("[tenants.a]\nkeys = []\nexpires = 12:00:00\n", 3, "tenants.a.expires: datetime.… must be a date"),
    ("[tenants.a]\nkeys = []\nexpires = 0\n", 3, "tenants.a.expires: 0 must be a date"),
    ("[tenants.a]\nkeys = []\npriority = 1.5\n", 3, "tenants.a.priority: 1.5 must be a whole number from"),
    ("[tenants.a]\nkeys = []\nmax_priority = 2147483648\n", 3, "tenants.a.max_priority: 2147483648 must be a whole number"),
    ("[tenants.a]\nkeys = []\npriority = 5\nmax_priority = 4\n", 3, "tenants.a.priority: 5 is above max_priority (4)"),
    (f'[tenants.a]\nkeys = ["{SUM}", {{ name = "ci" }}]\n', 2, 'tenants.a.keys: number 2 has no `key`; it is "sha256:"'),
    ('[tenants.a]\nkeys = [["sk-secret"]]\n', 2, "tenants.a.keys: number 1, a list, must be"),
    ("[tenants.a]\nkeys = [12345678]\n", 2, "tenants.a.keys: number 1, a value that is no text, must be"),
    ('[tenants.a]\nkeys = { "sk-secret" = 1 }\n', 2, "tenants.a.keys: a table must be a list of"),
    ('[tenants.a]\nkeys = [{ key = "sk-secret-in-the-clear" }]\n', 2, "tenants.a.keys: number 1, a text of 22 characters, must be"),
    (f'[tenants.a]\nkeys = [{{ key = "{SUM}", expire = 2027-01-31 }}]\n', 2, "unknown key 'expire'; did you mean expires?"),
    (f'[tenants.a]\nkeys = [{{ key = "{SUM}", name = "a b" }}]\n', 2, "tenants.a.keys: number 1, name 'a b' must be 1 to 64"),
    (f'[tenants.a]\nkeys = [{{ key = "{SUM}", name = "" }}]\n', 2, "tenants.a.keys: number 1, name '' must be 1 to 64"),
    (f'[tenants.a]\nkeys = [{{ key = "{SUM}", expires = 0 }}]\n', 2, "tenants.a.keys: number 1, expires 0 must be a date"),
    (f'[tenants.a]\nkeys = [{{ key = "{SUM}" }}, "{SUM}"]\n', 2, "tenants.a.keys: number 2 is also a key of tenant 'a'"),
]  # fmt: skip


LIMITED = f"""
[tenants.a]
keys = ["{keys.hash_key("one")}", {{ key = "{keys.hash_key("two")}", expires = 2027-01-01T01:00:00+01:00, name = "ci" }}]
requests_per_minute = 60
tokens_per_minute = 100_000
tokens_per_day = 5_000_000
expires = 2027-06-01
priority = -1
max_priority = 3
"""
YEAR_2027, JUNE_2027 = 1798761600.0, 1811808000.0


def test_limits_and_expiries(tmp_path: Path) -> None:
    found = keys.load(write(tmp_path, LIMITED))
    one, two = found.find("one"), found.find("two")
    assert one is not None
    assert two is not None
    assert one.tenant is two.tenant is found.tenants["a"]
    assert one.tenant.limits == Limits(60, 100_000, 5_000_000)
    assert (one.tenant.priority, one.tenant.max_priority) == (-1, 3)
    assert (one.name, one.expires_unix_s) == ("", JUNE_2027)
    assert (two.name, two.expires_unix_s) == ("ci", YEAR_2027), "the earlier of the key's and the tenant's"
    assert two.sum_start == hashlib.sha256(b"two").hexdigest()[:8]
    assert not two.has_expired(YEAR_2027 - 1)
    assert two.has_expired(YEAR_2027)
    for changed in (LIMITED.replace("2027-06-01", "2027-06-02"), LIMITED.replace("60", "61"), LIMITED.replace('"ci"', '"cd"')):
        assert keys.load(write(tmp_path, changed)).changes_from(found), "a reload says that something changed"
    assert keys.load(write(tmp_path, LIMITED)).changes_from(found) == []


def test_a_reload_tells_what_is_otherwise(tmp_path: Path) -> None:
    old = keys.load(write(tmp_path, LIMITED + f'[tenants.b]\nkeys = ["{keys.hash_key("three")}"]\n'))
    text = LIMITED.replace(f'"{keys.hash_key("one")}", ', f'"{keys.hash_key("four")}", ').replace("2027-01-01T01", "2027-01-01T02")
    new = keys.load(write(tmp_path, text.replace("max_priority = 3", "weight = 2") + "[tenants.c]\nkeys = []\n"))
    one, four = (hashlib.sha256(key).hexdigest()[:8] for key in (b"one", b"four"))
    assert new.changes_from(old) == [
        "b removed",
        f"a: weight, max_priority, key sha256:{four}… added, key sha256:{one}… removed, expiry of key 'ci'",
        "c added",
    ]


def test_a_lower_highest_priority_lowers_the_default(tmp_path: Path) -> None:
    tenant = keys.load(write(tmp_path, "[tenants.a]\nkeys = []\nmax_priority = -2\n")).tenants["a"]
    assert (tenant.priority, tenant.max_priority) == (-2, -2)


def test_keys_that_expire_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = keys.load(write(tmp_path, LIMITED))
    log = ExpiryLog()
    log.tell(None, YEAR_2027)
    log.tell(found, YEAR_2027 - expiry.SOON_S - 1)
    assert caplog.messages == []
    log.tell(found, YEAR_2027 - expiry.SOON_S)
    log.tell(found, YEAR_2027 - 5)
    assert caplog.messages == ["key 'ci' of tenant 'a' expires at 2027-01-01T00:00:00Z"]
    log.tell(found, YEAR_2027)
    log.tell(found, JUNE_2027)
    log.tell(found, JUNE_2027)
    start = hashlib.sha256(b"one").hexdigest()[:8]
    assert caplog.messages[1:] == [
        "key 'ci' of tenant 'a' expired at 2027-01-01T00:00:00Z",
        f"key sha256:{start}… of tenant 'a' expired at 2027-06-01T00:00:00Z",
    ]


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
    assert rows == list(tenant_table.FIELDS)
