"""The HTTP API over aiohttp: OpenAI's endpoints, Anthropic's messages, health and metrics."""
