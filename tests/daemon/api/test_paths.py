"""Wrong paths and methods: what was meant, as with a base URL without /v1, and the form in which each API's clients are told."""

from __future__ import annotations

import aiohttp
import pytest

from daemon.api import router
from daemon.api.endpoints.registry import ENDPOINTS
from tests.daemon.api.fakes import serve


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


@pytest.mark.parametrize(
    ("method", "path", "form", "says"),
    [
        ("POST", "/v1/messages/batches", "anthropic", "chats go to /v1/messages,"),
        ("GET", "/m/tiny/v1/messages/no", "anthropic", "/v1/messages"),
        ("GET", "/v1/messages", "anthropic", "use POST"),
        ("POST", "/api/pull", "ollama", "chats go to /api/chat, and /api/tags lists"),
        ("GET", "/m/tiny/api/no", "ollama", "/api/chat"),
        ("GET", "/api/chat", "ollama", "use POST"),
        ("POST", "/v1/audio/speech", "openai", "chats go to /v1/chat/completions, and /v1/models lists"),
        ("GET", "/v1/responses/input_tokens", "openai", "use POST"),
        ("GET", "/v1/responses/resp_1/input_items", "openai", "'resp_1' is not kept here"),
        ("GET", "/v1/responses/resp_1/output_items", "openai", "no such path: /v1/responses/resp_1/output_items"),
        ("POST", "/v1/responses/resp_1/compact/cancel", "openai", "no such path: /v1/responses/resp_1/compact/cancel"),
        ("GET", "/v1/responses/resp_1", "openai", "'resp_1' is not kept here"),
        ("GET", "/v1/models/no/such", "openai", "'no/such' does not exist"),
        ("GET", "/apis", "openai", ""),
    ],
)
async def test_errors_have_the_form_of_the_paths_api(method: str, path: str, form: str, says: str) -> None:
    async with serve() as node, aiohttp.ClientSession(node.url) as http, http.request(method, path) as answer:
        assert answer.status in (404, 405)
        told = await answer.json()
    if form == "ollama":
        message = told["error"]
    else:
        assert (told.get("type") == "error") == ("code" not in told["error"]) == (form == "anthropic")
        message = told["error"]["message"]
    assert says in message


def test_what_an_api_names_is_served() -> None:
    apis = {endpoint.api for endpoint in ENDPOINTS}
    assert len(apis) == 3
    for path in (path for api in apis for path in (api.chats, api.models)):
        assert router.target(path) is not None, path


async def test_anthropics_clients_are_told_in_their_form_whatever_the_path() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    async with serve() as node, aiohttp.ClientSession(node.url, headers=headers) as http:
        for path in ("/v1/files", "/v1/models/no/such"):
            async with http.get(path) as answer:
                assert (answer.status, (await answer.json())["error"]["type"]) == (404, "not_found_error")
