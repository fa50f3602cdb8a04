"""The OpenAI surface over aiohttp, one module per noun."""
