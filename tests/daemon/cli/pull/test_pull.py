"""`hearth pull` against a small hub of our own."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest

from daemon.cli.main import run
from daemon.cli.partial_folder import locked
from daemon.cli.pull import download
from loader.models.catalog import scan
from tests.daemon.cli.pull.hub import COMMITS, SmallHub
from tests.e2e.checkpoints import make_head, make_model
from tests.e2e.node import environment
from tests.loader.adapters import adapter_tensors, write_adapter
from tests.loader.checkpoints import CONFIG, write_checkpoint

NAME = "org/name"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SmallHub]:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("time.sleep", lambda _: None)  # what the library waits between its attempts
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 500)  # 10 MB, and less than that is not handed on
    checkpoint = write_checkpoint(tmp_path / "src", shards=2, random_bytes=True)
    for extra in (
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "1_Pooling/config.json",
    ):
        (checkpoint / extra).parent.mkdir(exist_ok=True)
        (checkpoint / extra).write_text('{"pooling_mode_lasttoken": true}' if "Pooling" in extra else "{}")
    (checkpoint / "consolidated.safetensors").write_bytes(bytes(1000))
    with SmallHub() as one:
        one.add(NAME, checkpoint)
        url = huggingface_hub.constants.ENDPOINT
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", one.url)
        template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace(url, one.url))
        yield one


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def pull(models: Path, *more: str, name: str = NAME) -> int:
    return run(["pull", name, "--models", str(models), "--control", str(models / "none.sock"), *more])


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, file: str, at: int) -> Iterator[None]:
    """No byte of the file can be written from `at` on."""
    written = download._Sink.write

    def write(sink: Any, data: bytes) -> int:
        if sink._file.name == file and sink.tell() + len(data) > at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(sink, data)

    with monkeypatch.context() as patched:
        patched.setattr(download._Sink, "write", write)
        yield


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_what_a_model_needs_arrives(hub: SmallHub, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull(models, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    folder = models / NAME
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        ".pull.json",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "1_Pooling/config.json",
        INDEX,
        "model-00001-of-00002.safetensors",
        WEIGHTS,
    }
    for name in names - {".pull.json"}:
        assert (folder / name).read_bytes() == hub.repos[NAME]["main"][name]
    assert value == {
        "name": NAME,
        "folder": str(folder),
        "commit": COMMITS["main"],
        "fetched_bytes": sum((folder / name).stat().st_size for name in names - {".pull.json"}),
    }
    assert scan(models)[NAME].complete
    assert os.listdir(models) == ["org"]


def test_an_adapter_is_its_two_files(hub: SmallHub, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_adapter(tmp_path / "lora", adapter_tensors({"model.layers.0.self_attn.q_proj": (16, 16)}))
    (folder / "README.md").write_text("about")
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    hub.add("me/lora", folder)
    assert pull(models, name="me/lora") == 0
    assert scan(models)["me/lora"].adapter is not None
    assert not (models / "me/lora" / "README.md").exists()
    write_adapter(folder, {}, use_dora=True)
    hub.add("me/dora", folder)
    capsys.readouterr()
    assert pull(models, name="me/dora") == 2
    assert "key use_dora: DoRA: not supported" in capsys.readouterr().err
    assert not (models / "me" / "dora").exists()


def test_a_head_that_drafts_tokens(hub: SmallHub, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_head(tmp_path / "head", make_model(tmp_path / "base"))
    hub.add("me/head", folder)
    assert pull(models, name="me/head") == 0
    assert scan(models)["me/head"].head is not None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    hub.add("me/deep", folder)
    capsys.readouterr()
    assert pull(models, name="me/deep") == 2
    assert "key num_hidden_layers: 2 is not supported; heads have one layer" in capsys.readouterr().err


def test_a_second_pull_fetches_nothing(hub: SmallHub, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull(models) == 0
    assert f"{NAME} is in {models / NAME}, commit aaaaaaaaaaaa" in capsys.readouterr().out
    hub.asked.clear()
    assert pull(models) == 0
    assert capsys.readouterr().out == f"{NAME} is there already, at commit aaaaaaaaaaaa\n"
    assert len(hub.asked) == 1
    assert pull(models, "--revision", COMMITS["main"]) == 0
    assert len(hub.asked) == 1, "a commit never changes: nobody is asked"
    (models / NAME / "tokenizer.json").unlink()
    assert pull(models) == 0
    assert hub.fetched()[-1] == "tokenizer.json"
    assert WEIGHTS not in hub.fetched()


def test_another_revision_fetches_what_differs(hub: SmallHub, models: Path, tmp_path: Path) -> None:
    assert pull(models) == 0
    (tmp_path / "src" / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 32}))
    hub.add(NAME, tmp_path / "src", "v2")
    hub.asked.clear()
    assert pull(models, "--revision", "v2") == 0
    assert set(hub.fetched()) == {"config.json", INDEX}
    assert json.loads((models / NAME / "config.json").read_text())["max_position_embeddings"] == 32
    assert scan(models)[NAME].complete
    assert os.listdir(models) == ["org"]


def test_an_interrupted_pull_goes_on(
    hub: SmallHub, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(hub.repos[NAME]["main"][WEIGHTS])
    hub.cut[WEIGHTS] = 1000
    with full_disk(monkeypatch, WEIGHTS, 3500):
        assert pull(models) == 4
    assert "make room, then run the same command again" in refusal(capsys)
    partial = models / ".partial-org--name"
    assert (partial / (WEIGHTS + ".incomplete")).stat().st_size == 3500
    assert list(scan(models)) == []
    hub.cut.clear()
    hub.asked.clear()
    assert pull(models, "--json") == 0
    assert json.loads(capsys.readouterr().out)["fetched_bytes"] <= hub.bytes_of(NAME) - 3500
    assert [asked for method, path, asked in hub.asked if path.endswith(WEIGHTS)] == ["bytes=3500-"]
    assert (models / NAME / WEIGHTS).read_bytes() == hub.repos[NAME]["main"][WEIGHTS]
    assert size > 3500
    assert not partial.exists()


def test_a_hub_that_ignores_ranges_sends_all_again(hub: SmallHub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.ignores_range = True
    with full_disk(monkeypatch, WEIGHTS, 1000):
        assert pull(models) == 4
    assert (models / ".partial-org--name" / (WEIGHTS + ".incomplete")).stat().st_size == 1000
    assert pull(models) == 0
    assert scan(models)[NAME].complete


def test_small_files_are_sent_again_by_such_a_hub(hub: SmallHub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.ignores_range = True
    with full_disk(monkeypatch, INDEX, 500):
        assert pull(models) == 4
    assert (models / ".partial-org--name" / (INDEX + ".incomplete")).stat().st_size == 500
    assert pull(models) == 0
    assert scan(models)[NAME].complete


def test_other_commits_leave_nothing_behind(hub: SmallHub, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(monkeypatch, WEIGHTS, 1000):
        assert pull(models) == 4
    shutil.rmtree(tmp_path / "src")
    hub.add(NAME, write_checkpoint(tmp_path / "src", dtype="BF16", random_bytes=True), "v2")
    assert pull(models, "--revision", "v2") == 0
    assert {path.name for path in (models / NAME).iterdir()} == {".pull.json", "config.json", "model.safetensors"}
    assert (models / NAME / "model.safetensors").read_bytes() == (tmp_path / "src" / "model.safetensors").read_bytes()


def test_wrong_bytes_are_not_kept(hub: SmallHub, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.spoiled = {WEIGHTS}
    assert pull(models) == 1
    assert f"{WEIGHTS} is not what the hub's checksum says" in refusal(capsys)
    hub.spoiled = set()
    assert pull(models) == 0
    assert scan(models)[NAME].complete


def test_it_must_fit(hub: SmallHub, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
    assert pull(models, "--json") == 4
    error = json.loads(capsys.readouterr().out)
    assert error["code"] == "no_space"
    assert error["details"]["free_bytes"] == 4096
    assert error["details"]["missing_bytes"] == error["details"]["wanted_bytes"] > 4096
    assert f"{models} has 4.0 KiB free: make room for" in error["message"]
    assert os.listdir(models) == []


def test_refusals(hub: SmallHub, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(exit_code: int, text: str, *more: str, name: str = NAME) -> None:
        assert pull(models, *more, name=name) == exit_code
        assert text in refusal(capsys)

    refused(3, "has no org/other; correct the name, or set HF_TOKEN", name="org/other")
    refused(3, "has no revision 'v9'", "--revision", "v9")
    for name in ("org/name/more", "../name", "/etc", "a b", "", "org/..", "."):
        assert pull(models, name=name) == 2, name
        capsys.readouterr()
    for names, text in (
        (["pytorch_model.bin", "config.json"], "only pickles (pytorch_model.bin), which are not loaded"),
        (["adapter_model.safetensors"], "but adapter_model.safetensors, which is no whole model"),
        (["model.safetensors"], "it has no config.json"),
    ):
        hub.repos["org/odd"] = {"main": dict.fromkeys(names, b"{}")}
        refused(2, text, name="org/odd")
    hub.repos["org/odd"] = {"main": {"model.safetensors": b"", "config.json": b'{"architectures": ["Nobody"]}'}}
    refused(2, "org/odd cannot be served: config.json", name="org/odd")
    hub.repos["org/odd"] = {"main": {"model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}'}}
    refused(2, "names b.safetensors, which the repository does not have", name="org/odd")
    hub.gated.add(NAME)
    refused(6, "is gated: accept its terms at")
    hub.gated.clear()
    hub.status = 418
    refused(5, "answers 418")
    hub.status = 0
    (models / NAME).mkdir(parents=True)
    refused(2, "did not come from a pull; move it away")
    shutil.rmtree(models / "org")
    with locked(download.partial_folder(models, NAME), "pull"):
        refused(5, "another pull is writing")
    assert pull(tmp_path / "nowhere") == 3
    assert os.listdir(models) == [".partial-org--name"]


def test_no_network(models: Path, tmp_path: Path) -> None:
    """As it is called: HF_ENDPOINT counts, and one line says what to do."""
    command = [sys.executable, "-P", "-m", "daemon.cli", "pull", NAME, "--models", str(models), "--control", str(tmp_path / "c")]
    variables = {**environment(), "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    assert result.returncode == 5
    assert result.stderr.startswith("hearth: no connection to http://127.0.0.1:9 (")
    assert result.stderr.count("\n") == 1
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables | {"HF_HUB_OFFLINE": "1"})
    assert (result.returncode, "HF_HUB_OFFLINE is set" in result.stderr) == (5, True)


def test_token_and_endpoint(hub: SmallHub, models: Path, tmp_path: Path) -> None:
    hub.gated.add(NAME)
    command = [sys.executable, "-P", "-m", "daemon.cli", "pull", NAME, "--models", str(models), "--control", str(tmp_path / "c")]
    variables = {**environment(), "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_right", "NO_PROXY": "*"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    assert (result.returncode, result.stderr) == (0, "")
    assert scan(models)[NAME].complete


def test_a_cache_of_the_hub_has_it(hub: SmallHub, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = models / "models--org--name" / "snapshots" / COMMITS["main"]
    shutil.copytree(tmp_path / "src", snapshot)
    assert pull(models) == 0
    assert "is there already" in capsys.readouterr().out


def test_which_folder(models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def pull_without_folder() -> int:
        return run(["pull", NAME, "--control", str(tmp_path / "none.sock")])

    monkeypatch.setattr("config.paths.SERVICE_CONFIG", str(tmp_path / "node.toml"))
    assert pull_without_folder() == 2
    assert "which models folder?" in refusal(capsys)
    (tmp_path / "node.toml").write_text('models_dir = "/nowhere"')
    assert pull_without_folder() == 3
    assert "node.toml: /nowhere is no folder" in refusal(capsys)
    (tmp_path / "node.toml").write_text("models_dir = 3")
    assert pull_without_folder() == 2
    assert "node.toml:1: models_dir: " in refusal(capsys)
