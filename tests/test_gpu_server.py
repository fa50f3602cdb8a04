"""The parts of `make gpu` that start a daemon: on what their checkpoints lie; of `server`, what of the device the daemon may take,
and what becomes of an unload that is refused; and `cohost`, as it runs without a GPU."""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import gpu_checkpoints, gpu_drives, gpu_server, server
from benchmarks.gpu_parts import PARTS
from config.devices import CUDA_LEFT_BYTES, GpuMemory, device_budgets
from config.schema import NodeConfig
from tests import kernel_cache

STARTING_DAEMONS = ("server", "confined", "cohost", "soak", "evictions", "adoption")
HOST_BYTES = 128 << 30


class Daemon:
    """Stands in for benchmarks.server.Server: a daemon with one model, whose CLI does what it is told. started: those
    of a test. refuses: the command that it refuses, which then changes nothing."""

    started: ClassVar[list[Daemon]] = []
    refuses: tuple[str, ...] = ()
    pid, ready_s = 1, 0.5

    def __init__(self, folder: Path, on: list[str], flags: list[str], cache_dir: Path | None = None) -> None:
        self.devices, self.flags = on, flags
        self.started.append(self)
        self._kept_in, self._rows = "disk", list[dict[str, str]]()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: there is no process."""

    def cli(self, verb: str, *arguments: str, check: bool = True) -> Any:
        if (verb, *arguments) == self.refuses:
            if check:
                raise RuntimeError(f"hearth {verb} {' '.join(arguments)}: exit 1")
            return {}
        if verb == "load":
            self._rows.append({"source": self._kept_in})
        elif verb == "unload":
            self._kept_in = "host" if "warm" in arguments else "disk"
        return self._rows if verb == "history" else {}


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> list[Daemon]:
    """The daemons that were started. The checkpoint of `serve` has no files, and its streams no tokens."""
    monkeypatch.setattr(Daemon, "started", [])
    monkeypatch.setattr(gpu_server, "Server", Daemon)
    monkeypatch.setattr(gpu_checkpoints, "make_apart", lambda *_: [16 << 30])
    monkeypatch.setattr(gpu_server, "measured", lambda *_: {"failed": 0, "errors": []})
    monkeypatch.setattr(gpu_server, "raw_read_s", lambda *_: 6.0)
    return Daemon.started


def test_the_daemon_with_the_8b_model_has_the_default_budget(daemons: list[Daemon], tmp_path: Path) -> None:
    """What its engine leaves free is then what the default budget leaves."""
    gpu_server.serve(tmp_path, tiny=False, confine=False)
    assert len(daemons) == 2, "with an empty and with a filled kernel cache"
    card = GpuMemory(0, "GPU-a", 80 << 30)
    for daemon in daemons:
        (device,) = device_budgets(NodeConfig(device=daemon.devices), HOST_BYTES, gpus=lambda: [card])
        assert (device.uuid, device.budget_bytes) == (card.uuid, card.total_bytes - CUDA_LEFT_BYTES)
        assert "--device" not in daemon.flags


@pytest.mark.parametrize("refused", [("--to", "warm"), ()], ids=["to host memory", "to nothing"])
def test_an_unload_that_is_refused_ends_the_part(
    daemons: list[Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...]
) -> None:
    """It ends with what the CLI says, before the next load tells a rate at which nothing was loaded."""
    monkeypatch.setattr(Daemon, "refuses", ("unload", "8b", *refused, "--json"))
    with pytest.raises(RuntimeError, match="hearth unload 8b"):
        gpu_server.serve(tmp_path, tiny=False, confine=False)


def test_the_daemons_checkpoints_are_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each script makes them in a folder on a drive, although temporary files are on a tmpfs."""
    monkeypatch.delenv(gpu_drives.SHARED, raising=False)
    memory, drive = tmp_path / "memory", tmp_path / "drive"
    for place in (memory, drive):
        place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(memory))
    monkeypatch.setattr(gpu_drives, "ROOT", drive)
    monkeypatch.setattr(gpu_drives, "file_system", lambda place: "tmpfs" if memory in (place, *place.parents) else "ext4")
    monkeypatch.setattr(gpu_drives, "free_bytes", lambda _: 30 << 30)
    folders = list[Path]()

    def made(folder: Path, *_: object) -> list[int]:
        folders.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_checkpoints, "make_apart", made)
    for part in STARTING_DAEMONS:
        script, *arguments = PARTS[part].arguments
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.delitem(sys.modules, script, raising=False)
        with pytest.raises(KeyboardInterrupt):
            runpy.run_module(script, run_name="__main__")
    assert [folder.parent for folder in folders] == [drive] * len(STARTING_DAEMONS)


def test_models_that_share_a_device_are_swapped_and_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The part `cohost` as `make gpu-dry` runs it, with kernels that are compiled: three tiny models where two have room, whose
    requests all end, with swaps from host memory, and texts as of each model alone."""
    monkeypatch.setattr(server, "CACHE", Path(kernel_cache.CACHE_DIR))
    monkeypatch.setattr(server, "compile_kernels", kernel_cache.warm)
    gpu_server.cohost(tmp_path, tiny=True)
    swapped, texts = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (swapped["what"], texts["what"]) == ("cohost", "texts")
    assert swapped["failed"] == 0 < swapped["from_host"] <= swapped["swaps"]
    assert (texts["differing"], texts["no_answer"]) == (0, 0)
    assert texts["compared"] > 0
