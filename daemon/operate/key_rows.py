"""Makes the rows of tenants and keys for `hearth keys` and `hearth status`. Of a key's hash only the beginning is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daemon.access import expiry
from daemon.process import moment

if TYPE_CHECKING:
    from daemon.node.node import NodeParts


def rows(node: NodeParts) -> list[dict[str, Any]]:
    """Returns one row for each tenant, for `hearth keys` and `hearth status`, in the order of the keys file: its numbers of valid
    and expired keys, when the next key expires (Unix seconds), its other settings, its limits with what is left of each (None for a
    limit that it does not have), and its tokens today. [] if no keys are set."""
    if node.keys is None:
        return []
    now = moment.now()
    used = node.quotas.used_today(now)
    found = []
    for tenant in node.keys.tenants.values():
        keys = [key for key in node.keys.all() if key.tenant is tenant]
        valid = [key for key in keys if not key.has_expired(now.unix_s)]
        standing = node.quotas.standing(tenant, now)  # includes what running requests have generated so far
        found.append(
            {
                "tenant": tenant.name,
                "keys": len(valid),
                "expired_keys": len(keys) - len(valid),
                "next_expiry": min((key.expires_unix_s for key in valid if key.expires_unix_s is not None), default=None),
                "weight": tenant.weight,
                "admin": tenant.admin,
                "priority": tenant.priority,
                "max_priority": tenant.max_priority,
                "limits": {name: None if left is None else left._asdict() for name, left in standing._asdict().items()},
                "tokens_today": used.get(tenant.name, 0),
            }
        )
    return found


def ending(node: NodeParts) -> list[dict[str, Any]]:
    """Returns one row for each API key that has expired or expires within a week, the earliest first."""
    if node.keys is None:
        return []
    unix_s = moment.now().unix_s
    return [
        {
            "tenant": key.tenant.name,
            "key": key.name or f"sha256:{key.sum_start}",
            "expires": key.expires_unix_s,
            "text": expiry.sentence(key, unix_s),
        }
        for key in expiry.ending(node.keys, unix_s)
    ]
