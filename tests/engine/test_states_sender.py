"""What becomes of a connection to another host when the thread that sends the states of a pipeline's steps ends by an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.remote.states_sender import StatesSender
from engine.remote.wire import WireClosed


@pytest.mark.parametrize("ends", ["an error", "the connection's end"])
def test_the_connection_ends_with_the_thread_that_sends(ends: str, caplog: pytest.LogCaptureFixture) -> None:
    """The stage on the other host would wait for its states without limit. Where the connection has ended, whoever receives from it
    notices."""
    calls: list[str] = []

    def send(frame: Any) -> None:
        calls.append("send")
        raise ValueError("a frame of 5 GiB") if ends == "an error" else WireClosed("reset")

    wire: Any = SimpleNamespace(send=send, shut=lambda: calls.append("shut"))
    link: Any = SimpleNamespace(take=lambda: np.zeros(64, np.uint8))
    sender = StatesSender(wire, 1, link, 8, lambda: None)
    sender.step(4)
    sender.close()
    assert calls == (["send", "shut"] if ends == "an error" else ["send"])
    assert ("a frame of 5 GiB" in caplog.text) == (ends == "an error")
