"""The running configuration. A reload replaces it as a whole, and code that reads it through here sees the new values at once."""

from __future__ import annotations

from collections.abc import Sequence

from config.schema import NodeConfig


class LiveSettings:
    """The current values of HttpSettings, AccessSettings and CorsSettings for the API."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config

    @property
    def max_body_bytes(self) -> int | str:
        return self.config.max_body_bytes

    @property
    def body_read_timeout_s(self) -> float:
        return self.config.body_read_timeout_s

    @property
    def request_timeout_s(self) -> float:
        return self.config.request_timeout_s

    @property
    def sse_comment_every_s(self) -> float:
        return self.config.sse_comment_every_s

    @property
    def allowed_hosts(self) -> Sequence[str]:
        return self.config.allowed_hosts

    @property
    def allowed_origins(self) -> Sequence[str]:
        return self.config.allowed_origins
