"""Errors in the words of an API whose fields have other names."""

from __future__ import annotations

import aiohttp
import pytest

from daemon.api.endpoints import messages, ollama, ollama_embed, responses
from daemon.api.generation.tool_dialect import CHOICE_HINT
from daemon.errors import BadRequest, no_model
from tests.daemon.api.fakes import serve


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("max_tokens: 0 is too few", "max_output_tokens: 0 is too few"),
        ("min_tokens (9) is more than max_tokens (5)", "min_tokens (9) is more than max_output_tokens (5)"),
        ("response_format.json_schema.schema: #/properties/max_tokens/minimum: must be a number",) * 2,
        ("metadata.max_tokens: must be a string",) * 2,
        ("max_tokens_per_doc: must be 1 or more",) * 2,
        ("tools[0].function.name: 'max_tokens' is there twice", "tools[0].name: 'max_tokens' is there twice"),
        ("""tools[0]: the tools' "a \\"max_tokens" is none""",) * 2,
        ("the model's max_tokens and its tools' max_tokens", "the model's max_output_tokens and its tools' max_output_tokens"),
    ],
)
def test_only_names_of_fields_are_replaced(told: str, expected: str) -> None:
    expected = expected.replace("response_format.json_schema.schema", "text.format.schema")
    error = BadRequest("invalid_request", told, param="max_tokens")
    assert responses._error_body(error)["error"] == error.body()["error"] | {"message": expected, "param": "max_output_tokens"}


def test_fields_of_each_api() -> None:
    error = BadRequest("invalid_request", f"tools[1].function.parameters.type: x{CHOICE_HINT}")
    assert messages._error_body(error)["error"]["message"].startswith("tools[1].input_schema.type: x; tool_choice any or tool ")
    assert ollama.error_body(error) == {"error": "tools[1].function.parameters.type: x"}
    error = BadRequest("invalid_request", "input: has no inputs, and input[0] none, with 'input'", param="input")
    assert ollama_embed._embeddings_error_body(error) == {"error": "prompt: has no inputs, and prompt[0] none, with 'input'"}


async def test_a_models_name_stays_as_the_client_wrote_it() -> None:
    body = {"model": "max_tokens", "input": "hi"}
    async with serve() as node, aiohttp.request("POST", node.url + "/v1/responses", json=body) as response:
        assert (await response.json())["error"]["message"] == no_model("max_tokens").message
