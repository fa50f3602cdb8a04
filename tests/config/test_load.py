"""config.load: what is accepted, and what an error tells."""

from pathlib import Path

import pytest

from config import host_tier
from config import load as config_load
from config.devices import device_budgets
from config.load import ConfigError, load
from config.schema import DeviceBudget, NodeConfig

GIB = 1 << 30


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return str(path)


def test_defaults_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setattr("config.paths.SERVICE_CONTROL", "/nowhere/hearthd/control.sock")
    config = load(None)
    assert config.control == "/run/user/7/hearthd/control.sock"
    assert config.chunk_bytes == 2 << 20
    assert config.max_body_bytes == 16 << 20


def test_file_and_flags(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        models_dir = "/srv/models"
        listen = "127.0.0.1:9"
        max_body_bytes = "1MB"
        [models."org/name"]
        aliases = ["gpt"]
        sampling = { temperature = 0.5 }
        """,
    )
    config = load(path, {"listen": "[::1]:0", "max_wait_s": "3", "threads": "2", "device": ["cpu=64MiB", "cpu:1=64MiB"]})
    assert config.models_dir == "/srv/models"
    assert (config.listen, config.max_wait_s, config.threads) == ("[::1]:0", 3.0, 2)
    assert config.max_body_bytes == 1_000_000
    assert config.models["org/name"].sampling.temperature == 0.5
    assert [d.name for d in device_budgets(config, GIB)] == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("listn = 'x'", ["listn", "did you mean listen?"]),
        ("zzzzz = 1", ["zzzzz", "known keys: models_dir"]),
        ("threads = 'four'", ["threads", "'four'", "whole number"]),
        ("threads = true", ["threads", "whole number"]),
        ("max_body_bytes = '16MX'", ["max_body_bytes", "16MX", '"512MiB"']),
        ("max_body_bytes = 0", ["max_body_bytes", "more than 0"]),
        ("max_body_bytes = [1]", ["max_body_bytes", '"512MiB"']),
        ("chunk_bytes = '3MiB'", ["chunk_bytes", "3MiB", "power of two"]),
        ("device = ['cpu']", ["device", "NAME=BUDGET"]),
        ("device = ['cpu=120%']", ["device", "percentage"]),
        ("device = ['tpu=1GiB']", ["device", "cuda:0=90%"]),
        ("device = 'cpu=1GiB'", ["device", "list"]),
        ("listen = '8000'", ["listen", "HOST:PORT"]),
        ("listen = '::1:8000'", ["listen", "brackets"]),
        ("listen = 'a:70000'", ["listen", "65535"]),
        ('[models.a]\nquantize = "int4"', ['models."a".quantize', "'int4'", "int8, none"]),
        ('[models.a]\nspeculator = " "', ['models."a".speculator', "must not be empty"]),
        ('[models.a]\nkv_cache_dtype = "int8"', ['models."a".kv_cache_dtype', "'int8'", "auto, fp8"]),
        ("dtype = 'fp8'", ["dtype", "'fp8'", "auto, float32, bfloat16, float16"]),
        ("runner = 'vllm'", ["runner", "torch, null"]),
        ("max_wait_s = 0", ["max_wait_s", "above 0"]),
        ("engine_stall_s = 9.9", ["engine_stall_s", "at least 10, or 0"]),
        ("text_stall_s = 9.9", ["text_stall_s", "at least 10, or 0"]),
        ("engine_stall_s = -1", ["engine_stall_s", "at least 10, or 0"]),
        ("engine_stall_s = inf", ["engine_stall_s", "at least 10, or 0"]),
        ("max_wait_s = nan", ["max_wait_s", "above 0"]),
        ("models = 1", ["models"]),
        ("[models]\nx = 1", ['models."x"', "table"]),
        ("[models.x]\nalias = ['a']", ['models."x".alias', "did you mean aliases?"]),
        ("[models.x]\nisolate_bytes = '64MiB'", ['models."x".isolate_bytes', "needs isolate = true"]),
        ("[models.x]\nisolate = true\nisolate_bytes = 'much'", ['models."x".isolate_bytes', "much", '"512MiB"']),
        ("[models.x]\ndevices = ['cpu:3']", ['models."x".devices', "cpu:3", "cpu:0"]),
        ("[models.x]\npriority = -1", ['models."x".priority', "above 0"]),
        ("[models.x.sampling]\ntemperature = 9", ['models."x".sampling.temperature', "at most 2"]),
        ("[models.x.sampling]\ntemprature = 1", ['models."x".sampling.temprature', "temperature"]),
        ("[models.x]\naliases=['a']\n[models.y]\naliases=['a']", ['models."y".aliases', "'a'", '"x"']),
        ("[models.x]\naliases=['y']\n[models.y]\n", ['models."x".aliases', "name of the model"]),
        ("names = 5", ["names: must be a table"]),
        ("[names]\nfast = 5", ['names."fast"', "5 must be a model's name or a list"]),
        ("[names]\nfast = []", ['names."fast"', "must be a model's name or a list"]),
        ("[names]\nfast = ['a', 5]", ['names."fast"', "must be a model's name or a list"]),
        ("[names]\nfast = ['a', '']", ['names."fast"', "must be a model's name or a list"]),
        ("[names]\nfast = ['a', 'b', 'a']", ['names."fast"', "'a' is named twice"]),
        ("[names]\ngpt-4.1 = 'a'", ['names."gpt-4"', 'a name with "." or "/" goes in quotes']),
        ("[names]\n'' = 'a'", ['names.""', "at least one character"]),
        ("[names]\nfast = 'a*'", ['names."fast"', "'a*' must be a model's name; patterns are for the left side"]),
        ("[names]\nfast = 'slow'\nslow = 'a'", ['names."fast"', "'slow' is an entry of this table, too"]),
        ("[names]\nx = 'a'\n[models.x]\n", ['names."x"', "is the name of a model"]),
        ("[names]\ny = 'a'\n[models.x]\naliases=['y']", ['names."y"', 'already an alias of "x"']),
        ("[models.x]\nmax_model_len=100\nkv_floor_tokens=5\n", ['models."x".kv_floor_tokens', "100"]),
        ("listen = \nx=1", ["not valid TOML", "line 1"]),
        ("a=1\na=2", ["not valid TOML"]),
    ],
)
def test_errors_name_file_key_and_what_is_allowed(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    for word in [path, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [
        ("max_wait_s", "inf", "--max-wait-s: inf must be a finite number above 0"),
        ("max_wait_s", "nan", "--max-wait-s: nan must be a finite number above 0"),
        ("max_wait_s", "0", "--max-wait-s: 0.0 must be above 0"),
        ("host_tier_bytes", "200%", "--host-tier-bytes: '200%' must be a percentage above 0 and at most 100"),
        ("device", ["cpu=1GiB", "cpu:1=200%"], "--device: 'cpu:1=200%' must be a percentage above 0 and at most 100"),
        ("device", ["cpu=1GiB", "tpu=1GiB"], "--device: 'tpu=1GiB' must be NAME=BUDGET"),
        ("allowed_origins", ["*", "https://a.org"], "--allowed-origins: ['*', 'https://a.org'] "),
    ],
)
def test_what_is_told_is_true_of_the_value_that_is_shown(key: str, given: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {key: given})
    assert str(caught.value).startswith(f"flags: {said}")


def test_missing_file_and_bad_flag() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/x.toml: cannot be read: No such file"):
        load("/nowhere/x.toml")
    with pytest.raises(ConfigError, match=r"flags: --max-wait-s: 'soon' must be a number"):
        load(None, {"max_wait_s": "soon"})


@pytest.mark.parametrize(
    ("value", "devices", "expected"),
    [
        (None, ["cpu:0"], 0),
        (None, ["cpu:0", "cuda:0"], 8 * GIB),
        ("25%", ["cpu:0"], 4 * GIB),
        ("3MiB", ["cpu:0"], 2 << 20),
        (0, ["cuda:0"], 0),
        ("0", ["cuda:0"], 0),
    ],
)
def test_the_host_tier_is_a_share_of_memory_or_a_size_in_whole_chunks(value: object, devices: list[str], expected: int) -> None:
    budgets = [DeviceBudget(name, GIB) for name in devices]
    config = NodeConfig(host_tier_bytes=value)  # type: ignore[arg-type]
    assert host_tier.resolved(config, budgets, 16 * GIB).host_tier_bytes == expected


def test_a_host_tier_beyond_the_machine_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 'host_tier_bytes = "60%"\n')
    with pytest.raises(ConfigError, match=r"node.toml:1: host_tier_bytes: .60%.: with the cpu devices. budgets that is 17.6 GiB"):
        host_tier.resolved(load(path), [DeviceBudget("cpu:0", 8 * GIB)], 16 * GIB, path)
    for bad in ("lots", "-1", "120%"):
        with pytest.raises(ConfigError, match="host_tier_bytes"):
            load(write(tmp_path, f'host_tier_bytes = "{bad}"\n'))


def test_every_checked_key_is_a_key() -> None:
    """A check for a key that was renamed would silently never run."""
    from config.schema import HostConfig, ModelConfig, ParallelConfig, SamplingDefaults, TracesConfig

    structs = (NodeConfig, ModelConfig, ParallelConfig, SamplingDefaults, TracesConfig, HostConfig)
    known = {field for struct in structs for field in struct.__struct_fields__}
    assert set(config_load._CHECKS) <= known


def test_paths_come_out_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's working directory is another one."""
    (tmp_path / "etc").mkdir()
    file = tmp_path / "etc" / "node.toml"
    file.write_text('models_dir = "models"\nstate_dir = "/var/state"\n')
    monkeypatch.chdir(tmp_path)
    loaded = load(str(file), {"control": "run/c.sock"})
    assert loaded.models_dir == str(tmp_path / "etc" / "models")
    assert loaded.state_dir == "/var/state"
    assert loaded.control == str(tmp_path / "run" / "c.sock")
    assert load(None, {"models_dir": "here"}).models_dir == str(tmp_path / "here")


def test_a_template_in_the_file_itself_stays_as_it_is(tmp_path: Path) -> None:
    """A template's path is taken from the file's folder, as any other."""
    text = '[models.a]\nchat_template = "{{ messages }}"\n[models.b]\nchat_template = "b.jinja"\n'
    models = load(write(tmp_path, text)).models
    assert (models["a"].chat_template, models["b"].chat_template) == ("{{ messages }}", f"{tmp_path}/b.jinja")
