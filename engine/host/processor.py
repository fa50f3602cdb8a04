"""Finds the vector instructions that this process may use on the host's processor, and defines which of them each kernel needs.

A feature is a group of instructions by which a kernel or torch chooses its code; a processor has a feature if it has all
instructions of the group. Usable are the features that the processor has, without those that HEARTHD_CPU_FEATURES removes. They are
read from /proc/cpuinfo on x86-64, and from the auxiliary vector on aarch64 (where an emulator shows the host's /proc/cpuinfo).
Kernels, libraries, `hearth doctor` and the log all use this module and no other source."""

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

# the features of x86-64: each with its flags in /proc/cpuinfo
_FLAGS: dict[str, frozenset[str]] = {
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "avx512vnni": frozenset({"avx512_vnni"}),
    "avx512bf16": frozenset({"avx512_bf16"}),
    "avx512vbmi2": frozenset({"avx512_vbmi2"}),
    "avx512fp16": frozenset({"avx512_fp16"}),
    "amx": frozenset({"amx_tile", "amx_bf16", "amx_int8"}),
}
# the features of aarch64: each with its word (0: AT_HWCAP, 1: AT_HWCAP2) and its bit in it, from asm/hwcap.h
_BITS = {"neon": (0, 1), "sve": (0, 22), "bf16": (1, 14)}
KNOWN = (*_FLAGS, *_BITS)
# feature -> the features that are removed together with it. They follow oneDNN's levels, each of which includes all lower ones;
# avx512vbmi2 is none of these.
_REST_ON = {
    "avx2": ("avx512", "avx512vnni", "avx512bf16", "avx512vbmi2", "avx512fp16", "amx"),
    "avx512": ("avx512vnni", "avx512bf16", "avx512vbmi2", "avx512fp16", "amx"),
    "avx512vnni": ("avx512bf16", "avx512fp16", "amx"),
    "avx512bf16": ("avx512fp16", "amx"),
    "avx512fp16": ("amx",),
    "neon": ("sve", "bf16"),
}

# The features that each kernel of engine/cpu/kernels needs. A kernel that is not named here runs everywhere, because LLVM splits
# its vectors. A kernel that this processor cannot run is not compiled either: where LLVM finds no instruction for an operation, it
# ends the whole process.
KERNELS_NEED: dict[str, frozenset[str]] = {
    "bfloat16_pairs": frozenset({"avx512bf16"}),  # bits.py, vectors.py: vdpbf16ps, vcvtneps2bf16
    "half_conversion": frozenset({"avx2"}),  # fp8_codes.py: vcvtph2ps
    "int8_linear": frozenset({"avx512vnni"}),  # int8.py: vpdpbusd
    "escapes_in_place": frozenset({"avx512", "avx512vbmi2"}),  # packed_tiles.py: vpexpandb
    "tiles": frozenset({"amx"}),  # amx*.py
    "wide_tables": frozenset({"avx512"}),  # four_bits_tiles.py: vpermw, vpermps
    "byte_tables": frozenset({"avx2"}),  # four_bits_tiles.py: vpshufb
    "neon_tables": frozenset({"neon"}),  # four_bits_tiles.py: tbl
}


class UnknownFeature(ValueError):
    """Raised if an item of HEARTHD_CPU_FEATURES is not "-" and a known feature. The message names the item and lists all that are
    allowed."""


@dataclass(slots=True, frozen=True)
class Tier:
    """A class of processors on which the kernels are about equally fast. name: for example "AVX-512 with VNNI". meaning: a sentence
    for the log and `hearth doctor` on how such a processor computes with weights. is_slow: whether the log should recommend another
    machine."""

    name: str
    meaning: str
    is_slow: bool = False


@dataclass(slots=True, frozen=True)
class Processor:
    """The features of a processor, by their names in KNOWN. features: the features that may be used. taken_away: the features that
    the processor has but HEARTHD_CPU_FEATURES removes."""

    features: frozenset[str]
    taken_away: frozenset[str] = frozenset()

    def runs(self, kernel: str) -> bool:
        """Returns whether the processor has the features that the kernel needs. Raises KeyError for a kernel that KERNELS_NEED
        does not name."""
        return KERNELS_NEED[kernel] <= self.features

    @property
    def tier(self) -> Tier:
        return next(tier for feature, tier in _TIERS if feature in self.features or not feature)

    def describe(self) -> str:
        """Returns one line for the log and `hearth doctor`: the processor's tier, the features that were removed, and what the tier
        means for speed."""
        without = f" (without {', '.join(sorted(self.taken_away))}, by {VARIABLE})" if self.taken_away else ""
        return f"{self.tier.name}{without}: {self.tier.meaning}"


# A processor's tier is the first one whose feature it has; the last one names no feature and fits every processor.
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
    """Returns the features that a text like "-amx,-avx512bf16" (the value of HEARTHD_CPU_FEATURES) removes: the named features and
    those that depend on them. Raises UnknownFeature for an item that is not "-" and a known feature."""
    named = [part.strip() for part in text.split(",") if part.strip()]
    for part in named:
        if not part.startswith("-") or part[1:] not in KNOWN:
            raise UnknownFeature(f"{VARIABLE}: {part!r} is none of {', '.join('-' + name for name in KNOWN)}")
    return frozenset(feature for part in named for feature in (part[1:], *_REST_ON.get(part[1:], ())))


def features_of(machine: str, flags: Collection[str], capabilities: tuple[int, int]) -> frozenset[str]:
    """Returns a processor's features. machine: the result of platform.machine(). flags: the processor's flags in /proc/cpuinfo,
    used on x86-64. capabilities: the processor's AT_HWCAP and AT_HWCAP2, used on aarch64."""
    if machine in ("x86_64", "AMD64"):
        return frozenset(name for name, needed in _FLAGS.items() if needed <= set(flags))
    if machine in ("aarch64", "arm64"):
        return frozenset(name for name, (word, bit) in _BITS.items() if capabilities[word] >> bit & 1)
    return frozenset()


def processor_of(found: frozenset[str], environment: Mapping[str, str]) -> Processor:
    """Returns a processor with the features `found`, without those that the environment's HEARTHD_CPU_FEATURES removes. Raises
    UnknownFeature if that variable names an unknown feature."""
    removed = parse_removal(environment.get(VARIABLE, ""))
    return Processor(found - removed, found & removed)


@functools.cache
def host_features() -> frozenset[str]:
    """Returns the features that this host's processor has according to Linux. HEARTHD_CPU_FEATURES has no effect on the result."""
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
    """Returns the processor of this host, with the features that this process may use: those it has, without those that
    HEARTHD_CPU_FEATURES removes. Raises UnknownFeature if that variable names an unknown feature."""
    return processor_of(host_features(), os.environ)


def runs(kernel: str) -> bool:
    """Returns whether this processor has the features that the kernel needs. Raises KeyError for a kernel that KERNELS_NEED does
    not name."""
    return this_processor().runs(kernel)


# Each row: a feature, and oneDNN's, MKL's and torch's names for the level that uses it. The row that counts is the first whose
# feature the processor has. Where nothing is removed no limit is set, because oneDNN and MKL then choose better by themselves.
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
    """Returns environment variables, name -> value, with which torch, oneDNN and MKL do not use the features that
    HEARTHD_CPU_FEATURES has removed; {} if none is removed. They must be set before the libraries are loaded. machine: the result
    of platform.machine()."""
    if not processor.taken_away:
        return {}
    if machine == "aarch64":
        return {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "ADVANCED_SIMD"}
    onednn, mkl, aten = next(level for feature, *level in _LIBRARY_LEVELS if feature in processor.features or not feature)
    return {"ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl, "ATEN_CPU_CAPABILITY": aten}


def limit_libraries() -> None:
    """Makes torch and the libraries that it loads use only the features that this process may use (this_processor). Must be called
    before torch is imported."""
    os.environ.update(library_environment(this_processor(), platform.machine()))


# Removing a feature removes LLVM's features whose names begin with these; LLVM then tunes for a processor without the feature
# (_LLVM_PROCESSORS).
_LLVM_NAMES = {
    "amx": ("amx",),
    "avx512fp16": ("avx512fp16", "avx10"),
    "avx512bf16": ("avx512bf16", "avx10"),
    "avx512vbmi2": ("avx512vbmi2", "avx10"),
    "avx512vnni": ("avx512vnni", "avxvnni", "avx10"),
    "avx512": ("avx512", "evex512", "avx10"),
    "avx2": ("avx2", "avx", "fma", "f16c", "vaes", "vpclmulqdq"),
    "sve": ("sve", "sme"),
    "bf16": ("bf16",),
    "neon": (),  # every compiler for this architecture requires it
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
    """Returns what LLVM must compile for: LLVM's name of a processor, and a list of features like "+avx2,-avx512f". Returns None if
    no feature was removed; LLVM may then compile for the host's own processor. host: for each feature, by LLVM's name, whether the
    host has it."""
    if not processor.taken_away:
        return None
    prefixes = tuple(prefix for feature in processor.taken_away for prefix in _LLVM_NAMES[feature])
    kept = {name: has and not name.startswith(prefixes) for name, has in host.items()}
    name = next(name for feature, name in _LLVM_PROCESSORS if feature in processor.features or not feature)
    return name, ",".join(("+" if has else "-") + feature for feature, has in sorted(kept.items()))
