"""The dialect of Cohere's Command R7B, Command A and their successors:
`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>`.
"""

from __future__ import annotations

from daemon.text.tool_parsers.call_list import ListParser

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
BEFORE, BETWEEN, BEHIND = "[\n    ", ",\n    ", "\n]"  # what models write around and between calls


class CommandParser(ListParser):
    marker, close = OPEN, CLOSE
    name_key = "tool_name"
