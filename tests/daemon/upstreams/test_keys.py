"""The files with keys for other servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from config.load import ConfigError
from config.schema import ModelConfig, NodeConfig
from daemon.upstreams import keys


def test_a_pipe_in_place_of_a_key_is_refused_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key")
    config = NodeConfig(models={"far": ModelConfig(upstream="http://gpu2/v1", upstream_key_file=str(tmp_path / "key"))})
    with pytest.raises(ConfigError, match=r"upstream_key_file: .*/key cannot be read: is a named pipe, not a regular file"):
        keys.load(config, "flags")
