"""Shares of models that are split over devices: what each holds, how it arrives, and which models are not split."""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.layers.weights import Weights
from loader.architectures.architecture import Cut, Dims
from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError, UnsupportedModel
from loader.files.safetensors import Header, TensorRef
from loader.formats.int8 import INT8
from loader.formats.plain import PLAIN
from loader.formats.weight_format import WeightSlot
from loader.reading import file_reader, range_plan, sinks
from loader.reading.range_plan import joined, plan_reads, staged_spans
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import OpenCheckpoint, ReadReport, open_checkpoint, planned_reads, stream_weights
from loader.shapes.kv_layout import kv_bytes_per_token, kv_groups, state_bytes
from loader.shapes.model_shape import LAST_TOKEN, DeviceShare, Division, EagleShape, ExpertCopies, HeadShape, ModelShape
from loader.sizes.capacity import Devices, Settings, share_of
from loader.sizes.layout import (
    block_offsets,
    layout_id,
    parameter_shapes,
    share_weights_bytes,
    stored_tensors,
    weight_layout,
    weights_bytes,
)
from loader.sizes.slices import split, whole
from loader.sizes.work_space import work_space_bytes
from tests.engine.model_bench import GEMMA4_ROPE
from tests.loader import test_predictor as predictors
from tests.loader.checkpoints import CONFIG, cut_out, tensors_for, write_checkpoint

STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
LATENTS = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": CONFIG | BIASES,
    "one KV head": CONFIG | {"num_key_value_heads": 1, "head_dim": 6},
    "qwen3": CONFIG | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4, "head_dim": 8},
    "gemma3": CONFIG | {"architectures": ["Gemma3ForCausalLM"], "hidden_act": "absent", "head_dim": 8, "sliding_window": 16},
    "phi": CONFIG | {"architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new", "num_key_value_heads": 4},
    "cohere": CONFIG | {"architectures": ["CohereForCausalLM"]},
    "latents": CONFIG | LATENTS | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 12, "attention_bias": True},
    "latents, one matrix of queries": CONFIG | LATENTS | {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None},
    "wrapper": {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": CONFIG | {"model_type": "mistral"}},
    "phi3": CONFIG | {"architectures": ["Phi3ForCausalLM"], "head_dim": 6},
    "phi3 with one KV head": CONFIG | {"architectures": ["Phi3ForCausalLM"], "num_key_value_heads": 1},
    "olmo2": CONFIG | {"architectures": ["Olmo2ForCausalLM"]},
    "glm4": CONFIG | {"architectures": ["Glm4ForCausalLM"], "attention_bias": True, "head_dim": 8},
    "gemma4": CONFIG
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "head_dim": 6,
        "global_head_dim": 8,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 40,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": GEMMA4_ROPE,
    },
    "qwen3.5": CONFIG
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 2,
    },
}
BY_ROWS = (
    "q_proj",
    "q_b_proj",
    "kv_b_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "fc1",
    "lm_head",
)
BY_ROWS += ("embed_tokens", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d")
NUMBERS_OF_HEADS = ("A_log", "dt_bias")
BY_COLUMNS = ("o_proj", "dense", "down_proj", "fc2", "out_proj")
# Matrices of 64 KiB and more, whose shares are, too.
LARGE = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "num_key_value_heads": 4, "vocab_size": 1024, "dtype": "bfloat16"}


def config_of(name: str) -> dict[str, Any]:
    return {key: value for key, value in FAMILIES[name].items() if value != "absent"}


def published(name: str) -> ModelShape:
    return parse_config((Path(__file__).parents[1] / "published" / f"{name}.json").read_bytes())


def parse(config: dict[str, Any]) -> ModelShape:
    return parse_config(json.dumps(config).encode())


def heads_of(name: str, shape: ModelShape) -> HeadShape:
    return shape.heads_of(int(name.split("layers.")[1].split(".")[0]))


def matrices_of(name: str, tensor: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """The matrices that a stored tensor holds one after the other."""
    module = name.split(".")[-2]
    if module == "qkv_proj":
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return [*tensor.split([queries, keys, keys])]
    if module == "gate_up_proj":
        return [*tensor.chunk(2)]
    if module in ("in_proj_qkv", "conv1d") and shape.delta is not None:
        keys, values = 6 * shape.delta.num_key_heads, 2 * shape.delta.num_value_heads
        return [*tensor.split([keys, keys, values])]
    return [tensor]


def repeated(tensor: torch.Tensor, heads: HeadShape, size: int) -> torch.Tensor:
    """Keys or values with each head as often as ranks hold it."""
    of_heads = tensor.unflatten(0, (heads.num_kv_heads, heads.head_dim))
    return of_heads.repeat_interleave(max(1, size // heads.num_kv_heads), 0).flatten(0, 1)


def part_of(name: str, tensor: torch.Tensor, shape: ModelShape, rank: int, size: int) -> torch.Tensor | None:
    """What the rank holds of a stored tensor; None: nothing. shape: of the whole model."""
    module, kind = name.split(".")[-2:]
    if module in BY_ROWS or kind in NUMBERS_OF_HEADS:
        matrices = matrices_of(name, tensor, shape)
        if module in ("k_proj", "v_proj", "qkv_proj"):
            matrices = [*matrices[:-2], *(repeated(one, heads_of(name, shape), size) for one in matrices[-2:])]
        return torch.cat([matrix.chunk(size)[rank] for matrix in matrices])
    if module in ("q_norm", "k_norm") and shape.whole_width_norms:
        heads = heads_of(name, shape)
        return (repeated(tensor, heads, size) if module == "k_norm" else tensor).chunk(size)[rank]
    if module not in BY_COLUMNS:
        return tensor
    if kind == "bias":
        return tensor if rank == 0 else None
    return tensor.chunk(size, dim=1)[rank]


def load(
    folder: Path,
    dtype: str,
    rank: int,
    size: int,
    slot_bytes: int = 8192,
    expert_parts: int = 1,
    num_stages: int = 1,
    copies: ExpertCopies = (),
) -> tuple[dict[str, torch.Tensor], OpenCheckpoint, ReadReport]:
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, share=DeviceShare(rank, Division(size, expert_parts, num_stages, copies)))
        memory = mmap.mmap(-1, weights_bytes(source.shape, dtype))
        told: list[tuple[int, int]] = []
        ring = StagingRing(3, slot_bytes)
        sink = sinks.HostSink(memoryview(memory))
        report = stream_weights(source, dtype, sink, ring, lambda *step: told.append(step), lambda: False)
        assert told[-1] == (report.num_bytes, report.num_bytes)
        held = {}
        for slot in weight_layout(source.shape, dtype):
            found = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=math.prod(slot.shape), offset=slot.offset_bytes)
            held[slot.name] = found.view(slot.shape)
    return held, source, report


def check(folder: Path, config: dict[str, Any], stored: str, dtype: str, size: int, slot_bytes: int = 8192) -> None:
    """Loads each rank's share, and compares it with parts of the stored tensors."""
    shape, tensors = parse(config), tensors_for(config, stored, random_bytes=True)
    for rank in range(size):
        held, source, report = load(folder, dtype, rank, size, slot_bytes)
        wanted, read = dict[str, torch.Tensor](), 0
        for name, (_, dims, data) in tensors.items():
            tensor = torch.frombuffer(bytearray(data), dtype=STORED[stored]).view(dims)
            part = part_of(name, tensor, shape, rank, size)
            if part is not None:
                wanted[name] = part.to(getattr(torch, dtype))
                of_columns = name.split(".")[-2] in BY_COLUMNS
                read += (tensor if of_columns else part).nbytes
        assert held.keys() == wanted.keys() == parameter_shapes(source.shape).keys()
        for name, part in wanted.items():
            assert torch.equal(held[name], part), (rank, name)
        assert report.num_bytes == read


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_rank_holds_its_part_of_every_tensor(tmp_path: Path, name: str, size: int) -> None:
    config = config_of(name)
    check(write_checkpoint(tmp_path / "m", config, random_bytes=True), config, "F32", "float32", size)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("stored", "dtype"), [("BF16", "bfloat16"), ("BF16", "float32"), ("F32", "bfloat16"), ("F16", "bfloat16")])
def test_parts_arrive_in_the_engine_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, stored: str, dtype: str
) -> None:
    """Also where fewer numbers than a row are converted at a time."""
    monkeypatch.setattr(sinks, "CONVERT_ELEMENTS", 5)
    config = CONFIG | BIASES
    folder = write_checkpoint(tmp_path / "m", config, shards, stored, random_bytes=True)
    check(folder, config, stored, dtype, 2)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
@pytest.mark.parametrize("cached", [True, False])
def test_rows_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, cached: bool) -> None:
    config = LARGE | {"architectures": [architecture]}
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: cached)
    folder = write_checkpoint(tmp_path / "m", config, dtype="BF16", random_bytes=True, padding=8)
    check(folder, config, "BF16", "bfloat16", 2, slot_bytes=256 << 10)
    _, source, report = load(folder, "bfloat16", 1, 2, slot_bytes=256 << 10)
    by_columns = [slot for slot in weight_layout(source.shape, "bfloat16") if slot.cut is not None and slot.cut.axis]
    columns = sum(2 * math.prod(slot.stored_shape) for slot in by_columns)
    assert columns < report.staged_bytes < columns + (report.num_bytes - columns) / 4
    assert report.direct_bytes == (0 if cached or report.refused else report.num_bytes)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
def test_little_more_than_the_share_is_read(tmp_path: Path, architecture: str) -> None:
    """A matrix of which columns are kept has one segment for each read, not for each row. Nothing is read of what lies between the
    queries, keys and values of a share."""
    config = LARGE | {"architectures": [architecture]}
    folder = write_checkpoint(tmp_path / "m", config, dtype="BF16", random_bytes=True)
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, share=DeviceShare(1, Division(2)))
        reads = planned_reads(source, "bfloat16", StagingRing(1, 256 << 10))
        everything = planned_reads(open_checkpoint(folder, "", stack), "bfloat16", StagingRing(1, 256 << 10))
    of_rows = sum(read.end - read.begin for read in reads)
    assert of_rows <= sum(read.num_bytes for read in reads) + 2 * 4096 * len(reads)
    assert of_rows < 0.8 * sum(read.end - read.begin for read in everything)
    segments = Counter(segment.tensor.name for read in reads for segment in read.segments)
    assert max(segments.values()) <= 4


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_shares_cover_each_tensor_once(name: str, size: int) -> None:
    """All but what each rank has whole, and KV heads that several ranks share; rows of the embedding and of the head, too."""
    shape = parse(config_of(name))
    covered = {tensor: np.zeros(dims, int) for tensor, dims in parameter_shapes(shape).items()}
    for rank in range(size):
        for slot in weight_layout(split(shape, rank, Division(size)), "float32"):
            assert slot.stored_shape == covered[slot.name].shape
            cut = slot.cut or Cut(0, ((0, slot.shape[0]),), slot.shape[0])
            for begin, end in cut.ranges:
                covered[slot.name][(slice(None),) * cut.axis + (slice(begin, end),)] += 1
    for tensor, times in covered.items():
        module, kind = tensor.split(".")[-2:]
        of_all_heads = module in ("q_norm", "k_norm") and shape.whole_width_norms
        once = module in BY_ROWS + BY_COLUMNS or kind in NUMBERS_OF_HEADS or of_all_heads
        counted = torch.from_numpy(times)
        of_keys = ("k_proj", "v_proj", "qkv_proj", "k_norm" if of_all_heads else "")
        keys = [*matrices_of(tensor, counted, shape)[-2:]] if module in of_keys else []
        for matrix in keys:
            matrix //= max(1, size // heads_of(tensor, shape).num_kv_heads)
        assert (counted == (1 if once else size)).all(), (tensor, kind)


@pytest.mark.parametrize(
    ("dims", "cut"),
    [
        ((40, 6), Cut(0, ((3, 9), (20, 24), (24, 25)), 40)),
        ((40, 6), Cut(1, ((0, 2), (3, 4)), 6)),
        ((7, 40, 6), Cut(0, ((1, 2), (4, 7)), 7)),
        ((7, 40, 6), Cut(1, ((5, 10), (25, 30)), 40)),
        ((7, 40, 6), Cut(2, ((4, 6),), 6)),
        ((3, 5, 4, 7), Cut(2, ((1, 2), (3, 4)), 4)),
        ((90,), Cut(0, ((10, 30), (40, 60)), 90)),
        ((4, 6000, 4), Cut(1, ((1000, 2500), (4000, 5500)), 6000)),
        ((6000, 4), Cut(0, ((1000, 1001), (4000, 5500)), 6000)),
        ((7, 40, 6), Cut(1, ((5, 10), (25, 30)), 40, Cut(0, ((1, 2), (4, 7)), 7))),
        ((7, 40, 6), Cut(2, ((4, 6),), 6, Cut(0, ((0, 1), (3, 4)), 7))),
    ],
)
@pytest.mark.parametrize(("stored", "dtype"), [("BF16", "bfloat16"), ("F32", "bfloat16")])
@pytest.mark.parametrize("min_run_bytes", [1, 256 << 10])
def test_any_ranges_of_any_axis_are_parts(
    monkeypatch: pytest.MonkeyPatch, dims: Dims, cut: Cut, stored: str, dtype: str, min_run_bytes: int
) -> None:
    """What lies between long runs, and between rows, is not read."""
    monkeypatch.setattr(range_plan, "MIN_RUN_BYTES", min_run_bytes)
    whole = torch.randn(dims, generator=torch.Generator().manual_seed(4)).to(STORED[stored])
    part = cut_out(whole, cut)
    assert cut.part_of(dims) == part.shape
    slot = WeightSlot("t", cut.part_of(dims), 64, 2 * part.numel(), cut=cut)
    assert slot.stored_shape == dims
    data = b"-" * 1004 + whole.view(torch.uint8).numpy().tobytes()
    header = Header((TensorRef("f", "t", stored, dims, 1004, whole.nbytes),), b"", len(data))
    reads = plan_reads({"f": header}, [slot], dtype, 64 << 10)
    memory = bytearray(64 + slot.num_bytes + 64)
    sink = sinks.HostSink(memoryview(memory))
    filled = sorted(place for read in reads for place in read.places)
    assert joined(filled) == [(64, 64 + slot.num_bytes)]
    assert sum(end - begin for begin, end in filled) == slot.num_bytes
    for read in reads:
        assert read.end - read.begin <= 64 << 10
        for span in staged_spans(read, ()):
            sink.store(span, memoryview(bytearray(data[span.begin : span.end])))
    held = torch.frombuffer(memory, dtype=torch.bfloat16, count=part.numel(), offset=64).view(part.shape)
    assert torch.equal(held, part.to(torch.bfloat16))
    assert not any(memory[:64])
    assert not any(memory[-64:])
    rows = whole if cut.experts is None else cut_out(whole, cut.experts)  # whose runs of columns may be too short to be read alone
    if cut.axis == 0 or whole[0].nbytes > 60 << 10 or min_run_bytes == 1:
        num_runs = math.prod(rows.shape[: cut.axis]) * len(cut.ranges)
        assert sum(read.num_bytes for read in reads) == part.nbytes
        assert sum(read.end - read.begin for read in reads) <= part.nbytes + 2 * 4096 * max(num_runs, len(reads))
    else:
        assert sum(read.num_bytes for read in reads) == rows.nbytes


class Memory:
    """Stands for a model's weight range, filled with its bytes' own numbers."""

    def __init__(self, num_bytes: int) -> None:
        self._all = torch.arange(num_bytes // 4, dtype=torch.float32).view(torch.uint8)

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._all[offset_bytes : offset_bytes + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


@pytest.mark.parametrize("tied", [True, False])
def test_views_are_of_the_share(tied: bool) -> None:
    shape = parse(CONFIG | {"tie_word_embeddings": tied, "attention_bias": True})
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    for rank in range(4):
        own = split(shape, rank, Division(4))
        memory: Any = Memory(weights_bytes(own, "float32"))
        weights = Weights(own, "float32", memory)
        layer, parts = "model.layers.1.", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        fused = weights.matrix(layer, parts)
        assert isinstance(fused, torch.Tensor)
        assert torch.equal(fused, torch.cat([weights.get(f"{layer}{part}.weight") for part in parts]))
        assert fused.shape == (4 + 4 + 4, 16)
        assert weights.fused(layer, parts, ".bias").shape == (12,)
        assert weights.get(f"{layer}self_attn.o_proj.weight").shape == (16, 4)
        assert (weights.find(f"{layer}self_attn.o_proj.bias") is None) == (rank > 0)
        assert weights.get(f"{layer}mlp.down_proj.weight").shape == (16, 6)
        assert weights.table(name).shape == weights.table("model.embed_tokens.weight").shape == (8, 16)
    whole_memory: Any = Memory(weights_bytes(shape, "float32"))
    assert Weights(shape, "float32", whole_memory).table(name).shape == (32, 16)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_whole_follows_from_a_share(name: str, size: int) -> None:
    shape = parse(config_of(name))
    assert [whole(split(shape, rank, Division(size))) for rank in range(size)] == [shape] * size


def test_a_share_has_a_layout_of_its_own() -> None:
    shape = parse(CONFIG | BIASES)
    shares = [split(shape, rank, Division(2)) for rank in range(2)]
    assert whole(shape) == shape
    assert len({layout_id(one, "float32") for one in (shape, *shares)}) == 3
    assert stored_tensors(shares[1]) == stored_tensors(shape)
    sizes = [weights_bytes(share, "float32") for share in shares]
    assert sizes[0] > sizes[1]  # biases of what is added up
    assert share_weights_bytes(shape, "float32", Division(2)) == sizes[0] < weights_bytes(shape, "float32")


def test_block_offsets_of_a_share_follow_from_those_of_the_model(tmp_path: Path) -> None:
    """So the daemon, which does not read headers again, counts the bytes that the engine maps."""
    folder = write_checkpoint(tmp_path / "m", LARGE | {"hidden_size": 248, "head_dim": 62}, dtype="BF16", padding=8)
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        share = open_checkpoint(folder, "", stack, share=DeviceShare(1, Division(2))).shape
        assert open_checkpoint(folder, "", stack, in_place=False, share=DeviceShare(1, Division(2))).shape.block_offsets == ()
    tensors = {tensor.name: tensor for header in source.headers.values() for tensor in header.tensors}
    assert share == split(source.shape, 1, Division(2))
    assert share.block_offsets == block_offsets(share, tensors.values())
    at = {slot.name: slot.offset_bytes for slot in weight_layout(share, "bfloat16")}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.gate_proj.weight"
        assert at[name] % 4096 == (tensors[name].offset_bytes + tensors[name].num_bytes // 2) % 4096
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            assert at[f"model.layers.{layer}.{part}.weight"] % 64 == 0


def test_kv_and_work_space_are_those_of_the_share() -> None:
    shape = parse(CONFIG | {"num_key_value_heads": 4, "vocab_size": 32000, "intermediate_size": 4096})
    two, four = split(shape, 0, Division(2)), split(shape, 1, Division(4))
    assert [kv_bytes_per_token(one, "bfloat16") for one in (shape, two, four)] == [128, 64, 32]
    assert [kv_groups(one, "bfloat16", 16)[0].block_bytes for one in (shape, two, four)] == [2048, 1024, 512]
    assert kv_bytes_per_token(split(parse(CONFIG), 3, Division(4)), "bfloat16") == 32  # of a KV head that two ranks have
    gathered = replace(two, intermediate_size=shape.intermediate_size, num_heads=4, num_kv_heads=4)
    assert work_space_bytes(gathered, "bfloat16", 16, 64) > work_space_bytes(shape, "bfloat16", 16, 64)  # the share's logits, too
    wide = replace(shape, vocab_size=64)
    assert work_space_bytes(split(wide, 0, Division(2)), "bfloat16", 512, 8) < work_space_bytes(wide, "bfloat16", 512, 8)


def test_kinds_of_heads_are_divided_or_repeated_each_by_itself() -> None:
    shape = published("gemma-4-31b")
    assert [(heads.num_kv_heads, heads.head_dim) for heads in shape.kinds_of_heads] == [(4, 512), (16, 256)]
    share = split(shape, 5, Division(8))
    assert share.num_heads == shape.num_heads // 8
    assert [(heads.num_kv_heads, heads.head_dim) for heads in share.kinds_of_heads] == [(1, 512), (2, 256)]
    of_whole, of_share = (kv_groups(one, "bfloat16", 16) for one in (shape, share))
    assert [one.block_bytes // own.block_bytes for one, own in zip(of_whole, of_share, strict=True)] == [4, 8]
    assert whole(share) == replace(shape, block_offsets=())
    e2b = published("gemma-4-e2b")
    half = split(e2b, 1, Division(2))
    assert (half.inner_size_of(0), half.inner_size_of(34)) == (e2b.inner_size_of(0) // 2, e2b.inner_size_of(34) // 2)
    assert work_space_bytes(e2b, "bfloat16", 512, 8) / 2 < work_space_bytes(half, "bfloat16", 512, 8)  # inputs of layers are whole
    assert work_space_bytes(half, "bfloat16", 512, 8) < work_space_bytes(e2b, "bfloat16", 512, 8)


def test_states_are_of_the_share() -> None:
    shape = parse(config_of("qwen3.5"))
    share = split(shape, 0, Division(4))
    assert state_bytes(shape) == 4 * state_bytes(share) == 4 * (8 * 6 * 2 + 3 * (2 * 4 * 6 + 8 * 2))
    assert [group.kind for group in kv_groups(share, "float32", 16)] == ["full", "state"]
    assert kv_groups(share, "float32", 16)[1].block_bytes == state_bytes(share)


@pytest.mark.parametrize("name", ["latents", "latents, one matrix of queries"])
def test_latents_are_kept_whole_by_each_rank(name: str) -> None:
    shape = parse(FAMILIES[name] | {"vocab_size": 64, "max_position_embeddings": 4096})
    shares = [split(shape, rank, Division(4)) for rank in range(4)]
    assert [whole(share) for share in shares] == [shape] * 4
    assert {(share.num_heads, share.num_kv_heads, share.head_dim) for share in shares} == {(1, 1, 10)}
    assert {kv_bytes_per_token(one, "bfloat16") for one in (shape, *shares)} == {2 * (20 + 4) * 2}
    assert len({kv_groups(one, "bfloat16", 16) for one in (shape, *shares)}) == 1
    own, every = (work_space_bytes(replace(one, experts=None), "bfloat16", 512, 8) for one in (shares[0], shape))
    assert own < every


def test_kv_heads_in_the_file_mean_nothing_beside_latents() -> None:
    """GLM-4.7-Flash has 20 heads, and as many of KV by its file, but one latent for all of them."""
    flash = replace(published("glm-4.7-flash"), experts=None)
    assert [split(flash, 3, Division(size)).num_heads for size in (4, 10, 20)] == [5, 2, 1]
    uneven = parse(FAMILIES["latents"] | {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 48})
    assert split(uneven, 1, Division(4)).num_heads == 3


def test_the_layer_that_predicts_further_tokens_is_left_out_of_shares(tmp_path: Path) -> None:
    config = predictors.config_of("deepseek-v3", first_k_dense_replace=2)
    found = predictors.write(tmp_path / "m", config, predictors.tensors_of(config))
    assert found.predicting is not None, "or this test says nothing"
    held, source, _ = load(tmp_path / "m", "float32", 1, 2)
    assert source.shape == split(found.shape or LLAMA, 1, Division(2))
    assert held.keys() == parameter_shapes(source.shape).keys()
    assert not any(name.startswith(predictors.PREFIX) for name in held)


def test_plans_count_the_largest_share() -> None:
    shape, chunk = parse(LARGE | {"num_hidden_layers": 4}), 64 << 10
    settings = Settings("bfloat16", PLAIN, "", 64, 8, 128, 16, chunk)
    by_kind = {kind: share_of(shape, settings, Devices(kind, 2, 64 << 20)) for kind in ("cpu", "cuda")}
    needed = share_weights_bytes(shape, "bfloat16", Division(2))
    assert 0 <= by_kind["cpu"].weights_bytes - needed < chunk
    assert needed > weights_bytes(shape, "bfloat16") / 2  # each device has all norms
    assert by_kind["cuda"].weights_bytes == by_kind["cpu"].weights_bytes
    quantised = share_of(shape, replace(settings, weight_format=INT8), Devices("cpu", 2, 64 << 20))
    assert quantised.weights_bytes < by_kind["cpu"].weights_bytes


LLAMA = parse(CONFIG)
HEAD = EagleShape(LLAMA, "llama", "", "", 32, False, False, False, False, False)
GROUPED = parse(CONFIG | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4})
REFUSED = {
    "encoder": (parse(CONFIG | {"architectures": ["BertModel"], "hidden_act": "gelu"}), 2, "an encoder is served on one device"),
    "embeddings": (replace(LLAMA, pooling=LAST_TOKEN), 2, "a decoder that makes vectors"),
    "delta": (
        replace(published("qwen3-next-80b-a3b"), experts=None, num_kv_heads=16, num_heads=32),
        32,
        "linear_num_key_heads 16 is",
    ),
    "predictor": (replace(LLAMA, predicts=True), 2, "predicts further tokens"),
    "EAGLE-3": (replace(LLAMA, predicts=True, eagle=HEAD), 2, "an EAGLE-3 head"),
    "full heads": (replace(LLAMA, full_heads=HeadShape(3, 8)), 2, "num_global_key_value_heads 3 neither divides 2"),
    "heads": (LLAMA, 8, "num_attention_heads 4 is no multiple of 8"),
    "heads that read latents": (parse(FAMILIES["latents"]), 8, "num_attention_heads 4 is no multiple of 8"),
    "KV heads": (GROUPED, 4, "num_key_value_heads 6 neither divides 4"),
    "MLP": (parse(CONFIG | {"intermediate_size": 25}), 2, "intermediate_size 25 is no multiple of 2"),
    "vocabulary": (parse(CONFIG | {"vocab_size": 33}), 2, "vocab_size 33 is no multiple of 2"),
    "predictor beside latents": (replace(parse(FAMILIES["latents"]), predicts=True), 2, "predicts further tokens"),
    "share": (split(LLAMA, 0, Division(2)), 2, "a share of a model already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_split_is_refused_with_the_reason(name: str) -> None:
    shape, size, said = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=f"config.json: parallel: .*{said}"):
        split(shape, size - 1, Division(size))


def test_a_rank_is_one_of_the_devices() -> None:
    with pytest.raises(ValueError, match="rank 2 is not below the number of devices 2"):
        split(LLAMA, 2, Division(2))


def test_a_tensor_of_another_shape_is_named_with_the_shape_of_the_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, share=DeviceShare(0, Division(2)))
        source.shape = replace(source.shape, intermediate_size=10)
        with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight: has shape \[24, 16\], expected \[20, 16\]"):
            planned_reads(source, "float32", StagingRing(1, 8192))
