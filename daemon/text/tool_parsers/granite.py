"""The dialect of Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`."""

from __future__ import annotations

from daemon.text.tool_parsers.call_list import ListParser

MARKER = "<|tool_call|>"


class GraniteParser(ListParser):
    marker = MARKER
