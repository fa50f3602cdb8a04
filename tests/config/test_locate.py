"""The line of a key in a TOML file, however it is written."""

from pathlib import Path

import pytest

from config.load import ConfigError, load
from config.locate import line_of, lines

TEXT = """\
# max_wait_s = 1
listen = "127.0.0.1:1"  # [models.z]
device = [
    "cpu=1GiB",  # ]
    "cpu:1=2GiB",
]
note = '''
[models.x]
dtype = "no"
'''
max_wait_s = 5

[models."org/name"]
aliases = ["[a]"]
"dtype" = "float32"
sampling = { temperature = 1.0 }

[models.x]
sampling.top_k = 1
[models.y.sampling]
top_p = 0.5
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("listen", 2),
        ("device", 3),
        ("max_wait_s", 11),
        ('models."org/name"', 13),
        ('models."org/name".aliases', 14),
        ('models."org/name".dtype', 15),
        ('models."org/name".sampling.temperature', 16),
        ('models."org/name".priority', 13),
        ('models."x".sampling.top_k', 19),
        ('models."y".sampling.top_p', 21),
        ('models."y".sampling', 20),
        ("models", 13),
        ("drain_timeout_s", 0),
        ('models."a"b"', 0),
    ],
)
def test_line_of(key: str, line: int) -> None:
    assert line_of(TEXT, key) == line


def test_lines_of_all_keys() -> None:
    found = lines(TEXT)
    assert found["listen",] == 2
    assert found["models", "org/name", "dtype"] == 15
    assert found["models", "org/name", "sampling", "temperature"] == 16
    assert found["models", "x", "sampling", "top_k"] == 19
    assert found["models", "y", "sampling", "top_p"] == 21
    assert ("models", "x", "dtype") not in found


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("\n\nmax_wait_s = 'soon'\n", ":3: max_wait_s: 'soon' must be a number"),
        ("listen = 'a:1'\nfrob = 1\n", ":2: frob: unknown key"),
        ("[models.x]\n\ndtype = 'int3'\n", ":3: models.\"x\".dtype: 'int3' must be one of auto, float32"),
        ("[models.x]\naliases=['y']\n[models.z]\naliases=['y']", ':4: models."z".aliases: \'y\' is already an alias of "x"'),
        ("listen = 'a:1'\nmax_wait_s = \n", ":2: is not valid TOML"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, start: str) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert str(caught.value).startswith(str(path) + start)
