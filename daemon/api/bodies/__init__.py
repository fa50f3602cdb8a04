"""The bodies of requests: their types, and how they are decoded and checked. Nothing here imports aiohttp, because text workers
parse bodies, too."""
