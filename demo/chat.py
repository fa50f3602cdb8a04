"""Asks one question and prints the answer as it streams. Standard library only.

usage: python -m demo.chat URL MODEL "QUESTION" [--max-tokens 120] [--seed 1]
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


def stream_chat(url: str, model: str, question: str, max_tokens: int = 120, seed: int = 1, **extra: object) -> Iterator[str]:
    """Pieces of the answer as they arrive. Raises ChatError with the server's message, also when it comes in mid-stream."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=120)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "seed": seed,
        "stream": True,
        **extra,
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
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    try:
        for piece in stream_chat(args.url, args.model, args.question, args.max_tokens, args.seed):
            print(piece, end="", flush=True)
        print()
    except (ChatError, OSError) as error:
        sys.exit(f"\n{error}")


if __name__ == "__main__":
    main()
