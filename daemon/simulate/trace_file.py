"""Reads and writes traces as CSV: `time_s,model,input_tokens,output_tokens`, one request per line, in the order of time."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from scheduler.simulate.trace import TraceRequest

COLUMNS = ("time_s", "model", "input_tokens", "output_tokens")


class TraceError(Exception):
    """Raised for a file that is no valid trace. The message names the file, and the line and column where they are known."""


def read(file: TextIO, name: str) -> list[TraceRequest]:
    """Returns the requests of a trace file. The first line names the columns, in any order; empty lines and those that begin with #
    are skipped. name: the file's name, for errors. Raises TraceError for a malformed line, times that are not in order, or a file
    without requests."""
    found: list[TraceRequest] = []
    header: list[str] | None = None
    before = 0.0
    try:
        for line, row in _rows(file):
            if header is None:
                header = [cell.strip() for cell in row]
                if sorted(header) != sorted(COLUMNS):
                    told = f"the first line must name the columns {','.join(COLUMNS)}; it is {','.join(row)!r}"
                    raise TraceError(f"{name}:{line}: {told}")
                continue
            if len(row) != len(header):
                raise TraceError(f"{name}:{line}: {len(row)} columns, expected {len(header)}: {','.join(header)}")
            cells = dict(zip(header, row, strict=True))
            time_s = _number(name, line, "time_s", cells["time_s"])
            if time_s < before:
                raise TraceError(f"{name}:{line}: time_s: {time_s:g} comes after {before:g}; a trace is in the order of time")
            before = time_s
            model = cells["model"].strip()
            if not model:
                raise TraceError(f"{name}:{line}: model: is empty")
            tokens = [_count(name, line, column, cells[column]) for column in ("input_tokens", "output_tokens")]
            found.append(TraceRequest(time_s, model, *tokens))
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: is not text: {error}") from None
    except csv.Error as error:
        raise TraceError(f"{name}: is not CSV: {error}") from None
    if not found:
        raise TraceError(f"{name}: holds no request")
    return found


def _rows(file: TextIO) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(file)
    for row in reader:
        if row and not row[0].lstrip().startswith("#"):
            yield reader.line_num, row


def _number(name: str, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise TraceError(f"{name}:{line}: {column}: {text.strip()!r} must be seconds from 0 on")
    return value


def _count(name: str, line: int, column: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise TraceError(f"{name}:{line}: {column}: {text!r} must be a whole number of tokens from 1 on")
    return int(text)


def write(file: TextIO, trace: Iterable[TraceRequest], comments: Sequence[str] = ()) -> None:
    for comment in comments:
        file.write(f"# {comment}\n")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for request in trace:
        writer.writerow((f"{request.time_s:.3f}", request.model, request.input_tokens, request.output_tokens))
