"""Forwards requests for some of this node's model names to upstreams: other servers with OpenAI's API."""
