"""Reads the HTTP headers, some of them secret, that are sent with the spans to the trace collector."""

from __future__ import annotations

from config import trace_endpoint
from config.credentials import path_of
from config.load import ConfigError
from config.schema import TracesConfig
from loader.files.regular_file import read_regular

_KEY = "traces.headers_file"
MAX_BYTES = 64 << 10


def load(config: TracesConfig) -> dict[str, str]:
    """Returns the headers for the trace collector: those of the setting `headers` and those in headers_file, which take precedence.
    Raises ConfigError, which names file and line and never a value."""
    return {**config.headers, **(_read(path_of(config.headers_file, _KEY)) if config.headers_file else {})}


def _read(path: str) -> dict[str, str]:
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(path, _KEY, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(path, _KEY, "is no UTF-8 text") from None
    headers = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = (part.strip() for part in line.partition(":"))
        wrong = trace_endpoint.header_problem(name, value) if colon else "must have NAME: VALUE on each line"
        if wrong:
            raise ConfigError(path, _KEY, wrong, number)
        headers[name] = value
    return headers
