"""What arrives in the journal."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.vm.guest import clients, service
from tests.vm.guest.checks import check, expect
from tests.vm.guest.service import UNIT, journal, journal_end, systemctl


@check("a request's line is there with priority, identifier and the fields of logs.md; the priority's mark is taken off")
def request_line() -> str:
    cursor = journal_end()
    clients.chat(headers={"X-Request-Id": "vm-42"})
    line = _wait_line(cursor, "request_id=vm-42")
    expect(line["PRIORITY"] == "6" and line["SYSLOG_IDENTIFIER"] == "hearthd" and line["_SYSTEMD_UNIT"] == UNIT, line)
    message = line["MESSAGE"]
    expect(message.startswith("request: chat "), message)
    told = ("model=fast", "status=200", "device=cpu:0", "output_tokens=8", "queue_ms=", "first_token_ms=", "total_ms=", "finish=")
    for name in told:
        expect(name in message, f"{name}: {message}")
    found = service.run("journalctl", "-u", "hearthd", "-g", "vm-42", "-o", "cat", "--no-pager").stdout
    expect("vm-42" in found, "journalctl -g, as operations.md has it, finds nothing")
    return message


@check("warnings and errors have their priorities: journalctl -p warning shows them, and no lines of info")
def priorities() -> str:
    cursor = journal_end()
    service.write_settings("max_wait_s = 'soon'\n")
    systemctl("reload", UNIT, code=None)
    line = _wait_line(cursor, "90-check.toml:1")
    expect(line["PRIORITY"] == "3", line)
    shown = service.run("journalctl", "-b", "-u", "hearthd", "-p", "warning", "-o", "cat", "--no-pager").stdout
    expect(line["MESSAGE"] in shown and "serves http" not in shown, shown[-500:])
    return str(line["MESSAGE"])


@check('log_format = "json": each message is an object with the fields', restarts=True)
def json_lines() -> str:
    service.write_settings('log_format = "json"\n')
    systemctl("restart", UNIT)
    service.wait_active()
    cursor = journal_end()
    clients.chat(headers={"X-Request-Id": "vm-43"})
    told = json.loads(_wait_line(cursor, "vm-43")["MESSAGE"])
    expect(told["request_id"] == "vm-43" and told["status"] == 200 and told["model"] == "fast", told)
    expect({"time", "level", "logger", "message"} <= set(told), told)
    return ", ".join(told)


def _wait_line(cursor: str, text: str) -> dict[str, Any]:
    for _ in range(20):
        if found := [one for one in journal(cursor) if text in str(one["MESSAGE"])]:
            return found[0]
        time.sleep(0.5)
    raise AssertionError(f"no line with {text}")
