"""Where each setting's value comes from."""

from pathlib import Path

from config.load import load
from config.provenance import Setting, Sources, settings
from config.schema import NodeConfig

TEXT = """\
max_wait_s = 50
listen = "127.0.0.1:1"

[models."org/name"]
aliases = [
    "a",
]
sampling = { temperature = 0.5 }

[names]
"gpt-4*" = "a"
"""


def test_flags_lines_and_defaults(tmp_path: Path) -> None:
    path = str(tmp_path / "node.toml")
    Path(path).write_text(TEXT)
    flags = {"listen": "127.0.0.1:2", "device": ["cpu=1GiB"]}
    found = {row.key: row for row in settings(load(path, flags), Sources(path, flags), {"device"})}
    assert set(NodeConfig.__struct_fields__) - set(found) == {"names", "traces", "hosts", "models"}
    assert found["max_wait_s"] == Setting("max_wait_s", 50.0, f"{path}:1", "live", False)
    assert found["listen"] == Setting("listen", "127.0.0.1:2", "--listen", "restart", False)
    assert found["device"].source == "--device"
    assert found["device"].waits
    assert found["drain_timeout_s"] == Setting("drain_timeout_s", 30.0, "", "live", False)
    assert found['models."org/name".aliases'].value == ["a"]
    assert found['models."org/name".aliases'].source == f"{path}:5"
    assert found['models."org/name".sampling.temperature'].source == f"{path}:8"
    assert found['names."gpt-4*"'].source == f"{path}:11"
    assert 'models."org/name".dtype' not in found, "of models only what is set"


def test_a_file_that_is_gone_again_has_no_lines(tmp_path: Path) -> None:
    assert Sources(str(tmp_path / "gone.toml"), {"listen": ""}).of("listen") == "--listen"
