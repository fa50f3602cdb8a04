"""The layers of a model, divided among the stages of a pipeline."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.architectures.registry import architecture_of
from loader.formats.plain import PLAIN
from loader.shapes import kv_layout
from loader.shapes.model_shape import Division, ModelShape
from loader.sizes.capacity import Devices, Settings, share_of
from loader.sizes.layout import parameter_shapes, share_weights_bytes, weights_bytes
from loader.sizes.slices import _stages_within, refusal, split, stage_ends, whole
from loader.sizes.work_space import handed_bytes, input_values, passed_values, staged_tokens, work_space_bytes
from tests.loader.checkpoints import tensors_for, write_checkpoint
from tests.loader.test_slices import CONFIG, FAMILIES, config_of, load, parse, published

ALIKE = [name for name in FAMILIES if name != "gemma4"]  # whose tensors are each in one stage
LAYERS = {"num_hidden_layers": 6}


def six_layers(name: str) -> ModelShape:
    config: dict[str, Any] = config_of(name) | LAYERS
    if "layer_types" in config:
        config["layer_types"] = (config["layer_types"] * 3)[:6]
    if "text_config" in config:
        config["text_config"] = config["text_config"] | LAYERS
    return parse(config)


def shares(shape: ModelShape, division: Division) -> list[ModelShape]:
    return [split(shape, rank, division) for rank in range(division.size)]


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("num_stages", [2, 3, 6])
def test_each_tensor_is_in_one_stage(name: str, num_stages: int) -> None:
    shape = six_layers(name)
    every = parameter_shapes(shape)
    own = [parameter_shapes(share) for share in shares(shape, Division(num_stages, num_stages=num_stages))]
    twice = {name for one, other in itertools.combinations(own, 2) for name in one.keys() & other.keys()}
    embedding = f"{architecture_of(shape).decoder_of(shape).names.embedding}.weight"  # type: ignore[attr-defined]
    assert twice == ({embedding} if shape.tie_word_embeddings else set()), "the head's, too, where they are one"
    assert {name: dims for one in own for name, dims in one.items()} == every
    assert embedding in own[-1], "the last rank has the first stage"
    if not shape.tie_word_embeddings:
        assert embedding not in own[0]


@pytest.mark.parametrize("name", ALIKE)
def test_stages_of_several_devices(name: str) -> None:
    """A device of a stage has what tensor parallelism gives it of the stage's layers."""
    shape = six_layers(name)
    if refusal(shape, Division(2)):
        pytest.skip("its matrices are not divided by 2")
    by_tensor = [parameter_shapes(share) for share in shares(shape, Division(2))]
    every = [parameter_shapes(share) for share in shares(shape, Division(6, num_stages=3))]
    for rank, own in enumerate(every):
        assert own.items() <= by_tensor[rank % 2].items()
    assert {key for own in every[::2] for key in own} == set(by_tensor[0])
    for rank in range(6):
        share = split(shape, rank, Division(6, num_stages=3))
        assert whole(share) == shape
        assert share.split is not None
        assert share.split.division == Division(6, num_stages=3)


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_have_one_size_in_all_stages(name: str) -> None:
    """The leader counts blocks for all of them. A stage with fewer layers of a group has places that it does not use."""
    shape = six_layers(name)
    of_whole = kv_layout.kv_groups(shape, "float32", 16)
    for num_stages in (2, 3 if name == "gemma4" else 4):
        groups = [kv_layout.kv_groups(share, "float32", 16) for share in shares(shape, Division(num_stages, num_stages=num_stages))]
        for own, of_model in zip(zip(*groups, strict=True), of_whole, strict=True):
            assert len({group.block_bytes for group in own}) == 1
            assert {group.kind for group in own} == {of_model.kind}
            layers = sorted(layer for group in own for layer in group.layers if layer != kv_layout.NO_LAYER)
            assert layers == sorted(of_model.layers)
            assert own[0].block_bytes * len(of_model.layers) == of_model.block_bytes * len(own[0].layers)
            assert max(sum(layer != kv_layout.NO_LAYER for layer in group.layers) for group in own) == len(own[0].layers)
        first = split(shape, 0, Division(num_stages, num_stages=num_stages))
        without_states = sum(group.block_bytes for group in groups[0] if not group.snapshot_tokens)
        assert kv_layout.kv_bytes_per_token(first, "float32") * 16 == without_states
        assert kv_layout.state_bytes(first) == sum(group.block_bytes for group in groups[0] if group.snapshot_tokens)


def test_a_stage_without_layers_of_a_group_sees_its_blocks_as_other_stages_do() -> None:
    """Also where the group's heads differ from those of the layers that the stage has."""
    shape = published("gemma-4-31b")
    for share in shares(shape, Division(60, num_stages=60)):
        for group in kv_layout.kv_groups(share, "float32", 16):
            token_bytes = 4 * math.prod(kv_layout.group_token_dims(share, group))
            assert group.block_bytes == token_bytes * 16 * len(group.layers)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 40), st.data())
def test_the_fullest_stage_has_as_little_as_can_be(sizes: list[int], behind: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(sizes)))

    def fullest(ends: tuple[int, ...]) -> int:
        return max(
            sum(sizes[begin:end]) + (behind if end == len(sizes) else 0) for begin, end in zip((0, *ends), ends, strict=False)
        )

    cuts = itertools.combinations(range(1, len(sizes)), num_stages - 1)
    best = min(fullest((*cut, len(sizes))) for cut in cuts)
    ends = _stages_within(sizes, behind, best, num_stages)
    assert ends is not None
    assert (len(ends), fullest(ends)) == (num_stages, best)
    assert _stages_within(sizes, behind, best - 1, num_stages) is None


def test_giants_are_divided_evenly() -> None:
    """The head counts for the last stage, and the first layers of a mixture, which have no experts, weigh little."""
    for name, num_stages in (("llama-3.1-8b", 2), ("deepseek-v3", 8), ("kimi-k2.5", 8), ("llama-4-scout", 2)):
        shape = published(name)
        ends = stage_ends(shape, num_stages)
        assert (len(ends), ends[-1]) == (num_stages, shape.num_layers)
        every = [
            sum(math.prod(dims) for dims in parameter_shapes(share).values())
            for share in shares(shape, Division(num_stages, num_stages=num_stages))
        ]
        assert max(every) < 1.15 * sum(every) / num_stages, name


@pytest.mark.parametrize(
    ("config", "num_stages", "why"),
    [
        (CONFIG, 3, "num_hidden_layers 2 are too few for 3 stages (pipeline)"),
        (
            config_of("gemma4"),
            2,
            "2 stages (pipeline) are more than the 1 that Gemma4ForCausalLM can have: its last layers (num_kv_shared_layers 2) "
            "read the keys and values of layer 0 or later ones, and are in one stage with these",
        ),
        (CONFIG | {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}, 2, ""),
    ],
)
def test_what_is_not_divided_says_why(config: dict[str, Any], num_stages: int, why: str) -> None:
    assert refusal(parse(config), Division(num_stages, num_stages=num_stages)) == why


def test_both_ways_have_their_rules() -> None:
    odd = parse(CONFIG | LAYERS | {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8})
    assert refusal(odd, Division(6, num_stages=3)) == "num_attention_heads 3 is no multiple of 2, the number of devices"
    assert refusal(odd, Division(9, num_stages=3)) != ""
    assert refusal(odd, Division(3, num_stages=3)) == ""


def test_what_a_device_needs_is_that_of_the_largest_stage() -> None:
    shape = published("llama-3.1-8b")
    division = Division(4, num_stages=4)
    every = [weights_bytes(share, "bfloat16") for share in shares(shape, division)]
    assert share_weights_bytes(shape, "bfloat16", division) == max(every)
    settings_ = Settings("bfloat16", PLAIN, "", 8192, 16, 2048, 16, 2 << 20)
    whole_, four = (share_of(shape, settings_, Devices("cpu", number, 64 << 30, 1, number)) for number in (1, 4))
    assert four.kv_token_bytes == whole_.kv_token_bytes * len(four_layers(shape)) // shape.num_layers
    assert four.weights_bytes < 0.32 * whole_.weights_bytes


def four_layers(shape: ModelShape) -> tuple[int, ...]:
    """The places that each of four stages has for layers."""
    (group,) = kv_layout.kv_groups(split(shape, 0, Division(4, num_stages=4)), "bfloat16", 16)
    return group.layers


def test_a_step_that_passes_through_stages_is_small() -> None:
    """So that a prompt is in several of them, and the states that they pass on take little memory."""
    shape = published("llama-3.1-8b")
    assert [staged_tokens(8, most) for most in (2048, 100)] == [512, 100]
    assert staged_tokens(1000, 2048) == 1000, "a token of each sequence"
    assert handed_bytes(shape, "bfloat16", 512) == 8 << 20
    assert handed_bytes(shape, "bfloat16", 1) == 16 << 10
    share = split(shape, 0, Division(2, num_stages=2))
    with_places = work_space_bytes(share, "bfloat16", 2048, 16)
    assert with_places == work_space_bytes(shape, "bfloat16", 512, 16) + 2 * (8 << 20)


@pytest.mark.parametrize("name", ["llama", "wrapper", "qwen3.5", "phi3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_stages_read_the_files_once(tmp_path: Path, name: str, shards: int) -> None:
    """What stages of one device hold is what the files have, and they read no byte twice but for an embedding that is the head,
    too."""
    config = config_of(name)
    shape, tensors = parse(config), tensors_for(config, "F32", random_bytes=True)
    folder = write_checkpoint(tmp_path / "m", config, shards, random_bytes=True)
    read, held = 0, dict[str, torch.Tensor]()
    for rank in range(2):
        own, source, report = load(folder, "float32", rank, 2, num_stages=2)
        assert own.keys() == parameter_shapes(source.shape).keys()
        assert all(torch.equal(tensor, held.get(key, tensor)) for key, tensor in own.items())
        held, read = held | own, read + report.num_bytes
    stored = {key: torch.frombuffer(bytearray(data), dtype=torch.float32).view(dims) for key, (_, dims, data) in tensors.items()}
    assert held.keys() == stored.keys()
    for key, tensor in stored.items():
        assert torch.equal(held[key], tensor), key
    twice = shape.vocab_size * shape.hidden_size * 4 if shape.tie_word_embeddings else 0
    assert read == sum(tensor.nbytes for tensor in stored.values()) + twice


INPUTS = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")


@pytest.mark.parametrize("size", [1, 2])
def test_each_stage_reads_what_its_layers_inputs_are_made_from(tmp_path: Path, size: int) -> None:
    """The table's columns and the projection's rows that belong to the stage's layers, on each of its devices, and the norm. The
    table's rows are too short to be read in parts, so each device reads them whole."""
    config = config_of("gemma4") | LAYERS | {"layer_types": ["sliding_attention", "full_attention"] * 3}
    tensors = tensors_for(config, "F32", random_bytes=True)
    folder = write_checkpoint(tmp_path / "m", config, random_bytes=True)
    stored = {key: torch.frombuffer(bytearray(data), dtype=torch.float32).view(dims) for key, (_, dims, data) in tensors.items()}
    table, projection, norm = (stored[f"model.{name}.weight"] for name in INPUTS)
    read, layers = 0, list[range]()
    for rank in range(3 * size):
        held, source, report = load(folder, "float32", rank, 3 * size, num_stages=3)
        own, width, read = source.shape.own_layers, 4, read + report.num_bytes
        columns = slice(own.start * width, own.stop * width)
        for name, part in zip(INPUTS, (table[:, columns], projection[columns], norm), strict=True):
            assert torch.equal(held[f"model.{name}.weight"], part), (rank, name)
        layers = layers if own in layers else [own, *layers]
    assert [layer for own in layers for layer in own] == list(range(6))
    assert layers[-1] == range(2, 6), "two layers read the keys and values of the two before them"
    if size == 1:
        embedding = stored["model.embed_tokens.weight"]
        assert read == sum(tensor.nbytes for tensor in stored.values()) + embedding.nbytes + 2 * (table.nbytes + norm.nbytes)


def test_layers_that_read_the_kv_of_others_are_in_their_stage() -> None:
    shape = published("gemma-4-e2b")
    for num_stages in (2, 3, 14):
        ends = stage_ends(shape, num_stages)
        assert (len(ends), ends[-2:]) == (num_stages, (13, 35))
    assert refusal(shape, Division(15, num_stages=15)).startswith("15 stages (pipeline) are more than the 14 that Gemma4")
    every = shares(shape, Division(2, num_stages=2))
    assert {every[0].kv_layer(layer) for layer in every[0].own_layers} == {13, 14}
    groups = [[layer for group in kv_layout.kv_groups(one, "bfloat16", 16) for layer in group.layers] for one in every]
    assert all({one.kv_layer(layer) for layer in one.own_layers} <= {*own} for one, own in zip(every, groups, strict=True))


def test_what_makes_inputs_of_layers_is_counted_where_it_is() -> None:
    """A stage has its layers' part of the table in memory and of the inputs in work space. A step reads few rows of the table, so
    these do not decide where the layers are divided."""
    shape = published("gemma-4-e2b")
    every = shares(shape, Division(2, num_stages=2))
    numbers = [parameter_shapes(share)["language_model.model.embed_tokens_per_layer.weight"] for share in every]
    assert numbers == [(262_144, 22 * 256), (262_144, 13 * 256)]
    assert [input_values(one) for one in (*every, shape)] == [22 * 256, 13 * 256, 35 * 256]
    assert [passed_values(one) for one in (*every, shape)] == [1536, 1536, 0]
    held_twice = shape.vocab_size * shape.hidden_size * 2
    total = sum(weights_bytes(one, "bfloat16") for one in every)
    assert 0 <= total - weights_bytes(shape, "bfloat16") - held_twice < 64 << 10
    alike = replace(shape, num_reading_layers=0, reading_intermediate_size=0)
    assert stage_ends(alike, 2) == stage_ends(replace(alike, layer_inputs=None), 2)
