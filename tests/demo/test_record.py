"""The recording in the README: what a terminal would show, and when."""

from __future__ import annotations

import re
import signal
import sys
import xml.etree.ElementTree as ET

import pytest

from demo import record
from demo.record import COLUMNS, Screen, recorded, svg

SVG = "{http://www.w3.org/2000/svg}"


def shown(screen: Screen) -> list[str]:
    return ["".join(piece.text for piece in line) for line in screen.lines]


def test_text_lies_where_a_terminal_puts_it() -> None:
    screen = Screen()
    screen.write("one\r\n\x1b[2m$ hearth ps\x1b[0m\r\n", 0.5)
    screen.write("x" * (COLUMNS + 3), 1.0)
    assert shown(screen) == ["one", "$ hearth ps", "x" * COLUMNS, "xxx"]
    assert [(piece.style, piece.time_s) for line in screen.lines for piece in line] == [("", 0.5), ("d", 0.5), ("", 1.0), ("", 1.0)]


def test_pieces_of_a_line_keep_their_times() -> None:
    screen = Screen()
    for at, word in enumerate(("The ", "event ", "loop")):
        screen.write(word, float(at))
    assert [(piece.time_s, piece.column, piece.text) for piece in screen.lines[0]] == [
        (0, 0, "The "),
        (1, 4, "event "),
        (2, 10, "loop"),
    ]


def test_a_sequence_that_moves_the_cursor_is_refused() -> None:
    with pytest.raises(ValueError, match="not known"):
        Screen().write("\x1b[2J", 0.0)


def test_the_picture_shows_the_last_rows_and_hides_what_has_not_come() -> None:
    screen = Screen()
    for at in range(40):
        screen.write(f"line {at} <&>\n", at / 10)
    root = ET.fromstring(svg(screen, 30))
    group = root.find(f"{SVG}svg/{SVG}g")
    assert group is not None
    assert group.get("transform") == f"translate(0 {-record.LINE * 10})"
    texts = group.findall(f"{SVG}text")
    assert [text.text for text in texts] == [f"line {at} <&>" for at in range(40)]
    waits = [float((text.find(f"{SVG}set").get("dur") or "")[:-1]) for text in texts]  # type: ignore[union-attr]
    assert waits == sorted(waits)
    assert waits[-1] == 3.9
    scroll = group.find(f"{SVG}animateTransform")
    assert scroll is not None
    assert len((scroll.get("keyTimes") or "").split(";")) == len((scroll.get("values") or "").split(";")) == 11


@pytest.mark.parametrize("given", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background"])
def test_a_command_is_recorded_on_a_terminal_and_stopped(given: signal.Handlers) -> None:
    """A shell's background job ignores SIGINT, and so do the processes it starts.

    The command sleeps in short steps: Python misses a SIGINT that arrives just before a blocking read, until that read returns."""
    tell = f"import sys, time; print(sys.stdout.isatty(), 'é'); print({record.LAST_LINE!r}, flush=True)"
    told = tell + "\nwhile True: time.sleep(0.05)"
    before = signal.signal(signal.SIGINT, given)
    try:
        assert shown(recorded([sys.executable, "-c", told], 30))[:2] == ["True é", record.LAST_LINE]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "STOP_S", 0.2)
    ignore = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    told = f"{ignore}; print({record.LAST_LINE!r}, flush=True); time.sleep(600)"
    assert shown(recorded([sys.executable, "-c", told], 30))[0] == record.LAST_LINE


def test_a_command_that_ends_early_is_told() -> None:
    with pytest.raises(RuntimeError, match=re.escape("the demo ended early: sorry")):
        recorded([sys.executable, "-c", "print('sorry')"], 30)
