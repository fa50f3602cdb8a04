"""The bodies of requests: their types, how they are decoded and checked. Without aiohttp, since text workers read them, too."""
