"""A watched file is edited, replaced, removed, or reached through a link that moves; other files in its folder do not count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.process import file_watch
from daemon.process.file_signature import signature
from daemon.process.file_watch import MOST_LOOKS, FileWatch, folders_of, settled
from tests.daemon.no_thread import no_thread


def edit(folder: Path) -> None:
    with (folder / "node.toml").open("a") as file:
        file.write("y = 2\n")


def replace(folder: Path) -> None:
    (folder / "new").write_text("x = 2\n")
    (folder / "new").replace(folder / "node.toml")


def remove(folder: Path) -> None:
    (folder / "node.toml").unlink()


@pytest.mark.parametrize("change", [edit, replace, remove])
async def test_a_change_is_told(tmp_path: Path, change: Callable[[Path], None]) -> None:
    (tmp_path / "node.toml").write_text("x = 1\n")
    paths = [str(tmp_path / "node.toml")]
    before, told = signature(paths), asyncio.Event()
    watch = FileWatch(folders_of(paths), told.set)
    try:
        async with asyncio.timeout(60):
            while not told.is_set():  # the watch may not be in place yet: written until it is heard
                (tmp_path / "other").write_text("")
                await asyncio.sleep(0.1)
        assert signature(paths) == before, "another file of the folder"
        told.clear()
        change(tmp_path)
        async with asyncio.timeout(60):
            await told.wait()
        assert signature(paths) != before
    finally:
        await asyncio.to_thread(watch.stop)


async def test_a_link_that_moves(tmp_path: Path) -> None:
    """As mounted configuration is exchanged: node.toml -> current/node.toml, current -> the newest folder."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "node.toml").write_text(f"x = '{name}'\n")
    (tmp_path / "current").symlink_to("one")
    (tmp_path / "node.toml").symlink_to("current/node.toml")
    paths = [str(tmp_path / "node.toml")]
    before, told = signature(paths), asyncio.Event()
    watch = FileWatch(folders_of(paths), told.set)
    try:
        async with asyncio.timeout(60):
            while not told.is_set():
                (tmp_path / "other").write_text("")
                await asyncio.sleep(0.1)
        (tmp_path / "next").symlink_to("two")
        told.clear()
        (tmp_path / "next").replace(tmp_path / "current")
        async with asyncio.timeout(60):
            await told.wait()
        assert signature(paths) != before
    finally:
        await asyncio.to_thread(watch.stop)


def test_nothing_to_watch() -> None:
    async def run() -> None:
        FileWatch([], lambda: None).stop()

    asyncio.run(run())
    assert signature(["/nowhere/x"]) == (None,)


async def test_no_thread_to_watch_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with no_thread():
        watch = FileWatch([str(tmp_path)], lambda: None)
    assert watch.is_stale, "the next reload tries again"
    assert f"{tmp_path} cannot be watched (thread watch settings: it did not begin" in caplog.text
    watch.stop()


@pytest.mark.parametrize(
    ("found", "last", "looks"),
    [
        ("aa", "a", 2),
        ("abcc", "c", 4),
        ("abb?", "b", 3),
        ("ab" * MOST_LOOKS, "a", MOST_LOOKS),
    ],
)
async def test_files_are_settled_once_two_looks_find_the_same(
    found: str, last: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "PAUSE_S", 0.0)
    left = list(found)

    async def look() -> str:
        return left.pop(0)

    assert await settled(look) == last
    assert len(found) - len(left) == looks
