"""The settings in use and where each was set. A reload replaces them as a whole, and code that reads them through LiveSettings sees
the new values at once."""

from __future__ import annotations

from collections.abc import Sequence

from config.provenance import Sources, settings
from config.schema import NodeConfig


class LiveSettings:
    """The settings in use, for the API: implements HttpSettings, AccessSettings and CorsSettings. sources: where each setting was
    set. needs_restart: dotted keys that have changed in the file since the start and take effect only after a restart."""

    def __init__(self, config: NodeConfig, sources: Sources) -> None:
        self.config, self.sources = config, sources
        self.needs_restart: Sequence[str] = ()

    def rows(self) -> list[dict[str, object]]:
        """Returns a row for each setting, with its value and where it was set, for `hearth config`."""
        return [setting._asdict() for setting in settings(self.config, self.sources, self.needs_restart)]

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
