"""The lines of the log: formats, fields, one line for each request, and nothing of what clients write."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from daemon.process import logs
from tests.daemon.test_main import hearthd
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import ROOT, SAFETY_S, Node, environment

MARKER = "purple-elephant-4711"


def record(
    message: str, *args: object, level: int = logging.INFO, name: str = "hearthd.api", **values: object
) -> logging.LogRecord:
    made = logging.LogRecord(name, level, "file.py", 1, message, args, None)
    made.__dict__ |= logs.fields(**values)
    return made


def test_text() -> None:
    line = logs.TextLines().format(record("loaded in %d s", 3, model="org/a", device="", cause=None, note="two words", n=0))
    assert re.fullmatch(r'\d\d:\d\d:\d\d\.\d{3} info api: loaded in 3 s model=org/a note="two words" n=0', line)
    assert logs.TextLines().format(record("x", name="hearthd")).endswith(" info x")


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 2)],
)
def test_journal(level: int, priority: int) -> None:
    assert logs.JournalLines().format(record("x", level=level, model="a")) == f"<{priority}>api: x model=a"


def test_a_traceback_keeps_its_priority() -> None:
    failed = record("failed", level=logging.ERROR)
    try:
        raise ValueError("why\nso")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert all(line.startswith("<3>") for line in logs.JournalLines().format(failed).splitlines())
    line = logs.JsonLines().format(failed)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: why\nso")


def test_json() -> None:
    value = json.loads(logs.JsonLines().format(record('say "%s"', "a\nb", model="a", status=200)))
    time = value.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert value == {"level": "info", "logger": "api", "message": 'say "a\nb"', "model": "a", "status": 200}


def test_nobody_writes_lines_of_their_own() -> None:
    for formatter in (logs.TextLines(), logs.JournalLines(), logs.JsonLines()):
        line = formatter.format(record("model %s", "a\n<0>kernel: all is lost\r\x1b[2J\u2028x", model="b\n<0>c"))
        assert len(line.splitlines()) == 1, line
        assert "\x1b" not in line


def test_the_journal_is_known_by_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    assert logs.stderr_is_journal()
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
    assert not logs.stderr_is_journal(), "inherited from a service whose child has another stderr"


UNREAD = """
import logging, sys
from daemon.process import logs

logs.set_up("info", "text")
for number in range(int(sys.argv[1])):
    logs.log.info("%d %s", number, "x" * int(sys.argv[2]))
print("goes on", flush=True)
sys.stdin.readline()
logs.log.info("read again")
"""


def _all_there_is(pipe: IO[str] | None) -> str:
    """Reads what a pipe holds, without waiting for more."""
    assert pipe is not None
    data = b""
    os.set_blocking(pipe.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while more := os.read(pipe.fileno(), 1 << 16):
            data += more
    os.set_blocking(pipe.fileno(), True)
    return data.decode()


@pytest.mark.parametrize(("num_lines", "num_chars"), [(4000, 100), (5, 100_000)], ids=["short", "longer than the pipe"])
def test_a_log_that_nobody_reads_delays_nothing(num_lines: int, num_chars: int) -> None:
    """The event loop would stand still at a full pipe."""
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", UNREAD, str(num_lines), str(num_chars)], cwd=ROOT, **options) as writing:
        assert writing.stdout is not None
        try:
            ready, _, _ = select.select([writing.stdout], [], [], SAFETY_S)
            assert ready, "it waits for a reader of its log"
            assert writing.stdout.readline() == "goes on\n"
            said = _all_there_is(writing.stderr)  # before a line is written that must not be lost
            _, rest = writing.communicate("\n", SAFETY_S)
        finally:
            writing.kill()
    said += rest
    *written, lost, last = said.splitlines()
    whole = [line for line in written if line.endswith(" " + "x" * num_chars)]
    assert len(whole) >= len(written) - 1, "one line at most was written in part"
    assert [line.split()[2] for line in written] == [str(number) for number in range(len(written))]
    assert lost.endswith(f"error lines of the log that are lost, because nobody read them: {num_lines - len(whole)}")
    assert last.endswith("info read again")


def test_auto_in_a_real_process(tmp_path: Path) -> None:
    """A file stands for the journal's stream; hearthd ends at once because its port is taken away."""
    code = "from daemon.process import logs; logs.set_up('info', 'auto'); logs.log.warning('here')"
    for journal in (True, False):
        with (tmp_path / "log").open("w") as log:
            status = os.fstat(log.fileno())
            stream = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"} if journal else {}
            subprocess.run([sys.executable, "-c", code], stderr=log, env={**environment(), **stream}, timeout=SAFETY_S, check=True)
        assert (tmp_path / "log").read_text().startswith("<4>here\n") == journal


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    result = hearthd("--models", str(tmp_path), "--log-format", "xml")
    assert result.returncode == 2
    assert "must be one of auto, text, json, journal" in result.stderr


# ---- a real daemon


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a daemon at level debug says of good and bad requests that all hold the marker."""
    folder = tmp_path_factory.mktemp("logs")
    make_model(folder / "models" / "a")
    with Node(folder, null_step_ms=1, flags=["--log-level", "debug", "--log-format", "json"]) as node:
        headers = {"X-Request-Id": "stream-1"}
        stream = Stream(node, "a", MARKER, 20)
        assert stream.join().finish_reason == "length"
        with node.openai() as client:
            chat = {"model": "a", "max_tokens": 5, "messages": [{"role": "user", "content": f"{MARKER} again"}]}
            client.chat.completions.create(**chat, extra_headers=headers)
            client.completions.create(model="a", prompt=[MARKER, MARKER], max_tokens=3, extra_headers={"X-Request-Id": "two"})
            for wrong in (
                chat | {"model": "nothing"},
                chat | {"stop": 7, "user": MARKER},
                chat | {"messages": [{"role": MARKER, "content": MARKER}]},
                chat | {"max_tokens": MARKER},
                chat | {"model": "a", "n": 0},
            ):
                with pytest.raises(Exception, match=r"Error code: 4"):
                    client.post("/chat/completions", body=wrong, cast_to=object, options={"headers": {"X-Request-Id": "wrong"}})
            gone = client.completions.create(
                model="a", prompt=MARKER, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(gone))
            gone.close()
        node.wait_for(lambda: '"finish": "cancelled"' in node.log_text(), "the line of a request whose client went")
        assert MARKER not in node.cli("events", "--json").stdout
    text = node.log_text()
    assert MARKER not in text
    return [json.loads(line) for line in text.splitlines()]


def requests(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["logger"] == "request"]


def test_every_line_is_json(lines: list[dict[str, Any]]) -> None:
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


def test_one_line_a_request(lines: list[dict[str, Any]]) -> None:
    one = [line for line in requests(lines) if line["request_id"] == "stream-1"]
    assert len(one) == 1
    line = one[0]
    assert (line["message"], line["status"], line["model"], line["device"]) == ("chat", 200, "a", "cpu:0")
    assert (line["output_tokens"], line["cached_tokens"], line["finish"]) == (5, 0, "length")
    assert line["prompt_tokens"] > 0
    assert 0 <= line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"]
    assert re.fullmatch(r"req-\d+", line["cause"])
    (two,) = (line for line in requests(lines) if line["request_id"] == "two")
    assert (two["message"], two["output_tokens"]) == ("completions", 6)


def test_refused_and_cancelled_requests_have_theirs(lines: list[dict[str, Any]]) -> None:
    wrong = [line for line in requests(lines) if line["request_id"] == "wrong"]
    assert sorted(line["status"] for line in wrong) == [400, 400, 400, 400, 404]
    assert not any("finish" in line for line in wrong)
    (gone,) = (line for line in requests(lines) if line.get("finish") == "cancelled")
    assert 0 < gone["output_tokens"] < 1900


def test_states_name_model_device_and_cause(lines: list[dict[str, Any]]) -> None:
    (ready,) = (line for line in lines if line["message"].startswith("loading -> ready"))
    assert (ready["model"], ready["device"]) == ("a", "cpu:0")
    assert ready["cause"]
    assert any(line["message"].startswith("engine is up") and line["device"] == "cpu:0" for line in lines)


def test_the_reference_lists_the_fields(lines: list[dict[str, Any]]) -> None:
    page = (ROOT / "docs/reference/logs.md").read_text()
    listed = {name for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.M) for name in re.findall(r"\w+", row)}
    written = {name for line in lines for name in line.keys() - {"time", "level", "logger", "message", "exception"}}
    not_set_here = {"tenant", "asked", "upstream", "trace_id"}  # of keys, the table of names, other servers and traces
    assert written | not_set_here == listed
