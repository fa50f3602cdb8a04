"""What this host's processor has, less what HEARTHD_CPU_FEATURES takes away, and what each kernel needs of it.

The one place that kernels, libraries, `hearth doctor` and the log ask. A feature is a group of instructions that a kernel or torch
chooses by; a processor has it if it has all of them. Source: /proc/cpuinfo on x86-64, the auxiliary vector on aarch64 (where an
emulator shows the host's /proc/cpuinfo).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HEARTHD_CPU_FEATURES"
_CPUINFO = Path("/proc/cpuinfo")
_AT_HWCAP, _AT_HWCAP2 = 16, 26  # linux/auxvec.h

# x86-64, each feature with its flags in /proc/cpuinfo
_FLAGS: dict[str, frozenset[str]] = {
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "avx512vnni": frozenset({"avx512_vnni"}),
    "avx512bf16": frozenset({"avx512_bf16"}),
    "avx512fp16": frozenset({"avx512_fp16"}),
    "amx": frozenset({"amx_tile", "amx_bf16", "amx_int8"}),
}
# aarch64, each feature with its bit: (0: AT_HWCAP, 1: AT_HWCAP2; bit), asm/hwcap.h
_BITS = {"neon": (0, 1), "sve": (0, 22), "bf16": (1, 14)}
KNOWN = (*_FLAGS, *_BITS)
# feature -> what goes with it when it is taken away. It is oneDNN's order, whose levels cannot leave one out.
_REST_ON = {
    "avx2": ("avx512", "avx512vnni", "avx512bf16", "avx512fp16", "amx"),
    "avx512": ("avx512vnni", "avx512bf16", "avx512fp16", "amx"),
    "avx512vnni": ("avx512bf16", "avx512fp16", "amx"),
    "avx512bf16": ("avx512fp16", "amx"),
    "avx512fp16": ("amx",),
    "neon": ("sve", "bf16"),
}

# What each kernel of engine/kernels needs; whatever is not named here runs everywhere: LLVM splits its vectors. A kernel that this
# processor cannot run is not compiled for it either, since LLVM ends the whole process where it finds no instruction.
KERNELS_NEED: dict[str, frozenset[str]] = {
    "bfloat16_pairs": frozenset({"avx512bf16"}),  # cpu_bits.py, cpu_vectors.py: vdpbf16ps, vcvtneps2bf16
    "int8_linear": frozenset({"avx512vnni"}),  # cpu_int8.py: vpdpbusd
    "tiles": frozenset({"amx"}),  # cpu_amx*.py
}


class UnknownFeature(ValueError):
    """HEARTHD_CPU_FEATURES names something that it cannot take away; the message says what and what it can."""


@dataclass(slots=True, frozen=True)
class Tier:
    """name: as in "AVX-512 with VNNI". meaning: what it does to speed. is_slow: another machine would be worth it."""

    name: str
    meaning: str
    is_slow: bool = False


@dataclass(slots=True, frozen=True)
class Processor:
    """features: those in use. taken_away: those it has beside them."""

    features: frozenset[str]
    taken_away: frozenset[str] = frozenset()

    def runs(self, kernel: str) -> bool:
        """Whether the processor has what the kernel needs. Raises KeyError for a kernel that KERNELS_NEED does not name."""
        return KERNELS_NEED[kernel] <= self.features

    @property
    def tier(self) -> Tier:
        return next(tier for feature, tier in _TIERS if feature in self.features or not feature)

    def describe(self) -> str:
        """One line for the log and `hearth doctor`."""
        without = f" (without {', '.join(sorted(self.taken_away))}, by {VARIABLE})" if self.taken_away else ""
        return f"{self.tier.name}{without}: {self.tier.meaning}"


# the first whose feature is there
_TIERS = (
    ("amx", Tier("AMX", "bfloat16 and int8 weights are multiplied by the matrix unit")),
    ("avx512bf16", Tier("AVX-512 with BF16", "bfloat16 weights are multiplied as they are; int8 ones too where there is VNNI")),
    (
        "avx512vnni",
        Tier(
            "AVX-512 with VNNI",
            "bfloat16 weights are widened, so they compute no faster than float32; int8 ones as they are",
        ),
    ),
    ("avx512", Tier("AVX-512", "weights of bfloat16 and int8 are widened, so they compute no faster than float32")),
    ("avx2", Tier("AVX2", "as AVX-512 without BF16 and VNNI, with vectors half as wide", is_slow=True)),
    ("neon", Tier("NEON", "weights of bfloat16 and int8 are widened, in vectors of four float32", is_slow=True)),
    ("", Tier("no vectors hearthd knows", "everything is computed with what every such processor has, slowly", is_slow=True)),
)


def parse_removal(text: str) -> frozenset[str]:
    """Features that a list like "-amx,-avx512bf16" takes away, with those that rest on them. Raises UnknownFeature."""
    named = [part.strip() for part in text.split(",") if part.strip()]
    for part in named:
        if not part.startswith("-") or part[1:] not in KNOWN:
            raise UnknownFeature(f"{VARIABLE}: {part!r} is none of {', '.join('-' + name for name in KNOWN)}")
    return frozenset(feature for part in named for feature in (part[1:], *_REST_ON.get(part[1:], ())))


def features_of(machine: str, flags: Collection[str], capabilities: tuple[int, int]) -> frozenset[str]:
    """machine: as platform.machine() says. flags: of /proc/cpuinfo. capabilities: AT_HWCAP, AT_HWCAP2."""
    if machine in ("x86_64", "AMD64"):
        return frozenset(name for name, needed in _FLAGS.items() if needed <= set(flags))
    if machine in ("aarch64", "arm64"):
        return frozenset(name for name, (word, bit) in _BITS.items() if capabilities[word] >> bit & 1)
    return frozenset()


def processor_of(found: frozenset[str], environment: Mapping[str, str]) -> Processor:
    """The processor with these features under this environment. Raises UnknownFeature."""
    removed = parse_removal(environment.get(VARIABLE, ""))
    return Processor(found - removed, found & removed)


@functools.cache
def host_features() -> frozenset[str]:
    """What Linux says of this host's processor."""
    flags: list[str] = []
    capabilities = (0, 0)
    if platform.machine() == "aarch64":
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
        capabilities = (getauxval(_AT_HWCAP), getauxval(_AT_HWCAP2))
    elif _CPUINFO.exists():
        lines = _CPUINFO.read_text().splitlines()
        flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return features_of(platform.machine(), flags, capabilities)


@functools.cache
def this_processor() -> Processor:
    """The host's, as this process was told to use it. Raises UnknownFeature."""
    return processor_of(host_features(), os.environ)


def runs(kernel: str) -> bool:
    """Processor.runs of this one."""
    return this_processor().runs(kernel)


# oneDNN's, MKL's and torch's own names, the first whose feature is there; oneDNN and MKL without a limit know better themselves
_LIBRARY_LEVELS = (
    ("amx", "AVX512_CORE_AMX", "AVX512_E4", "avx512"),
    ("avx512fp16", "AVX512_CORE_FP16", "AVX512_E3", "avx512"),
    ("avx512bf16", "AVX512_CORE_BF16", "AVX512_E3", "avx512"),
    ("avx512vnni", "AVX512_CORE_VNNI", "AVX512_E1", "avx512"),
    ("avx512", "AVX512_CORE", "AVX512", "avx512"),
    ("avx2", "AVX2", "AVX2", "avx2"),
    ("", "SSE41", "SSE4_2", "default"),
)


def library_environment(processor: Processor, machine: str) -> dict[str, str]:
    """Variables under which torch, oneDNN and MKL use no more than the processor's features; they read them when they are loaded.
    Empty if nothing is taken away."""
    if not processor.taken_away:
        return {}
    if machine == "aarch64":
        return {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "ADVANCED_SIMD"}
    onednn, mkl, aten = next(level for feature, *level in _LIBRARY_LEVELS if feature in processor.features or not feature)
    return {"ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl, "ATEN_CPU_CAPABILITY": aten}


def limit_libraries() -> None:
    """Has torch and what it brings use no more than this_processor(). To be called before torch is imported."""
    os.environ.update(library_environment(this_processor(), platform.machine()))


# LLVM's feature names that begin with these go with the feature; the processor that LLVM tunes for is one without it
_LLVM_NAMES = {
    "amx": ("amx",),
    "avx512fp16": ("avx512fp16", "avx10"),
    "avx512bf16": ("avx512bf16", "avx10"),
    "avx512vnni": ("avx512vnni", "avxvnni", "avx10"),
    "avx512": ("avx512", "evex512", "avx10"),
    "avx2": ("avx2", "avx", "fma", "f16c", "vaes", "vpclmulqdq"),
    "sve": ("sve", "sme"),
    "bf16": ("bf16",),
    "neon": (),  # no compiler of this architecture does without
}
_LLVM_PROCESSORS = (
    ("amx", "sapphirerapids"),
    ("avx512bf16", "cooperlake"),
    ("avx512vnni", "cascadelake"),
    ("avx512", "skylake-avx512"),
    ("avx2", "haswell"),
    ("neon", "generic"),
    ("", "x86-64"),
)


def llvm_target(processor: Processor, host: Mapping[str, bool]) -> tuple[str, str] | None:
    """Name and features of a processor that LLVM is to compile for. host: features as LLVM finds them. None: the host's own."""
    if not processor.taken_away:
        return None
    prefixes = tuple(prefix for feature in processor.taken_away for prefix in _LLVM_NAMES[feature])
    kept = {name: has and not name.startswith(prefixes) for name, has in host.items()}
    name = next(name for feature, name in _LLVM_PROCESSORS if feature in processor.features or not feature)
    return name, ",".join(("+" if has else "-") + feature for feature, has in sorted(kept.items()))
