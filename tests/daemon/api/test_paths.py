"""What a wrong path was meant to be: clients with a base URL without /v1, and misspelt ones."""

from __future__ import annotations

import pytest

from daemon.api import router


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/models/", "/v1/models"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/audio/speech", ""),
        ("/" + 10_000 * "a", ""),
        ("", ""),
    ],
)
def test_nearest(path: str, meant: str) -> None:
    assert router.nearest(path) == meant
