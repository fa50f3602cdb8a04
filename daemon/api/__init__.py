"""Serves the HTTP API, with aiohttp: OpenAI's endpoints, Anthropic's messages, health and metrics."""
