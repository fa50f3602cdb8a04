"""Settings in several files: what is read, which value wins, and which file and line an error or a setting names."""

import os
from pathlib import Path

import pytest

from config.devices import device_budgets
from config.host_tier import resolved
from config.load import ConfigError, load, located_setting
from config.provenance import Sources, settings
from config.settings_files import settings_files
from daemon.models import models_check

GIB = 1 << 30


def write(folder: Path, **texts: str) -> str:
    """Writes node.toml and, by their names without .toml, files of conf.d. Returns the path of the first."""
    (folder / "conf.d").mkdir(exist_ok=True)
    (folder / "node.toml").write_text("")
    for name, text in texts.items():
        path = folder / "node.toml" if name == "node" else folder / "conf.d" / f"{name}.toml"
        path.write_text(text)
    return str(folder / "node.toml")


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value)


def test_which_files_are_read_and_in_which_order(tmp_path: Path) -> None:
    path = write(tmp_path, b="", a="", B="", **{"10": "", "9": ""})
    for other in (".a.toml", ".x.toml.swp", "x.toml~", "#x.toml#", "x.conf", "toml"):
        (tmp_path / "conf.d" / other).write_text("not read = at all [")
    (tmp_path / "conf.d" / "folder").mkdir()
    (tmp_path / "conf.d" / ".#a.toml").symlink_to("user@host.1234")  # as Emacs locks a file
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "conf.d" / "c.toml").symlink_to("../elsewhere")
    names = ["10.toml", "9.toml", "B.toml", "a.toml", "b.toml", "c.toml"]
    assert settings_files(path) == [path, *(f"{tmp_path}/conf.d/{name}" for name in names)]
    load(path)


def test_no_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("max_wait_s = 5")
    assert load(str(tmp_path / "node.toml")).max_wait_s == 5
    assert load(None).max_wait_s == 60


def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        node='max_wait_s = 1\nallowed_hosts = ["a", "b"]\n[models.m]\npriority = 2.0\naliases = ["x"]\nsampling.top_k = 3\n'
        '[names]\n"n*" = "m"',
        a='max_wait_s = 2\n[models.m]\nsampling = { top_k = 4, top_p = 0.5 }\n[models.o]\npinned = true\n[names]\n"o*" = ["o"]',
        b='max_wait_s = 3\nallowed_hosts = ["c"]\n[models.m]\naliases = []\n[models.m.sampling]\ntop_p = 0.25\n',
    )
    config = load(path, {"overdue_after_s": "7"})
    assert (config.max_wait_s, config.allowed_hosts, config.overdue_after_s) == (3, ["c"], 7)
    model = config.models["m"]
    assert (model.priority, model.aliases, model.sampling.top_k, model.sampling.top_p) == (2.0, [], 4, 0.25)
    assert config.models["o"].pinned
    assert config.names == {"n*": ["m"], "o*": ["o"]}
    rows = {row.key: row.source for row in settings(config, Sources(path, {"overdue_after_s": "7"}))}
    folder = tmp_path / "conf.d"
    assert rows["max_wait_s"] == f"{folder}/b.toml:1"
    assert rows["allowed_hosts"] == f"{folder}/b.toml:2"
    assert rows["overdue_after_s"] == "--overdue-after-s"
    assert rows["drain_timeout_s"] == ""
    assert rows['models."m".priority'] == f"{path}:4"
    assert rows['models."m".aliases'] == f"{folder}/b.toml:4"
    assert rows['models."m".sampling.top_k'] == f"{folder}/a.toml:3"
    assert rows['models."m".sampling.top_p'] == f"{folder}/b.toml:6"
    assert rows['models."o".pinned'] == f"{folder}/a.toml:5"
    assert (rows['names."n*"'], rows['names."o*"']) == (f"{path}:8", f"{folder}/a.toml:7")


def test_a_path_is_relative_to_its_own_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        node='state_dir = "s"\nkeys_file = "k"\n[models.m]\nchat_template = "t"\n[models.n]\nchat_template = "t"',
        a='keys_file = "../k2"\nmodels_dir = "m"\naudit_log = "journal"\n[models.n]\nchat_template = "t"',
        b='keys_file = "credential:k"',
    )
    config = load(path)
    assert (config.state_dir, config.models_dir) == (f"{tmp_path}/s", f"{tmp_path}/conf.d/m")
    assert (config.keys_file, config.audit_log) == ("credential:k", "journal")
    assert config.models["m"].chat_template == f"{tmp_path}/t"
    assert config.models["n"].chat_template == f"{tmp_path}/conf.d/t"


@pytest.mark.parametrize(
    ("node", "a", "b", "start"),
    [
        ("", "max_wait_s = \n", "", "conf.d/a.toml:1: is not valid TOML"),
        ("", "\nmax_wait_s = 'soon'", "max_wait_s = 3", "conf.d/a.toml:2: max_wait_s: 'soon' must be a number"),
        ("max_wait_s = 'soon'", "max_wait_s = 3", "", "node.toml:1: max_wait_s: 'soon' must be a number"),
        ("", "", "\n[models.m]\npinnned = true", 'conf.d/b.toml:3: models."m".pinnned: unknown key; did you mean pinned?'),
        ("", "models = 3", "[models.m]", "conf.d/a.toml:1: models: must be tables"),
        ("[models.m]\naliases=['x']", "\n[models.o]\naliases=['x']", "", "conf.d/a.toml:3: models.\"o\".aliases: 'x' is already"),
        ("[models.m]", "[models.m]\nisolate_bytes = '1GiB'", "[models.m]\npriority = 2.0", 'conf.d/a.toml:2: models."m".isolate_b'),
        ("device=['cpu=1GiB']\nmodels.m.devices=['cpu:1']", "", "", "node.toml:2: models.\"m\".devices: 'cpu:1' is no device"),
        ("models.m.devices=['cpu:0']", "device=['cpu:1=1GiB']", "", "node.toml:1: models.\"m\".devices: 'cpu:0' is no device"),
        ("[names]\nn='m'", "[names]\no = 'n'", "", "conf.d/a.toml:2: names.\"o\": 'n' is an entry of this table, too"),
    ],
)
def test_an_error_names_file_and_line(tmp_path: Path, node: str, a: str, b: str, start: str) -> None:
    path = write(tmp_path, node=node, a=a, b=b)
    assert refusal(path).startswith(f"{tmp_path}/{start}")


def test_later_checks_name_the_file_that_set_the_key(tmp_path: Path) -> None:
    path = write(tmp_path, node="device = ['cpu=1GiB']", a="\ndevice = ['cpu=9GiB']", b="\n\nhost_tier_bytes = '1GiB'")
    config = load(path)
    with pytest.raises(ConfigError, match=r"conf\.d/a\.toml:2: device: the budgets together are 9"):
        device_budgets(config, GIB, path)
    with pytest.raises(ConfigError, match=r"conf\.d/b\.toml:3: host_tier_bytes: '1GiB'"):
        resolved(config, [], GIB // 2, path)
    error = ConfigError(path, "models_dir", "is set nowhere")
    assert str(located_setting(error)) == f"{path}: models_dir: is set nowhere"


def test_check_config_names_the_file_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    path = write(tmp_path, node='models_dir = "models"', a="[models.ash]\npriority = 2.0", b="[models.ash]\npinned = true")
    (warning,) = models_check.check(load(path), path)
    assert warning.startswith(f'{tmp_path}/conf.d/b.toml:1: models."ash": there is no model of that name')


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path)
    bad = tmp_path / "conf.d" / "bad.toml"
    bad.symlink_to("nowhere")
    assert refusal(path) == f"{bad}: cannot be read: No such file or directory"
    bad.unlink()
    bad.mkdir()
    assert refusal(path) == f"{bad}: cannot be read: it is not a regular file"
    bad.rmdir()
    os.mkfifo(bad)  # opening it would wait for a writer
    assert refusal(path) == f"{bad}: cannot be read: it is not a regular file"
    bad.unlink()
    bad.write_bytes(b"listen = '\xff'")
    assert refusal(path).startswith(f"{bad}: is not valid TOML: ")
    bad.unlink()
    odd = os.fsencode(tmp_path) + b"/conf.d/\xff.toml"
    Path(os.fsdecode(odd)).write_text("")
    assert refusal(path) == f"{tmp_path}/conf.d: cannot be read: the name '\\udcff.toml' is not printable UTF-8"
    Path(os.fsdecode(odd)).unlink()
    load(path)
    (tmp_path / "conf.d").rmdir()
    (tmp_path / "conf.d").symlink_to("nowhere")
    assert refusal(path) == f"{tmp_path}/conf.d: cannot be read: No such file or directory"
    (tmp_path / "conf.d").unlink()
    (tmp_path / "conf.d").write_text("")
    assert refusal(path) == f"{tmp_path}/conf.d: cannot be read: Not a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permissions_are_told(tmp_path: Path) -> None:
    path = write(tmp_path, a="")
    (tmp_path / "conf.d" / "a.toml").chmod(0)
    assert refusal(path) == f"{tmp_path}/conf.d/a.toml: cannot be read: Permission denied"
