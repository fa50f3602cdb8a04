"""Parses and formats sizes, addresses and device budgets as people write them."""

from __future__ import annotations

import math
import os
import re

from config.device_names import HOST, HOST_FORM, KINDS

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "kib": 1 << 10,
    "m": 1000**2,
    "mb": 1000**2,
    "mib": 1 << 20,
    "g": 1000**3,
    "gb": 1000**3,
    "gib": 1 << 30,
    "t": 1000**4,
    "tb": 1000**4,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*\Z")
_DEVICE = re.compile(rf"({'|'.join(KINDS)})(?::([A-Za-z0-9-]+))?(@.*)?\Z")
SIZE_FORM = 'a number of bytes or a size such as "512MiB", "1.5GiB" or "2GB"'

FOREVER = "forever"
DURATION_FORM = 'a number of seconds, a duration such as "10m", "1h30m" or "0", or "forever" (-1)'
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"-?(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h|d))+\Z")
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?)([a-zµ]+)")
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?\Z")
_LONGEST_S = 100 * 365 * 86400.0  # longer durations count as for ever, because dates and timers have limits


def parse_bytes(value: int | str) -> int:
    """Returns the number of bytes of a size: "512MiB" -> 536870912, "1GB" -> 10**9, 4096 -> 4096. Raises ValueError for text of
    another form and for less than 1 byte; the message says what is allowed."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"must be {SIZE_FORM}")
    if isinstance(value, int):
        num_bytes = value
    else:
        match = _SIZE.match(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"must be {SIZE_FORM}")
        num_bytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if num_bytes <= 0:
        raise ValueError("must be more than 0 bytes")
    return num_bytes


def parse_duration_s(value: float | str) -> float:
    """Returns a duration in seconds: 90 -> 90.0, "1h30m" -> 5400.0, "forever" or a negative number -> inf. Raises ValueError for
    text of another form; the message says what is allowed."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be {DURATION_FORM}")
    if isinstance(value, str):
        text = value.strip().lower()
        if text == FOREVER:
            return math.inf
        if _NUMBER.match(text):
            seconds = float(text)
        elif _DURATION.match(text):
            seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
            seconds = -seconds if text.startswith("-") else seconds
        else:
            raise ValueError(f"must be {DURATION_FORM}")
    elif math.isnan(value):
        raise ValueError(f"must be {DURATION_FORM}")
    else:
        seconds = float(value)
    return math.inf if seconds < 0 or seconds > _LONGEST_S else seconds


def format_bytes(num_bytes: float) -> str:
    """Returns a number of bytes as text, in B, KiB, MiB or GiB: 536870912 -> '512.0 MiB'."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def parse_budget(text: str, memory_bytes: int) -> int:
    """Returns the number of bytes of a device's budget: a size ("2GiB"), or a percentage of `memory_bytes` ("50%"). Raises
    ValueError for text of another form, for less than 1 byte, and for a percentage that is 0 or above 100."""
    match = _PERCENT.match(text)
    if match is None:
        try:
            return parse_bytes(text)
        except ValueError as error:
            raise ValueError(f'{error}, or a percentage such as "50%"') from None
    percent = float(match[1])
    if not 0 < percent <= 100:
        raise ValueError("must be a percentage above 0 and at most 100")
    return int(memory_bytes * percent / 100)


def parse_size_or_share(value: int | str, memory_bytes: int) -> int:
    """Returns the number of bytes of a setting that is 0 or "0", a size ("2GiB"), or a percentage of `memory_bytes` ("50%"). Raises
    ValueError for another form."""
    return 0 if value in (0, "0") else parse_budget(str(value), memory_bytes)


def parse_device(text: str) -> tuple[str, str]:
    """Splits a device entry into its name and budget: `cpu=512MiB` -> ("cpu:0", "512MiB"), `cuda:1` -> ("cuda:1", ""), `cpu@b=8GiB`
    -> ("cpu:0@b", "8GiB"). Raises ValueError for an entry of another form, for one without a budget unless it is a cuda device of
    this machine, and for a percentage as the budget of another host's device."""
    name, equals, budget = text.partition("=")
    match = _DEVICE.match(name.strip())
    is_cpu = match is not None and match[1] == "cpu"
    if match is None or bool(equals) != bool(budget.strip()) or (is_cpu and not (equals and (match[2] or "0").isdigit())):
        raise ValueError('must be NAME=BUDGET, as in "cpu=512MiB", "cpu:1=25%" or "cuda:0=90%", or a cuda device\'s name alone')
    index, at_host = match[2] if match[2] is not None else "0", match[3] or ""
    if at_host and HOST.match(at_host[1:]) is None:
        raise ValueError(f"must be NAME@HOST=BUDGET: {HOST_FORM}")
    if at_host and (not equals or _PERCENT.match(budget) is not None):
        raise ValueError('must have a budget in bytes, as in "cuda:1@b=70GiB": this machine does not know the memory of that host')
    return f"{match[1]}:{int(index) if index.isdigit() else index}{at_host}", budget.strip()


def parse_listen(text: str) -> tuple[str, int]:
    """Splits an address into host and port: `127.0.0.1:8000`, `[::1]:8000` or `:8000`. The brackets of an IPv6 address are removed.
    An empty host ("") means all addresses. Raises ValueError for text of another form and for a port above 65535."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError('must be HOST:PORT with a port from 0 to 65535, as in "127.0.0.1:8000"')
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError('an IPv6 address goes in brackets, as in "[::1]:8000"')
    return host, int(port)


def machine_memory_bytes() -> int:
    """Returns the machine's memory in bytes, or the limit of this process's control group if that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
