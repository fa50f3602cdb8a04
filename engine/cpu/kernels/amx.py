"""Provides Intel AMX to Numba kernels: instructions that multiply tiles of 16 rows of bfloat16 pairs (tdpbf16ps), and a function
that tells whether this process may use them.

A tile register holds 16 rows of 64 bytes. dot(c, a, b) adds to c [16, 16] float32 the product of a [16, 32] with b [32, 16], both
bfloat16. Rows of b are pairs: row i, column n holds elements 2 i and 2 i + 1 of column n (Intel 64 and IA-32 Architectures Software
Developer's Manual, volume 1, chapter "Programming with Intel AMX")."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.host import processor

TILE_ROWS = 16
TILE_ROW_BYTES = 64
_I8, _I64 = ir.IntType(8), ir.IntType(64)
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18  # asm/unistd_64.h, asm/prctl.h


HAS_TILES = processor.runs("tiles") and platform.system() == "Linux"


@functools.cache
def may_use_tiles() -> bool:
    """Returns whether this process may use tile registers: the processor multiplies tiles of bfloat16, and Linux permits it.

    The call itself asks Linux (5.16 or newer) for the permission. It returns False if Linux refuses, or if the process's signal
    stacks are too small to hold the registers."""
    if not HAS_TILES:
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def fits_tiles(block_tokens: int, head_dim: int) -> bool:
    """Returns whether the bfloat16 keys of a block can be divided into whole tiles: block_tokens (positions) is a multiple of 16,
    and head_dim (elements of a position) a multiple of 32."""
    return block_tokens % TILE_ROWS == 0 and head_dim * 2 % TILE_ROW_BYTES == 0


def tile_configuration() -> Any:
    """Returns a configuration [64] uint8 for configure_tiles that gives each of the eight tile registers 16 rows of 64 bytes."""
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1  # palette
    configuration[16:32:2] = TILE_ROW_BYTES  # 16 bits for each tile
    configuration[48:56] = TILE_ROWS
    return configuration


def _call(builder: ir.IRBuilder, name: str, args: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


@intrinsic
def configure_tiles(typing_context: Any, configuration: Any) -> Any:
    """Configures the tile registers of the calling thread. configuration: [64] uint8, the operand of ldtilecfg (see
    tile_configuration). A thread must call this before it uses tiles. Afterwards it must call release_tiles; until then the system
    saves the registers whenever it switches threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        _call(builder, "llvm.x86.ldtilecfg", [data])
        return context.get_dummy_value()

    return types.void(configuration), generate


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), generate


def _at_array(name: str, tile: int) -> Callable[..., None]:
    @intrinsic
    def operation(typing_context: Any, array: Any, at: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            place = builder.bitcast(builder.gep(data, [args[1]]), _I8.as_pointer())
            _call(builder, name, [_I8(tile), place, args[2]])
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int64), generate

    return operation


def load(tile: int) -> Callable[..., None]:
    """Returns a function (array, at, stride) for kernels that loads tile register number `tile`, each of its rows from the row's
    bytes in memory: the first row from element `at` of the array on, the next ones `stride` bytes apart."""
    return _at_array("llvm.x86.tileloadd64", tile)


def store(tile: int) -> Callable[..., None]:
    """Returns a function (array, at, stride) for kernels that stores tile register number `tile`: its first row from element `at`
    of the array on, the next ones `stride` bytes apart."""
    return _at_array("llvm.x86.tilestored64", tile)


def zero(tile: int) -> Callable[..., None]:
    @intrinsic
    def operation(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _call(builder, "llvm.x86.tilezero", [_I8(tile)])
            return context.get_dummy_value()

        return types.void(), generate

    return operation


def dot(total: int, left: int, right: int) -> Callable[..., None]:
    """Returns a function () for kernels that adds the product of tile registers `left` and `right` to tile register `total` (all
    three are numbers from 0 to 7; for the layout see the module)."""

    @intrinsic
    def operation(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _call(builder, "llvm.x86.tdpbf16ps", [_I8(total), _I8(left), _I8(right)])
            return context.get_dummy_value()

        return types.void(), generate

    return operation
