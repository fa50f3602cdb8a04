"""traceparent and tracestate, by the rules and examples of https://www.w3.org/TR/trace-context/ and its test suite."""

from __future__ import annotations

import pytest

from daemon.traces.trace_context import Parent, parent_of, written

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-ff", True),  # flags that are not defined are ignored
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"cc-{TRACE}-{SPAN}-01", True),  # a later version, which may have more fields
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
        (f"cc-{TRACE}-{SPAN}-01-", True),
    ],
)
def test_a_parent(header: str, is_sampled: bool) -> None:
    assert parent_of([header], []) == Parent(TRACE, SPAN, is_sampled, "")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [GOOD, GOOD],
        [""],
        ["00"],
        [GOOD + "-"],
        [GOOD + "-extra"],
        [GOOD + "\n"],
        [GOOD + " "],
        [f"ff-{TRACE}-{SPAN}-01"],
        [f"0-{TRACE}-{SPAN}-01"],
        [f"000-{TRACE}-{SPAN}-01"],
        [f"0G-{TRACE}-{SPAN}-01"],
        [f"cc-{TRACE}-{SPAN}-01.what"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE[:-1]}-{SPAN}-01"],
        [f"00-{TRACE}f-{SPAN}-01"],
        [f"00-{TRACE}-{SPAN[:-1]}-01"],
        [f"00-{TRACE}-{SPAN}-1"],
        [f"00-{TRACE}-{SPAN}-001"],
        [f"00-{TRACE.upper()}-{SPAN}-01"],
        [f"00-{TRACE}-{SPAN}-0A"],
        [f"00_{TRACE}_{SPAN}_01"],
        [f"00-{TRACE}-{SPAN}"],
        ["\udcff" * 55],
    ],
)
def test_no_parent(headers: list[str]) -> None:
    assert parent_of(headers, ["a=b"]) is None


@pytest.mark.parametrize(
    ("headers", "state"),
    [
        ([], ""),
        (["foo=1,bar=2"], "foo=1,bar=2"),
        (["foo=1", "bar=2"], "foo=1,bar=2"),
        (["foo=1 \t , \t bar=2,"], "foo=1,bar=2"),
        ([""], ""),
        (["foo@bar=1,0a@b=2"], "foo@bar=1,0a@b=2"),
        (["a=" + " " * 9 + "x"], "a=" + " " * 9 + "x"),
        ([f"{'z' * 256}={'y' * 256}"], f"{'z' * 256}={'y' * 256}"),
        ([",".join(f"k{at}=1" for at in range(32))], ",".join(f"k{at}=1" for at in range(32))),
        ([",".join(f"k{at}=1" for at in range(33))], ""),
        (
            ["a=" + "y" * 250, "b=" + "y" * 250, "c=" + "y" * 250, "d=" + "y" * 250],
            ",".join(f"{key}={'y' * 250}" for key in "abcd"),
        ),
        ([f"{key}={'y' * 250}" for key in "abcdef"], ",".join(f"{key}={'y' * 250}" for key in "abcd")),
        ([f"{'z' * 257}=1"], ""),
        ([f"a={'y' * 257}"], ""),
        (["foo=1,bar"], ""),
        (["foo=1,=2"], ""),
        (["FOO=1"], ""),
        (["0a=1"], ""),
        (["foo=1=2"], ""),
        (["foo@=1"], ""),
        (["@foo=1"], ""),
        (["foo@bar@baz=1"], ""),
        (["foo=\u00e4"], ""),
        (["foo=1\n"], ""),
    ],
)
def test_states(headers: list[str], state: str) -> None:
    assert parent_of([GOOD], headers) == Parent(TRACE, SPAN, True, state)


def test_written() -> None:
    assert written(TRACE, SPAN, True) == GOOD
    assert parent_of([written(TRACE, SPAN, False)], []) == Parent(TRACE, SPAN, False, "")
