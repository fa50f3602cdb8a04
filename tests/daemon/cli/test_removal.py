"""`hearth rm` and `hearth cp` without a daemon: what goes, what stays, what is refused before anything is touched."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from daemon.cli import main, removal


def model(folder: Path, num_bytes: int = 10) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(num_bytes))
    (folder / "packed").mkdir()
    (folder / "packed" / "x.safetensors").write_bytes(b"12345")
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    model(tmp_path / "models" / "org" / "a")
    model(tmp_path / "models" / "b")
    return tmp_path / "models"


def hearth(models: Path, *args: str) -> int:
    return main.run(["--control", str(models / "no.sock"), *args, "--models", str(models)])


def there(models: Path) -> set[str]:
    return {str(path.relative_to(models)) for path in models.rglob("*") if path.is_symlink() or (path / "config.json").exists()}


def test_a_model_goes_with_its_empty_folders(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hearth(models, "rm", "org/a", "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned == {
        **{"name": "org/a", "path": str(models / "org" / "a"), "link_to": "", "removed": False},
        **{"num_files": 3, "num_bytes": 2 + 10 + 5},
    }
    assert there(models) == {"org/a", "b"}
    assert hearth(models, "rm", "org/a", "--yes") == 0
    assert "org/a (17 B in 3 files" in capsys.readouterr().out
    assert (there(models), (models / "org").exists()) == ({"b"}, False)


def test_without_a_terminal_it_takes_yes(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hearth(models, "rm", "b") == 2
    assert "say --yes" in capsys.readouterr().err
    assert there(models) == {"org/a", "b"}


@pytest.mark.parametrize(("said", "code", "left"), [("y\n", 0, {"org/a"}), ("\n", 2, {"org/a", "b"}), ("n\n", 2, {"org/a", "b"})])
def test_on_a_terminal_it_asks(models: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int, left: set[str]) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return said

    monkeypatch.setattr(removal.sys, "stdin", Terminal())
    assert hearth(models, "rm", "b") == code
    assert there(models) == left


@pytest.mark.parametrize(
    ("name", "code"),
    [("org", 3), ("nobody", 3), ("org/a/packed", 2), ("..", 2), ("org/../b", 2), ("/b", 2), ("", 2), (".hidden", 2), ("org//a", 2)],
)
def test_what_is_no_model_is_left_alone(models: Path, name: str, code: int) -> None:
    (models / ".hidden").mkdir()
    assert hearth(models, "rm", name, "--yes") == code
    assert there(models) == {"org/a", "b"}


def test_links_are_not_gone_through(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = model(tmp_path / "elsewhere" / "c")
    (models / "share").symlink_to(outside.parent)
    (models / "c").symlink_to(outside)
    (models / "b" / "inner").symlink_to(outside)
    assert hearth(models, "rm", "share/c", "--yes") == 2
    assert "is a link to" in capsys.readouterr().err
    assert hearth(models, "rm", "c", "--yes") == 0
    assert f"a link to {outside} (which stays)" in capsys.readouterr().out
    assert hearth(models, "rm", "b", "--yes") == 0
    assert (outside / "model.safetensors").exists()
    assert there(models) == {"org/a", "share"}


def test_a_model_of_the_hubs_cache_is_the_hubs(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(models / "models--org--c" / "snapshots" / "1")
    assert hearth(models, "rm", "org/c", "--yes") == 2
    assert "the hub's own tools" in capsys.readouterr().err


def test_an_interrupted_removal_goes_on(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        assert hearth(models, "rm", "org/a", "--yes") == 130
    assert there(models) - {"org/.removing-a"} == {"b"}
    assert hearth(models, "rm", "org/a", "--yes") == 0
    assert not (models / "org").exists()
    assert hearth(models, "rm", "org/a", "--yes") == 3


def test_without_permission(models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuses(path: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refuses)
    assert hearth(models, "rm", "b", "--yes") == 6
    assert f"{models / 'b'}: no permission to write; run it as a user who may" in capsys.readouterr().err
    assert there(models) == {"org/a", "b"}


def test_a_second_name(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hearth(models, "cp", "org/a", "new/name", "--json") == 0
    assert json.loads(capsys.readouterr().out)["link_to"] == "../org/a"
    assert (models / "new" / "name" / "config.json").exists()
    assert hearth(models, "cp", "new/name", "third") == 0
    assert os.readlink(models / "third") == "org/a", "of the model itself, not of its other name"
    assert hearth(models, "rm", "org/a", "--yes") == 5
    assert "new/name, third would lead to nothing" in capsys.readouterr().err
    assert hearth(models, "rm", "new/name", "--yes") == 0
    assert hearth(models, "rm", "third", "--yes") == 0
    assert there(models) == {"org/a", "b"}


@pytest.mark.parametrize(
    ("old", "new", "code"), [("b", "org/a", 5), ("b", "org", 5), ("no", "x", 3), ("b", "../x", 2), ("b", "org/a/x", 2)]
)
def test_second_names_that_cannot_be(models: Path, old: str, new: str, code: int) -> None:
    assert hearth(models, "cp", old, new) == code
    assert there(models) == {"org/a", "b"}
