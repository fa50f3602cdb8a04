"""`upstream`: what its keys may be, and what may stand beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.load import ConfigError, load
from config.upstream import host_of, is_own_address

URL = '[models.big]\nupstream = "http://gpu2:8000/v1"\n'


def read(tmp_path: Path, text: str) -> object:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return load(str(path), {}).models["big"]


def test_a_name_with_all_that_may_be_said_of_it(tmp_path: Path) -> None:
    text = URL + 'upstream_model = "org/x"\nupstream_key_file = "up.key"\naliases = ["huge"]\nmax_sequences = 8\nmax_queued = 4\n'
    model = read(tmp_path, text)
    assert getattr(model, "upstream_key_file") == str(tmp_path / "up.key"), "relative to the file's folder"  # noqa: B009
    kept = read(tmp_path, URL + 'upstream_key_file = "credential:gpu2"\n')
    assert getattr(kept, "upstream_key_file") == "credential:gpu2"  # noqa: B009


@pytest.mark.parametrize(
    ("lines", "key", "why"),
    [
        ('upstream = "gpu2:8000"', "upstream", "must be the address of an OpenAI API"),
        ('upstream = "ftp://gpu2/v1"', "upstream", "must be the address of an OpenAI API"),
        ('upstream = "http://gpu2:99999/v1"', "upstream", "must be the address of an OpenAI API"),
        ('upstream = "http://gpu 2/v1"', "upstream", "must be the address of an OpenAI API"),
        ('upstream = "http://me:secret@gpu2/v1"', "upstream", "a key goes into upstream_key_file"),
        ('upstream = "http://gpu2/v1?key=1"', "upstream", "without ? and #"),
        ("upstream = 5", "upstream", "must be text"),
        ('upstream_model = "x"', "upstream_model", "needs upstream beside it"),
        ('upstream_key_file = "x"', "upstream_key_file", "needs upstream beside it"),
        ('upstream = "http://gpu2/v1"\nupstream_model = ""', "upstream_model", "leave it out for the same"),
        ('upstream = "http://gpu2/v1"\npinned = true', "pinned", "has no effect beside upstream"),
        ('upstream = "http://gpu2/v1"\nquantize = "int8"', "quantize", "has no effect beside upstream"),
        ('upstream = "http://gpu2/v1"\nsampling = {top_k = 4}', "sampling", "has no effect beside upstream"),
        ('upstream = "http://localhost:8123/v1"', "upstream", "is this node's own address"),
    ],
)
def test_what_is_refused(tmp_path: Path, lines: str, key: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f'listen = "127.0.0.1:8123"\n[models.big]\n{lines}\n')
    assert caught.value.key == f'models."big".{key}'
    assert why in str(caught.value)
    assert f"{tmp_path / 'node.toml'}:" in str(caught.value)


def test_the_name_of_a_server_for_messages() -> None:
    assert host_of("https://api.example.org/v1") == "api.example.org:443"
    assert host_of("http://[fd00::2]:8000/v1/") == "[fd00::2]:8000"


@pytest.mark.parametrize(
    ("url", "listen", "own"),
    [
        ("http://127.0.0.1:8000/v1", "0.0.0.0:8000", True),
        ("http://localhost:8000/v1", ":8000", True),
        ("http://[::1]:8000/v1", "[::]:8000", True),
        ("http://10.0.0.7:8000/v1", "10.0.0.7:8000", True),
        ("http://localhost:8000/v1", "10.0.0.7:8000", False),
        ("http://localhost:8001/v1", "127.0.0.1:8000", False),
        ("http://localhost:8000/v1", "127.0.0.1:0", False),
    ],
)
def test_which_address_is_the_nodes_own(url: str, listen: str, own: bool) -> None:
    assert is_own_address(url, listen) is own
