"""What the scheduler and the API are told of models that are split over devices, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from config.schema import DeviceBudget, ModelConfig, NodeConfig, ParallelConfig
from daemon.errors import HearthError
from daemon.models.registry import Registry
from daemon.record.state import NodeState
from loader.formats.int8 import INT8
from loader.formats.plain import PLAIN
from loader.formats.registry import FORMATS
from loader.formats.stored_int8 import STORED_INT8
from loader.models.catalog import scan_one
from loader.shapes import kv_layout
from loader.shapes.model_shape import Division, ModelShape
from loader.sizes import gpu_sizing, layout, slices, work_space
from scheduler.node import events
from tests.e2e.checkpoints import make_head, make_model
from tests.e2e.test_embeddings import make_encoder
from tests.loader import gptq
from tests.loader import test_predictor as predictors
from tests.loader.adapters import adapter_tensors, modules_of, write_adapter
from tests.loader.checkpoints import CONFIG, write_checkpoint
from tests.loader.checkpoints import shape as shape_of_checkpoint
from tests.loader.compressed import compress
from tests.loader.packed_checkpoints import pack_checkpoint
from tests.loader.test_experts import MIXTRAL

MIB = 1 << 20
CHUNK = 64 << 10
TWO = ParallelConfig(tensor=2)


async def registry_of(folder: Path, *devices: DeviceBudget, **models: ModelConfig) -> Registry:
    config = NodeConfig(models_dir=str(folder), models=models, chunk_bytes=CHUNK, dtype="float32")
    registry = Registry(config, devices or [DeviceBudget("cpu:0", 32 * MIB), DeviceBudget("cpu:1", 24 * MIB)], NodeState(""))
    await registry.rescan()
    return registry


async def facts_of(folder: Path, settings: ModelConfig, *devices: DeviceBudget) -> events.ModelFacts:
    return (await registry_of(folder, *devices, m=settings)).models["m"].facts


async def test_bytes_are_those_of_a_share(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    whole = await facts_of(tmp_path, ModelConfig(max_model_len=256))
    split = await facts_of(tmp_path, ModelConfig(max_model_len=256, parallel=TWO))
    shape = scan_one(tmp_path / "m", "m").shape
    assert shape is not None
    assert (whole.num_ranks, split.num_ranks) == (1, 2)
    assert split.weights_bytes == layout.weights_bytes(slices.split(shape, 0, Division(2)), "float32")
    assert whole.weights_bytes / 2 < split.weights_bytes < 0.75 * whole.weights_bytes, "embedding and norms are whole on each"
    assert split.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    share = slices.split(shape, 0, Division(2))
    assert split.work_space_bytes == work_space.work_space_bytes(share, "float32", 512, 256, 256, PLAIN)
    assert (split.devices, whole.devices) == (("cpu:0", "cpu:1"), ())


def make_ordered_gptq(folder: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    plain = write_checkpoint(folder.parent / "plain", CONFIG | sizes, random_bytes=True)
    gptq.quantize(plain, folder, gptq.gptq(desc_act=True))


async def test_bytes_of_a_quantised_share(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    facts = await facts_of(tmp_path, ModelConfig(max_model_len=256, parallel=TWO, quantize="int8"))
    shape = scan_one(tmp_path / "m", "m").shape
    assert shape is not None
    share = slices.split(shape, 0, Division(2))
    assert facts.weights_bytes == layout.weights_bytes(share, "float32", INT8) < layout.weights_bytes(share, "float32")
    assert facts.work_space_bytes == work_space.work_space_bytes(share, "float32", 512, 256, 256, INT8)


async def test_kv_is_a_quarter_of_what_is_left_on_the_smaller_device(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    facts = await facts_of(tmp_path, ModelConfig(max_model_len=256, parallel=TWO))
    left = 24 * MIB - facts.weights_bytes - facts.work_space_bytes
    kv_bytes = facts.kv_floor_tokens * facts.kv_bytes_per_token
    assert left // 4 - 16 * facts.kv_bytes_per_token < kv_bytes <= left // 4
    few = await facts_of(tmp_path, ModelConfig(max_model_len=256, max_sequences=3, parallel=TWO))
    assert few.kv_floor_tokens == 3 * 256, "no more than it can use"
    tight = (DeviceBudget("cpu:0", 4 * MIB), DeviceBudget("cpu:1", 4 * MIB))
    assert (await facts_of(tmp_path, ModelConfig(max_model_len=2048, parallel=TWO), *tight)).kv_floor_tokens == 2048, "one request"
    told = await facts_of(tmp_path, ModelConfig(max_model_len=256, kv_floor_tokens=512, parallel=TWO))
    assert told.kv_floor_tokens == 512
    wide = await facts_of(tmp_path, ModelConfig(max_model_len=256, devices=["cpu:0"], parallel=ParallelConfig(tensor=1)))
    assert (wide.num_ranks, wide.kv_floor_tokens) == (1, 0)


LENT = (DeviceBudget("cpu:0", 24 * MIB), DeviceBudget("cpu:0@b", 40 * MIB), DeviceBudget("cpu:1@b", 32 * MIB))


async def test_stages_on_other_hosts_count_and_nothing_else_does(tmp_path: Path) -> None:
    make_model(tmp_path / "m", num_layers=4)
    whole = ModelConfig(max_model_len=256)
    by_layers = msgspec.structs.replace(whole, parallel=ParallelConfig(pipeline=2))
    split = await facts_of(tmp_path, by_layers, *LENT)
    assert (split.num_ranks, split.num_stages, split.devices) == (2, 2, ("cpu:0", "cpu:0@b", "cpu:1@b"))
    here = await facts_of(tmp_path, by_layers, DeviceBudget("cpu:0", 24 * MIB), DeviceBudget("cpu:1", 24 * MIB))
    assert split.kv_floor_tokens == here.kv_floor_tokens, "the smallest device of the best group counts"
    alone = await facts_of(tmp_path, whole, *LENT)
    assert alone == await facts_of(tmp_path, whole, LENT[0])
    lengths = [await facts_of(tmp_path, ModelConfig(), *devices) for devices in (LENT, LENT[:1])]
    assert lengths[0].max_model_len == lengths[1].max_model_len
    divided = await facts_of(tmp_path, msgspec.structs.replace(whole, parallel=TWO), *LENT)
    assert divided.unusable.endswith("a model whose matrices are divided uses the devices of this host only")
    assert "and the node has cpu:0, cpu:0@b, cpu:1@b" in divided.unusable
    four = ParallelConfig(tensor=2, pipeline=2)
    stages = await facts_of(tmp_path, msgspec.structs.replace(whole, parallel=four), *LENT, DeviceBudget("cpu:1", 24 * MIB))
    assert (stages.num_ranks, stages.num_stages, len(stages.devices)) == (4, 2, 4)


async def test_the_last_stage_is_here(tmp_path: Path) -> None:
    """However much larger the devices of other hosts are, and however many."""
    make_model(tmp_path / "m", num_layers=4)
    three = ModelConfig(max_model_len=256, parallel=ParallelConfig(pipeline=3))
    small, *large = DeviceBudget("cpu:0", 16 * MIB), *(DeviceBudget(f"cpu:{at}@b", 64 * MIB) for at in range(4))
    found, like = await facts_of(tmp_path, three, small, *large), [DeviceBudget(f"cpu:{at}", 16 * MIB) for at in range(3)]
    assert found.kv_floor_tokens == (await facts_of(tmp_path, three, *like)).kv_floor_tokens
    elsewhere = await facts_of(tmp_path, three, *large)
    assert elsewhere.unusable.endswith("each stage is on devices of one host, and the last one on devices of this host")


async def test_a_gpu_of_another_host_refuses_no_format_here(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    gpu = DeviceBudget("cuda:0@b", 64 * MIB)
    found = await facts_of(tmp_path, ModelConfig(max_model_len=256, quantize="int8"), *LENT, gpu)
    assert found.unusable == ""
    float16 = NodeConfig(models_dir=str(tmp_path), chunk_bytes=CHUNK)
    registry = Registry(float16, [LENT[0], gpu], NodeState(""))
    make_model(tmp_path / "half", dtype="float16")
    await registry.rescan()
    assert registry.models["half"].dtype == "bfloat16", "as on any node of cpu devices"


async def test_replicas_each_have_their_last_stage_here(tmp_path: Path) -> None:
    make_model(tmp_path / "m", num_layers=4)
    settings = ModelConfig(max_model_len=256, parallel=ParallelConfig(pipeline=2), replicas="auto")
    two = DeviceBudget("cpu:1", 24 * MIB)
    for devices, number in ((LENT, 1), ((*LENT, two), 2), (LENT[:2], 1), ((LENT[0], two), 1)):
        registry = await registry_of(tmp_path, *devices, m=settings)
        assert len(registry.models["m"].replicas) + 1 == number


async def test_windows_do_not_make_room_for_one_sequence_alone(tmp_path: Path) -> None:
    make_model(tmp_path / "m", architecture="MistralForCausalLM", model_type="mistral", sliding_window=64)
    facts = await facts_of(tmp_path, ModelConfig(max_model_len=1024, kv_floor_tokens=4096, parallel=TWO))
    assert facts.kv_reserved_bytes == 4096 * facts.kv_bytes_per_token


async def test_what_loads_and_clients_are_told(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    registry = await registry_of(tmp_path, m=ModelConfig(max_model_len=256, parallel=TWO))
    facts, entry, source = registry.models["m"].facts, registry.resolve("m"), registry.source("m")
    assert source is not None
    shape = scan_one(tmp_path / "m", "m").shape
    assert shape is not None
    assert source.form is not None
    assert source.form.num_kv_groups == len(kv_layout.kv_groups(shape, "float32", 16)) == 1
    assert (entry.speculator, entry.head, entry.weights_bytes) == ("prompt-lookup", "", 2 * facts.weights_bytes)
    assert registry.layout_id("m") == "", "nothing of it is taken over or kept"
    told = registry.describe("m")
    assert "split over 2 devices, max_model_len 256" in told
    assert "; on each device: weights " in told


async def test_a_head_beside_it_is_left_out(tmp_path: Path) -> None:
    make_head(tmp_path / "m" / "head", make_model(tmp_path / "m"))
    whole = await registry_of(tmp_path)
    assert whole.resolve("m").speculator == "eagle3", "or this test says nothing"
    split = await registry_of(tmp_path, m=ModelConfig(parallel=TWO))
    assert split.resolve("m").speculator == "prompt-lookup"
    assert split.resolve("m").fingerprint != whole.resolve("m").fingerprint


async def test_a_layer_that_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    config = predictors.config_of("deepseek-v3", first_k_dense_replace=2)
    shape = predictors.write(tmp_path / "m", config, predictors.tensors_of(config)).shape
    assert shape is not None
    assert (await registry_of(tmp_path)).resolve("m").speculator == "mtp", "or this test says nothing"
    split = await registry_of(tmp_path, m=ModelConfig(parallel=TWO))
    assert split.resolve("m").speculator == "prompt-lookup"
    facts = split.models["m"].facts
    assert facts.weights_bytes == layout.share_weights_bytes(shape, "float32", Division(2))
    assert facts.kv_bytes_per_token == 2 * (32 + 8) * 4, "the latents of two layers, whole"


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (
            lambda folder: write_checkpoint(folder, MIXTRAL | {"num_local_experts": 3}),
            {"parallel": ParallelConfig(expert=2)},
            "num_local_experts) 3 is no multiple of 2, the parts of experts",
        ),
        (make_model, {"parallel": ParallelConfig(tensor=3)}, "needs 3 devices of one kind, and the node has cpu:0, cpu:1"),
        (make_ordered_gptq, {}, "has its 128 inputs in an order of its own (desc_act): not divided"),
        (make_model, {"devices": ["cpu:1"]}, "needs 2 devices of one kind, and devices names cpu:1"),
        (make_encoder, {}, "an encoder is served on one device alone"),
    ],
)
async def test_refusals_name_the_key(
    tmp_path: Path, make: Callable[[Path], object], settings: dict[str, object], words: str
) -> None:
    make(tmp_path / "m")
    registry = await registry_of(tmp_path, m=ModelConfig(**{"parallel": TWO, **settings}))  # type: ignore[arg-type]
    assert registry.models["m"].problem.startswith('models."m".parallel: ')
    with pytest.raises(HearthError) as caught:
        registry.resolve("m")
    assert caught.value.code == "model_unusable"
    assert words in caught.value.message


async def test_heads_that_cannot_be_divided(tmp_path: Path) -> None:
    make_model(tmp_path / "m", num_heads=3, num_kv_heads=3, hidden_size=24)
    problem = (await registry_of(tmp_path, m=ModelConfig(parallel=TWO))).models["m"].problem
    assert problem == 'models."m".parallel: num_attention_heads 3 is no multiple of 2, the number of devices'


CPUS = (DeviceBudget("cpu:0", 32 * MIB), DeviceBudget("cpu:1", 32 * MIB))
GPUS = (DeviceBudget("cuda:0", 4096 * MIB, "GPU-a"), DeviceBudget("cuda:1", 2048 * MIB, "GPU-b"))


async def test_a_group_is_of_one_kind(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    one = await registry_of(tmp_path, CPUS[0], GPUS[0], m=ModelConfig(parallel=TWO))
    assert "tensor = 2 needs 2 devices of one kind, and the node has cpu:0, cuda:0" in one.models["m"].problem
    for there, devices in (
        ((CPUS[0], GPUS[0], CPUS[1]), ("cpu:0", "cpu:1")),
        ((GPUS[0], CPUS[0], GPUS[1]), ("cuda:0", "cuda:1")),
        ((*CPUS, *GPUS), ("cpu:0", "cpu:1", "cuda:0", "cuda:1")),
    ):
        assert (await facts_of(tmp_path, ModelConfig(parallel=TWO), *there)).devices == devices
    by_layers = await facts_of(tmp_path, ModelConfig(parallel=ParallelConfig(pipeline=2)), *CPUS, *GPUS)
    assert by_layers.devices == ("cpu:0", "cpu:1", "cuda:0", "cuda:1")


async def test_bytes_of_a_share_on_gpus(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    settings = ModelConfig(max_model_len=256, parallel=TWO)
    facts, shape = await facts_of(tmp_path, settings, *GPUS), scan_one(tmp_path / "m", "m").shape
    assert shape is not None
    share = slices.split(shape, 0, Division(2))
    assert facts.weights_bytes == layout.weights_bytes(share, "float32")
    assert facts.work_space_bytes == gpu_sizing.gpu_work_space_bytes(share, "float32", 512, 256)
    assert facts.kv_floor_tokens == 256 * 256, "the most that it can use, on the smaller one"
    in_fp8 = await facts_of(tmp_path, msgspec.structs.replace(settings, kv_cache_dtype="fp8"), *CPUS, *GPUS)
    assert in_fp8.devices == ("cuda:0", "cuda:1")
    assert in_fp8.kv_bytes_per_token == kv_layout.kv_bytes_per_token(share, "fp8") < facts.kv_bytes_per_token / 2


async def test_kv_leaves_no_kind_out_that_holds_the_model(tmp_path: Path) -> None:
    """A pair of small GPUs beside two large cpu devices, and one that holds no share."""
    make_model(tmp_path / "m")
    roomy = [DeviceBudget(f"cpu:{at}", 8192 * MIB) for at in range(2)]
    settings = ModelConfig(parallel=TWO, max_sequences=4096)
    gpus_alone, both = [await facts_of(tmp_path, settings, *more, *GPUS) for more in ((), roomy)]
    assert both.kv_floor_tokens == gpus_alone.kv_floor_tokens < 4096 * both.max_model_len
    small = [DeviceBudget(f"cuda:{at}", 64 * MIB, f"GPU-{at}") for at in range(2)]
    assert (await facts_of(tmp_path, settings, *roomy, *small)).kv_floor_tokens > both.kv_floor_tokens


async def test_replicas_are_on_groups_of_one_kind(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    for devices, number in (((*CPUS, GPUS[0]), 0), ((*CPUS, *GPUS), 1)):
        registry = await registry_of(tmp_path, *devices, m=ModelConfig(parallel=TWO, replicas="auto"))
        assert len(registry.models["m"].replicas) == number


async def test_a_format_that_gpus_do_not_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, STORED_INT8.name, replace(STORED_INT8, device_kinds=("cpu",)))
    compress(write_checkpoint(tmp_path / "plain", CONFIG, random_bytes=True), tmp_path / "models" / "m")
    settings = ModelConfig(parallel=TWO)
    assert (await facts_of(tmp_path / "models", settings, *CPUS, *GPUS)).devices == ("cpu:0", "cpu:1")
    problem = (await registry_of(tmp_path / "models", CPUS[0], *GPUS, m=settings)).models["m"].problem
    why = f"{STORED_INT8.title} is not built for cuda devices"
    assert problem == f'models."m".parallel: tensor = 2 needs 2 cpu devices ({why}), and the node has cpu:0, cuda:0, cuda:1'


async def test_packed_weights_alone_take_what_plain_ones_do(tmp_path: Path) -> None:
    make_model(tmp_path / "m", dtype="bfloat16")
    pack_checkpoint(tmp_path / "m")
    both = await facts_of(tmp_path, ModelConfig(parallel=TWO), *CPUS)
    (tmp_path / "m" / "model.safetensors").unlink()
    alone = await facts_of(tmp_path, ModelConfig(parallel=TWO), *CPUS)
    assert alone.num_ranks == 2
    assert (alone.weights_bytes, alone.kv_bytes_per_token) == (both.weights_bytes, both.kv_bytes_per_token)


async def test_adapters_of_a_split_model_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base")
    write_adapter(tmp_path / "lora", adapter_tensors(modules_of(shape_of_checkpoint())), base_model_name_or_path="base")
    assert (await registry_of(tmp_path)).resolve("lora").adapter is not None
    registry = await registry_of(tmp_path, base=ModelConfig(parallel=TWO))
    assert registry.resolve("base").adapter is None
    with pytest.raises(HearthError) as caught:
        registry.resolve("lora")
    assert (caught.value.code, caught.value.status) == ("model_unusable", 400)
    assert "its base base is split over devices (parallel); adapters are served with models on one device" in caught.value.message


# ---- copies of experts

MIXTURE = MIXTRAL | {"num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 2}
BY_EXPERTS = ParallelConfig(expert=2)


def skewed(layers: int = 2) -> dict[int, list[int]]:
    return {layer: [4000, 100, 100, 100] for layer in range(layers)}


async def test_copies_are_chosen_by_what_was_counted(tmp_path: Path) -> None:
    shape = write_mixture(tmp_path)
    registry = await registry_of(tmp_path, m=ModelConfig(max_model_len=256, parallel=BY_EXPERTS, expert_copies=3))
    found = registry.models["m"]
    assert found.facts.expert_copies == 2, "a device has two of the four already"
    assert found.facts.weights_bytes == layout.share_weights_bytes(shape, "float32", Division(2, 2)), "without copies"
    asked: list[list[str]] = []

    def counts(names: Sequence[str]) -> dict[int, list[int]]:
        asked.append(list(names))
        return skewed()

    event = registry.chosen_copies("m", counts)
    assert event is not None
    assert event.copies is not None
    assert asked == [["m"]]
    assert (event.model, event.copies.number) == ("m", 1)
    assert [parts[1] for parts in event.copies.table] == [(0,), (0,)]
    taken = layout.share_weights_bytes(shape, "float32", Division(2, 2, copies=event.copies.table))
    assert found.facts.weights_bytes < taken <= event.copies.weights_bytes < taken + 4096 * len(shape.block_offsets)
    source = registry.source("m")
    assert source is not None
    assert source.form is not None
    assert source.form.division == Division(2, 2)


async def test_fewer_copies_than_were_allowed_have_a_size_too(tmp_path: Path) -> None:
    """Sizes are known of 1, 2 and 4 copies, and 3 are chosen."""
    shape = write_mixture(tmp_path, num_local_experts=8)
    registry = await registry_of(tmp_path, m=ModelConfig(max_model_len=256, parallel=BY_EXPERTS, expert_copies=4))
    assert list(registry.models["m"].bytes_with_copies) == [1, 2, 4]
    row = [200, 300, 100, 1300, 500, 500, 200, 100]
    event = registry.chosen_copies("m", lambda names: {0: row, 1: row})
    assert event is not None
    assert event.copies is not None
    assert event.copies.number == 3
    assert layout.share_weights_bytes(shape, "float32", Division(2, 2, copies=event.copies.table)) <= event.copies.weights_bytes


async def test_nothing_counted_or_counts_of_other_files_give_no_copies(tmp_path: Path) -> None:
    write_mixture(tmp_path)
    registry = await registry_of(tmp_path, m=ModelConfig(max_model_len=256, parallel=BY_EXPERTS, expert_copies=2))
    for counts in ({}, skewed(layers=1), {layer: [4000, 0] for layer in range(2)}, {layer: [900] * 4 for layer in range(2)}):
        event = registry.chosen_copies("m", lambda names, counts=counts: counts)  # type: ignore[misc]
        assert event is not None
        assert event.copies is None


async def test_other_models_are_not_asked_for_copies(tmp_path: Path) -> None:
    write_mixture(tmp_path)
    for settings in (ModelConfig(parallel=BY_EXPERTS), ModelConfig(parallel=TWO, expert_copies=2), ModelConfig(expert_copies=2)):
        registry = await registry_of(tmp_path, m=settings)
        assert registry.models["m"].facts.expert_copies == 0
        assert registry.chosen_copies("m", lambda names: skewed()) is None
    assert registry.chosen_copies("gone", lambda names: skewed()) is None


def write_mixture(folder: Path, **config: int) -> ModelShape:
    write_checkpoint(folder / "m", MIXTURE | config)
    shape = scan_one(folder / "m", "m").shape
    assert shape is not None
    return shape
