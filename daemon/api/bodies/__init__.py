"""Defines the types of request bodies, and decodes and checks the bodies. Nothing here imports aiohttp, because text workers parse
bodies, too."""
