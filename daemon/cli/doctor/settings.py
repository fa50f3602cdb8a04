"""What is checked against: the running daemon's own words, else the configuration it would start with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from config import host_tier, load, paths
from daemon.cli.client import Client, CommandError
from daemon.errors import EXIT_USAGE


@dataclass(slots=True, frozen=True)
class Settings:
    """source: where they come from. pid: of the running daemon, 0: none. budgets: device -> bytes. models_dir: "" if unset."""

    source: str
    pid: int
    models_dir: str
    budgets: dict[str, int]
    host_tier_bytes: int
    listen: str
    cache_dir: str

    @property
    def wants_gpu(self) -> bool:
        return any(name.startswith("cuda") for name in self.budgets)


def settings(client: Client, path: str, memory_bytes: int) -> Settings:
    """path: a configuration file, "" for the service's if there is one. It is read where no daemon runs. Raises CommandError."""
    if not path:
        try:
            return of_status(client.get("/control/v1/status"))
        except CommandError:
            path = paths.SERVICE_CONFIG if os.path.exists(paths.SERVICE_CONFIG) else ""
    try:
        config = load.load(path or None)
        devices = load.device_budgets(config, memory_bytes, path or "defaults")
        tier_bytes = host_tier.resolved(config, devices, memory_bytes, path or "defaults").host_tier_bytes
    except load.ConfigError as error:
        details = {"code": "invalid_config", "message": f"{error}; correct it first", "details": {}}
        raise CommandError(EXIT_USAGE, details) from None
    assert isinstance(tier_bytes, int)
    budgets = {device.name: device.budget_bytes for device in devices}
    return Settings(path or "defaults", 0, config.models_dir, budgets, tier_bytes, config.listen, config.cache_dir)


def of_status(status: dict[str, Any]) -> Settings:
    """From what `hearth status --json` prints."""
    return Settings(
        source=f"hearthd {status['version']}, pid {status['pid']}",
        pid=status["pid"],
        models_dir=status.get("models_dir", ""),
        budgets={row["name"]: row["budget_bytes"] for row in status["devices"]},
        host_tier_bytes=status["host_tier"]["bytes"],
        listen=status["url"],
        cache_dir=status.get("cache_dir") or paths.cache_dir(),
    )
