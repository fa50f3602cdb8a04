"""The files of a `make gpu` run, brought up to date with every line: NAME.jsonl (every line), NAME.md (tables), NAME.log (what each
part wrote)."""

from __future__ import annotations

import json
import pathlib
import threading
from typing import Any

Line = dict[str, Any]


class Report:
    """lines[0] is about the machine."""

    def __init__(self, out: pathlib.Path, name: str = "gpu") -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.lines = list[Line]()
        self._lock = threading.Lock()
        self.jsonl, self.md, self.log = (out / f"{name}.{kind}" for kind in ("jsonl", "md", "log"))
        for file in (self.jsonl, self.log):
            file.write_text("")

    def add(self, line: Line) -> None:
        with self._lock:
            self.lines.append(line)
            with self.jsonl.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.md.write_text(self.markdown())

    def markdown(self) -> str:
        """Returns one table a title, rows as they came."""
        parts = [" · ".join(f"{key} {value}" for key, value in self.lines[0].items())]
        titles = list(dict.fromkeys(_title(line) for line in self.lines[1:]))
        for title in titles:
            rows = [
                {k: v for k, v in line.items() if k not in ("benchmark", "what")}
                for line in self.lines[1:]
                if _title(line) == title
            ]
            columns = list(dict.fromkeys(key for row in rows for key in row))
            head = "| " + " | ".join(column.replace("_", " ") for column in columns) + " |"
            body = ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
            parts.append("\n".join([f"### {title}", "", head, "|" + "---|" * len(columns), *body]))
        return "\n\n".join(parts) + "\n"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _title(line: Line) -> str:
    return " ".join(str(line[key]) for key in ("benchmark", "what") if key in line)
