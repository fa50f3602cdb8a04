"""The committed reference and example are made from the schema."""

import re
from pathlib import Path

from config import reference
from config.load import load
from config.schema import LIVE, RESTART, HostConfig, ModelConfig, NodeConfig

ROOT = Path(__file__).resolve().parents[2]


def test_committed_files_are_current() -> None:
    assert (ROOT / "docs/reference/config.md").read_text() == reference.reference(), "run: python -m config.reference"
    assert (ROOT / "config/example.toml").read_text() == reference.example(), "run: python -m config.reference example"


def test_every_key_is_described_and_says_when_it_applies() -> None:
    for struct in (NodeConfig, ModelConfig, HostConfig):
        for name, _, unit, reload, description in reference.fields(struct):
            assert description, name
            assert reload in (LIVE, RESTART), name
            assert unit or not re.search(r"_(s|ms|bytes|tokens)$", name), f"{name} has no unit"


def test_the_example_is_valid_with_every_key_switched_on(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    path.write_text(reference.example())
    assert load(str(path)).hosts == {}, "as it is committed, it names no host"
    path.write_text(re.sub(r"^# (\w+ = |\[hosts)", r"\1", reference.example(), flags=re.M))
    config = load(str(path))
    assert config.models["org/name"].sampling.top_k == 40
    assert config.hosts["b"].address == "10.0.0.2:7100"
