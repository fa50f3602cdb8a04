"""A Hugging Face cache as the models folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loader.files.hub_cache import repo_name
from loader.models.catalog import scan
from tests.loader.checkpoints import write_checkpoint


def cached(root: Path, commit: str, shards: int = 2) -> Path:
    """One commit of org/name as the hub's tools leave it: links into blobs/."""
    folder = root / "models--org--name"
    whole = write_checkpoint(root.parent / f"src-{commit}", shards=shards)
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for path in whole.iterdir():
        blob = folder / "blobs" / f"{commit}-{path.name}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def refer(root: Path, commit: str) -> None:
    (root / "models--org--name" / "refs").mkdir(exist_ok=True)
    (root / "models--org--name" / "refs" / "main").write_text(commit)


def test_the_commit_of_main_is_the_model(tmp_path: Path) -> None:
    root = tmp_path / "hub"
    first, second = cached(root, "aaa"), cached(root, "bbb")
    os.utime(first, (1, 1))
    (root / ".locks").mkdir()
    write_checkpoint(root / "plain")
    found = scan(root)
    assert list(found) == ["org/name", "plain"]
    assert found["org/name"].complete
    assert found["org/name"].path == str(second), "without refs the one written last"
    refer(root, "aaa")
    again = scan(root, found)
    assert again["org/name"].path == str(first)
    assert again["plain"] is found["plain"]
    assert scan(root, again)["org/name"] is again["org/name"]
    refer(root, "gone")
    assert scan(root)["org/name"].path == str(second)
    refer(root, "../../x")
    assert scan(root)["org/name"].path == str(second)


def test_incomplete_until_the_blobs_are_there(tmp_path: Path) -> None:
    root = tmp_path / "hub"
    snapshot = cached(root, "aaa", shards=1)
    blob = (snapshot / "model.safetensors").resolve()
    blob.rename(blob.with_suffix(".incomplete"))
    assert not scan(root)["org/name"].complete
    blob.with_suffix(".incomplete").rename(blob)
    assert scan(root)["org/name"].complete


def test_a_plain_folder_of_that_name_wins(tmp_path: Path) -> None:
    root = tmp_path / "hub"
    cached(root, "aaa")
    plain = write_checkpoint(root / "org" / "name")
    assert scan(root)["org/name"].path == str(plain)


def test_a_cache_without_snapshots_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "models--org--name" / "blobs").mkdir(parents=True)
    assert scan(tmp_path) == {}
    (tmp_path / "models--org--name" / "snapshots").write_text("")
    assert scan(tmp_path) == {}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("models--org--name", "org/name"),
        ("models--gpt2", "gpt2"),
        ("models--a--b--c", None),
        ("models--", None),
        ("datasets--org--name", None),
        ("org", None),
    ],
)
def test_repo_names(folder: str, name: str | None) -> None:
    assert repo_name(folder) == name
