"""Settings in `conf.d` on a real node: changes are seen by themselves and at a reload, and a bad file changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_main import hearthd
from tests.e2e.node import Node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("conf_d") / "n", config="max_wait_s = 40\n") as made:
        yield made


def setting(node: Node, key: str) -> tuple[Any, str]:
    """Returns a setting's value and where it is set, without the folder of the settings."""
    row = next(row for row in node.json("config", "--all") if row["key"] == key)
    return row["value"], row["source"].removeprefix(f"{node.folder}/")


def test_the_folder_and_its_files_come_and_go(node: Node) -> None:
    """Nobody asks for a reload here: the files are watched."""
    folder = node.folder / "conf.d"
    assert setting(node, "max_wait_s") == (40.0, "node.toml:1")
    folder.mkdir()
    (folder / "b.toml").write_text("\nmax_wait_s = 41\n")
    node.wait_for(lambda: setting(node, "max_wait_s") == (41.0, "conf.d/b.toml:2"), "the first file")
    (folder / "b.toml").write_text("max_wait_s = 42\n")
    node.wait_for(lambda: setting(node, "max_wait_s") == (42.0, "conf.d/b.toml:1"), "its change")
    (folder / "c.toml").write_text("max_wait_s = 43\n")
    node.wait_for(lambda: setting(node, "max_wait_s") == (43.0, "conf.d/c.toml:1"), "a second file")
    (folder / "c.toml").rename(folder / "a.toml")
    node.wait_for(lambda: setting(node, "max_wait_s") == (42.0, "conf.d/b.toml:1"), "another order")
    (folder / "b.toml").unlink()
    node.wait_for(lambda: setting(node, "max_wait_s") == (43.0, "conf.d/a.toml:1"), "the end of a file")
    (folder / "a.toml").unlink()
    folder.rmdir()
    node.wait_for(lambda: setting(node, "max_wait_s") == (40.0, "node.toml:1"), "the end of the folder")
    folder.mkdir()
    (folder / "a.toml").write_text("max_wait_s = 44\n")
    node.wait_for(lambda: setting(node, "max_wait_s") == (44.0, "conf.d/a.toml:1"), "a file in a new folder")
    (folder / "a.toml").unlink()


def test_a_reload_reads_them_and_refuses_all_for_one(node: Node) -> None:
    folder = node.folder / "conf.d"
    folder.mkdir(exist_ok=True)
    (folder / "a.toml").write_text("max_wait_s = 50\n")
    (folder / "b.toml").write_text('[models."m"]\npriority = 2.0\n')
    node.json("reload")  # which the watch may have come before
    assert setting(node, 'models."m".priority') == (2.0, "conf.d/b.toml:2")
    (folder / "c.toml").write_text("\n\nmax_wait_s = 'soon'\n")
    (folder / "a.toml").write_text("max_wait_s = 51\n")
    refused = node.cli("reload")
    assert refused.returncode == 2
    words = f"{folder}/c.toml:3: max_wait_s: 'soon' must be a number"
    assert refused.stderr == f"hearth: The running settings stay: {words}\n"
    assert setting(node, "max_wait_s") == (50.0, "conf.d/a.toml:1")
    found = node.json("status")["reload_refused"]
    assert (found["file"], found["line"], found["key"]) == (f"{folder}/c.toml", 3, "max_wait_s")
    doctor = {one["check"]: one for one in node.json("doctor")["findings"]}
    assert (doctor["settings"]["level"], words in doctor["settings"]["found"]) == ("warn", True)
    (folder / "c.toml").rename(folder / "c.toml~")
    node.signal(signal.SIGHUP)
    node.wait_for(lambda: setting(node, "max_wait_s") == (51.0, "conf.d/a.toml:1"), "the reload")
    doctor = {one["check"]: one for one in node.json("doctor")["findings"]}
    assert doctor["settings"]["level"] == "ok"
    assert f"{node.config}, {folder}/a.toml, {folder}/b.toml; not read" in doctor["settings"]["found"]
    assert "'c.toml~'" in doctor["settings"]["found"]


def test_the_start_and_its_check_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("")
    (tmp_path / "conf.d").mkdir()
    extra = tmp_path / "conf.d" / "models.toml"
    extra.write_text("models_dir = '..'\nlisten = '127.0.0.1:7'\n")
    flags = ("--config", str(tmp_path / "node.toml"), "--device", "cpu=64MiB", "--state-dir", str(tmp_path / "s"))
    good = hearthd("--check-config", *flags)
    assert (good.returncode, good.stderr) == (0, "")
    assert "listen 127.0.0.1:7" in good.stdout
    assert good.stdout.endswith(f", settings {tmp_path}/node.toml, {extra}\n")
    extra.write_text("\nmodels_dir = 'nowhere'\n")
    for refused in (hearthd("--check-config", *flags), hearthd(*flags)):
        assert refused.returncode == 2
        assert refused.stderr == f"hearthd: {extra}:2: models_dir: '{tmp_path}/conf.d/nowhere' is no folder\n"
