"""Shares of mixtures of experts that are split over devices: what each holds and reads, and which are not split so."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.architectures.experts import ExpertNames, Experts
from loader.configs.hf_config import parse_config
from loader.errors import UnsupportedModel
from loader.formats.plain import PLAIN
from loader.reading import file_reader
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, planned_reads
from loader.shapes.model_shape import (
    ALTERNATING,
    INPUT_MAJOR,
    OUTPUT_MAJOR,
    DeviceShare,
    Division,
    ExpertCopies,
    ExpertShape,
    ModelShape,
    SplitShape,
)
from loader.sizes.layout import (
    block_offsets,
    parameter_shapes,
    share_bytes_with_copies,
    share_weights_bytes,
    stored_tensors,
    weight_layout,
    weights_bytes,
)
from loader.sizes.slices import share_of, split, whole
from loader.sizes.work_space import expert_bytes, work_space_bytes
from tests.loader.checkpoints import CONFIG, cut_out, tensors_for, write_checkpoint
from tests.loader.test_slices import load

MIXTRAL = CONFIG | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN2 = CONFIG | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "mlp_only_layers": [0],
}
GLM4 = CONFIG | {
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
}
LLAMA4 = CONFIG | {
    "architectures": ["Llama4ForCausalLM"],
    "num_local_experts": 4,
    "intermediate_size": 8,
    "intermediate_size_mlp": 24,
    "interleave_moe_layer_step": 2,
    "head_dim": 4,
    "dtype": "float32",
}
FAMILIES = {"mixtral": MIXTRAL, "qwen2-moe": QWEN2, "glm4-moe": GLM4, "llama4": LLAMA4}
# of layers without experts, of experts, and of the expert for all tokens
ROWS, COLUMNS = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")


def parse(config: dict[str, Any]) -> ModelShape:
    return parse_config(json.dumps(config).encode())


def part_of_mlp(name: str, tensor: torch.Tensor, rank: int, division: Division) -> torch.Tensor | None:
    """What the rank holds of a tensor of an MLP, an expert or a router; None: nothing."""
    parts = division.size // division.expert_parts
    part, inner = divmod(rank, parts)
    if name.endswith("experts.gate_up_proj"):  # [experts, inputs, outputs]
        gate, up = tensor.chunk(division.expert_parts)[part].chunk(2, dim=2)
        return torch.cat([gate.chunk(parts, dim=2)[inner], up.chunk(parts, dim=2)[inner]], dim=2)
    if name.endswith("experts.down_proj"):
        return tensor.chunk(division.expert_parts)[part].chunk(parts, dim=1)[inner]
    path = name.split(".")
    if "experts" in path:
        if int(path[path.index("experts") + 1]) // (4 // division.expert_parts) != part:
            return None
    else:
        inner, parts = rank, division.size
    if path[-2] in (*ROWS, *COLUMNS):
        return tensor.chunk(parts, dim=int(path[-2] in COLUMNS))[inner]
    return tensor


def is_of_mlp(name: str) -> bool:
    return not any(part in name for part in ("attn", "norm", "embed", "lm_head"))


@pytest.mark.parametrize("division", [Division(2), Division(2, 2), Division(4, 2)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_rank_holds_its_part_of_experts(tmp_path: Path, name: str, division: Division) -> None:
    config = FAMILIES[name]
    folder = write_checkpoint(tmp_path / "m", config, random_bytes=True)
    for rank in range(division.size):
        held, source, _ = load(folder, "float32", rank, division.size, expert_parts=division.expert_parts)
        assert held.keys() == parameter_shapes(source.shape).keys()
        for tensor, (_, dims, data) in tensors_for(config, random_bytes=True).items():
            if not is_of_mlp(tensor):
                continue
            part = part_of_mlp(tensor, torch.frombuffer(bytearray(data), dtype=torch.float32).view(dims), rank, division)
            assert (part is None) == (tensor not in held), tensor
            assert part is None or torch.equal(held[tensor], part), tensor


# two layers, of which the first has no experts in most families
COPIES: dict[str, ExpertCopies] = {
    "mixtral": (((3,), (0,)), ((2,), (1,))),
    "qwen2-moe": ((), ((2, 3), (0, 1))),
    "glm4-moe": ((), ((3,), (0,))),
    "llama4": ((), ((3,), (0,))),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_copies_of_experts_are_held_and_read(tmp_path: Path, name: str, size: int) -> None:
    """In the order of the experts' numbers, each once, as many bytes as are planned for; also where two ranks share each expert."""
    config, copies = FAMILIES[name], COPIES[name]
    folder = write_checkpoint(tmp_path / "m", config, random_bytes=True)
    stored = {
        key: torch.frombuffer(bytearray(data), dtype=torch.float32).view(dims)
        for key, (_, dims, data) in tensors_for(config, random_bytes=True).items()
    }
    plain = load(folder, "float32", 0, size, expert_parts=2)[1].shape
    for rank in range(size):
        part, inner = divmod(rank, size // 2)
        held, source, _ = load(folder, "float32", rank, size, expert_parts=2, copies=copies)
        assert held.keys() == parameter_shapes(source.shape).keys()
        assert weights_bytes(source.shape, "float32") > weights_bytes(plain, "float32")
        planned = share_weights_bytes(whole(source.shape), "float32", Division(size, 2, copies=copies))
        assert weights_bytes(source.shape, "float32") <= planned < weights_bytes(source.shape, "float32") + 4096
        for layer in range(2):
            own = sorted({2 * part, 2 * part + 1, *(copies[layer][part] if copies[layer] else ())})
            if copies[layer]:
                assert source.shape.experts_of(layer) == tuple(own)
            of_layer = {key: one for key, one in stored.items() if f"layers.{layer}." in key and ".experts." in key}
            found = {key: one for key, one in held.items() if f"layers.{layer}." in key and ".experts." in key}
            if name == "llama4":
                wanted = {key: one[own] for key, one in of_layer.items()}
            else:
                wanted = {key: one for key, one in of_layer.items() if int(key.split(".experts.")[1].split(".")[0]) in own}
            assert found.keys() == wanted.keys()
            parts = {key: part_of_mlp(key, one, inner, Division(size // 2)) for key, one in wanted.items()}
            assert all(torch.equal(found[key], one) for key, one in parts.items())
            slots = [slot.name for slot in weight_layout(source.shape, "float32") if slot.name in found and "down" in slot.name]
            assert name == "mixtral" or slots == sorted(slots)


def test_copies_of_experts_that_make_no_sense_are_refused() -> None:
    shape, qwen2 = parse(MIXTRAL), parse(QWEN2)
    good: ExpertCopies = (((3,), (0,)), ((2,), (1,)))
    for of, division, said in (
        (shape, Division(2, 1, copies=good), "copies of experts need experts that are divided (expert)"),
        (shape, Division(2, 2, copies=good[:1]), "copies of experts are given for 1 layers of 2"),
        (shape, Division(4, 4, copies=good), "copies of experts are given for 2 parts of layer 0"),
        (qwen2, Division(2, 2, copies=good), "copies of experts are given for 2 parts of layer 0"),
        (shape, Division(2, 2, copies=(((1,), (0,)), ((2,), (1,)))), "copies of experts [1] are no ascending numbers"),
        (shape, Division(2, 2, copies=(((3, 2), (0, 1)), ((2, 3), (1, 0)))), "copies of experts [3, 2] are no ascending numbers"),
        (shape, Division(2, 2, copies=(((4,), (0,)), ((2,), (1,)))), "copies of experts [4] are no ascending numbers"),
    ):
        with pytest.raises(UnsupportedModel, match=re.escape(said)):
            split(of, 0, division)
    assert split(shape, 1, Division(2, 2, copies=good)).experts_of(0) == (0, 2, 3)
    some = split(shape, 1, Division(2, 2, copies=(((), ()), ((), (0, 1)))))
    assert [some.experts_of(layer) for layer in range(2)] == [(2, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_planned_holds_any_copies(tmp_path: Path, name: str, size: int) -> None:
    folder = write_checkpoint(tmp_path / "m", FAMILIES[name] | {"hidden_size": 64, "moe_intermediate_size": 96}, padding=8)
    with ExitStack() as stack:
        shape = open_checkpoint(folder, "", stack).shape
    assert shape.block_offsets
    layers, draw = [layer not in shape.experts.dense_layers for layer in range(2)], random.Random(name)
    for number in (1, 2):
        planned = share_bytes_with_copies(shape, "float32", Division(size, 2), PLAIN, number)
        for _ in range(5):
            parts = [[tuple(sorted(draw.sample(own, draw.randint(0, number)))) for own in ([2, 3], [0, 1])] for _ in layers]
            copies = tuple(tuple(part) if layer else () for part, layer in zip(parts, layers, strict=True))
            taken = share_weights_bytes(shape, "float32", Division(size, 2, copies=copies))
            assert taken <= planned
            if all(len(one) == number for part in copies for one in part):
                assert planned <= taken + 4096 * len(shape.block_offsets)


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_of_other_ranks_are_not_read(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "m", FAMILIES[name])
    every = parameter_shapes(parse(FAMILIES[name]))
    of_all = {tensor: 4 * math.prod(dims) for tensor, dims in every.items() if ".experts." in tensor}
    read = Counter[str]()
    for rank in range(2):
        with ExitStack() as stack:
            source = open_checkpoint(folder, "", stack, share=DeviceShare(rank, Division(2, 2)))
            reads = planned_reads(source, "float32", StagingRing(1, 8192))
        own = Counter[str]()
        for segment in (segment for one in reads for segment in one.segments):
            own[segment.tensor.name] += segment.end - segment.begin
        assert sum(own[tensor] for tensor in of_all) == sum(of_all.values()) / 2
        assert weights_bytes(source.shape, "float32") < weights_bytes(parse(FAMILIES[name]), "float32")
        read += own
    assert {tensor: num for tensor, num in read.items() if tensor in of_all} == of_all, "a tensor is read twice"


def test_own_experts_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: False)
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_key_value_heads": 4, "vocab_size": 512, "dtype": "bfloat16"}
    folder = write_checkpoint(tmp_path / "m", MIXTRAL | sizes, dtype="BF16", random_bytes=True, padding=8)
    _, source, report = load(folder, "bfloat16", 1, 2, slot_bytes=256 << 10, expert_parts=2)
    with ExitStack() as stack:
        headers = open_checkpoint(folder, "", stack).headers
    tensors = {tensor.name: tensor for header in headers.values() for tensor in header.tensors}
    assert source.shape.block_offsets == block_offsets(source.shape, tensors.values())
    of_experts = [slot for slot in weight_layout(source.shape, "bfloat16") if ".experts." in slot.name]
    assert all((slot.offset_bytes - tensors[slot.name].offset_bytes) % 4096 == 0 for slot in of_experts)
    assert report.refused or report.direct_bytes > sum(slot.num_bytes for slot in of_experts)


def test_copies_between_own_experts_are_read_in_place_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: False)
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_key_value_heads": 4, "vocab_size": 512, "dtype": "bfloat16"}
    folder = write_checkpoint(tmp_path / "m", MIXTRAL | sizes, dtype="BF16", random_bytes=True, padding=8)
    how = {"slot_bytes": 256 << 10, "expert_parts": 2, "copies": (((3,), (0,)), ((2,), (1,)))}
    _, source, report = load(folder, "bfloat16", 1, 2, **how)
    of_experts = [slot for slot in weight_layout(source.shape, "bfloat16") if ".experts." in slot.name]
    assert len(of_experts) == 2 * 3 * 3
    assert report.refused or report.direct_bytes > sum(slot.num_bytes for slot in of_experts)


def _output(x: np.ndarray, tensors: dict[str, np.ndarray], kind: str, expert: int) -> np.ndarray:
    """What an expert of these stacks makes of x, with the gate itself as its activation."""
    gate_up, down = tensors["gu"][expert], tensors["d"][expert]
    if kind == INPUT_MAJOR:
        gate_up, down = gate_up.T, down.T
    made = gate_up @ x + tensors.get("gu_bias", np.zeros((len(tensors["gu"]), 1)))[expert]
    gate, up = (made[::2], made[1::2]) if kind == ALTERNATING else np.split(made, 2)
    return np.asarray(down @ (gate * up) + tensors.get("d_bias", np.zeros((len(tensors["d"]), 1)))[expert])


@pytest.mark.parametrize("division", [Division(2), Division(4), Division(2, 2), Division(4, 4), Division(4, 2)], ids=str)
@pytest.mark.parametrize("kind", [ALTERNATING, INPUT_MAJOR, OUTPUT_MAJOR])
def test_parts_of_stacks_add_up(kind: str, division: Division) -> None:
    names = ExpertNames(stacked_gate_up="gu", stacked_down="d")
    experts = ExpertShape(4, 2, 16, True, stacked=True, stack=kind)
    family = Experts(4, 2, names, stack=kind, has_biases=kind == ALTERNATING)
    groups, generator = family.tensor_groups(experts, 8), np.random.default_rng(1)
    tensors = {name: generator.normal(size=dims) for group in groups for name, dims in group.tensors}
    x, found = generator.normal(size=8), np.zeros((4, 8))
    for rank in range(division.size):
        own: dict[str, np.ndarray] = {}
        for group in share_of(groups, SplitShape(rank, division.size, expert_parts=division.expert_parts)):
            ((name, dims),) = group.tensors
            own[name] = cut_out(torch.from_numpy(tensors[name]), group.cuts[0] if group.cuts else None).numpy()
            assert own[name].shape == dims
        first = rank // division.inner_parts * (4 // division.expert_parts)
        for expert in range(len(own["gu"])):
            found[first + expert] += _output(x, own, kind, expert)
    np.testing.assert_allclose(found, [_output(x, tensors, kind, expert) for expert in range(4)])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_share_is_undone_exactly(name: str) -> None:
    shape = parse(FAMILIES[name])
    for division in (Division(2), Division(2, 2), Division(4, 4), Division(4, 2)):
        for rank in range(division.size):
            share = split(shape, rank, division)
            assert whole(share) == shape
            assert stored_tensors(share) == stored_tensors(shape)
    assert whole(split(shape, 1, Division(2, 2, copies=COPIES[name]))) == shape
    odd = parse(MIXTRAL | {"intermediate_size": 9})  # that of experts alone
    assert whole(split(odd, 1, Division(2, 2))) == odd


def test_the_work_space_is_that_of_the_share() -> None:
    shape = parse(QWEN2 | {"moe_intermediate_size": 4096, "shared_expert_intermediate_size": 4096})
    inner, apart = split(shape, 1, Division(4)), split(shape, 1, Division(4, 4))
    assert apart.experts is not None
    assert shape.experts is not None
    assert (apart.experts.intermediate_size, apart.experts.shared_size) == (4096, 1024)
    assert (list(apart.experts.own), list(shape.experts.own)) == ([1], [0, 1, 2, 3])
    assert expert_bytes(inner, "bfloat16") < expert_bytes(apart, "bfloat16") < expert_bytes(shape, "bfloat16")
    assert work_space_bytes(apart, "bfloat16", 512, 8) < work_space_bytes(shape, "bfloat16", 512, 8)
    experts = 2 * 3 * 4 * 4096 * 16  # bytes of the only layer with them
    of_share = share_weights_bytes(shape, "bfloat16", Division(2, 2))
    assert experts / 2 < weights_bytes(shape, "bfloat16") - of_share < experts


REFUSED = {
    "number": (
        parse(MIXTRAL | {"num_local_experts": 6}),
        Division(4, 4),
        "num_experts (or num_local_experts) 6 is no multiple of 4, the parts of experts",
    ),
    "size": (
        parse(QWEN2 | {"moe_intermediate_size": 13}),
        Division(4, 2),
        "moe_intermediate_size 13 is no multiple of 2, the number of devices that have the same experts",
    ),
    "size by another key": (parse(MIXTRAL | {"intermediate_size": 9}), Division(2), "intermediate_size 9 is no multiple of 2"),
    "MLP": (parse(LLAMA4 | {"intermediate_size_mlp": 9}), Division(2, 2), "intermediate_size_mlp 9 is no multiple of 2"),
    "shared expert": (
        parse(QWEN2 | {"shared_expert_intermediate_size": 21}),
        Division(2, 2),
        "shared_expert_intermediate_size 21 is no multiple of 2, the number of devices",
    ),
    "shared experts": (
        parse(GLM4 | {"moe_intermediate_size": 13, "n_shared_experts": 3}),
        Division(2, 2),
        "n_shared_experts * moe_intermediate_size 39 is no multiple of 2, the number of devices",
    ),
    "no experts": (parse(CONFIG), Division(2, 2), "expert = 2 divides the experts of a model, and LlamaForCausalLM has none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_divided_is_refused_with_the_reason(name: str) -> None:
    shape, division, said = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=f"^config.json: parallel: {re.escape(said)}"):
        split(shape, division.size - 1, division)
