"""A model's files are on a mount that stops to answer in the middle of its load. Its neighbours do not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from daemon.access.keys import hash_key
from tests.chaos.slow_mount import SlowMount
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, without_drafts

DEADLINE_S = 4.0
ROLL_BACK_S = 10.0  # after which the engine would be started again
NEAR_TOKENS = 8000
KEY = "a key of a tenant of this node"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[SlowMount]:
    """Yields a mount below the models folder, with the model `far` on it."""
    make_model(tmp_path / "far", seed=2, weights_bytes=24 << 20)
    made = mounted(tmp_path / "far", tmp_path / "n" / "models" / "far")
    yield made
    made.close()


def mounted(folder: Path, at: Path) -> SlowMount:
    """Mounts a folder at `at`, which it makes. Skips the test where that cannot be done."""
    at.mkdir(parents=True)
    try:
        return SlowMount(folder, at)
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")


def test_a_chat_template_that_hangs_delays_no_rescan(tmp_path: Path) -> None:
    """A file that `chat_template` names is on a mount that hangs. New models are found, and those whose template it is go on."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "own.jinja").write_text("{{ messages[0]['content'] }}")
    at = tmp_path / "at"
    mount = mounted(tmp_path / "far", at)
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", config=f'[models.a]\nchat_template = "{at}/own.jinja"\n') as node:
        try:
            assert Stream(node, "a", "hello", 4).join().error == ""
            with mount.hang():
                make_model(node.models / "b")
                node.wait_for(lambda: node.state("b") == "cold", "the whole new model")
                assert Stream(node, "a", "hello", 4).join().error == ""
                assert Stream(node, "b", "hello", 4).join().error == ""
                assert f"{at}/own.jinja does not answer" in node.log_text()
        finally:
            mount.close()
    assert "Traceback" not in node.log_text()


def test_settings_that_hang_delay_their_reload_alone(tmp_path: Path) -> None:
    """A file that the settings name is on a mount that hangs while they are read again. Chats and operators' views go on."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "keys.toml").write_text(f'[tenants.a]\nkeys = ["{hash_key(KEY)}"]\n')
    at = tmp_path / "at"
    mount = mounted(tmp_path / "far", at)
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", flags=["--keys-file", str(at / "keys.toml")]) as node, ThreadPoolExecutor(1) as pool:
        try:
            assert Stream(node, "a", "hello", 4, key=KEY).join().error == ""
            with mount.hang():
                reloading = pool.submit(node.cli, "reload")
                time.sleep(1.0)
                assert node.get("/healthz")[0] == 200
                assert Stream(node, "a", "hello", 4, key=KEY).join().error == ""
                assert node.cli("status").returncode == 0
                assert not reloading.done()
            assert reloading.result().returncode == 0
        finally:
            mount.close()
    assert "Traceback" not in node.log_text()


@pytest.mark.parametrize(
    ("reads", "logged"),
    [(False, "the file system does not answer"), (True, "reads do not return")],
    ids=["opening", "reading"],
)
def test_a_load_that_hangs_is_rolled_back_and_its_engine_lives_on(
    tmp_path: Path, mount: SlowMount, reads: bool, logged: str
) -> None:
    """reads: the mount begins to hang while the load reads weights, not before it."""
    make_model(tmp_path / "n" / "models" / "near", seed=1, max_position_embeddings=16384)
    config = f"load_deadline_s = {DEADLINE_S}\n{without_drafts('near')}"
    flags = ["--dtype", "float32", "--threads", "1"]
    with Node(tmp_path / "n", devices=["cpu:0=128MiB"], runner="torch", config=config, flags=flags) as node:
        node.wait_for(lambda: "far" in {model["name"] for model in node.json("models")}, "the mounted model")
        assert Stream(node, "far", "opens its tokenizer", 1).join().error == ""
        assert node.cli("unload", "far", "--to", "cold").returncode == 0
        pids = node.engine_pids()
        near = Stream(node, "near", "a long story", NEAR_TOKENS)
        near.wait_for_chunks(5)
        if reads:
            mount.hangs_at = 1 << 20  # behind everything that is not weights
            far = Stream(node, "far", "hello", 8)
            node.wait_for(lambda: mount.hangs, "a read of its weights")
        with mount.hang():
            if not reads:
                far = Stream(node, "far", "hello", 8)
            assert "missed its deadline" in far.join().error
            begun = time.monotonic()
            node.wait_for(lambda: node.state("far") == "cold", "the roll-back")
            assert time.monotonic() - begun < ROLL_BACK_S
            assert node.get("/healthz")[1]["status"] == "ok"
            other = Stream(node, "near", "meanwhile", 50).join()
            assert (other.error, other.finish_reason) == ("", "length")
        far = Stream(node, "far", "hello", 8).join()
        assert (far.error, far.finish_reason) == ("", "length")
        assert (near.join().error, near.finish_reason) == ("", "length")
        assert node.engine_pids() == pids
        assert logged in node.log_text()
        assert "Traceback" not in node.log_text()
