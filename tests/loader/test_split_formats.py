"""Shares of checkpoints whose matrices are quantised: what each device holds, how it arrives, and what cannot be divided."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.layers.weights import Weights
from engine.ops.ops import Fp8Matrix, Int4Matrix, Int8Matrix, Matrix, Mxfp4Matrix, Nvfp4Matrix
from engine.ops.reference import fp8_rows, int4_rows, nvfp4_rows
from loader.architectures.architecture import Cut, TensorGroup
from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError, UnsupportedModel
from loader.files.safetensors import DTYPE_BYTES, Header, TensorRef
from loader.formats import registry
from loader.formats.registry import held_format
from loader.formats.weight_format import Space, StoredTensor, WeightFormat
from loader.reading import range_plan
from loader.reading.range_plan import plan_reads, staged_spans
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import OpenCheckpoint, open_checkpoint, planned_reads, stream_weights
from loader.shapes.model_shape import DeviceShare, Division, ModelShape
from loader.sizes.layout import plain_groups_of_modules, share_weights_bytes, weight_layout, weights_bytes
from loader.sizes.slices import refusal, split
from tests.loader import compressed, fp8, gptq, int4, nvfp4
from tests.loader import test_mxfp4 as mxfp4
from tests.loader.checkpoints import CONFIG, cut_out, write_checkpoint
from tests.loader.test_slices import published

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "attention_bias": True,
    "dtype": "bfloat16",
}
LAYER = "model.layers.0."
ROWS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
COLUMNS = ("self_attn.o_proj", "mlp.down_proj")
JOINED = (ROWS[:3], COLUMNS[:1], ROWS[3:], COLUMNS[1:])
Quantise = Callable[[Path, Path], Any]


def _int4(**weights: Any) -> Quantise:
    return lambda source, target: int4.quantize(source, target, int4.compressed(weights))


def _by_input(config: dict[str, Any]) -> Quantise:
    return lambda source, target: gptq.quantize(source, target, config)


def _fp8(kind: str, plain: str = "-") -> Quantise:
    return lambda source, target: fp8.quantize(source, target, fp8.KINDS[kind], plain)


FORMATS: dict[str, Quantise] = {
    "int8": compressed.compress,
    "FP8 by matrix": _fp8("autofp8"),
    "FP8 by output": _fp8("compressed-channel"),
    "FP8 by output, a list": _fp8("quark-channel"),
    "FP8 by block": _fp8("fine-grained"),
    "FP8, plain groups": _fp8("fine-grained", plain="mlp."),
    "INT4": _int4(),
    "INT4 by 128 with zeros": _int4(group_size=128, symmetric=False),
    "INT4 by output with zeros": _int4(strategy="channel", group_size=None, symmetric=False),
    "AWQ": _by_input(gptq.awq(group_size=64)),
    "AWQ by output, symmetric": _by_input(gptq.awq(group_size=-1, zero_point=False)),
    "GPTQ": _by_input(gptq.gptq()),
    "GPTQ v2 with zeros": _by_input(gptq.gptq(group_size=64, sym=False, checkpoint_format="gptq_v2")),
    "GPTQ by output": _by_input(gptq.gptq(group_size=-1, sym=False)),
    "NVFP4": lambda source, target: nvfp4.quantize(source, target, nvfp4.modelopt()),
    "NVFP4, compressed-tensors": lambda source, target: nvfp4.quantize(source, target, nvfp4.compressed()),
}


def parse(config: dict[str, Any]) -> ModelShape:
    return parse_config(json.dumps(CONFIG | SIZES | config).encode())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drawn(tmp_path_factory.mktemp("plain"), {})


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drawn(tmp_path_factory.mktemp("fused"), {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"})


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "attention_bias": False}
    family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
    return write_drawn(tmp_path_factory.mktemp("mixture"), family | own)


def write_drawn(to: Path, config: dict[str, Any]) -> Path:
    """Writes a checkpoint whose outputs have different scales."""
    folder = write_checkpoint(to, CONFIG | SIZES | config, dtype="BF16")
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        drawn = torch.randn(tensor.shape, generator=generator) * torch.rand(len(tensor), generator=generator).view(
            -1, *[1] * (tensor.dim() - 1)
        )
        tensors[name] = drawn.to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


class Memory:
    """Stands for a model's weight range."""

    def __init__(self, num_bytes: int) -> None:
        self.mapped = mmap.mmap(-1, num_bytes)

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.mapped, dtype=dtype, count=math.prod(shape), offset=offset_bytes).view(shape)


class Loaded(NamedTuple):
    weights: Weights
    source: OpenCheckpoint
    num_bytes: int


def load(folder: Path, share: DeviceShare | None = None, quantize: str | None = None, slot_bytes: int = 8192) -> Loaded:
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, share=share)
        held_in = held_format(source.shape, quantize)
        memory: Any = Memory(weights_bytes(source.shape, "bfloat16", held_in))
        told: tuple[Any, Any] = (lambda *_: None, lambda: False)
        sink = HostSink(memoryview(memory.mapped))
        report = stream_weights(source, "bfloat16", sink, StagingRing(3, slot_bytes), *told, held_in)
    return Loaded(Weights(source.shape, "bfloat16", memory, held_in), source, report.num_bytes)


def values(matrix: Matrix) -> Tensor:
    """Returns the numbers that a matrix stands for [N, K] float32, its inputs in their own order."""
    if isinstance(matrix, Tensor):
        return matrix.float()
    if isinstance(matrix, Int8Matrix):
        return matrix.values.float() * matrix.scales.unsqueeze(1)
    if isinstance(matrix, Fp8Matrix):
        out = torch.empty(matrix.values.shape)
        fp8_rows(matrix.values, matrix.scales, matrix.group_inputs, out)
        return out
    out = torch.empty(matrix.packed.shape[0], 2 * matrix.packed.shape[1])
    if isinstance(matrix, Nvfp4Matrix):
        nvfp4_rows(matrix.packed, matrix.scales, matrix.factors, out)
        return out
    assert isinstance(matrix, Int4Matrix)
    int4_rows(matrix.packed, matrix.scales, matrix.zeros, matrix.group_inputs, out)
    if matrix.order is None:
        return out
    in_order = torch.empty_like(out)
    in_order[:, matrix.order.long()] = out
    return in_order


def parts_of(weights: Weights, names: tuple[str, ...]) -> list[Tensor]:
    """Returns the values of matrices that lie together, each for itself."""
    joined = values(weights.matrix(LAYER, names))
    each = [values(weights.matrix(LAYER, (name,))) for name in names]
    assert torch.equal(torch.cat(each), joined)
    return each


def part_of(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """What the rank has of a matrix by the definition."""
    if name in COLUMNS:
        return whole.chunk(size, dim=1)[rank]
    if name in ROWS[1:3]:
        return whole.unflatten(0, (2, 64)).repeat_interleave(size // 2, 0).chunk(size)[rank].flatten(0, 1)
    return whole.chunk(size)[rank]


def check_parts(folder: Path, size: int, quantize: str | None = None, columns_differ: bool = False) -> list[Loaded]:
    """Compares what all ranks hold with what one device does."""
    whole = load(folder, quantize=quantize)
    shares = [load(folder, DeviceShare(rank, Division(size)), quantize) for rank in range(size)]
    for names in JOINED:
        wholes = dict(zip(names, parts_of(whole.weights, names), strict=True))
        for rank, share in enumerate(shares):
            for name, own in zip(names, parts_of(share.weights, names), strict=True):
                wanted = part_of(name, wholes[name], rank, size)
                assert own.shape == wanted.shape
                assert wanted.abs().max() > 0.01
                if columns_differ and name in COLUMNS:
                    assert (own - wanted).abs().max() < 0.02 * wanted.abs().max()
                else:
                    assert torch.equal(own, wanted), (name, rank)
    for rank, share in enumerate(shares):
        for name in ("model.norm.weight", f"{LAYER}self_attn.q_proj.bias"):
            of_all = whole.weights.get(name)
            assert torch.equal(share.weights.get(name), of_all.chunk(size)[rank] if "bias" in name else of_all)
        assert (share.weights.find(f"{LAYER}self_attn.o_proj.bias") is None) == (rank > 0)
    held_in = held_format(whole.source.shape, quantize)
    largest = weights_bytes(shares[0].source.shape, "bfloat16", held_in)
    assert share_weights_bytes(whole.source.shape, "bfloat16", Division(size), held_in) == largest
    return [whole, *shares]


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in FORMATS), ("INT4", 4), ("AWQ", 4), ("FP8, plain groups", 4), ("NVFP4", 4)]
)
def test_parts_of_all_ranks_are_the_whole(plain: Path, tmp_path: Path, name: str, size: int) -> None:
    """Each of two ranks has one head of keys and values, half a block of FP8's, and two of four ranks have the same head."""
    if (name, size) == ("FP8, plain groups", 4):
        fp8.quantize(plain, tmp_path, fp8.KINDS["fine-grained"], plain="o_proj")
    else:
        FORMATS[name](plain, tmp_path)
    check_parts(tmp_path, size)


def test_outputs_of_gptq_in_an_order_are_divided(plain: Path, tmp_path: Path) -> None:
    """Where the matrices are plain whose inputs would be divided."""
    gptq.quantize(plain, tmp_path, gptq.gptq(desc_act=True), plain="down_proj")
    quantised, stored = load_file(tmp_path / "model.safetensors"), load_file(plain / "model.safetensors")
    name = f"{LAYER}self_attn.o_proj."
    kept = {one: tensor for one, tensor in quantised.items() if not one.startswith(name) or one.endswith("bias")}
    save_file(kept | {f"{name}weight": stored[f"{name}weight"]}, tmp_path / "model.safetensors")
    whole, *_ = check_parts(tmp_path, 2)
    joined = whole.weights.matrix(LAYER, ROWS[:3])
    assert isinstance(joined, Int4Matrix)
    assert joined.order is not None


def test_the_setting_quantises_shares(plain: Path) -> None:
    """Outputs have the scales that they have on one device; of the inputs of a share the scales are its own, which is finer."""
    whole, *shares = check_parts(plain, 2, "int8", columns_differ=True)
    given = load(plain).weights.matrix(LAYER, COLUMNS[:1])
    assert isinstance(given, Tensor)
    held = torch.cat([values(share.weights.matrix(LAYER, COLUMNS[:1])) for share in shares], dim=1)
    on_one = values(whole.weights.matrix(LAYER, COLUMNS[:1]))
    assert 0 < (held - given.float()).square().mean() < (on_one - given.float()).square().mean()


@pytest.mark.parametrize(
    ("name", "tensor", "part"),
    [
        ("INT4", "mlp.gate_proj.weight_packed", 0.5),
        ("INT4", "mlp.down_proj.weight_packed", 1.0),
        ("FP8 by block", "mlp.up_proj.weight", 0.5),
        ("FP8 by block", "mlp.up_proj.weight_scale_inv", 1.0),
        ("FP8 by block", "mlp.down_proj.weight", 1.0),
        ("NVFP4", "mlp.gate_proj.weight_scale", 0.5),
        ("AWQ", "mlp.gate_proj.qweight", 1.0),
        ("AWQ", "mlp.down_proj.qweight", 0.5),
        ("AWQ", "mlp.down_proj.scales", 0.5),
        ("GPTQ", "mlp.down_proj.g_idx", 0.5),
    ],
)
def test_what_is_read_for_a_share(plain: Path, tmp_path: Path, name: str, tensor: str, part: float) -> None:
    """Runs of stored rows are read alone, and of parts of rows whole rows; words of AWQ and GPTQ have inputs as their rows."""
    FORMATS[name](plain, tmp_path)
    with ExitStack() as stack:
        source = open_checkpoint(tmp_path, "", stack, share=DeviceShare(1, Division(2)))
        reads = planned_reads(source, "bfloat16", StagingRing(1, 64 << 10), held_format(source.shape, None))
        segments = [segment for read in reads for segment in read.segments if segment.tensor.name == LAYER + tensor]
    assert sum(segment.end - segment.begin for segment in segments) == part * segments[0].tensor.num_bytes


def test_words_of_a_share_are_read_straight_into_place(tmp_path: Path) -> None:
    """They begin as far from a block's boundary as in the file."""
    folder = write_checkpoint(tmp_path / "plain", CONFIG | SIZES | {"intermediate_size": 1024}, dtype="BF16", random_bytes=True)
    int4.quantize(folder, tmp_path / "int4", int4.compressed())
    with ExitStack() as stack:
        source = open_checkpoint(tmp_path / "int4", "", stack, share=DeviceShare(1, Division(2)))
        of_all = open_checkpoint(tmp_path / "int4", "", stack).shape
    assert split(of_all, 1, Division(2)) == source.shape
    tensors = {tensor.name: tensor for header in source.headers.values() for tensor in header.tensors}
    slots = {slot.name: slot for slot in weight_layout(source.shape, "bfloat16", held_format(source.shape, None))}
    tensor = tensors[f"{LAYER}mlp.gate_proj.weight_packed"]
    assert slots[tensor.name].offset_bytes % 4096 == (tensor.offset_bytes + tensor.num_bytes // 2) % 4096


BLOCKS = {"quantization_config": fp8.FINE_GRAINED}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "FP8's blocks": (
        BLOCKS | {"intermediate_size": 320},
        r"intermediate_size 320 in 2 parts: FP8 \(e4m3\) with one scale a block of 128 x 128: model.layers.0.mlp.down_proj.weight "
        "cannot be cut at 160 of 320, which is no multiple of 128",
    ),
    "FP8's blocks and heads": (
        BLOCKS | {"head_dim": 32},
        "num_attention_heads 4 with 32 inputs each in 2 parts: FP8 .*o_proj.weight cannot be cut at 64 of 128, which is no "
        "multiple of 128",
    ),
    "INT4's groups": (
        {"intermediate_size": 640, "quantization_config": int4.compressed({"group_size": 128})},
        "intermediate_size 640 in 2 parts: .*down_proj.weight has 320 inputs, no multiple of 128, which INT4 needs",
    ),
    "INT4's steps": (
        {"intermediate_size": 544, "quantization_config": int4.BY_OUTPUT},
        "intermediate_size 544 in 2 parts: .*down_proj.weight has 272 inputs, no multiple of 32, which INT4 needs",
    ),
    "AWQ's words": (
        {"head_dim": 4, "num_attention_heads": 64, "quantization_config": gptq.awq()},
        "num_key_value_heads 2 with 4 outputs each in 2 parts: AWQ .*k_proj.weight has 4 outputs, no multiple of 8, which",
    ),
    "GPTQ's order": (
        {"quantization_config": gptq.gptq(desc_act=True)},
        "num_attention_heads 4 with 64 inputs each in 2 parts: GPTQ with 4 bits: model.layers.0.self_attn.o_proj.weight has its "
        r"256 inputs in an order of its own \(desc_act\): not divided",
    ),
    "NVFP4's steps": (
        {"intermediate_size": 480, "quantization_config": nvfp4.modelopt()},
        "intermediate_size 480 in 2 parts: NVFP4 .*down_proj.weight has 240 inputs, no multiple of 32, which NVFP4 needs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_reason(name: str) -> None:
    config, said = REFUSED[name]
    shape = parse(config)
    with pytest.raises(UnsupportedModel, match=f"config.json: parallel: {said}"):
        split(shape, 0, Division(2))


def test_blocks_of_experts_are_cut_into_as_many_parts_as_there_are_devices_with_each() -> None:
    """gpt-oss's inner dimensions are halves of whole blocks, and no quarters."""
    shape = published("gpt-oss-120b")
    assert refusal(shape, Division(4, 2)) == ""
    for division in (Division(4), Division(8, 2)):
        assert refusal(shape, division).startswith("intermediate_size 2880 in 4 parts: mxfp4 experts of gpt-oss: ")


def test_plain_groups_are_not_refused() -> None:
    shape = parse({"quantization_config": gptq.gptq(desc_act=True)})
    plain = plain_groups_of_modules(shape, lambda module: module.endswith(COLUMNS))
    assert refusal(replace(shape, plain_groups=plain), Division(2)) == ""


# any ranges of a matrix [outputs, inputs], or of several [experts, outputs, inputs]
MATRIX, STACK = (512, 768), (6, 8, 128)
CUTS = {
    "outputs": (MATRIX, Cut(0, ((0, 64), (72, 200), (480, 512)), 512)),
    "inputs": (MATRIX, Cut(1, ((128, 256), (384, 768)), 768)),
    "experts": (STACK, Cut(0, ((1, 2), (4, 6)), 6)),
    "outputs of experts": (STACK, Cut(1, ((2, 4), (6, 8)), 8)),
    "inputs of experts": (STACK, Cut(2, ((32, 64), (96, 128)), 128)),
    "outputs of some experts": (STACK, Cut(1, ((2, 4), (6, 8)), 8, Cut(0, ((1, 2), (4, 6)), 6))),
    "inputs of some experts": (STACK, Cut(2, ((32, 64),), 128, Cut(0, ((0, 2), (3, 4)), 6))),
}
OF_GROUPS = [
    *((name, cut) for cut in ("outputs", "inputs") for name in ("fp8 by matrix", "fp8 by output", "fp8 by block", "nvfp4")),
    *((name, cut) for cut in ("outputs", "inputs") for name in ("compressed-tensors int8", "int4 by 64, zero points")),
    *((name, cut) for cut in ("outputs", "inputs") for name in ("awq by 32", "gptq by 128, zero points")),
    *(("gptq by output, zero points", cut) for cut in ("outputs", "inputs")),
    *(("mxfp4", cut) for cut in CUTS if "experts" in cut),
]


def drawn(tensor: StoredTensor, group_inputs: int) -> tuple[str, bytes]:
    """Returns dtype and bytes of a stored tensor."""
    generator, dtype = torch.Generator().manual_seed(len(tensor.name)), tensor.dtypes[0]
    if tensor.name.endswith("g_idx"):
        return dtype, (torch.arange(*tensor.shape).int() // group_inputs).numpy().tobytes()
    if dtype == "F32":
        return dtype, torch.randint(1, 100, tensor.shape, generator=generator).float().numpy().tobytes()
    codes = torch.randint(0, 0x78, (math.prod(tensor.shape) * DTYPE_BYTES[dtype],), generator=generator)  # none is NaN
    return dtype, codes.to(torch.uint8).numpy().tobytes()


def held_of(held_in: WeightFormat, group: TensorGroup, stored: Sequence[StoredTensor]) -> dict[str, Tensor]:
    """Returns the bytes that are held of each tensor of a group, [outputs, bytes] or [experts, outputs, bytes]."""
    slots, end = held_in.place(group, Space(64, 2, -1, 0, "bfloat16"))
    group_inputs = slots[0].group_inputs
    refs, data = [], b"-" * 1004
    for tensor in stored:
        dtype, own = drawn(tensor, group_inputs if group_inputs in (32, 64, 128) else MATRIX[1])
        refs.append(TensorRef("f", tensor.name, dtype, tensor.shape, len(data), len(own)))
        data += own
    memory = bytearray(end + 64)
    sink = HostSink(memoryview(memory))
    filled = []
    for read in plan_reads({"f": Header(tuple(refs), b"", len(data))}, slots, "bfloat16", 16 << 10):
        filled += read.places
        for span in staged_spans(read, ()):
            sink.store(span, memoryview(bytearray(data[span.begin : span.end])))
    held = [slot for slot in slots if slot.num_bytes]
    assert sum(last - first for first, last in filled) == sum(slot.num_bytes for slot in held)
    assert not any(memory[:64])
    assert not any(memory[-64:])
    rows = group.tensors[0][1][:-1]
    return {
        slot.name: torch.frombuffer(memory, dtype=torch.uint8, count=slot.num_bytes, offset=slot.offset_bytes).view(*rows, -1)
        for slot in held
    }


@pytest.mark.parametrize(("name", "cut"), OF_GROUPS)
@pytest.mark.parametrize("min_run_bytes", [1, 256 << 10])
def test_any_ranges_between_groups_and_words_are_parts(
    monkeypatch: pytest.MonkeyPatch, name: str, cut: str, min_run_bytes: int
) -> None:
    """Also where long runs of columns are read alone."""
    monkeypatch.setattr(range_plan, "MIN_RUN_BYTES", min_run_bytes)
    dims, own = CUTS[cut]
    held_in = registry.FORMATS[name]
    group = TensorGroup((("m.weight", dims),), may_be_quantized=True)
    part = group._replace(tensors=(("m.weight", own.part_of(dims)),), cuts=(own,))
    wholes, parts = (held_of(held_in, one, held_in.stored(group)) for one in (group, part))
    assert wholes.keys() == parts.keys()
    for tensor, whole in wholes.items():
        if own.axis < whole.dim() - 1:
            wanted = cut_out(whole, own)
        elif dims == MATRIX and whole.shape[-1] <= 4:  # one scale, whatever part of the inputs is taken
            wanted = whole
        else:
            places = [(begin * whole.shape[-1] // own.whole, end * whole.shape[-1] // own.whole) for begin, end in own.ranges]
            wanted = torch.cat([cut_out(whole, own.experts)[..., begin:end] for begin, end in places], -1)
        assert torch.equal(parts[tensor], wanted), tensor


@pytest.mark.parametrize(
    ("name", "cut", "said"),
    [
        ("mxfp4", Cut(2, ((0, 48),), 128), "m.weight_blocks: cannot be cut at 48 of 128, which is no multiple of 32"),
        ("fp8 by block", Cut(1, ((0, 192),), 768), "m.weight: cannot be cut at 192 of 768, which is no multiple of 128"),
        ("awq by 32", Cut(0, ((4, 12),), 512), "m.qweight: cannot be cut at 4 of 512, which is no multiple of 8"),
        ("gptq by 64", Cut(1, ((32, 96),), 768), "m.scales: cannot be cut at 32 of 768, which is no multiple of 64"),
        ("nvfp4", Cut(1, ((8, 40),), 768), "m.weight_scale: cannot be cut at 8 of 768, which is no multiple of 16"),
    ],
)
def test_a_cut_within_a_group_is_refused(name: str, cut: Cut, said: str) -> None:
    dims = STACK if name == "mxfp4" else MATRIX
    group = TensorGroup((("m.weight", cut.part_of(dims)),), may_be_quantized=True, cuts=(cut,))
    with pytest.raises(CheckpointError, match=said):
        registry.FORMATS[name].place(group, Space(0, 2, -1, 0, "bfloat16"))


# one of each way in which numbers and scales are cut
TELLING = ("FP8 by block", "INT4 by 128 with zeros", "AWQ", "NVFP4")


@pytest.mark.parametrize("name", TELLING)
def test_each_matrix_of_a_fused_tensor_is_cut(tmp_path: Path, fused: Path, name: str) -> None:
    FORMATS[name](fused, tmp_path / "q")
    held = load(tmp_path / "q")
    shares = [load(tmp_path / "q", DeviceShare(rank, Division(2))) for rank in range(2)]

    def parts(name: str) -> tuple[Tensor, list[Tensor]]:
        whole, *own = (values(one.weights.matrix(LAYER, (name,))) for one in (held, *shares))
        return whole, own

    for name_of, lengths in (("self_attn.qkv_proj", [256, 128, 128]), ("mlp.gate_up_proj", [512, 512])):
        whole, own = parts(name_of)
        matrices = whole.split(lengths)
        for rank in range(2):
            assert torch.equal(own[rank], torch.cat([matrix.chunk(2)[rank] for matrix in matrices]))
    for name_of in COLUMNS:
        whole, own = parts(name_of)
        assert torch.equal(torch.cat(own, 1), whole)


@pytest.mark.parametrize("expert_parts", [1, 2])
@pytest.mark.parametrize("name", [*TELLING, "int8"])
def test_a_share_has_whole_experts_or_a_part_of_each(tmp_path: Path, mixture: Path, name: str, expert_parts: int) -> None:
    FORMATS[name](mixture, tmp_path / "q")
    held = load(tmp_path / "q")
    for rank in range(2):
        share = load(tmp_path / "q", DeviceShare(rank, Division(2, expert_parts)))
        own = range(4) if expert_parts == 1 else range(2 * rank, 2 * rank + 2)
        for expert in range(4):
            for part, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
                matrix = (f"mlp.experts.{expert}.{part}",)
                if expert not in own:
                    with pytest.raises(KeyError):
                        share.weights.matrix(LAYER, matrix)
                    continue
                whole = values(held.weights.matrix(LAYER, matrix))
                expected = whole if expert_parts > 1 else whole.chunk(2, axis)[rank]
                assert torch.equal(values(share.weights.matrix(LAYER, matrix)), expected)


@pytest.mark.parametrize("name", [*TELLING, "int8"])
def test_a_share_may_have_copies_of_experts(tmp_path: Path, mixture: Path, name: str) -> None:
    """They lie among its own in the order of their numbers, as the product of all experts reads them."""
    FORMATS[name](mixture, tmp_path / "q")
    held, copies = load(tmp_path / "q"), (((2,), (0,)),)
    for rank in range(2):
        share = load(tmp_path / "q", DeviceShare(rank, Division(2, 2, copies=copies)))
        experts = sorted({2 * rank, 2 * rank + 1, *copies[0][rank]})
        for kinds in (("gate_proj", "up_proj"), ("down_proj",)):
            names = [f"mlp.experts.{expert}.{kind}" for expert in experts for kind in kinds]
            wanted = torch.cat([values(held.weights.matrix(LAYER, (name,))) for name in names])
            assert torch.equal(values(share.weights.matrix(LAYER, tuple(names))), wanted)


def test_the_setting_quantises_whole_experts_as_on_one_device(mixture: Path) -> None:
    """Also those that are copies of another share's."""
    held, copies = load(mixture, quantize="int8"), (((2,), (0,)),)
    for rank in range(2):
        share = load(mixture, DeviceShare(rank, Division(2, 2, copies=copies)), "int8")
        experts = sorted({2 * rank, 2 * rank + 1, *copies[0][rank]})
        for kinds in (("gate_proj", "up_proj"), ("down_proj",)):
            names = [f"mlp.experts.{expert}.{kind}" for expert in experts for kind in kinds]
            own = share.weights.matrix(LAYER, tuple(names))
            assert isinstance(own, Int8Matrix)
            wanted = torch.cat([values(held.weights.matrix(LAYER, (name,))) for name in names])
            assert torch.equal(values(own), wanted)


def test_stacks_in_mxfp4_have_copies_of_experts(tmp_path: Path) -> None:
    mxfp4.write(tmp_path / "m", mxfp4.tensors())
    held, num_experts = load(tmp_path / "m", slot_bytes=1 << 20), mxfp4.CONFIG_OF["num_local_experts"]
    half = num_experts // 2
    copies = (((half,), (0,)), ((num_experts - 1,), (half - 1,)))
    for rank in range(2):
        share = load(tmp_path / "m", DeviceShare(rank, Division(2, 2, copies=copies)), slot_bytes=1 << 20)
        for layer in range(2):
            experts = sorted({*range(rank * half, (rank + 1) * half), *copies[layer][rank]})
            for part in ("gate_up_proj", "down_proj"):
                whole, own = (one.weights.stack(f"model.layers.{layer}.mlp.experts.{part}") for one in (held, share))
                assert isinstance(whole, Mxfp4Matrix)
                assert isinstance(own, Mxfp4Matrix)
                assert torch.equal(own.blocks, whole.blocks[experts])
                assert torch.equal(own.scales, whole.scales[experts])


@pytest.mark.parametrize("expert_parts", [1, 2])
def test_stacks_of_experts_in_mxfp4_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expert_parts: int) -> None:
    monkeypatch.setitem(mxfp4.CONFIG_OF, "intermediate_size", 192)
    mxfp4.write(tmp_path / "m", mxfp4.tensors())
    held = load(tmp_path / "m", slot_bytes=1 << 20)
    for rank in range(2):
        share = load(tmp_path / "m", DeviceShare(rank, Division(2, expert_parts)), slot_bytes=1 << 20)
        for layer in range(2):
            for part, inner_axis in (("gate_up_proj", 1), ("down_proj", 2)):
                whole, own = (one.weights.stack(f"model.layers.{layer}.mlp.experts.{part}") for one in (held, share))
                assert isinstance(whole, Mxfp4Matrix)
                assert isinstance(own, Mxfp4Matrix)
                axis = 0 if expert_parts > 1 else inner_axis
                assert torch.equal(own.blocks, whole.blocks.chunk(2, axis)[rank])
                assert torch.equal(own.scales, whole.scales.chunk(2, axis)[rank])
