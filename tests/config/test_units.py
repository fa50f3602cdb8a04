import math

import pytest

from config import units


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (7, 7),
        ("7", 7),
        ("1k", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("1GB", 10**9),
        ("1.5GiB", 3 << 29),
        (" 2 gib ", 2 << 30),
    ],
)
def test_parse_bytes(text: int | str, num_bytes: int) -> None:
    assert units.parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "1XB", "-1", "1e3", 0, -1, True, 1.5, None])
def test_parse_bytes_refuses(text: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        units.parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        ("0", 0.0),
        ("0s", 0.0),
        (90, 90.0),
        ("90", 90.0),
        (1.5, 1.5),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        (" 1.5H ", 5400.0),
        ("2d", 172800.0),
        ("500ms", 0.5),
        (-1, math.inf),
        ("-1", math.inf),
        ("-5m", math.inf),
        ("forever", math.inf),
        (math.inf, math.inf),
        (1e15, math.inf),
    ],
)
def test_parse_duration(value: float | str, seconds: float) -> None:
    assert units.parse_duration_s(value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "10 m", "m", "1h30", "10x", True, None, math.nan, [1]])
def test_parse_duration_refuses(value: object) -> None:
    with pytest.raises(ValueError, match="must be a number of seconds"):
        units.parse_duration_s(value)  # type: ignore[arg-type]


def test_budgets_and_devices() -> None:
    assert units.parse_budget("25 %", 1000) == 250
    assert units.parse_budget("1KiB", 10) == 1024
    assert units.parse_device("cpu=1GiB") == ("cpu:0", "1GiB")
    assert units.parse_device("cpu:01=1GiB") == ("cpu:1", "1GiB")
    assert units.parse_device("cuda:GPU-3f1a=90%") == ("cuda:GPU-3f1a", "90%")
    assert units.parse_device("cuda") == ("cuda:0", "")
    for bad in ("0%", "101%", "%", "x"):
        with pytest.raises(ValueError, match="must be"):
            units.parse_budget(bad, 1000)


@pytest.mark.parametrize(("text", "pair"), [("h:1", ("h", 1)), (":0", ("", 0)), ("[::1]:8", ("::1", 8))])
def test_listen(text: str, pair: tuple[str, int]) -> None:
    assert units.parse_listen(text) == pair


def test_format_bytes() -> None:
    assert [units.format_bytes(n) for n in (5, 1536, 512 << 20, 3 << 40)] == ["5 B", "1.5 KiB", "512.0 MiB", "3072.0 GiB"]
