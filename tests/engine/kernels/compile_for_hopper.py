"""Compiles every Triton kernel to machine code for compute capability 9.0 or another, on a machine without a GPU, as the engine
would launch it for an 8B model in bfloat16. Prints one JSON line for each kernel: what the assembler reports of it, how many
instructions it has, and how many bytes of KV an iteration of attention reads.

usage: python -m tests.engine.kernels.compile_for_hopper [CAPABILITY] [--unlisted] [--largest] (90, 80, 89, 100; not under
TRITON_INTERPRET; --unlisted: without the numbers of instructions, for which the code must be listed, which takes longer than all
else; --largest: of a kernel's forms that differ in a size only the one that needs most registers)
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.cuda.kernels import (
    entry,
    linear_choice,
    tiles,
    triton_adapters,
    triton_checksum,
    triton_decode,
    triton_delta,
    triton_experts,
    triton_extend,
    triton_four_bits_linear,
    triton_fp8_linear,
    triton_inputs,
    triton_latent,
    triton_latent_attention,
    triton_logits,
    triton_peers,
    triton_rope,
    triton_rows,
    triton_unpack,
)
from engine.layers.gated_delta import columns_of
from engine.memory.arena import kv_views
from engine.ops.ops import (
    AdaptedProduct,
    BatchAdapters,
    ClampedSwiglu,
    DeltaRule,
    Fp8Matrix,
    Int4Matrix,
    Int8Matrix,
    LatentHeads,
    Mxfp4Matrix,
    Nvfp4Matrix,
    Rotary,
    SigmoidRouting,
)
from loader.files.frame import FRAME_VALUES
from loader.shapes.kv_dtypes import KV_FP8, kv_dtype_named
from loader.shapes.kv_layout import KVGroupSpec
from loader.shapes.model_shape import DeltaShape

BLOCK_TOKENS = 16
HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER, VOCAB, ROWS = 32, 8, 128, 4096, 14336, 128256, 8
EXPERTS, CHOSEN, EXPERT_INNER = 64, 8, 768
WIDE_DIM = 512
LATENT_HEADS, RANK, PLAIN, ROPE, VALUE = (16, 128), 512, 128, 64, 128  # of DeepSeek-V2-Lite and V3
CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


largest_alone = "--largest" in sys.argv


def tried(*forms: Any) -> tuple[Any, ...]:
    """Returns which of some forms, of which the last needs most registers, are compiled."""
    return forms[-1:] if largest_alone else forms


class NoGpu:
    """Stands in for Triton's driver, with the methods that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def assembled(cubin: bytes, listed: bool) -> dict[str, int]:
    """Returns the registers and stack_bytes of compiled code and, if it is to be listed, its instructions and loop_instructions.
    stack_bytes: what did not fit into registers. loop_instructions: those of its longest loop without another loop in it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([str(CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        code = ""
        if listed:
            code = subprocess.run([str(CUOBJDUMP), "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(re.findall(rf"{key}:(\d+)", told)[0]) for name, key in (("registers", "REG"), ("stack_bytes", "STACK"))}
    return found | (counted(code) if listed else {})


def counted(code: str) -> dict[str, int]:
    """Returns how many instructions a listing of machine code has, in all and in its longest innermost loop."""
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+([^;]*);", code, re.MULTILINE)
    at = {int(address, 16): number for number, (address, _) in enumerate(lines)}
    loops = []
    for number, (address, text) in enumerate(lines):
        target = re.search(r"\bBRA\b[^`]*?(0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < int(address, 16):  # a branch to itself behind the end is no loop
            loops.append((at.get(int(target[1], 16), number), number))
    innermost = [(begin, end) for begin, end in loops if not any(begin <= b and e < end for b, e in loops)]
    return {"instructions": len(lines), "loop_instructions": max((end - begin + 1 for begin, end in innermost), default=0)}


def widest_load_bytes(ptx: str) -> int:
    """Returns the bytes that one thread loads from the device's memory with its widest instruction, into registers or shared
    memory."""
    direct = [int(many or 1) * int(bits) // 8 for many, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\s", ptx)]
    copied = [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^,\n]*,[^,\n]*, (0x[0-9a-f]+)", ptx)]
    return max(direct + copied, default=0)


def kv_bytes(kernel: str, options: dict[str, Any], item_bytes: int) -> int:
    """Returns how many bytes of keys and values, scales included, a program of an attention kernel reads in an iteration of its
    loop; 0 for other kernels. options: those of its launch. item_bytes: of a number that is not in FP8."""
    if kernel in ("_piece_kernel", "_extend_kernel"):
        num, head = 2, options["D"]
    elif kernel in ("_latent_piece_kernel", "_latent_extend_kernel"):
        num, head = 1, options["L"] + options["E"]
    else:
        return 0
    return int(options["N"]) * num * (head + 1 if options["FP8"] else head * item_bytes)


def compile_instead_of_running(capability: int, listed: bool) -> None:
    seen: set[str] = set()
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = run(self, *args, grid=grid, warmup=True, **options)
        if made.hash not in seen:
            seen.add(made.hash)
            ptx = made.asm["ptx"]
            item_bytes = args[0].element_size() if isinstance(args[0], torch.Tensor) else 0
            line = {
                "kernel": self.fn.__name__,
                "head_dim": options.get("D", 0),
                "item_bytes": item_bytes,
                "kv_bytes": kv_bytes(self.fn.__name__, options, item_bytes),
                "fp8": bool(options.get("FP8")),
                "mxfp4": bool(options.get("FOUR_BITS")) and not options.get("INT4") and not options["E4M3"],
                "int4": bool(options.get("INT4")),
                "int8": any(isinstance(each, torch.Tensor) and each.dtype == torch.int8 for each in args[:3]),
                "nvfp4": bool(options.get("E4M3")) or ("four_bits" in self.fn.__name__ and not options["INT4"]),
                "zeros": bool(options.get("ZEROS")),
                "warps": made.metadata.num_warps,
                "shared_bytes": made.metadata.shared,
                "wgmma": ptx.count("wgmma.mma_async"),
                "mma": ptx.count("mma.sync"),
                "tcgen05": ptx.count("tcgen05.mma"),
                "widest_load_bytes": widest_load_bytes(ptx),
                "async_copies_of_16_bytes": len(re.findall(r"cp\.async\.cg[^\n]*, 0x10", ptx)),
            }
            print(json.dumps(line | assembled(made.asm["cubin"], listed)), flush=True)
        return made

    JITFunction.run = compiled
    triton.runtime.driver.set_active(NoGpu(capability))


def kept_as(kv_dtype: str, token_dims: tuple[int, int, int] = (2, KV_HEADS, HEAD_DIM)) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns KV of four layers in this type, and its scales (None unless fp8)."""
    num, kv_heads, head_dim = token_dims
    block_bytes = 4 * num * kv_heads * BLOCK_TOKENS * kv_dtype_named(kv_dtype).head_bytes(head_dim)
    group = KVGroupSpec("full", BLOCK_TOKENS, block_bytes, (0, 1, 2, 3))
    return kv_views(torch.zeros(ROWS * block_bytes, dtype=torch.uint8), group, token_dims, kv_dtype)


def launch_latents(heads: int, kv_dtype: str, table: torch.Tensor, ints: torch.Tensor, longs: torch.Tensor) -> None:
    """Launches the kernels of latent attention, those that do not read KV once."""
    dtype, kv, work = torch.bfloat16, kept_as(kv_dtype, (1, 1, RANK + ROPE)), entry.split_contexts(ints, 0, 132)
    queries, down = torch.zeros(ROWS, heads * (PLAIN + ROPE), dtype=dtype), torch.zeros(ROWS, RANK + ROPE, dtype=dtype)
    turns, norm = torch.zeros(ROWS, ROPE), down[0, :RANK]
    triton_latent.rope_and_store_latents(queries, down, turns, norm, 1e-6, *kv, 3, heads, longs, True)
    absorbed = torch.zeros(ROWS, heads, RANK + ROPE, dtype=dtype)
    sums, where = absorbed[..., :RANK].contiguous(), (*kv, 3, table, ints)
    if heads in tried(*reversed(LATENT_HEADS)):  # its form for few heads has fewer warps, and needs more registers
        triton_latent_attention.decode_attention(absorbed, *where, work, 0.1, 32, False, sums)
    tile = entry.tile_tokens([PLAIN + ROPE], dtype, kv_dtype == KV_FP8)
    if heads in tried(*LATENT_HEADS):
        triton_latent_attention.extend_attention(absorbed, 0, *where, ints, ints, tile, ints, ints, ints, 0.1, False, sums)
    if kv_dtype == KV_FP8:
        return
    height = heads * (PLAIN + VALUE)
    codes, values = torch.zeros(height, RANK, dtype=torch.uint8), torch.zeros(ROWS, heads, VALUE, dtype=dtype)
    fp8 = Fp8Matrix(codes, torch.zeros(height, RANK // 128), 128)
    nvfp4 = Nvfp4Matrix(codes[:, : RANK // 2], codes[:, : RANK // 16], torch.zeros(height))
    int8 = Int8Matrix(codes.view(torch.int8), torch.zeros(height))
    many = 64  # tokens, which take larger tiles than ROWS do
    for up, rows in product((fp8, int8, nvfp4), tried(ROWS, many)):
        of_heads = LatentHeads(up, heads, PLAIN, ROPE, VALUE)
        own = absorbed.expand(rows // ROWS, -1, -1, -1).reshape(rows, heads, -1)
        triton_latent.product_by_head(own[..., :PLAIN], of_heads, False, False, own[..., :RANK])
        triton_latent.product_by_head(own[..., :RANK], of_heads, True, False, values)


def launch_wide_heads(dim: int, dtype: torch.dtype, table: torch.Tensor, ints: torch.Tensor, longs: torch.Tensor) -> None:
    """Launches the kernels of attention with heads of `dim` numbers, as Gemma's are: 32 of queries and 4 of keys and values."""
    heads, kv, work = 32, kept_as(str(dtype).removeprefix("torch."), (2, 4, dim)), entry.split_contexts(ints, 0, 132)
    qkv, out = torch.zeros(ROWS, (heads + 2 * 4) * dim, dtype=dtype), torch.zeros(ROWS, heads * dim, dtype=dtype)
    turns, norm = torch.zeros(ROWS, dim), qkv[0, :dim]
    triton_rope.rope_and_store(qkv, turns, norm, norm, False, 1e-6, *kv, 3, heads, longs, value_norm=norm)
    triton_rope.rope(out, turns, norm, False, 1e-6, heads, longs, False)
    triton_decode.decode_attention(qkv, *kv, 3, heads, table, ints, work, 1.0, 0.0, None, False, out)
    columns = (table, ints, ints, ints, triton_extend.tile_tokens([dim], dtype, False), ints, ints, ints)
    triton_extend.extend_attention(qkv, *kv, 3, heads, *columns, 0, 1.0, 0.0, None, False, out)


def launch_delta(table: torch.Tensor, ints: torch.Tensor) -> None:
    """Launches the kernels of the gated delta rule with Qwen3-Next's sizes."""
    shape = DeltaShape(frozenset((0, 1, 2)), 16, 32, 128, 128, 4, by_head=True)
    heads, values = shape.num_value_heads, shape.num_value_heads * shape.value_dim
    zeros = torch.zeros(shape.conv_width, 4, dtype=torch.bfloat16)
    sizes = (shape.num_key_heads, heads, shape.key_dim, shape.value_dim, columns_of(shape))
    rule = DeltaRule(zeros, torch.zeros(heads), torch.zeros(heads), zeros[: shape.value_dim, 0].contiguous(), 1e-6, *sizes)
    states, x = torch.zeros(1, 3, shape.state_values), torch.zeros(ROWS, shape.conv_width + values, dtype=torch.bfloat16)
    columns = (table, ints, ints, ints, ints, ints)
    triton_delta.gated_delta(x, x[:, : 2 * heads].contiguous(), rule, states, 2, BLOCK_TOKENS, *columns, True, x[:, :values])


def launch_adapters(x: torch.Tensor, ints: torch.Tensor, longs: torch.Tensor) -> None:
    """Launches the kernels of LoRA adapters for queries, keys and values, and for one matrix."""
    triton_adapters.adapter_numbers(ints, ints, ints, ints)
    held = BatchAdapters(ints, longs.expand(2, -1), ints.expand(2, -1), x.flatten())  # nothing is read
    for parts, tile in product(((WIDTH, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), (WIDTH,)), tried(*triton_adapters.TILE_TOKENS)):
        out = torch.zeros(ROWS, sum(parts), dtype=x.dtype)
        triton_adapters.add_adapters(x, out, AdaptedProduct(1, parts), held, 64, tile, False)


def main(capability: int, listed: bool) -> None:
    assert not entry.INTERPRETED
    compile_instead_of_running(capability, listed)
    dtype = torch.bfloat16
    qkv = torch.zeros(ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    out = torch.zeros(ROWS, HEADS * HEAD_DIM, dtype=dtype)
    table, ints, longs, floats = (
        torch.zeros(ROWS + 1, 64, dtype=torch.int32),
        torch.zeros(ROWS, dtype=torch.int32),
        torch.zeros(ROWS, dtype=torch.int64),
        torch.zeros(ROWS),
    )
    entry.split_contexts(torch.zeros(entry.MANY_ROWS, dtype=torch.int32), 0, 132, KV_HEADS)
    work = entry.split_contexts(ints, 0, 132, KV_HEADS)
    partial = torch.zeros(len(work.rows), HEADS, HEAD_DIM), torch.zeros(len(work.rows), HEADS)
    turns, norm = entry.cos_sin(ints, Rotary(torch.zeros(HEAD_DIM // 2))), qkv[0, :HEAD_DIM]
    for kv in [kept_as(kind) for kind in ("bfloat16", KV_FP8) if kind != KV_FP8 or capability >= 89]:  # FP8_CAPABILITY
        for joins in tried(False, True):
            with tiles.forced(tiles.decode_tile(HEAD_DIM, 2, kv[1] is not None)._replace(joins=joins)):
                triton_decode.decode_attention(qkv, *kv, 3, HEADS, table, ints, work, 0.1, 0.0, None, False, out)
        triton_decode.join_in_order(*partial, work, KV_HEADS, None, out)
        for window, softcap in tried((0, 0.0), (4096, 50.0)):
            columns = (table, ints, ints, ints, triton_extend.tile_tokens([HEAD_DIM], dtype, kv[1] is not None), ints, ints, ints)
            triton_extend.extend_attention(qkv, *kv, 3, HEADS, *columns, window, 0.1, softcap, None, False, out)
        for norms in ((None, None), (norm, norm)):
            triton_rope.rope_and_store(qkv, turns, *norms, False, 1e-6, *kv, 3, HEADS, longs)
        triton_rope.rope_and_store(qkv, turns, None, None, False, 1e-6, *kv, 3, HEADS, longs, True)
        for heads in LATENT_HEADS:
            launch_latents(heads, KV_FP8 if kv[1] is not None else "bfloat16", table, ints, longs)
    for wide in tried((256, torch.float32), (WIDE_DIM, torch.float32), (256, dtype), (WIDE_DIM, dtype)):
        launch_wide_heads(*wide, table, ints, longs)
    launch_delta(table, ints)
    launch_adapters(out[:, :WIDTH], ints, longs)
    x = torch.zeros(ROWS, WIDTH, dtype=dtype)
    routing = triton_experts.empty_routing(ROWS, CHOSEN, EXPERTS, x.device)
    scores = torch.zeros(ROWS, EXPERTS + 1, dtype=dtype)
    triton_experts.route(scores, longs, EXPERTS, True, *routing[:2])
    rule = SigmoidRouting(torch.zeros(EXPERTS), 8, 4, 2.5)
    triton_experts.route_by_sigmoid(torch.zeros(ROWS, EXPERTS), longs, rule, True, *routing[:2])
    for counts in (None, longs):
        triton_experts.sort(routing[0], *routing[2:], counts=counts)
    triton_experts.keep_own_pairs(routing[0], longs, torch.zeros(EXPERTS, 3, dtype=torch.int32), EXPERTS)
    gate_up, down = torch.zeros(EXPERTS, 2 * EXPERT_INNER, WIDTH, dtype=dtype), x[None]  # nothing is read
    inner, made = (torch.zeros(ROWS * CHOSEN, width, dtype=dtype) for width in (EXPERT_INNER, WIDTH))
    for tile in tried(*triton_experts.TILE_ROWS):
        triton_experts.grouped_linear(x, gate_up, *routing[2:], CHOSEN, True, tile, False, inner)
        triton_experts.grouped_linear(inner, down, *routing[2:], CHOSEN, False, tile, False, made)
        along_outputs = gate_up.view(EXPERTS, WIDTH, -1).transpose(1, 2)
        triton_experts.grouped_linear(x, along_outputs, *routing[2:], CHOSEN, True, tile, False, inner, weights=routing[1])
    blocks = torch.zeros(EXPERTS, 2 * EXPERT_INNER, WIDTH // 32, 16, dtype=torch.uint8)
    halves = Mxfp4Matrix(blocks, blocks[..., 0]), Mxfp4Matrix(blocks[:, :EXPERT_INNER], blocks[:, :EXPERT_INNER, :, 0])
    for tile in tried(*triton_experts.TILE_ROWS):
        how, clamped = (*routing[2:], CHOSEN), ClampedSwiglu(7.0, 1.702)
        triton_experts.grouped_linear(x, halves[0], *how, True, tile, False, inner, x, clamped)
        triton_experts.grouped_linear(inner, halves[1], *how, False, tile, False, made, x)
    in_fp8 = Fp8Matrix(torch.zeros(EXPERTS, 1, 1, dtype=torch.uint8), torch.zeros(EXPERTS, 1, WIDTH // 128), 128)
    in_int8 = Int8Matrix(torch.zeros(EXPERTS, 1, WIDTH, dtype=torch.int8), torch.zeros(EXPERTS, 1))
    for of_bytes, tile in product((in_fp8, in_int8), tried(*triton_experts.TILE_ROWS)):
        triton_experts.grouped_linear(x, of_bytes, *routing[2:], CHOSEN, True, tile, False, inner)
    for zeros in (None, blocks):
        in_int4 = Int4Matrix(blocks.flatten(2), torch.zeros(EXPERTS, 1, WIDTH // 32, dtype=dtype), 32, zeros)
        for tile in tried(*triton_experts.TILE_ROWS):
            triton_experts.grouped_linear(x, in_int4, *routing[2:], CHOSEN, True, tile, False, inner)
    in_nvfp4 = Nvfp4Matrix(blocks.flatten(2), blocks.flatten(2)[..., : WIDTH // 16], torch.zeros(EXPERTS, 1))
    for tile in tried(*triton_experts.TILE_ROWS):
        triton_experts.grouped_linear(x, in_nvfp4, *routing[2:], CHOSEN, True, tile, False, inner)
        triton_experts.grouped_linear(inner, in_nvfp4, *routing[2:], CHOSEN, False, tile, False, made)
    triton_experts.combine(made, routing[1], longs, scores, x, x)
    triton_experts.combine(made, routing[1], longs, None, x, x)
    triton_experts.combine(made, routing[1], longs, None, x, x, True, routing[0], range(1, 3))
    entry.rms_norm(x, x[0], 1e-5, False)
    entry.add_rms_norm(x, x, x[0], 1e-5, False)
    entry.layer_norm(x, x, x[0], x[0], 1e-5)
    entry.gelu(x)
    for gelu in (False, True):
        entry.gate_and_mul(torch.zeros(ROWS, 2 * INNER, dtype=dtype), gelu)
    triton_rows.gather_rows(x, ints, 1.0, x)
    entry.prepare_inputs(ints, ints, ints, ints, ints, torch.zeros(ROWS + 1, dtype=torch.int32), table, 16)
    triton_inputs.set_entries(table, ints, ints)
    weight = torch.zeros(2 * INNER, WIDTH, dtype=dtype)
    for num_rows in tried(*entry.FEW_ROWS):
        linear_choice.ours(x[:num_rows], weight, None)
    for num_rows, gelu in product(tried(*entry.FEW_ROWS), tried(False, True)):
        linear_choice.ours(x[:num_rows], weight, None, gelu)
    codes = torch.zeros(2 * INNER, WIDTH, dtype=torch.uint8)
    for num_groups, group, of_byte in tried((1, WIDTH, codes), (WIDTH // 128, 128, codes), (1, WIDTH, codes.view(torch.int8))):
        matrix = (of_byte, torch.zeros(1, num_groups).expand(2 * INNER, -1), group, None)  # nothing is read
        for num_rows in tried(4, 1):
            triton_fp8_linear.few_rows_linear(x[:num_rows], *matrix, weight)
        for tile in tried(*triton_fp8_linear.TILE_ROWS):
            triton_fp8_linear.tile_linear(x, *matrix, tile, False, weight)
    packed, in_four_bits = codes[:, : WIDTH // 2], list[Int4Matrix | Nvfp4Matrix]()
    for num_groups, group, zeros in tried((1, WIDTH, None), (WIDTH // 128, 128, None), (WIDTH // 128, 128, codes)):
        in_four_bits.append(Int4Matrix(packed, torch.zeros(1, num_groups, dtype=dtype).expand(2 * INNER, -1), group, zeros))
    in_four_bits.append(Nvfp4Matrix(packed, codes[:, : WIDTH // 16], torch.zeros(2 * INNER)))
    for four_bits in in_four_bits:
        for num_rows in tried(4, 1):
            triton_four_bits_linear.few_rows_linear(x[:num_rows], four_bits, None, weight)
        for tile in tried(*triton_fp8_linear.TILE_ROWS):
            triton_four_bits_linear.tile_linear(x, four_bits, None, tile, False, weight)
    logits = torch.zeros(ROWS, VOCAB, dtype=dtype)
    wide, alternatives = logits.float(), (torch.zeros(ROWS, 20, dtype=torch.int32), torch.zeros(ROWS, 20))
    counts, edits = torch.zeros(ROWS, VOCAB, dtype=torch.int32), torch.zeros(triton_logits.EDIT_WORDS, dtype=torch.int32)
    penalties = torch.ones(triton_logits.PENALTIES, dtype=torch.float64)
    entry.sample(logits, (floats, floats, ints, floats, ints, ints), ints, ints)
    entry.widen(logits, 0, ints, ints, ints, wide, counts)
    entry.add_biases_and_count(wide, counts, edits, ints)
    entry.penalise_and_ban(wide, counts, edits, penalties, ints)
    entry.top_logprobs(logits, 0, ints, ints, ints, floats, *alternatives)
    entry.ranks(logits, ints, ints)
    triton_unpack.unpack(torch.zeros(64, dtype=torch.uint8), longs, FRAME_VALUES, x, ints[:1])

    regions = torch.zeros(triton_peers.MOST_RANKS, 2 << 20, dtype=torch.uint8)
    for kind, num_values in tried(*triton_peers.FORMS):
        triton_peers.sum_over_ranks(torch.zeros(num_values, dtype=kind), regions, longs[:1], 1, False)
    triton_checksum.partial_sums(longs.view(-1, 2), torch.zeros(len(longs) // 2, 1, 2, dtype=torch.int64))


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:2] and sys.argv[1].isdigit() else 90, "--unlisted" not in sys.argv)
