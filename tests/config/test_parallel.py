"""The key `parallel` of a model: what it goes with, and what a refusal tells."""

from pathlib import Path

import pytest

from config.load import ConfigError, load
from config.parallel import ONE_HOST, STAGES, by_kind, num_ranks, problem
from config.provenance import Sources, settings
from config.reload import plan
from config.schema import ModelConfig, NodeConfig, ParallelConfig

TWO = 'device = ["cpu:0=64MiB", "cpu:1=64MiB"]\n'


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return str(path)


def test_a_model_over_two_devices(tmp_path: Path) -> None:
    text = TWO + '[models."a/b"]\nparallel = { tensor = 2 }\nspeculator = "prompt-lookup"\n[models.c]\nparallel = {}\n[models.d]\n'
    text += "[models.e]\nparallel = { pipeline = 2 }\n"
    models = load(write(tmp_path, text)).models
    assert [num_ranks(models[name]) for name in ("a/b", "c", "d", "e")] == [2, 1, 1, 2]


def check_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    """Checks that a configuration is refused with these words."""
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parallel = { stages = 2 }", ["node.toml:3", ".parallel.stages", "unknown key", "known keys: tensor, expert, pipeline"]),
        ("parallel = { pipeline = 0 }", [".parallel.pipeline", "at least 1 and at most 64"]),
        (
            "parallel = { tensor = 2, pipeline = 2 }",
            ['"m".parallel', "tensor = 2, pipeline = 2 needs 4 devices of one kind, and"],
        ),
        ("parallel = { tensors = 2 }", [".parallel.tensors", "did you mean tensor?"]),
        ("parallel = 2", ["node.toml:3", '"m".parallel', '2 must be "auto" or a table', "{ tensor = 2 }"]),
        ('parallel = "Auto"', ["node.toml:3", '"m".parallel', "'Auto' must be \"auto\" or a table, as in parallel = {"]),
        ('parallel = ""', ['"m".parallel', """'' must be "auto" or a table"""]),
        ('sampling = "auto"', ['"m".sampling', "'auto' must be a table, as in sampling"]),
        ("parallel = { tensor = 0 }", [".parallel.tensor", "at least 1 and at most 64"]),
        ("parallel = { tensor = 65 }", [".parallel.tensor", "at least 1 and at most 64"]),
        ("parallel = { tensor = 1.5 }", [".parallel.tensor", "whole number"]),
        ("parallel = { tensor = 2 }\nisolate = true", ['"m".parallel', "isolate = true"]),
        (
            'parallel = { tensor = 2 }\nkv_cache_dtype = "fp8"',
            ["needs 2 cuda devices (kv_cache_dtype = 'fp8' is not built for cpu devices), and the node has cpu:0, cpu:1"],
        ),
        ('parallel = { tensor = 2 }\nspeculator = "mtp"', ['"m".parallel', "speculator = 'mtp'", "auto, none, prompt-lookup"]),
        ("parallel = { tensor = 3 }", ['"m".parallel', "needs 3 devices of one kind", "the node has cpu:0, cpu:1"]),
        ('parallel = { tensor = 2 }\ndevices = ["cpu:1"]', ['"m".parallel', "needs 2 devices of one kind", "devices names cpu:1"]),
        ('parallel = { tensor = 2 }\nupstream = "http://a/v1"', [".parallel", "no effect beside upstream"]),
        ('parallel = { tensor = 2 }\nbase = "b"', [".parallel", "no effect beside base"]),
        ('parallel = "auto"\nupstream = "http://a/v1"', [".parallel", "no effect beside upstream"]),
        ('parallel = "auto"\nbase = "b"', [".parallel", "no effect beside base"]),
        ("expert_copies = 2", ['"m".expert_copies', "needs parallel = { expert = 2 } or more beside it"]),
        ('parallel = "auto"\nexpert_copies = 1', ['"m".expert_copies', "needs parallel = { expert = 2 }"]),
        ("parallel = { tensor = 2 }\nexpert_copies = 1", ['"m".expert_copies', "needs parallel = { expert = 2 }"]),
        ("parallel = { expert = 2 }\nexpert_copies = 17", [".expert_copies", "at least 0 and at most 16"]),
        ("parallel = { expert = 2 }\nexpert_copies = -1", [".expert_copies", "at least 0 and at most 16"]),
        ('expert_copies = 1\nupstream = "http://a/v1"', [".expert_copies", "no effect beside upstream"]),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    check_refused(tmp_path, f"{TWO}[models.m]\n{text}\n", words)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ('["cuda:0"]', ["needs 2 devices of one kind, and the node has cuda:0"]),
        ('["cpu=1GiB"]', ["needs 2 devices of one kind, and the node has cpu:0"]),
        ('["cpu=1GiB", "cuda:0"]', ["needs 2 devices of one kind, and the node has cpu:0, cuda:0"]),
    ],
)
def test_nodes_without_two_devices_of_a_kind(tmp_path: Path, device: str, words: list[str]) -> None:
    check_refused(tmp_path, f"device = {device}\n[models.m]\nparallel = {{ tensor = 2 }}\n", words)


FOUR = ["cpu:0", "cuda:0", "cpu:1", "cuda:1"]


@pytest.mark.parametrize(
    ("how", "devices", "others", "wrong"),
    [
        (ParallelConfig(2), [], {}, ""),
        (ParallelConfig(2), ["cpu:0", "cuda:0", "cuda:1"], {}, ""),
        (ParallelConfig(2), ["cpu:0", "cuda:0"], {}, "tensor = 2 needs 2 devices of one kind, and devices names cpu:0, cuda:0"),
        (ParallelConfig(4), [], {}, f"tensor = 4 needs 4 devices of one kind, and the node has {', '.join(FOUR)}"),
        (ParallelConfig(2, 2), ["cuda:0", "cuda:1"], {}, "tensor = 2, expert = 2 needs 4 devices of one kind, and devices names"),
        (ParallelConfig(pipeline=2), [], {}, ""),
        (ParallelConfig(2), [], {"kv_cache_dtype": "fp8"}, ""),
        (ParallelConfig(2), ["cpu:0", "cpu:1"], {"kv_cache_dtype": "fp8"}, "tensor = 2 needs 2 cuda devices (kv_cache_dtype = "),
    ],
)
def test_devices_count_by_their_kind(how: ParallelConfig, devices: list[str], others: dict[str, str], wrong: str) -> None:
    found = problem(ModelConfig(parallel=how, devices=devices, **others), FOUR)  # type: ignore[arg-type]
    assert found.startswith(wrong)
    assert bool(found) == bool(wrong)


LENT = ["cpu:0", "cpu:1", "cpu:0@b", "cpu:1@b", "cpu:0@c"]


@pytest.mark.parametrize(
    ("how", "devices", "wrong"),
    [
        (ParallelConfig(2), [], ""),
        (
            ParallelConfig(3),
            [],
            "tensor = 3 needs 3 devices of one kind, and the node has cpu:0, cpu:1, cpu:0@b, cpu:1@b, cpu:0@c; a ",
        ),
        (
            ParallelConfig(2),
            ["cpu:0", "cpu:0@b"],
            "tensor = 2 needs 2 devices of one kind, and devices names cpu:0, cpu:0@b; a model",
        ),
        (ParallelConfig(expert=3), [], "expert = 3 needs 3 devices of one kind, and the node has"),
        (ParallelConfig(pipeline=5), [], ""),
        (ParallelConfig(pipeline=6), [], "pipeline = 6 needs 6 devices of one kind, and the node has"),
        (ParallelConfig(pipeline=3), ["cpu:0", "cpu:0@b", "cpu:0@c"], ""),
        (
            ParallelConfig(pipeline=2),
            ["cpu:0@b", "cpu:1@b"],
            "pipeline = 2 needs 2 devices of one kind, and devices names cpu:0@b, ",
        ),
        (ParallelConfig(2, pipeline=2), [], ""),
        (
            ParallelConfig(2, pipeline=2),
            ["cpu:0", "cpu:0@b", "cpu:1@b", "cpu:0@c"],
            "tensor = 2, pipeline = 2 needs 4 devices of one",
        ),
        (
            ParallelConfig(2, pipeline=2),
            ["cpu:0", "cpu:1", "cpu:0@b", "cpu:0@c"],
            "tensor = 2, pipeline = 2 needs 4 devices of one",
        ),
    ],
)
def test_devices_of_other_hosts_hold_stages_alone(how: ParallelConfig, devices: list[str], wrong: str) -> None:
    found = problem(ModelConfig(parallel=how, devices=devices), LENT)
    assert found.startswith(wrong)
    assert bool(found) == bool(wrong)
    assert bool(wrong) == (found.endswith((ONE_HOST, STAGES))), "and it tells why"
    if wrong:
        assert found.endswith(STAGES) == (how.pipeline > 1)


def test_files_may_not_allow_a_kind() -> None:
    settings, no_gpu = ModelConfig(parallel=ParallelConfig(2)), {"cuda": "int9 is not built for cuda devices"}
    assert problem(settings, FOUR, no_gpu) == ""
    why = "tensor = 2 needs 2 cpu devices (int9 is not built for cuda devices), and the node has cpu:0, cuda:0, cuda:1"
    assert problem(settings, ["cpu:0", "cuda:0", "cuda:1"], no_gpu) == why
    in_fp8 = ModelConfig(parallel=ParallelConfig(2), kv_cache_dtype="fp8")
    why = "tensor = 2 is possible on no kind of device: kv_cache_dtype = 'fp8' is not built for cpu devices; int9 is not built"
    assert problem(in_fp8, FOUR, no_gpu).startswith(why)


def test_gpus_are_named_by_number_or_uuid(tmp_path: Path) -> None:
    text = 'device = ["cuda:GPU-a", "cuda:1"]\n[models.m]\nparallel = { expert = 2 }\nkv_cache_dtype = "fp8"\n'
    assert num_ranks(load(write(tmp_path, text)).models["m"]) == 2
    assert by_kind(["cuda:GPU-a", "cpu:0", "cuda:1"]) == {"cuda": ["cuda:GPU-a", "cuda:1"], "cpu": ["cpu:0"]}


def test_a_change_needs_a_restart_and_the_settings_show_it(tmp_path: Path) -> None:
    path = write(tmp_path, TWO + '[models."a/b"]\nparallel = { tensor = 2 }\n')
    config = load(path)
    changes = plan(NodeConfig(models={"a/b": ModelConfig()}), NodeConfig(models=config.models))
    assert changes.needs_restart == ['models."a/b".parallel']
    assert changes.effective.models["a/b"] == ModelConfig()
    rows = {row.key: row for row in settings(config, Sources(path, {}), changes.needs_restart)}
    row = rows['models."a/b".parallel.tensor']
    assert (row.value, row.source, row.reload, row.waits) == (2, f"{path}:3", "restart", True)
    assert config.models["a/b"].parallel == ParallelConfig(tensor=2)


@pytest.mark.parametrize(
    "beside", ["", "isolate = true", 'quantize = "int8"', 'kv_cache_dtype = "fp8"', 'speculator = "mtp"', 'devices = ["cpu:0"]']
)
def test_auto_goes_with_what_a_split_model_does_not(tmp_path: Path, beside: str) -> None:
    """It means whole there. One device is enough, too."""
    model = load(write(tmp_path, f'device = ["cpu=1GiB"]\n[models.m]\nparallel = "auto"\n{beside}\n')).models["m"]
    assert (model.parallel, num_ranks(model)) == ("auto", 1)


def test_auto_needs_a_restart_and_the_settings_show_it(tmp_path: Path) -> None:
    path = write(tmp_path, TWO + '[models."a/b"]\nparallel = "auto"\n')
    config = load(path)
    changes = plan(NodeConfig(models={"a/b": ModelConfig(parallel=ParallelConfig(2))}), NodeConfig(models=config.models))
    assert changes.needs_restart == ['models."a/b".parallel']
    rows = {row.key: row for row in settings(config, Sources(path, {}), changes.needs_restart) if "parallel" in row.key}
    assert list(rows) == ['models."a/b".parallel']
    row = rows['models."a/b".parallel']
    assert (row.value, row.source, row.reload, row.waits) == ("auto", f"{path}:3", "restart", True)


@pytest.mark.parametrize(
    ("first", "later", "result"),
    [
        ("parallel = { tensor = 2 }", "[models.m.parallel]\ntensor = 1", ParallelConfig(1)),
        ("parallel = { tensor = 2 }", '[models.m]\nparallel = "auto"', "auto"),
        ('parallel = "auto"', "[models.m.parallel]\ntensor = 2", ParallelConfig(2)),
    ],
)
def test_a_later_file_overrides_it(tmp_path: Path, first: str, later: str, result: object) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "x.toml").write_text(later + "\n")
    path = write(tmp_path, f"{TWO}[models.m]\n{first}\n")
    config = load(path)
    assert config.models["m"].parallel == result
    shown = [row.key for row in settings(config, Sources(path, {})) if "parallel" in row.key]
    assert shown == ['models."m".parallel' if result == "auto" else 'models."m".parallel.tensor']
