"""Compares /v1/responses with OpenAI's OpenAPI specification: `python -m tests.openai_specification openapi.json --requests 2000`.

Random bodies that follow the specification are sent to a node whose replies are written by hand. Each must be answered as the
specification has it, whole or as events, or refused by a message that names a field. So must be the lists of the items that kept
responses were made from. The file is not part of this repository:
https://github.com/openai/openai-openapi.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from typing import Any

import aiohttp
import jsonschema_rs

from engine.protocol import FINISH_LENGTH
from tests.daemon.api.fakes import Script, entry, serve, text_script

REPLIES = [
    "Hello.",
    "",
    "<think>why\n</think>\n\nBecause é.",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Köln"}}\n</tool_call>',
    '<think>hm</think>Wait.\n<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "stop", "arguments": {oops}}</tool_call>',
]
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": None}
ITEMS = ["EasyInputMessage", "FunctionToolCall", "FunctionCallOutputItemParam", "ReasoningItem"]  # those that are served
MAX_DEPTH = 9


class Specification:
    """OpenAI's schemas, by name."""

    def __init__(self, path: str) -> None:
        with open(path, encoding="utf-8") as file:
            self.all = json.load(file)
        self.schemas: dict[str, Any] = self.all["components"]["schemas"]
        self._validators: dict[str, Any] = {}

    def schema(self, name: str) -> dict[str, Any]:
        return {"$ref": f"#/components/schemas/{name}", "components": {"schemas": self.schemas}}

    def faults(self, name: str, value: object) -> list[str]:
        """Returns how a value differs from a schema."""
        if name not in self._validators:
            self._validators[name] = jsonschema_rs.validator_for(self.schema(name))
        return [f"{error.instance_path}: {error.message[:200]}" for error in self._validators[name].iter_errors(value)]

    def event_schema(self, kind: str) -> str:
        """Returns the name of the schema of an event, by its type."""
        for each in self.schemas["ResponseStreamEvent"].get("anyOf") or self.schemas["ResponseStreamEvent"]["oneOf"]:
            name = each["$ref"].rsplit("/", 1)[1]
            if kind in self.schemas[name]["properties"]["type"].get(
                "enum", [self.schemas[name]["properties"]["type"].get("const")]
            ):
                return str(name)
        raise KeyError(kind)


class Generator:
    """Makes random values that follow a schema; sometimes ones that do not."""

    def __init__(self, specification: Specification, rng: random.Random) -> None:
        self._specification, self._rng = specification, rng

    def properties(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns the properties of an object's schema, with those of the schemas it is made of."""
        schema = self._resolved(schema)
        found = dict(schema.get("properties", {}))
        for part in schema.get("allOf", []):
            found |= self.properties(part)
        return found

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        rng = self._rng
        schema = self._resolved(schema)
        if rng.random() < 0.01:
            return rng.choice([None, 0, -1, "", [], {}, 1.5, True, "\0", "x" * 300, {"a": {"b": []}}])
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                options = schema[key] if depth < MAX_DEPTH else schema[key][:1]
                return self.value(rng.choice(options), depth + 1)
        kind = schema.get("type")
        kind = rng.choice(kind) if isinstance(kind, list) else kind
        if "allOf" in schema or "properties" in schema or kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return [
                self.value(schema.get("items", {}), depth + 1)
                for _ in range(rng.choice([0, 1, 1, 2, 3]) if depth < MAX_DEPTH else 0)
            ]
        if kind == "integer":
            return rng.choice([schema.get("minimum", 0), schema.get("minimum", 0) + 1, rng.randrange(0, 1 << 16)])
        if kind == "number":
            return rng.choice([schema.get("minimum", 0), schema.get("maximum", 1), rng.random()])
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "null":
            return None
        return rng.choice(["", "a", "hello there", "é\n\U0001f600", '{"city": "Köln"}', "get_weather"])

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        required: set[str] = set(schema.get("required", []))
        for part in schema.get("allOf", []):
            required |= set(self._resolved(part).get("required", []))
        made = {}
        for name, each in self.properties(schema).items():
            if name in required or (depth < MAX_DEPTH and self._rng.random() < 0.3):
                made[name] = self.value(each, depth + 1)
        return made

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._specification.schemas[schema["$ref"].rsplit("/", 1)[1]]
        return schema


async def compare(path: str, num_requests: int, seed: int) -> int:
    specification, rng = Specification(path), random.Random(seed)
    made = Generator(specification, rng)
    fields = made.properties(specification.schema("CreateResponse"))
    statuses: Counter[str] = Counter()
    faults: Counter[str] = Counter()

    def script(generation: Any) -> Script:
        reply = rng.choice(REPLIES).encode()
        if rng.random() < 0.2:
            return [(list(reply[: generation.params.max_tokens]), FINISH_LENGTH)]
        return text_script(reply[: generation.params.max_tokens - 1])

    models = [entry(tool_parser="hermes", reasoning_parser="think")]
    kept = ""
    async with serve(script, models=models) as node, aiohttp.ClientSession(node.url) as http:
        for _ in range(num_requests):
            body = {name: made.value(fields[name]) for name in rng.sample(sorted(fields), rng.choice([0, 1, 1, 2, 3, 6]))}
            body |= {"model": "tiny"} if rng.random() < 0.98 else {}
            if "input" not in body or rng.random() < 0.5:
                body["input"] = "hi"
            elif rng.random() < 0.7:
                body["input"] = [made.value(specification.schema(rng.choice(ITEMS))) for _ in range(rng.choice([1, 1, 2, 3]))]
            body["previous_response_id"] = kept if rng.random() < 0.3 and kept else None
            if rng.random() < 0.3:
                body["tools"] = [WEATHER]
            async with asyncio.timeout(30), http.post("/v1/responses", json=body) as answer:
                text = await answer.text()
            found, response = check(specification, answer.status, answer.content_type, text)
            statuses[str(answer.status) if answer.status != 400 else f"400 {json.loads(text)['error']['param']}"] += 1
            if response is not None and response.get("status") == "completed":
                kept = response["id"]
            if response is not None and response.get("store") and response["status"] in ("completed", "incomplete"):
                async with http.get(f"/v1/responses/{response['id']}/input_items?limit=100") as answer:
                    text = await answer.text()
                items = specification.faults("ResponseItemList", json.loads(text))
                found += [f"input_items{fault}" for fault in [*items, *([] if answer.status == 200 else ["status"])]]
            for fault in found:
                if faults[fault] == 0:
                    print(f"{fault}\n  body {json.dumps(body)[:600]}\n  answer {text[:600]}", flush=True)
                faults[fault] += 1
    print(
        json.dumps({"requests": num_requests, "seed": seed, "faults": sum(faults.values()), "statuses": statuses.most_common(40)})
    )
    return 1 if faults else 0


def check(specification: Specification, status: int, content_type: str, text: str) -> tuple[list[str], dict[str, Any] | None]:
    """Returns the faults of an answer, and the response it holds."""
    if status >= 500 or (status != 200 and not json.loads(text)["error"]["message"]):
        return [f"status {status}"], None
    if status != 200:
        return specification.faults("ErrorResponse", json.loads(text)), None
    if content_type == "application/json":
        return specification.faults("Response", json.loads(text)), json.loads(text)
    found, events = [], []
    for event in text.removesuffix("\n\n").split("\n\n"):
        lines = event.split("\n")
        events.append(json.loads(lines[-1].removeprefix("data: ")))
        kind = events[-1]["type"]
        if lines[0] != f"event: {kind}":
            found.append(f"line {lines[0]}")
        found += [f"{kind}{fault}" for fault in specification.faults(specification.event_schema(kind), events[-1])]
    return found, events[-1].get("response")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("specification", help="OpenAI's openapi.json")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    return asyncio.run(compare(options.specification, options.requests, options.seed))


if __name__ == "__main__":
    raise SystemExit(main())
