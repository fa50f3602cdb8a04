"""All errors that a client or operator can get, as classes that determine the HTTP status, the body in OpenAI's form and the exit
code.

HearthError
├── BadRequest    the caller's fault: 4xx, names the field
├── NoKey         401: a key is missing or not known
├── NotAllowed    403: the caller lacks permission, or the request is from another site's page
├── NotNow        429/503, with Retry-After where trying again makes sense
└── ServerFault   the server's fault: 500, the engine was restarted or the model is at fault
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from scheduler.node.actions import Refusal

# exit codes of the command line; the control API groups its error codes by them
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_NO_FIT, EXIT_BUSY, EXIT_DENIED = range(7)
EXIT_NOT_SAVED = 7  # the command took effect, but a restart would forget it


# text in quotes; an apostrophe within or behind a word begins none
_QUOTED = (r"(?<!\w)'(?:[^'\\]|\\.)*+'(?!\w)", r'(?<!\w)"(?:[^"\\]|\\.)*+"(?!\w)')


def _whole(name: str) -> str:
    """Returns a pattern that finds a field's name, but neither within a longer word nor in a JSON pointer or a path of other
    fields."""
    before, behind = r"(?<![\w./-])" if name[0].isalnum() else "", r"(?![\w/-])" if name[-1].isalnum() else ""
    return before + re.escape(name) + behind


class HearthError(Exception):
    """An error to report to a client or operator.

    code: a machine-readable word. param: the request's offending field, or None. status: the HTTP status. type: OpenAI's error
    type. retry_after_s: the seconds after which to try again; None: not known. details: further facts for operators."""

    status = 500
    type = "server_error"

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
        details: dict[str, object] | None = None,
        kind: str = "",
    ) -> None:
        """Makes the error. status: the HTTP status; None: that of the class. kind: OpenAI's error type; "": that of the class."""
        super().__init__(message)
        self.type = kind or type(self).type
        self.code, self.message, self.param = code, message, param
        self.status = status or type(self).status
        self.retry_after_s = retry_after_s
        self.details = details or {}

    def renamed(self, names: Iterable[tuple[str, str]]) -> dict[str, str | None]:
        """Returns the error's message and param as {"message", "param"}, for an API in which the request's fields have other names:
        each name is replaced where it stands as whole words and outside quotes, because quoted text is the client's own. names:
        pairs of a field's name in OpenAI's API and in the other API; the first that fits is used."""
        theirs = dict(names)
        pattern = re.compile("|".join([*map(_whole, theirs), *_QUOTED]))

        def told(text: str) -> str:
            return pattern.sub(lambda found: theirs.get(found[0], found[0]), text)

        return {"message": told(self.message), "param": self.param and told(self.param)}

    def body(self) -> dict[str, Any]:
        """Returns the error as the JSON object that OpenAI's API answers with."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES.get(self.code, EXIT_BUSY if self.status in (429, 503) else EXIT_USAGE if self.status < 500 else 1)


class BadRequest(HearthError):
    status = 400
    type = "invalid_request_error"


class NoKey(HearthError):
    status = 401
    type = "authentication_error"


class NotAllowed(HearthError):
    status = 403
    type = "permission_error"


class NotNow(HearthError):
    status = 503
    type = "overloaded_error"


class ServerFault(HearthError):
    status = 500
    type = "server_error"


# refusal code -> (class, HTTP status)
_REFUSALS: dict[str, tuple[type[HearthError], int]] = {
    "model_not_found": (BadRequest, 404),
    "model_removed": (BadRequest, 404),
    "model_too_large": (BadRequest, 400),
    "model_unusable": (BadRequest, 400),
    "model_incomplete": (NotNow, 503),
    "model_disabled": (NotNow, 503),
    "model_failed": (NotNow, 503),
    "model_draining": (NotNow, 503),
    "node_draining": (NotNow, 503),
    "server_restarting": (NotNow, 503),
    "queue_full": (NotNow, 429),
    "would_not_fit": (NotNow, 503),
    "wait_exceeded": (NotNow, 503),
    "load_timeout": (NotNow, 503),
    "crashed_twice": (ServerFault, 500),
    "unloaded": (NotNow, 503),
    "busy": (NotNow, 503),
    "not_kept": (BadRequest, 409),
}
_EXIT_CODES = {
    "model_not_found": EXIT_NOT_FOUND,
    "adapter_not_found": EXIT_NOT_FOUND,
    "model_removed": EXIT_NOT_FOUND,
    "request_not_found": EXIT_NOT_FOUND,
    "not_found": EXIT_NOT_FOUND,
    "model_too_large": EXIT_NO_FIT,
    "model_unusable": EXIT_NO_FIT,
    "adapter_unusable": EXIT_NO_FIT,
    "adapter_without_base": EXIT_NO_FIT,
    "would_not_fit": EXIT_NO_FIT,
    "not_kept": EXIT_NO_FIT,
    "permission_denied": EXIT_DENIED,
    "state_not_saved": EXIT_NOT_SAVED,
}


def no_model(name: str) -> HearthError:
    """Returns the error for an unknown model. It is also used for a model that the tenant may not use, so that the tenant does
    not learn that the model exists."""
    return BadRequest("model_not_found", f"The model {name[:256]!r} does not exist.", param="model", status=404)


def from_refusal(refusal: Refusal) -> HearthError:
    kind, status = _REFUSALS[refusal.code]
    return kind(
        refusal.code,
        refusal.message,
        param="model" if status in (400, 404) else None,
        status=status,
        retry_after_s=refusal.retry_after_s,
        details=refusal.details,
    )
