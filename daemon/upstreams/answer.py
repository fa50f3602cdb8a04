"""Rewrites an upstream's answer, whole or as a stream of events: this node's name of the model replaces the upstream's, and the
tokens are counted.

Only the outermost fields of each JSON object are decoded; the others are passed on as the bytes that came.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from daemon.contracts import Generation, ReportedUsage
from daemon.errors import HearthError
from daemon.upstreams import failure

MAX_EVENT_BYTES = 16 << 20
_EMPTY, _LONGEST_EMPTY = b"[] \n\t", 32  # an empty list; values longer than this are not checked for being one
_NOT_FINISHED = b'"finish_reason":null'  # most events contain this
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"([a-z_]+)"')
_DONE = b"[DONE]"
_END = b"data: [DONE]\n\n"
_decoder = msgspec.json.Decoder(dict[str, Raw])


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


_usage_decoder = msgspec.json.Decoder(_Usage)
_choices_decoder = msgspec.json.Decoder(list[_Choice])


class Answer:
    """Rewrites one answer of an upstream for the client. outcome: how the request ended as far as is known, "stop" or "length".
    has_text: whether the answer is generated text, not an embedding."""

    def __init__(self, host: str, name: str, generation: Generation, shows_usage: bool) -> None:
        """host: the upstream's host. name: the model's name on this node. generation: the request, in which the tokens are counted.
        shows_usage: whether the client gets the event of a stream that holds only the usage."""
        self.outcome, self.has_text = "stop", False
        self._host, self._shows_usage = host, shows_usage
        self._name = Raw(msgspec.json.encode(name))
        self._generation = generation
        assert generation.reported is not None
        self._reported: ReportedUsage = generation.reported
        self._is_reported = False

    def whole(self, body: bytes) -> bytes:
        """Returns the answer to send to the client, with this node's name of the model, and counts its tokens. body: the upstream's
        whole answer. Raises HearthError upstream_invalid if it is no JSON object or its choices are malformed."""
        fields = self._decode(body)
        if (choices := fields.get("choices")) is not None:
            try:
                reasons = {each.finish_reason for each in _choices_decoder.decode(choices)}
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                raise self._invalid("answered with `choices` that are none") from None
            self.outcome, self.has_text = "length" if "length" in reasons else "stop", True
        self._count(fields)
        return self._renamed(fields)

    def _decode(self, data: bytes) -> dict[str, Raw]:
        try:
            return _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._invalid("answered with what is no JSON object") from None

    def _renamed(self, fields: dict[str, Raw]) -> bytes:
        if "model" in fields:
            fields["model"] = self._name
        return msgspec.json.encode(fields)

    def _count(self, fields: dict[str, Raw]) -> bool:
        """Takes the token counts from the field `usage` of an answer or event. Returns whether there is such a field and it holds
        counts."""
        raw = fields.get("usage")
        if raw is None:
            return False
        try:
            usage = _usage_decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # also raised for null
            return False
        self._is_reported = True
        total = usage.total_tokens if usage.completion_tokens is None else None  # some servers report only the total for scores
        self._reported.prompt_tokens = max(0, usage.prompt_tokens or total or 0)
        self._reported.output_tokens = max(0, usage.completion_tokens or 0)
        details = usage.prompt_tokens_details
        self._generation.num_cached = max(0, (details.cached_tokens if details is not None else 0) or 0)
        return True

    def _invalid(self, what: str) -> HearthError:
        return failure.invalid(self._host, what)


class AnswerStream(Answer):
    """Rewrites a stream of server-sent events, which arrives in pieces of any size and leaves as whole events. is_over: whether the
    last event has come. has_failed: whether an event was an error. broken: why no more events can be read; None: they can."""

    def __init__(self, host: str, name: str, generation: Generation, shows_usage: bool) -> None:
        super().__init__(host, name, generation, shows_usage)
        self.is_over = self.has_failed = False
        self.broken: HearthError | None = None
        self.has_text = True
        self._held = bytearray()  # the beginning of an event whose end has not come
        self._seen = 0  # bytes of `_held` that are known to contain no end of an event
        self._is_after_cr = False  # whether a line feed that comes next belongs to the carriage return before it
        self._finish = ""  # the last finish_reason
        self.has_begun = False  # whether an event with an answer has come

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes from the upstream, and returns the events that they complete, as they are to be sent to the client;
        b"" if they complete none. Sets `broken` after an event that cannot be read."""
        self._held += self._with_plain_ends(data)
        end = self._held.rfind(b"\n\n", max(0, self._seen - 1))
        if end < 0:
            self._seen = len(self._held)
            if len(self._held) > MAX_EVENT_BYTES:
                self.broken = self._invalid(f"sent an event of more than {MAX_EVENT_BYTES >> 20} MiB")
            return b""
        events = bytes(self._held[:end])
        del self._held[: end + 2]
        self._seen = 0
        out = []
        for event in events.split(b"\n\n"):
            try:
                out.append(self._event(event) if event and not self.is_over else b"")
            except HearthError as error:  # the events before it are still sent
                self.broken = error
                break
        return b"".join(out)

    def _with_plain_ends(self, data: bytes) -> bytes:
        """Returns the bytes with a line feed in place of every line ending (CR, LF, or CRLF, even if two pieces divide it). JSON
        contains no bare line endings, so each line ending separates lines of the stream."""
        if self._is_after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._is_after_cr = False
        if b"\r" in data:
            self._is_after_cr = data.endswith(b"\r")
            return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if data:
            self._is_after_cr = False
        return data

    def ended(self) -> bytes:
        """Called when the upstream has ended its answer without an error of the connection. Returns the bytes that are still to be
        sent to the client: the last event, if its end was missing, and the final [DONE] if the upstream has left it out. Sets
        `broken` if the answer is not complete."""
        if self.is_over:
            return b""
        out = self.feed(b"\n\n") if self._held.strip() else b""
        if self.is_over or self.broken is not None:
            return out
        if not self._finish:
            self.broken = self._invalid("ended its stream before the answer was whole")
        else:  # some servers leave out the final [DONE]
            self.is_over, out = True, out + _END
        return out

    def _event(self, event: bytes) -> bytes:
        if event.startswith(b"data:") and b"\n" not in event:
            return self._data(event[5:].strip(), b"")
        lines = event.split(b"\n")
        data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if not data:
            return event + b"\n\n"  # a comment
        others = [line for line in lines if line and not line.startswith(b"data:")]
        return self._data(b" ".join(data), b"".join(line + b"\n" for line in others))

    def _data(self, data: bytes, before: bytes) -> bytes:
        """Returns an event as it is sent to the client; b"" if the client does not get it. data: the event's data, JSON or [DONE].
        before: the event's other lines, which are kept."""
        if data == _DONE:
            self.is_over = True
            return before + _END
        fields = self._decode(data)
        if "error" in fields and bytes(fields["error"]) != b"null":
            self.has_failed = self.is_over = True
            return b"%bdata: %b\n\n" % (before, data)
        choices = bytes(fields["choices"]) if "choices" in fields else b""
        has_text = len(choices) > _LONGEST_EMPTY or bool(choices.strip(_EMPTY))
        if "usage" in fields:
            if self._count(fields):
                if choices and not has_text and not self._shows_usage:
                    return b""
            elif not self._shows_usage and bytes(fields["usage"]) == b"null":
                del fields["usage"]  # the client has not asked for it
        if has_text:
            self.has_begun = True
            if not self._is_reported:
                self._reported.output_tokens += 1  # an estimate until the usage comes
            if _NOT_FINISHED not in choices and (found := _FINISHED.search(choices)) is not None:
                self._finish = found[1].decode()
                self.outcome = "length" if self._finish == "length" else "stop"
        return b"%bdata: %b\n\n" % (before, self._renamed(fields))
