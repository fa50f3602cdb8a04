"""`parallel = "auto"`: over how many devices a model is split, and what a refusal tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from config.schema import DeviceBudget, ModelConfig, ParallelConfig
from daemon.models import planning
from daemon.models.planning import division_over
from daemon.models.registered import Registered
from loader.models.catalog import scan_one
from loader.shapes.model_shape import Division, ModelShape
from loader.sizes import layout, slices
from scheduler.node import events
from tests.daemon.test_split_models import MIB, facts_of, registry_of
from tests.e2e.checkpoints import make_model
from tests.e2e.test_embeddings import make_encoder
from tests.loader.checkpoints import shape as shape_of
from tests.loader.test_experts import MIXTRAL
from tests.loader.test_predictor import config_of, tensors_of
from tests.loader.test_predictor import write as write_predicting

# Whole it takes 28.5 MiB of a device, split over two 19.9, over four 16.3. Its 16 heads make no three shares.
WHOLE, HALVES, QUARTERS, LITTLE = 30, 24, 17, 12
AUTO = ModelConfig(max_model_len=256, parallel="auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    make_model(folder / "m", weights_bytes=8 * MIB)
    return folder


def cpus(*mib: int) -> list[DeviceBudget]:
    return [DeviceBudget(f"cpu:{at}", size * MIB) for at, size in enumerate(mib)]


async def registered(folder: Path, settings: ModelConfig, *devices: DeviceBudget) -> Registered:
    return (await registry_of(folder, *devices, m=settings)).models["m"]


@pytest.mark.parametrize(
    ("budgets", "number"),
    [
        ((WHOLE,) * 4, 1),
        ((LITTLE, WHOLE), 1),
        ((HALVES,) * 4, 2),
        ((HALVES, LITTLE, LITTLE, HALVES), 2),
        ((QUARTERS,) * 4, 4),
        ((HALVES, QUARTERS, QUARTERS, QUARTERS), 4),
    ],
)
async def test_the_fewest_devices_that_hold_it(folder: Path, budgets: tuple[int, ...], number: int) -> None:
    chosen = await registered(folder, AUTO, *cpus(*budgets))
    asked = msgspec.structs.replace(AUTO, parallel=ParallelConfig(number))
    assert chosen.facts == (await registered(folder, asked, *cpus(*budgets))).facts, "as if the settings had named the number"
    assert (chosen.facts.num_ranks, chosen.division, chosen.facts.if_too_large) == (number, Division(number), "")


async def test_the_length_of_a_request_counts(folder: Path) -> None:
    for length, number in ((256, 1), (2048, 2)):
        facts = await facts_of(folder, msgspec.structs.replace(AUTO, max_model_len=length), *cpus(29, 29))
        assert (facts.num_ranks, facts.max_model_len) == (number, length)
    kept = msgspec.structs.replace(AUTO, kv_floor_tokens=(HALVES << 20) // 512)
    assert "it is too large for 1 and 2" in (await facts_of(folder, kept, *cpus(HALVES, HALVES))).if_too_large


async def test_a_default_length_is_lowered_before_another_device_is_taken(tmp_path: Path) -> None:
    make_model(tmp_path / "m", weights_bytes=8 * MIB, max_position_embeddings=1 << 16)
    facts = await facts_of(tmp_path, ModelConfig(parallel="auto"), *cpus(40, 40))
    assert facts.num_ranks == 1
    assert 2048 <= facts.max_model_len < 10 * MIB // facts.kv_bytes_per_token, "less than a quarter of the device"


async def test_what_loads_is_what_was_chosen(folder: Path) -> None:
    registry = await registry_of(folder, *cpus(HALVES, HALVES), m=AUTO)
    source = registry.source("m")
    assert source is not None
    assert source.form is not None
    assert (source.form.num_kv_groups, source.form.division.expert_parts) == (1, 1)
    assert registry.resolve("m").weights_bytes == 2 * registry.models["m"].facts.weights_bytes
    assert registry.layout_id("m") == ""
    assert "split over 2 devices" in registry.describe("m")


async def test_a_reload_chooses_again(folder: Path) -> None:
    registry = await registry_of(folder, *cpus(HALVES, HALVES, WHOLE), m=AUTO)
    assert registry.models["m"].facts.num_ranks == 1
    two = msgspec.structs.replace(AUTO, devices=["cpu:0", "cpu:1"])
    (change,) = await registry.rescan(msgspec.structs.replace(registry.config, models={"m": two}))
    assert isinstance(change, events.ModelRegistered)
    assert (change.facts.num_ranks, change.facts.devices) == (2, ("cpu:0", "cpu:1"))


async def test_its_kv_is_not_what_makes_it_too_large(folder: Path) -> None:
    """In large chunks, a quarter of what is beside the weights may be more than is left."""
    registry = await registry_of(folder, *[DeviceBudget(f"cpu:{at}", 27 * MIB + 768 * 1024) for at in range(2)], m=AUTO)
    await registry.rescan(msgspec.structs.replace(registry.config, chunk_bytes=2 * MIB))
    facts = registry.models["m"].facts
    assert (facts.num_ranks, facts.kv_floor_tokens, facts.if_too_large) == (2, 2 * MIB // facts.kv_bytes_per_token, "")


async def test_it_fits_no_number_of_devices(folder: Path) -> None:
    budgets = cpus(*(LITTLE,) * 4)
    found = await registered(folder, AUTO, *budgets)
    four = await facts_of(folder, msgspec.structs.replace(AUTO, parallel=ParallelConfig(4)), *budgets)
    assert replace(found.facts, if_too_large="") == four, "the arithmetic is that of the most devices"
    assert found.facts.if_too_large == (
        'models."m".parallel = "auto" finds no number of devices: it is too large for 1, 2, 3 and 4'
    )


async def test_reasons_are_told_once_and_not_without_end(tmp_path: Path) -> None:
    make_model(tmp_path / "m", num_heads=3, num_kv_heads=3, hidden_size=24)
    whole = await facts_of(tmp_path, AUTO, *cpus(*(1,) * 7))
    reasons = [f"over {n}: num_attention_heads 3 is no multiple of {n}, the number of devices" for n in (4, 5, 6)]
    assert whole.num_ranks == 3
    told = f"is too large for 1, 2 and 3; {'; '.join(reasons)}; nor can it be split over 7"
    assert whole.if_too_large == f'models."m".parallel = "auto" finds no number of devices: it {told}'


async def test_kinds_that_have_no_shares(tmp_path: Path) -> None:
    make_encoder(tmp_path / "m")
    encoder = await facts_of(tmp_path, ModelConfig(parallel="auto"), *cpus(1, 1, 1))
    assert (encoder.num_ranks, "over 2 and 3: an encoder is served on one device alone" in encoder.if_too_large) == (1, True)


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ({"isolate": True}, "does not go with isolate = true: "),
        ({"speculator": "mtp"}, "does not go with speculator = 'mtp': "),
        ({"devices": ["cpu:1"]}, "splits over two or more devices of one kind, and devices names cpu:1"),
    ],
)
async def test_settings_that_keep_it_whole(tmp_path: Path, beside: dict[str, object], why: str) -> None:
    if "speculator" in beside:
        config = config_of("glm4-moe")
        write_predicting(tmp_path / "m", config, tensors_of(config))
    else:
        make_model(tmp_path / "m")
    settings = ModelConfig(**{"max_model_len": 256, "parallel": "auto", **beside})  # type: ignore[arg-type]
    fits = await registered(tmp_path, settings, *cpus(64, 64))
    assert (fits.problem, fits.facts.num_ranks, fits.facts.if_too_large) == ("", 1, "")
    facts = await facts_of(tmp_path, settings, *cpus(1, 1))
    assert facts.num_ranks == 1
    assert facts.if_too_large.startswith(f'models."m".parallel = "auto" {why}')


async def test_a_gpu_holds_it_whole_and_cpu_devices_share_what_it_does_not_hold(folder: Path) -> None:
    gpu = DeviceBudget("cuda:0", 1024 * MIB, "GPU-a")
    whole = await facts_of(folder, AUTO, gpu, *cpus(HALVES, HALVES))
    assert (whole.num_ranks, whole.devices) == (1, ())
    small = DeviceBudget("cuda:0", LITTLE * MIB, "GPU-a")
    for named in ([], ["cuda:0", "cpu:1", "cpu:0"]):
        split = await facts_of(folder, msgspec.structs.replace(AUTO, devices=named), small, *cpus(HALVES, HALVES))
        assert (split.num_ranks, split.devices) == (2, ("cpu:0", "cpu:1"))
    gpu_alone = await facts_of(folder, msgspec.structs.replace(AUTO, devices=["cuda:0"]), small, *cpus(HALVES, HALVES))
    why = "splits over two or more devices of one kind, and devices names cuda:0"
    assert gpu_alone.if_too_large == f'models."m".parallel = "auto" {why}'
    fp8 = msgspec.structs.replace(AUTO, kv_cache_dtype="fp8")
    assert (await facts_of(folder, fp8, gpu, *cpus(HALVES, HALVES))).num_ranks == 1
    forbidden = await facts_of(folder, fp8, small, *cpus(HALVES, HALVES))
    assert "needs 2 cuda devices (kv_cache_dtype = 'fp8' is not built for cpu devices), and the node" in forbidden.if_too_large


def gpus(*mib: int) -> list[DeviceBudget]:
    return [DeviceBudget(f"cuda:{at}", size * MIB, f"GPU-{at}") for at, size in enumerate(mib)]


async def test_the_fewest_devices_of_one_kind(tmp_path: Path) -> None:
    """Its KV is divided. On a GPU a share's work space has 512 MiB for the communicator, too."""
    make_model(tmp_path / "m", num_heads=4, num_kv_heads=4)
    each = (await facts_of(tmp_path, AUTO, *gpus(2048))).kv_bytes_per_token
    long = msgspec.structs.replace(AUTO, kv_floor_tokens=2048 * MIB // each)
    few, many = gpus(2048, 2048, 2048), cpus(700, 700, 700, 700)
    for there, number, devices in (
        (gpus(2048, 4096), 1, ()),
        (few, 2, ("cuda:0", "cuda:1", "cuda:2")),
        ([*gpus(LITTLE, 2048, LITTLE, 2048), *many[:1]], 2, tuple(f"cuda:{at}" for at in range(4))),
        ([*few[:1], *many], 4, tuple(f"cpu:{at}" for at in range(4))),
        ([*few[:2], *many], 2, ("cuda:0", "cuda:1", *(f"cpu:{at}" for at in range(4)))),
    ):
        facts = await facts_of(tmp_path, long, *there)
        assert (facts.num_ranks, facts.devices, facts.if_too_large) == (number, devices, "")
    why = "finds no number of devices: it is too large for 1 and 2"
    assert (await facts_of(tmp_path, long, *gpus(1500, 1500))).if_too_large == f'models."m".parallel = "auto" {why}'


async def test_without_the_key_a_refusal_tells_whether_it_would_help(folder: Path) -> None:
    for given in (None, ParallelConfig(1)):
        plain = msgspec.structs.replace(AUTO, parallel=given)
        two = await facts_of(folder, plain, *cpus(HALVES, HALVES))
        hint = 'models."m".parallel = "auto" would split it over 2 devices'
        assert (two.num_ranks, two.if_too_large) == (1, hint)
        assert (await facts_of(folder, plain, *cpus(WHOLE, HALVES))).if_too_large == ""
        assert (await facts_of(folder, plain, *cpus(LITTLE, LITTLE))).if_too_large == ""


async def test_layers_are_divided_where_matrices_cannot_be(tmp_path: Path) -> None:
    make_model(tmp_path / "m", num_heads=3, num_kv_heads=3, hidden_size=96, num_layers=60)
    found = await registered(tmp_path, AUTO, *cpus(30, 30))
    assert (found.division, found.facts.if_too_large) == (Division(2, num_stages=2), "")
    named = msgspec.structs.replace(AUTO, parallel=ParallelConfig(pipeline=2))
    assert found.facts == await facts_of(tmp_path, named, *cpus(30, 30))


# ---- devices of other hosts


def lent(*mib: int) -> list[DeviceBudget]:
    return [DeviceBudget(f"cpu:{at}@b", size * MIB) for at, size in enumerate(mib)]


async def test_a_pipeline_over_hosts_where_this_machine_does_not_hold_it(tmp_path: Path) -> None:
    make_model(tmp_path / "m", num_layers=12, weights_bytes=8 * MIB)
    whole, half = 40, 27
    for devices, division in (
        ([*cpus(whole), *lent(whole, whole)], Division(1)),
        ([*cpus(half, half), *lent(whole, whole)], Division(2)),
        ([*cpus(half), *lent(half, half)], Division(2, num_stages=2)),
    ):
        found = await registered(tmp_path, AUTO, *devices)
        assert (found.division, found.facts.if_too_large) == (division, "")
    named = msgspec.structs.replace(AUTO, parallel=ParallelConfig(pipeline=2))
    assert found.facts == await facts_of(tmp_path, named, *devices), "as if the settings had named the number"
    assert found.facts.devices == ("cpu:0", "cpu:0@b", "cpu:1@b")
    here = msgspec.structs.replace(AUTO, devices=["cpu:0"])
    refused = await facts_of(tmp_path, here, *devices)
    assert refused.if_too_large.endswith("splits over two or more devices of one kind, and devices names cpu:0")
    plain = await facts_of(tmp_path, msgspec.structs.replace(AUTO, parallel=None), *devices)
    assert plain.if_too_large == 'models."m".parallel = "auto" would split it over 2 devices'


@pytest.mark.parametrize(
    ("here", "there", "mib", "num_heads", "division"),
    [
        (2, 2, 30, 4, Division(4, num_stages=2)),
        (1, 3, 30, 4, Division(4, num_stages=4)),  # the last stage would need two devices here
        (2, 2, 21, 3, Division(4, num_stages=4)),  # its matrices make no two shares
    ],
)
async def test_stages_are_divided_where_each_host_has_the_devices(
    tmp_path: Path, here: int, there: int, mib: int, num_heads: int, division: Division
) -> None:
    make_model(tmp_path / "m", num_heads=num_heads, num_kv_heads=num_heads, hidden_size=32 * num_heads, num_layers=60)
    found = await registered(tmp_path, AUTO, *cpus(*[mib] * here), *lent(*[mib] * there))
    assert (found.division, found.facts.if_too_large) == (division, "")


async def test_no_number_of_devices_of_all_hosts_holds_it(tmp_path: Path) -> None:
    make_model(tmp_path / "m", num_layers=12, weights_bytes=8 * MIB)
    found = await registered(tmp_path, AUTO, *cpus(4), *lent(64, 64))
    assert found.division == Division(3, num_stages=3), "its arithmetic is that of the most devices"
    assert found.facts.if_too_large == (
        'models."m".parallel = "auto" splits over two or more devices of one kind, and the node has cpu:0; over several hosts: '
        "finds no number of devices: it is too large for 1, 2 and 3"
    )


async def test_layers_that_are_divided_here_may_also_be_elsewhere(tmp_path: Path) -> None:
    """Its matrices make no two shares. It is the fewest of this machine's devices that decide on the number."""
    make_model(tmp_path / "m", num_heads=3, num_kv_heads=3, hidden_size=96, num_layers=60)
    found = await registered(tmp_path, AUTO, *cpus(30, 30), *lent(30))
    assert found.division == Division(2, num_stages=2)
    assert found.facts.devices == ("cpu:0", "cpu:1", "cpu:0@b")
    three = await registered(tmp_path, AUTO, *cpus(30, 22, 22), *lent(30))
    assert three.division == Division(3), "not two stages, one of them elsewhere"


def test_experts_are_divided_where_only_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, dense = shape_of(**MIXTRAL), shape_of()
    can = {Division(2), Division(4, 4), Division(5, 1, 5)}

    def refusal(shape: ModelShape, division: Division) -> str:
        return "" if division in can else "refused"

    monkeypatch.setattr(planning.slices, "refusal", refusal)
    assert division_over(mixture, 2) == ParallelConfig(tensor=2)
    assert division_over(mixture, 3) == ParallelConfig(tensor=3), "nothing else can be done either"
    assert division_over(mixture, 4) == ParallelConfig(expert=4)
    assert division_over(dense, 5) == ParallelConfig(pipeline=5)


async def test_the_largest_share_counts(tmp_path: Path) -> None:
    """Shares lie differently in the blocks of their file."""
    make_model(tmp_path / "m", weights_bytes=4 * MIB, vocab_size=1004)
    facts = await facts_of(tmp_path, msgspec.structs.replace(AUTO, parallel=ParallelConfig(4)), *cpus(*(64,) * 4))
    shape = scan_one(tmp_path / "m", "m").shape
    assert shape is not None
    shares = [layout.weights_bytes(slices.split(shape, rank, Division(4)), "float32") for rank in range(4)]
    assert facts.weights_bytes == max(shares) > shares[0]
