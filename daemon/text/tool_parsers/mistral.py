"""The dialect of Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or the newer `[TOOL_CALLS]name[ARGS]{…}` once for each
call.
"""

from __future__ import annotations

from daemon.text.tool_parsers.call import Call
from daemon.text.tool_parsers.call_list import ListParser
from daemon.text.tool_parsers.named_call import NamedCall

MARKER = "[TOOL_CALLS]"


class MistralParser(ListParser):
    marker = MARKER

    def other_call(self) -> Call:
        return NamedCall(self.num_calls, self.lead)
