"""Devices of other hosts in the settings: their names, the hosts' tables, and what they do not count for on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from config import host_tier
from config.device_names import hardware_of, host_of, kind_of
from config.devices import device_budgets
from config.load import ConfigError, load
from config.provenance import Sources, settings
from config.reload import plan
from config.schema import DeviceBudget, HostConfig
from config.units import parse_device

GIB = 1 << 30
DEVICES = 'device = ["cpu:0=64MiB", "cpu:0@b=64GiB", "cuda:1@b=70GiB"]\n'
HOST = '[hosts.b]\naddress = "10.0.0.2:7100"\nkey_file = "b.key"\n'


def write(folder: Path, text: str, name: str = "node.toml") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    return str(caught.value)


def test_a_name_has_a_kind_a_host_and_hardware() -> None:
    names = ["cpu:0", "cuda:GPU-3f1a@b-2", "cpu:0/org/x@y"]
    assert [(kind_of(name), host_of(name), hardware_of(name)) for name in names] == [
        ("cpu", "", "cpu:0"),
        ("cuda", "b-2", "cuda:GPU-3f1a"),
        ("cpu", "", "cpu:0"),
    ]
    lent = DeviceBudget("cuda:1@b", GIB)
    assert (lent.kind, lent.host, lent.hardware, lent.is_local("cuda")) == ("cuda", "b", "cuda:1", False)
    own = DeviceBudget("cuda:1", GIB, "GPU-1")
    assert (own.is_local("cuda"), own.is_local("cpu")) == (True, False)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("cpu@b=8GiB", ("cpu:0@b", "8GiB")),
        ("cpu:01@b = 8GiB", ("cpu:1@b", "8GiB")),
        ("cuda:1@gpu-2=70GiB", ("cuda:1@gpu-2", "70GiB")),
        ("cuda:GPU-3f1a@b=70GiB", ("cuda:GPU-3f1a@b", "70GiB")),
    ],
)
def test_entries_with_a_host(text: str, parsed: tuple[str, str]) -> None:
    assert parse_device(text) == parsed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cpu:0@B=8GiB", "must be NAME@HOST=BUDGET: the name of a host has small letters"),
        ("cpu:0@-b=8GiB", "the name of a host has small letters"),
        ("cpu:0@=8GiB", "the name of a host has small letters"),
        ("cpu:0@b@c=8GiB", "the name of a host has small letters"),
        ("cpu:0@b/c=8GiB", "the name of a host has small letters"),
        ("cuda:0@b", "must have a budget in bytes"),
        ("cuda:0@b=50%", "must have a budget in bytes"),
        ("cpu:0@b=50 %", "does not know the memory of that host"),
        ("cpu:0@b", "must be NAME=BUDGET"),
        ("gpu:0@b=8GiB", "must be NAME=BUDGET"),
    ],
)
def test_entries_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_device(text)
    with pytest.raises(ConfigError, match=words):
        load(None, {"device": [text]})


def test_a_host_with_its_devices(tmp_path: Path) -> None:
    config = load(write(tmp_path, DEVICES + HOST))
    assert config.hosts == {"b": HostConfig("10.0.0.2:7100", str(tmp_path / "b.key"))}
    budgets = device_budgets(config, GIB)
    assert [(one.name, one.budget_bytes, one.uuid) for one in budgets] == [
        ("cpu:0", 64 << 20, ""),
        ("cpu:0@b", 64 * GIB, ""),
        ("cuda:1@b", 70 * GIB, ""),
    ], "no driver is asked, and the memory of this machine is no limit"


def test_devices_of_flags_and_tables_of_several_files(tmp_path: Path) -> None:
    path = write(tmp_path, '[hosts.b]\naddress = "10.0.0.2:7100"\n')
    write(tmp_path, '[hosts.b]\nkey_file = "credential:b"\n', "conf.d/b.toml")
    config = load(path, {"device": ["cpu=8MiB", "cpu:0@b=8GiB"]})
    assert config.hosts == {"b": HostConfig("10.0.0.2:7100", "credential:b")}
    write(tmp_path, '[hosts.b]\nkey_file = "b.key"\n', "conf.d/b.toml")
    config = load(path, {"device": ["cpu=8MiB", "cpu:0@b=8GiB"]})
    assert config.hosts["b"].key_file == str(tmp_path / "conf.d" / "b.key"), "relative to the file that names it"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DEVICES, ["node.toml:1: device: 'cpu:0@b=64GiB'", "there is no table [hosts.b]"]),
        (
            'device = ["cpu=1GiB"]\n' + HOST,
            ["node.toml:2: hosts.b: ", 'no device of this host is named; name one in device, as in "cpu:0@b'],
        ),
        (HOST, ["hosts.b: ", "no device of this host is named"]),
        ('device = ["cpu:0@b=1GiB"]\n' + HOST, ["node.toml:1: device: cpu:0@b=1GiB: a device of this machine is needed, too"]),
        (DEVICES + '[hosts.b]\naddress = "b:7100"\n', ["node.toml:2: hosts.b: needs key_file"]),
        (DEVICES + '[hosts.b]\nkey_file = "k"\n', ["node.toml:2: hosts.b: needs address"]),
        (DEVICES + HOST.replace("10.0.0.2:7100", "10.0.0.2"), ["node.toml:3: hosts.b.address: '10.0.0.2' must be HOST:PORT"]),
        (
            DEVICES + HOST.replace("10.0.0.2:7100", "b:0"),
            ["hosts.b.address: 'b:0' must be HOST:PORT with a host and a port above 0"],
        ),
        (DEVICES + HOST.replace("10.0.0.2:7100", ":7100"), ["hosts.b.address: ':7100' must be HOST:PORT with a host"]),
        (DEVICES + HOST.replace("b.key", ""), ["node.toml:4: hosts.b.key_file: '' must not be empty"]),
        (DEVICES + HOST.replace('"b.key"', "1"), ["hosts.b.key_file: 1 must be text"]),
        (DEVICES + HOST + "port = 1\n", ["node.toml:5: hosts.b.port: unknown key; known keys: address, key_file"]),
        (DEVICES + HOST.replace("hosts.b", "hosts.B"), ["node.toml:2: hosts.\"B\": 'B' is no name of a host"]),
        (DEVICES + "[hosts]\nb = 1\n", ["node.toml:3: hosts.b: 1 must be a table [hosts.b]"]),
        ("hosts = 1\n" + DEVICES, ["node.toml:1: hosts: must be tables"]),
        (DEVICES + HOST + '[models.m]\ndevices = ["cpu:0@b"]\n', ['models."m".devices', "must name a device of this machine"]),
        (DEVICES + HOST + '[models.m]\ndevices = ["cpu:0", "cpu:1@b"]\n', ["'cpu:1@b' is no device of this node: cpu:0, cpu:0@b"]),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refusal(tmp_path, text)
    for word in words:
        assert word in message


def test_the_memory_of_other_hosts_is_no_memory_of_this_machine(tmp_path: Path) -> None:
    config = load(write(tmp_path, 'device = ["cpu:0=900MiB", "cpu:0@b=900MiB"]\nhost_tier_bytes = "100MiB"\n' + HOST))
    devices = device_budgets(config, GIB)
    assert host_tier.resolved(config, devices, GIB).host_tier_bytes == 100 << 20
    lent_gpu = [DeviceBudget("cpu:0", GIB // 4), DeviceBudget("cuda:0@b", GIB)]
    assert host_tier.resolved(load(None), lent_gpu, GIB).host_tier_bytes == 0, "as on any node of cpu devices"


def test_another_hosts_gpu_makes_this_no_node_with_a_gpu(tmp_path: Path) -> None:
    config = load(write(tmp_path, DEVICES + HOST))
    assert (config.chunk_bytes, config.max_num_batched_tokens) == (2 << 20, 512)
    own = load(write(tmp_path, DEVICES.replace("cpu:0=64MiB", "cuda:0=8GiB") + HOST))
    assert (own.chunk_bytes, own.max_num_batched_tokens) == (16 << 20, 4096)


def test_hosts_need_a_restart_and_the_settings_show_them(tmp_path: Path) -> None:
    path = write(tmp_path, DEVICES + HOST)
    config = load(path)
    moved = load(write(tmp_path, DEVICES + HOST.replace("7100", "7101")))
    changes = plan(config, moved)
    assert (changes.needs_restart, changes.effective.hosts) == (["hosts"], config.hosts)
    rows = {row.key: row for row in settings(config, Sources(path, {}), changes.needs_restart)}
    address, key_file = rows["hosts.b.address"], rows["hosts.b.key_file"]
    assert (address.value, address.source, address.reload, address.waits) == ("10.0.0.2:7100", f"{path}:3", "restart", True)
    assert (key_file.value, key_file.source) == (str(tmp_path / "b.key"), f"{path}:4")
