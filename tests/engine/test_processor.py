"""What a processor has, what is taken away from it, and what libraries and compiler are told."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.host import processor
from engine.host.processor import KERNELS_NEED, KNOWN, VARIABLE, Processor, UnknownFeature, features_of, processor_of

ROOT = Path(__file__).resolve().parents[2]
AVX2 = ["avx2", "fma", "f16c"]
AVX512 = ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]
X86 = frozenset({"avx2", "avx512", "avx512vnni", "avx512bf16", "avx512vbmi2", "avx512fp16", "amx"})
VNNI = frozenset({"avx2", "avx512", "avx512vnni"})


@pytest.mark.parametrize(
    ("machine", "flags", "capabilities", "found"),
    [
        ("x86_64", ["sse2"], (0, 0), set()),
        ("x86_64", AVX2, (0, 0), {"avx2"}),
        ("x86_64", [*AVX2, "avx512f"], (0, 0), {"avx2"}),
        ("x86_64", [*AVX2, *AVX512, "avx512_vnni"], (0, 0), VNNI),
        ("x86_64", [*AVX2, *AVX512, "amx_tile", "amx_bf16"], (0, 0), {"avx2", "avx512"}),
        ("aarch64", [], (1 << 1, 0), {"neon"}),
        ("aarch64", [], (1 << 1 | 1 << 22, 1 << 14), {"neon", "sve", "bf16"}),
        ("riscv64", AVX2, (1 << 1, 0), set()),
    ],
)
def test_features(machine: str, flags: list[str], capabilities: tuple[int, int], found: set[str]) -> None:
    assert features_of(machine, flags, capabilities) == found


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", X86),
        ("-amx", X86 - {"amx"}),
        (" -avx512bf16 , -amx ", VNNI | {"avx512vbmi2"}),
        ("-avx512bf16", VNNI | {"avx512vbmi2"}),
        ("-avx512vbmi2", X86 - {"avx512vbmi2"}),
        ("-avx512vnni", {"avx2", "avx512", "avx512vbmi2"}),
        ("-avx512", {"avx2"}),
        ("-avx2", set()),
        ("-neon", X86),
    ],
)
def test_what_is_taken_away_takes_with_it_what_rests_on_it(text: str, left: set[str]) -> None:
    found = processor_of(X86, {VARIABLE: text})
    assert found.features == left
    assert found.taken_away == X86 - left


@pytest.mark.parametrize("text", ["amx", "+amx", "-amx2", "-", "-amx -avx2"])
def test_what_is_no_feature_is_told(text: str) -> None:
    with pytest.raises(UnknownFeature, match=rf"{VARIABLE}: {re.escape(repr(text))} is none of -avx2, .*-amx"):
        processor_of(X86, {VARIABLE: text})


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (X86, "AMX"),
        (VNNI, "AVX-512 with VNNI"),
        ({"avx2"}, "AVX2"),
        ({"neon", "bf16"}, "NEON"),
        (set(), "no vectors hearthd knows"),
    ],
)
def test_tiers(features: set[str], name: str) -> None:
    assert Processor(frozenset(features)).describe().startswith(f"{name}: ")


def test_kernels_need_features_that_are_known() -> None:
    assert set().union(*KERNELS_NEED.values()) <= set(KNOWN)
    assert Processor(X86).runs("tiles")
    assert not Processor(VNNI).runs("bfloat16_pairs")
    with pytest.raises(KeyError):
        Processor(X86).runs("something else")


def test_processor_features_are_asked_for_in_one_place() -> None:
    """A kernel that asks LLVM itself would not hear of what was taken away."""
    for package in ("engine", "daemon", "loader", "scheduler"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            assert "/proc/cpuinfo" not in text or path.name == "processor.py", path
            assert "get_host_cpu_features" not in text or path.name == "compiled.py", path


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("", {}),
        (
            "-amx",
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3", "ATEN_CPU_CAPABILITY": "avx512"},
        ),
        (
            "-avx512bf16",
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1", "ATEN_CPU_CAPABILITY": "avx512"},
        ),
        ("-avx512", {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}),
        ("-avx2", {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ATEN_CPU_CAPABILITY": "default"}),
    ],
)
def test_libraries_are_held_to_it(text: str, variables: dict[str, str]) -> None:
    assert processor.library_environment(processor_of(X86, {VARIABLE: text}), "x86_64") == variables


def test_libraries_of_aarch64_are_held_to_it() -> None:
    taken = processor_of(frozenset({"neon", "sve", "bf16"}), {VARIABLE: "-sve"})
    expected = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "ADVANCED_SIMD"}
    assert processor.library_environment(taken, "aarch64") == expected


ASKS_TORCH = """
from engine.host.process import prepare_process
prepare_process()
import torch
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch names other capabilities on other architectures")
@pytest.mark.parametrize(("text", "capability"), [("-avx512", "AVX2"), ("-avx2", "DEFAULT")])
def test_torch_is_held_to_it(text: str, capability: str) -> None:
    """A processor without these features says the same."""
    if "avx2" not in processor.this_processor().features:
        capability = "DEFAULT"
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"} | {VARIABLE: text}
    asked = subprocess.run(
        [sys.executable, "-c", ASKS_TORCH], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert asked.stdout.strip() == capability


def test_the_compiler_is_held_to_it() -> None:
    host = {"avx2": True, "fma": True, "avx512f": True, "avx512bf16": True, "avx10.1": True, "amx-tile": True, "sse4a": False}
    assert processor.llvm_target(Processor(X86), host) is None
    name, features = processor.llvm_target(processor_of(X86, {VARIABLE: "-avx512bf16"}), host) or ("", "")
    assert name == "cascadelake"
    assert features.split(",") == ["-amx-tile", "-avx10.1", "+avx2", "-avx512bf16", "+avx512f", "+fma", "-sse4a"]
    name, features = processor.llvm_target(processor_of(X86, {VARIABLE: "-avx512"}), host) or ("", "")
    assert name == "haswell"
    assert "-avx512f" in features.split(",")
    assert "+fma" in features.split(",")
