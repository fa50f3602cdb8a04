"""Records `make demo` as a terminal shows it, in real time, into a picture that moves: docs/demo.svg.

The demo runs on a pseudo-terminal; what it prints, and when, becomes one SVG with SMIL timing, which a browser plays in a loop also
inside <img>. A viewer that plays nothing shows the last screen. usage: python -m demo.record [--out docs/demo.svg] [--rows 30]
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pathlib
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS = 100
LAST_LINE = "Ctrl-C stops it."
HOLD_S = 8.0  # the last screen stays before it begins again
TICK_S = 0.05  # what is printed within it appears together
LIMIT_S = 180.0
STOP_S = 30.0  # a command that has not ended so long after SIGINT is killed
CHARACTER, LINE, MARGIN = 7.8, 17, 14  # of a 13 px monospaced font, in px
STYLES = {"1": "b", "2": "d", "33": "y", "35": "m", "36": "c"}  # SGR codes the demo uses
CSS = """
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d8dee9;white-space:pre}
.b{font-weight:bold;fill:#fff}.d{fill:#8b949e}.y{fill:#e5c07b}.m{fill:#c678dd}.c{fill:#56b6c2}"""
_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


@dataclass(slots=True)
class Piece:
    """Characters of a line that appeared together. time_s counts from the first output."""

    time_s: float
    column: int
    style: str
    text: str


@dataclass(slots=True)
class Screen:
    """The screen of a terminal of COLUMNS columns that never forgets a line. Only what the demo prints is known: text, line
    ends, and colours; other sequences raise ValueError."""

    lines: list[list[Piece]] = field(default_factory=lambda: [[]])
    column: int = 0
    style: str = ""

    def write(self, text: str, time_s: float) -> None:
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _SEQUENCE.match(text, at)
                if found is None or found[2] != "m":
                    raise ValueError(f"a terminal sequence that is not known: {text[at : at + 8]!r}")
                self.style = STYLES.get(found[1], "")
                at = found.end()
            elif text[at] == "\n":
                self.lines.append([])
                self.column = 0
                at += 1
            elif text[at] == "\r":
                at += 1
            else:
                if self.column == COLUMNS:
                    self.lines.append([])
                    self.column = 0
                self._put(text[at], time_s)
                at += 1

    def _put(self, character: str, time_s: float) -> None:
        line = self.lines[-1]
        if not line or line[-1].style != self.style or time_s - line[-1].time_s > TICK_S:
            line.append(Piece(time_s, self.column, self.style, ""))
        line[-1].text += character
        self.column += 1


def recorded(command: list[str], rows: int) -> Screen:
    """Runs the command on a terminal until it says that Ctrl-C stops it, and stops it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job's children would ignore it
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
    screen, rest, began, told = Screen(), b"", 0.0, ""
    end = time.perf_counter() + LIMIT_S
    try:
        while LAST_LINE not in told:
            if time.perf_counter() > end:
                raise TimeoutError(f"the demo has not ended after {LIMIT_S:.0f} s")
            try:
                rest += os.read(terminal, 65536)
            except OSError as error:
                raise RuntimeError(f"the demo ended early: {told[-500:]}") from error
            now = time.perf_counter()
            began = began or now
            # a character or a sequence may be cut by the end of a read
            whole = rest.rfind(b"\x1b") if re.search(rb"\x1b[^A-Za-z]*$", rest) else len(rest)
            text = rest[:whole].decode("utf-8", "ignore")
            rest = rest[len(text.encode()) :]
            screen.write(text, now - began)
            told = (told + text)[-4096:]
    finally:
        os.kill(pid, signal.SIGINT)
        if not _drained(terminal):
            os.kill(pid, signal.SIGKILL)
        os.close(terminal)
        os.waitpid(pid, 0)
    return screen


def _drained(terminal: int) -> bool:
    """Reads until the process has closed its end, because one that cannot print would not end. False after STOP_S seconds."""
    poll = select.poll()
    poll.register(terminal, select.POLLIN)
    end = time.perf_counter() + STOP_S
    while poll.poll(max(0.0, end - time.perf_counter()) * 1000):
        try:
            if not os.read(terminal, 65536):
                return True
        except OSError:  # how Linux reports the end of a terminal
            return True
    return False


def svg(screen: Screen, rows: int) -> str:
    """The recording as a picture of that many rows."""
    lines = screen.lines
    while lines and not lines[-1]:
        lines = lines[:-1]
    last_s = max(piece.time_s for line in lines for piece in line)
    total_s = last_s + HOLD_S
    width, height = round(COLUMNS * CHARACTER) + 2 * MARGIN, rows * LINE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="a recording of make demo">',
        f"<style>{CSS}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>',
        f'<rect width="0" height="0"><animate id="t" attributeName="x" dur="{total_s:.2f}s" begin="0;t.end"/></rect>',
        f'<svg x="{MARGIN}" y="{MARGIN}" width="{width - 2 * MARGIN}" height="{rows * LINE}">',
        f'<g transform="translate(0 {-LINE * max(0, len(lines) - rows)})">',
        _scrolling(lines, rows, total_s),
    ]
    for row, line in enumerate(lines):
        parts += [_piece(piece, LINE * row + LINE - 4) for piece in line if piece.text.strip()]
    return "\n".join([*parts, "</g></svg></svg>", ""])


def _piece(piece: Piece, y: int) -> str:
    style = f' class="{piece.style}"' if piece.style else ""
    lead = len(piece.text) - len(piece.text.lstrip())
    text, x = escape(piece.text.strip()), (piece.column + lead) * CHARACTER
    hidden = f'<set attributeName="visibility" to="hidden" begin="t.begin" dur="{max(piece.time_s, 0.01):.2f}s"/>'
    # the length is given, so that a viewer with another font keeps the columns
    length = f"{len(piece.text.strip()) * CHARACTER:.1f}"
    return f'<text x="{x:.1f}" y="{y}" textLength="{length}" lengthAdjust="spacingAndGlyphs"{style}>{text}{hidden}</text>'


def _scrolling(lines: list[list[Piece]], rows: int, total_s: float) -> str:
    """Returns the animation that scrolls up a line whenever one begins below the last row."""
    times, places, top = [0.0], [0], 0
    for row, line in enumerate(lines):
        if line and row >= rows + top:
            top = row - rows + 1
            times.append(min(line[0].time_s / total_s, 1.0))
            places.append(-LINE * top)
    values = ";".join(f"0 {place}" for place in places)
    at = ";".join(f"{moment:.5f}" for moment in times)
    return (
        f'<animateTransform attributeName="transform" type="translate" calcMode="discrete" values="{values}" keyTimes="{at}" '
        f'begin="t.begin" dur="{total_s:.2f}s"/>'
    )


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "demo.svg")
    parser.add_argument("--rows", type=int, default=30)
    options = parser.parse_args(None if arguments is None else list(arguments))
    screen = recorded([sys.executable, "-m", "demo.run"], options.rows)
    options.out.write_text(svg(screen, options.rows), encoding="utf-8")
    print(f"{options.out}: {sum(map(len, screen.lines))} pieces in {len(screen.lines)} lines, {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
