"""Upstreams: other servers with OpenAI's API that answer requests for some of this node's model names."""
