"""Speaks HTTP over the control socket, and turns its errors into exit codes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from daemon.errors import EXIT_BUSY, EXIT_DENIED, EXIT_USAGE
from daemon.operate.control_status import EXIT_OF_STATUS

BACK_LIMIT_S = 60.0
WAITING = "hearthd has ended; waiting for the next one"
_ENDED = ("connection_lost", "not_running", "server_restarting")


class CommandError(Exception):
    """Raised to end the command with a message. exit_code: the program's exit code. error: `{code, message, details}`, which --json
    prints."""

    def __init__(self, exit_code: int, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.exit_code, self.error = exit_code, error


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.connect(self._path)
        except OSError:
            self.close()
            raise


class Client:
    """The access of one command to the daemon, over its control socket. control: the path of the control socket. status: the path
    of a second socket that answers only GET requests; it is used for those if this user may not open `control`; "": there is none.
    All methods raise CommandError."""

    def __init__(self, control: str, status: str = "") -> None:
        self.control, self._status = control, status

    def get(self, path: str) -> Any:
        return json.loads(self._request("GET", path).read())

    def post(self, path: str) -> Any:
        return json.loads(self._request("POST", path).read())

    def lines(self, method: str, path: str) -> Iterator[dict[str, Any]]:
        """Sends a request and yields the objects of its answer, one JSON object a line, as they arrive. Raises CommandError if the
        daemon refuses the request or ends before it has answered."""
        response = self._request(method, path)
        try:
            for line in response:
                if line.strip():
                    yield json.loads(line)
        except (OSError, http.client.HTTPException) as error:
            raise self.gone(error) from None

    def until_back(self, error: CommandError) -> None:
        """Waits until a daemon listens on the control socket again, after one that ended during a command and is most likely being
        restarted. error: the error that the command met. Raises `error` at once if it does not mean that the daemon has ended, and
        after BACK_LIMIT_S seconds if no daemon listens."""
        end_s = time.monotonic() + BACK_LIMIT_S
        while error.error["code"] in _ENDED:
            time.sleep(0.2)
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.connect(self.control)
                return
            if time.monotonic() > end_s:
                break
        raise error

    def result(self, lines: Iterator[dict[str, Any]]) -> dict[str, Any]:
        """Reads all lines of a command's answer and returns the last one, which holds the command's result. Raises CommandError if
        the command failed or the last line is missing."""
        last = None
        for last in lines:  # noqa: B007
            pass
        if last is None or last.get("event") != "result":
            raise self.gone(None)
        return check(last)

    def _request(self, method: str, path: str, socket_path: str = "") -> http.client.HTTPResponse:
        connection = _UnixConnection(socket_path or self.control)
        try:
            connection.request(method, path, headers={"Connection": "close"})  # the daemon closes the socket after the answer
            response = connection.getresponse()
        except PermissionError:
            if method == "GET" and not socket_path and os.path.exists(self._status):
                return self._request(method, path, self._status)
            message = (
                f"no permission to open {self.control}; ask for membership of the group that owns it (the service's is hearthd)"
            )
            raise CommandError(EXIT_DENIED, _error("permission_denied", message)) from None
        except (FileNotFoundError, ConnectionRefusedError):
            message = f"hearthd is not running at {self.control}; start it, or name its socket with --control"
            raise CommandError(EXIT_BUSY, _error("not_running", message)) from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and "too long" in str(error):
                message = f"{self.control}: the path is too long for a socket"
                raise CommandError(EXIT_USAGE, _error("invalid_request", message)) from None
            raise self.gone(error) from None
        if response.status != 200:
            try:
                error_object = json.loads(response.read())
                error_object["message"], error_object["code"]
            except (ValueError, KeyError, TypeError):
                error_object = _error("internal", f"{self.control} answered {response.status} without a reason: is it hearthd's?")
            raise CommandError(EXIT_OF_STATUS.get(response.status, 1), error_object)
        return response

    def gone(self, error: Exception | None = None) -> CommandError:
        """Returns the CommandError to raise because the daemon ended before it had answered. error: the exception that was raised
        while reading the answer; None: the answer just ended."""
        why = f": {error}" if error is not None and str(error) else ""
        return CommandError(EXIT_BUSY, _error("connection_lost", f"hearthd ended before it answered{why}"))


def check(result: dict[str, Any]) -> dict[str, Any]:
    """Returns `result`, the daemon's result of a command, if the command succeeded. Otherwise raises CommandError."""
    if not result["ok"]:
        raise CommandError(EXIT_OF_STATUS.get(result["status"], 1), result["error"])
    return result


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "details": {}}
