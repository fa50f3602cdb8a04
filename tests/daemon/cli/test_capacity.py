"""`hearth plan --config`: published models' sizes from config.json alone, the ledger's verdict on one device, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from daemon.cli import main
from loader.configs.hf_config import parse_config
from loader.files.safetensors import INDEX_NAME
from loader.formats.plain import PLAIN
from loader.formats.weight_format import WeightFormat
from loader.shapes.kv_layout import kv_bytes_per_token, kv_reserved_bytes
from loader.shapes.model_shape import Division, ModelShape
from loader.sizes import capacity
from loader.sizes.capacity import Devices, Settings, share_of
from loader.sizes.gpu_sizing import gpu_work_space_bytes
from loader.sizes.layout import parameter_shapes, share_weights_bytes, weights_bytes
from loader.sizes.slices import split
from loader.sizes.work_space import work_space_bytes
from scheduler.node.events import ModelFacts
from scheduler.node.ledger import size_of
from tests.loader.checkpoints import CONFIG, safetensors_bytes, write_checkpoint
from tests.loader.compressed import quantization_config
from tests.loader.test_families import MIXTRAL_8X7B
from tests.loader.test_llama4 import TEXT as LLAMA4_TEXT
from tests.loader.test_predictor import config_of, tensors_of

PUBLISHED = Path(__file__).parents[2] / "published"
LLAMA31_8B: dict[str, Any] = json.loads((PUBLISHED / "llama-3.1-8b.json").read_text())
DEEPSEEK_V2_LITE: dict[str, Any] = json.loads((PUBLISHED / "deepseek-v2-lite.json").read_text())
DENSE_LATENTS = DEEPSEEK_V2_LITE | {"first_k_dense_replace": 27, "max_position_embeddings": 4096}
QWEN3_235B_A22B: dict[str, Any] = json.loads((PUBLISHED / "qwen3-235b-a22b.json").read_text())


def folder_of(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main.run(["plan", "--json", *args]) == 0
    return json.loads(capsys.readouterr().out)


# parameters, those of a token, bytes of KV a token: published; (devices, bytes each): tokens that fit
@pytest.mark.parametrize(
    ("config", "parameters", "active", "token_bytes", "devices", "tokens"),
    [
        (LLAMA31_8B, 8_030_261_248, 8_030_261_248, 131_072, "cuda=80GiB", (500_000, 520_000)),
        (QWEN3_235B_A22B, 235_093_634_560, 22_190_763_520, 192_512, "cuda=8x80GiB", (490_000, 505_000)),
        (DEEPSEEK_V2_LITE, 15_706_484_224, 2_661_150_208, 31_104, "cuda=80GiB", (1_600_000, 1_700_000)),
    ],
)
def test_published_models(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    parameters: int,
    active: int,
    token_bytes: int,
    devices: str,
    tokens: tuple[int, int],
) -> None:
    plan = planned(capsys, "--config", folder_of(tmp_path, config), "--devices", devices)
    assert (plan["num_parameters"], plan["active_parameters"], plan["source"]) == (parameters, active, "config")
    assert 2 * parameters <= plan["weights_bytes"] < 2 * parameters * 1.001
    assert [need["token_bytes"] for need in plan["kv"]] == [token_bytes]
    assert tokens[0] < plan["shares"][-1]["tokens"] < tokens[1]


def test_kimi_k25_is_planned_in_int4_from_the_text_model_of_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4.5 bits for each weight of the experts that are chosen, 16 for each other, as `ignore` says. Published: 1 T parameters, 32 B
    of them for a token."""
    folder = folder_of(tmp_path, json.loads((PUBLISHED / "kimi-k2.5.json").read_text()))
    plan = planned(capsys, "--config", folder, "--devices", "cuda=8x80GiB", "--max-model-len", "65536")
    assert plan["settings"]["weight_format"] == "int4 by 32"
    assert plan["num_parameters"] == 1_026_408_232_448
    assert plan["num_parameters"] - plan["active_parameters"] == 60 * (384 - 8) * 3 * 7168 * 2048
    chosen = 60 * 384 * 3 * 7168 * 2048
    wanted = chosen * 4.5 / 8 + 2 * (plan["num_parameters"] - chosen)
    assert wanted <= plan["weights_bytes"] < 1.001 * wanted
    assert [need["token_bytes"] for need in plan["kv"]] == [70_272]
    share = plan["shares"][-1]
    assert (share["sequences"], share["not_split"]) == (1, "")
    # whole on each: what makes latents (1536 + 512 + 64 outputs) in 61 layers, 60 routers in float32
    whole = 7168 * (2 * 61 * (1536 + 512 + 64) + 4 * 60 * 384)
    assert 0 < share["weights_bytes"] - (wanted / 8 + 7 / 8 * whole) < 0.001 * share["weights_bytes"]


def test_states_are_planned_beside_kv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of four devices has a quarter of the heads of the delta rule, one of which serves two of values."""
    folder = folder_of(tmp_path, json.loads((PUBLISHED / "qwen3-next-80b-a3b.json").read_text()))
    plan = planned(capsys, "--config", folder, "--devices", "cuda=4x80GiB", "--max-model-len", "32768")
    assert plan["num_parameters"] == 79_674_391_296
    assert [(need["kind"], need["token_bytes"], need["state_bytes"]) for need in plan["kv"]] == [
        ("full", 24_576, 0),
        ("state", 0, 79_036_416),
    ]
    share, states = plan["shares"][-1], 8 * 79_036_416
    assert share["kv_token_bytes"] == 24_576 // 2
    assert 32_768 * 12_288 + states // 4 < share["sequence_bytes"] < 32_768 * 12_288 + states // 4 + (96 << 20)
    assert main.run(["plan", "--config", folder]) == 0
    assert "75.4 MiB a state in 36 layers, of which a request keeps two" in capsys.readouterr().out


def test_what_is_kept_twice_where_devices_outnumber_kv_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, QWEN3_235B_A22B)
    four, eight = (planned(capsys, "--config", folder, "--devices", f"cuda={n}x141GB")["shares"][-1] for n in (4, 8))
    assert four["kv_token_bytes"] == eight["kv_token_bytes"] == 192_512 // 4


@pytest.mark.parametrize("windows", [False, True])
def test_one_device_is_judged_as_by_the_ledger(windows: bool) -> None:
    """The least budget that this arithmetic calls enough is the least that the node scheduler accepts."""
    family = {"architectures": ["MistralForCausalLM"], "sliding_window": 40} if windows else {}
    config = CONFIG | family | {"max_position_embeddings": 4096, "hidden_size": 64, "vocab_size": 4096}
    shape, chunk = parse_config(json.dumps(config).encode()), 64 << 10
    settings = Settings("float32", PLAIN, "", 1000, 8, 128, 16, chunk)
    reserved = kv_reserved_bytes(shape, "float32", 1000, 16, 128, chunk) if windows else 0
    facts = ModelFacts(
        name="m",
        weights_bytes=weights_bytes(shape, "float32"),
        kv_bytes_per_token=kv_bytes_per_token(shape, "float32"),
        work_space_bytes=work_space_bytes(shape, "float32", 128, 8, 1000),
        max_model_len=1000,
        kv_reserved_bytes=reserved,
    )
    size = size_of(facts, chunk)
    least = (size.chunks + size.work_space_chunks) * chunk
    assert share_of(shape, settings, Devices("cpu", 1, least)).sequences == 1
    assert not share_of(shape, settings, Devices("cpu", 1, least - 1)).fits


def test_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An index names the matrices that a quantised checkpoint holds plain; without one they count as quantised."""
    config = CONFIG | {"quantization_config": quantization_config()}
    folder = folder_of(tmp_path, config)
    every = planned(capsys, "--config", folder, "--devices", "cpu=1GiB")
    assert (every["source"], every["settings"]["weight_format"]) == ("config", "compressed-tensors int8")
    shape = parse_config(json.dumps(config).encode())
    names = dict.fromkeys(named(shape, plain="layers.1.mlp.down_proj"), "model.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    by_index = planned(capsys, "--config", folder)
    assert by_index["source"] == "index"
    assert by_index["weights_bytes"] > every["weights_bytes"]
    names.pop("model.norm.weight")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert main.run(["plan", "--config", folder]) == 4
    assert "tensor model.norm.weight: missing" in capsys.readouterr().err


def named(shape: Any, plain: str) -> list[str]:
    from loader.sizes.layout import stored_tensors

    return [one.name for one in stored_tensors(shape) if plain not in one.name or not one.name.endswith("_scale")]


def test_files_that_are_there_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, CONFIG)
    plan = planned(capsys, "--config", str(tmp_path), "--devices", "cpu=64MiB", "--max-model-len", "32")
    assert plan["source"] == "headers"
    assert plan["shares"][0]["fits"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_rounded_experts_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Each layer's matrices take a byte a number and four for each output; those in one tensor are refused."""
    args = ("--config", folder_of(tmp_path, MIXTRAL_8X7B), "--devices", f"{kind}=800GiB", "--max-model-len", "2048")
    args += ("--dtype", "bfloat16")
    plain, rounded = planned(capsys, *args), planned(capsys, *args, "--quantize", "int8")
    shape = parse_config(json.dumps(MIXTRAL_8X7B).encode())
    matrices = [dims for name, dims in parameter_shapes(shape).items() if "_proj." in name or ".experts." in name]
    saved = sum(num_outputs * num_inputs - 4 * num_outputs for num_outputs, num_inputs in matrices)
    assert len(matrices) == shape.num_layers * (4 + 3 * MIXTRAL_8X7B["num_local_experts"])
    assert abs(plain["weights_bytes"] - rounded["weights_bytes"] - saved) < 4096 * len(matrices) < 1e-3 * saved, "but for alignment"
    stacked = folder_of(tmp_path, LLAMA4_TEXT)
    assert main.run(["plan", "--config", stacked, "--quantize", "int8", "--devices", f"{kind}=80GiB"]) == 4
    assert "int8 is not built for experts that the checkpoint holds in one tensor" in capsys.readouterr().err


def test_a_models_predictor_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By config.json, an index or headers; where it fits, and where the devices run one."""
    flash = json.loads((PUBLISHED / "glm-4.7-flash.json").read_text())
    args = ("--config", folder_of(tmp_path, flash), "--devices", "cpu=80GiB", "--max-model-len", "32768")
    plain, auto, named_one = (planned(capsys, *args, "--speculator", name) for name in ("none", "auto", "mtp"))
    assert auto == named_one == planned(capsys, *args)
    assert (plain["speculator"], plain["predictor"], auto["speculator"]) == ("none", None, "mtp")
    own = auto["predictor"]
    assert auto["num_parameters"] == plain["num_parameters"], "of a model alone"
    assert own["kv_token_bytes"] == 2 * (512 + 64) == auto["kv"][0]["token_bytes"] - plain["kv"][0]["token_bytes"]
    assert own["weights_bytes"] == auto["weights_bytes"] - plain["weights_bytes"] >= 2 * own["num_parameters"] > 1e9
    assert own["work_space_bytes"] > 0
    assert auto["shares"][0]["free_bytes"] < plain["shares"][0]["free_bytes"] - own["weights_bytes"]
    assert main.run(["plan", *args]) == 0
    assert "predictor   1.2 GiB of the weights, 1.1 KiB of a token's KV, 22.5 MiB of a step's work space" in capsys.readouterr().out
    small = (*args[:2], "--devices", "cpu=57GiB", "--max-model-len", "1024")
    assert main.run(["plan", *small]) == 0
    assert "predictor   not counted: with it the model would not fit\n" in capsys.readouterr().out
    assert planned(capsys, *small)["speculator"] == "prompt-lookup"
    assert main.run(["plan", *small, "--speculator", "bogus"]) == 2
    assert "one of auto, none, prompt-lookup, mtp, or the folder of an EAGLE-3 head, not 'bogus'" in capsys.readouterr().err


def test_a_predictor_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, LLAMA31_8B)
    assert main.run(["plan", "--config", folder, "--speculator", "mtp"]) == 4
    assert "--speculator mtp: its files hold no layer that predicts further tokens" in capsys.readouterr().err
    assert planned(capsys, "--config", folder)["speculator"] == "prompt-lookup"
    config = config_of("glm4-moe")
    folder, tensors = folder_of(tmp_path, config), tensors_of(config)
    for left_out, message in (
        ("model.layers.2.eh_proj.weight", "its files hold no layer that predicts further tokens"),
        ("model.layers.2.mlp.experts.1.up_proj.weight", "tensor model.layers.2.mlp.experts.1.up_proj.weight: missing"),
    ):
        names = dict.fromkeys(tensors.keys() - {left_out}, "model.safetensors")
        (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        plan = planned(capsys, "--config", folder)
        assert (plan["source"], plan["predictor"]) == ("index", None)
        assert main.run(["plan", "--config", folder, "--speculator", "mtp"]) == 4
        assert message in capsys.readouterr().err
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    by_index = planned(capsys, "--config", folder)
    (tmp_path / INDEX_NAME).unlink()
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    by_headers = planned(capsys, "--config", folder)
    assert (by_index["source"], by_headers["source"]) == ("index", "headers")
    assert (
        by_index["predictor"] == by_headers["predictor"] == planned(capsys, "--config", folder, "--speculator", "mtp")["predictor"]
    )
    assert by_index["predictor"]["weights_bytes"] > 0


def test_what_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, QWEN3_235B_A22B)
    assert main.run(["plan", "--config", folder, "--devices", "cuda=8x80GiB"]) == 0
    told = capsys.readouterr().out
    for line in (
        "Qwen3MoeForCausalLM, 235.09 B parameters, 22.19 B for a token: by config.json alone",
        "one cuda device of 80.0 GiB: does not fit",
        "8 cuda devices of 80.0 GiB: fits",
        "54.9 GiB on each for weights",
        "split so by parallel = { tensor = 8 } in the model's table; without it a model is on one device",
    ):
        assert line in told
    assert main.run(["plan", "--config", folder, "--devices", "cuda=80GiB"]) == 4
    capsys.readouterr()
    assert main.run(["plan", "--json", "--config", folder, "--devices", "cuda=80GiB"]) == 4
    assert json.loads(capsys.readouterr().out)["shares"][0]["sequences"] == 0, "one JSON value, for scripts"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("number", "flags"), [(2, ()), (2, ("--tensor", "2")), (4, ("--tensor", "4", "--expert", "1"))])
def test_shares_are_those_that_are_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, number: int, flags: tuple[str, ...]
) -> None:
    args = ("--config", folder_of(tmp_path, DENSE_LATENTS), "--devices", f"{kind}={number}x64GiB", *flags)
    plan, division = planned(capsys, *args), Division(number)
    assert [share["devices"]["num_devices"] for share in plan["shares"]] == ([number] if flags else [1, number])
    share, shape, chunk = plan["shares"][-1], parse_config(json.dumps(DENSE_LATENTS).encode()), plan["settings"]["chunk_bytes"]
    own = split(shape, 0, division)
    assert (share["devices"]["expert_parts"], share["not_split"]) == (1, "")
    assert 0 <= share["weights_bytes"] - share_weights_bytes(shape, "bfloat16", division) < chunk
    of_step = work_space_bytes(own, "bfloat16", 512, 256) if kind == "cpu" else gpu_work_space_bytes(own, "bfloat16", 4096, 256)
    assert 0 <= share["work_space_bytes"] - of_step < chunk
    assert share["kv_token_bytes"] == plan["kv"][0]["token_bytes"] == 31_104, "the latents of all heads, on each device"
    assert main.run(["plan", *args]) == 0
    told = capsys.readouterr().out
    assert f"split so by parallel = {{ tensor = {number} }} in the model's table" in told
    assert (f"one {kind} device" in told) == (not flags)


def test_by_default_a_model_is_divided_as_auto_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By whole experts where parts of them are no whole blocks, and by layers where nothing else can be divided. More devices than
    KV heads have each of them several times."""
    fp8 = json.loads((PUBLISHED / "qwen3-235b-a22b-fp8.json").read_text())
    (folder := tmp_path / "fp8").mkdir()
    four, eight = (
        planned(capsys, "--config", folder_of(folder, fp8), "--devices", f"cuda={number}x141GB")["shares"][-1] for number in (4, 8)
    )
    assert [share["devices"]["expert_parts"] for share in (four, eight)] == [1, 8]
    assert four["not_split"] == eight["not_split"] == ""
    assert four["kv_token_bytes"] == eight["kv_token_bytes"] == 192_512 // 4
    three = planned(capsys, "--config", folder_of(tmp_path, LLAMA31_8B), "--devices", "cpu=3x64GiB")["shares"][-1]
    assert (three["devices"]["num_stages"], three["not_split"]) == (3, "")


def test_parts_of_experts_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the shares of a mixture: they are what tensor = 4 makes of a dense model."""
    seen = []

    def as_dense(shape: ModelShape, dtype: str, division: Division, weight_format: WeightFormat) -> int:
        seen.append((division, weight_format))
        return 5 << 30

    monkeypatch.setattr(capacity, "share_weights_bytes", as_dense)
    monkeypatch.setattr(capacity, "split", lambda shape, rank, division: split(shape, rank, Division(division.size)))
    args = ("--config", folder_of(tmp_path, DENSE_LATENTS), "--devices", "cpu=4x64GiB", "--tensor", "2", "--expert", "2")
    (share,) = planned(capsys, *args)["shares"]
    assert set(seen) == {(Division(4, 2), PLAIN)}
    assert (share["devices"]["num_devices"], share["devices"]["expert_parts"]) == (4, 2)
    assert 0 <= share["weights_bytes"] - (5 << 30) < 64 << 20
    assert main.run(["plan", *args]) == 0
    assert "split so by parallel = { tensor = 2, expert = 2 } in the model's table" in capsys.readouterr().out


def test_what_is_not_split_is_planned_as_expected_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, LLAMA31_8B)
    three = planned(capsys, "--config", folder, "--devices", "cuda=3x32GiB")["shares"][-1]
    assert (three["devices"]["num_stages"], three["not_split"]) == (3, ""), "as by default its layers would be divided"
    many = planned(capsys, "--config", folder, "--devices", "cuda=33x32GiB")["shares"][-1]
    why = "config.json: parallel: num_attention_heads 32 is no multiple of 33, the number of devices"
    assert many["not_split"] == why
    assert many["weights_bytes"] < 0.5 * 2**30, "a part of each of the matrices"
    assert main.run(["plan", "--config", folder, "--devices", "cuda=33x32GiB"]) == 0
    assert f"{why}; over several devices, these are the sums of tensor parallelism" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "by_default"), [("cpu", "mtp"), ("cuda", "prompt-lookup")])
def test_shares_have_no_predictor(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, by_default: str) -> None:
    """Whether they are asked for or are shown beside one device."""
    config = config_of("deepseek-v3", first_k_dense_replace=2)
    args = ("--config", folder_of(tmp_path, config), "--devices", f"{kind}=2x4GiB")
    plain = planned(capsys, *args, "--speculator", "none")
    beside, named = planned(capsys, *args), planned(capsys, *args, "--tensor", "2")
    assert beside["speculator"] == by_default
    beside = planned(capsys, *args, "--speculator", "mtp")
    assert beside["shares"][0]["kv_token_bytes"] > plain["shares"][0]["kv_token_bytes"]
    assert beside["shares"][1] == plain["shares"][1] == named["shares"][0]
    assert plain["shares"][1]["not_split"] == ""
    assert (named["speculator"], named["no_predictor"]) == ("prompt-lookup", "models that are split over devices have none")
    assert main.run(["plan", *args, "--tensor", "2", "--speculator", "mtp"]) == 4
    assert "parallel: does not go with speculator = 'mtp'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "which model? Name it, or a folder with --config"),
        (["name", "--config", "{}"], 2, "give NAME or --config, not both"),
        (["--config", "/nowhere"], 2, "--config /nowhere/config.json: No such file"),
        (["--config", "{}/config.json"], 2, "/config.json: is a file; name the folder in which the model's config.json lies"),
        (["--config", "{}", "--speculator", "{}"], 2, "': neither model.safetensors nor model.safetensors.index.json is there"),
        (["--config", ""], 2, "--config: is empty; name the folder in which the model's config.json lies"),
        (["name", "--devices", ""], 2, "--devices: goes with --config FOLDER"),
        (["--config", "{}", "--devices", ""], 2, "--devices: as in cuda=8x80GiB, cuda=80GiB or cpu=64GiB; not ''"),
        (["--config", "{}", "--resident", ""], 2, "--resident: '' is no weight format"),
        (["--config", "{}", "--devices", "80GiB"], 2, "--devices: as in cuda=8x80GiB"),
        (["--config", "{}", "--devices", "cuda=0x80GiB"], 2, "from 1 to 1024 devices, not 0"),
        (["--config", "{}", "--devices", "cuda=80XB"], 2, "'80XB' must be a number of bytes"),
        (["--config", "{}", "--tensor", "2"], 2, "--tensor 2: for 2 devices, and --devices names none"),
        (
            ["--config", "{}", "--devices", "cpu=8x80GiB", "--tensor", "2", "--expert", "2"],
            2,
            "--tensor 2, --expert 2: for 4 devices, and --devices names 8",
        ),
        (["--config", "{}", "--devices", "cpu=2x80GiB", "--expert", "0"], 2, "--expert 0: at least 1"),
        (
            ["--config", "{}", "--devices", "cpu=2x80GiB", "--expert", "2"],
            4,
            "config.json: parallel: expert = 2 divides the experts of a model, and LlamaForCausalLM has none",
        ),
        (
            ["--config", "{}", "--devices", "cuda=3x80GiB", "--tensor", "3"],
            4,
            "config.json: parallel: num_attention_heads 32 is no multiple of 3, the number of devices",
        ),
        (
            ["--config", "{}", "--devices", "cpu=3x80GiB", "--tensor", "3"],
            4,
            "config.json: parallel: num_attention_heads 32 is no multiple of 3, the number of devices",
        ),
        (["--config", "{}", "--devices", "cpu=128x80GiB", "--tensor", "128"], 4, "a model is split over 64 at most"),
        (["--config", "{}", "--max-model-len", "0"], 2, "--max-model-len: from 1 to the checkpoint's 131072, not 0"),
        (["--config", "{}", "--max-sequences", "0"], 2, "--max-sequences: at least 1, not 0"),
        (["--config", "{}", "--dtype", "int8"], 2, "--dtype: one of auto, float32"),
        (["--config", "{}", "--quantize", "int7"], 2, "--quantize: 'int7' is no weight format"),
        (["--config", "{}", "--resident", "pickled"], 2, "--resident: 'pickled' is no weight format"),
        (
            ["--config", "{}", "--resident", "packed", "--quantize", "int8"],
            2,
            "--quantize: int8 does not go with resident = 'packed'",
        ),
        (["--config", "{}", "--resident", "packed", "--devices", "cuda=80GiB"], 4, "packed is not built for cuda devices"),
        (
            ["--config", "{}", "--resident", "packed", "--dtype", "float32"],
            4,
            "--resident: packed is for bfloat16 weights, and this",
        ),
        (["--config", "{}", "--kv-cache-dtype", "fp8", "--devices", "cpu=80GiB"], 4, "is built for cuda devices only"),
    ],
)
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str) -> None:
    folder = folder_of(tmp_path, LLAMA31_8B)
    assert main.run(["plan", *(arg.format(folder) for arg in args)]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "'FalconForCausalLM' is not supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"rms_norm_eps": -1}, "config.json: key rms_norm_eps: -1.0 is not positive"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4096, "num_experts_per_tok": 1, "num_hidden_layers": 1024},
            "experts",
        ),
    ],
)
def test_hostile_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str) -> None:
    assert main.run(["plan", "--config", folder_of(tmp_path, QWEN3_235B_A22B | changes)]) == 4
    assert message in capsys.readouterr().err
