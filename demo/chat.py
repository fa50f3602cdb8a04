"""Asks one question and prints the answer as it streams. Standard library only.

usage: python -m demo.chat URL MODEL "QUESTION" [--max-tokens 120] [--temperature 0] [--seed 1] [--ignore-eos]
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit


class ChatError(Exception):
    """The server's own message."""


def stream_chat(
    url: str, model: str, question: str, max_tokens: int, temperature: float, seed: int, ignore_eos: bool
) -> Iterator[str]:
    """Pieces of the answer as they arrive. Raises ChatError with the server's message, also when it comes in mid-stream."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=120)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "stream": True,
    }
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ChatError(json.loads(response.read())["error"]["message"])
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ChatError(event["error"]["message"])
            for choice in event["choices"]:
                text = choice["delta"].get("content")
                if text:
                    yield text
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("question")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model would stop")
    args = parser.parse_args()
    try:
        for piece in stream_chat(
            args.url, args.model, args.question, args.max_tokens, args.temperature, args.seed, args.ignore_eos
        ):
            print(piece, end="", flush=True)
        print()
    except (ChatError, OSError) as error:
        sys.exit(f"\n{error}")


if __name__ == "__main__":
    main()
