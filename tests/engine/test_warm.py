"""Kernels are compiled by two processes when the cache has none, and by none when it has them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.kernels import cpu, native
from engine.warm import compile_beside

SIGNATURE = SimpleNamespace(args=("float32",))


@dataclass(eq=False)
class Kernel:
    """As far as `prepare` sees Numba's."""

    cached: bool
    misses: Counter[tuple[str, ...]] = field(default_factory=Counter)

    @property
    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(cache_misses=self.misses)

    def compile(self, signature: SimpleNamespace) -> None:
        self.misses[signature.args] += not self.cached

    def disable_compile(self, value: bool = True) -> None:
        pass


@pytest.mark.parametrize(("cached", "told"), [([True, True], 0), ([False, True], 1), ([True, False], 1), ([False, False], 1)])
def test_a_missing_kernel_is_told_of_once(monkeypatch: pytest.MonkeyPatch, cached: list[bool], told: int) -> None:
    monkeypatch.setattr(cpu, "_wanted", lambda *args: [(Kernel(one), SIGNATURE) for one in cached])
    calls: list[int] = []
    cpu.prepare("float32", False, "", 0, when_cold=lambda: calls.append(1))
    assert len(calls) == told


def test_both_shares_are_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    all_kernels = [(Kernel(cached=True), SIGNATURE) for _ in range(5)]
    monkeypatch.setattr(cpu, "_wanted", lambda *args: all_kernels)
    monkeypatch.setattr(cpu, "_LONGEST", (all_kernels[2][0],))
    callers: list[object] = []
    monkeypatch.setattr(native, "prepare", callers.append)
    compiled: list[Kernel] = []
    monkeypatch.setattr(Kernel, "compile", lambda self, signature: compiled.append(self))
    for share in (0, 1):
        cpu.prepare("float32", True, "", share)
    assert [all_kernels.index((kernel, SIGNATURE)) for kernel in compiled] == [0, 1, 3, 4, 2]
    assert callers == [[SIGNATURE.args] * 5]  # what calls them is compiled once, for all of them


def test_the_second_process_ends_with_the_first(tmp_path: Path) -> None:
    process = compile_beside(str(tmp_path), ["float32"])
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine.warm", str(tmp_path), "float8"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "no kernels for float8" in done.stderr
