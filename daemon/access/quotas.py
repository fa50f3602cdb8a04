"""Enforces the tenants' limits: those per minute by token buckets, the one per day (UTC) by a count.

A bucket holds at most a minute's worth and refills continuously, so a tenant that was silent may send a minute's worth at once.
A request is counted as follows:

- At its admission it takes one request, and the tokens of all its prompts. If a limit has less left, the request is refused and
  takes nothing.
- The tokens that it generates are taken afterwards: at its end, and whenever its tenant sends another request. They are not
  reserved at the admission, because few clients name the max_tokens that they need, and the default is all that the context
  leaves. So running requests may take a bucket below zero, and the next request waits until the refill has paid that off. The
  tenant's mean rate is thus its limit, and an answer of N minutes' worth makes it wait for N minutes.
- At its end, tokens of prompts that never reached an engine are given back.

A request whose prompts are larger than a limit could never be admitted, so its error says that it never fits. Prompt tokens count
whether or not they were found in the prefix cache. Minutes go by the monotonic clock, days by Unix time; callers give both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from daemon.access.tenant import Tenant
from daemon.process.moment import Moment

DAY_S = 86400
_ROUNDING = 1e-6  # tokens; a tolerance, so that a wait computed in floating point suffices


class Left(NamedTuple):
    """The amount that is left of one limit of a tenant. limit: the limit, in requests or tokens in a minute or a day. remaining:
    the requests or tokens that are left, at least 0. full_in_s: seconds until the whole limit is available again."""

    limit: int
    remaining: int
    full_in_s: float


class Standing(NamedTuple):
    """The amount that is left of each limit of a tenant; None for a limit that the tenant does not have. The fields have the names
    of the limits in the keys file."""

    requests_per_minute: Left | None
    tokens_per_minute: Left | None
    tokens_per_day: Left | None


class OverLimit(NamedTuple):
    """The reason why a request is not admitted. limit: the name of the exceeded limit in the keys file. left: what is left of that
    limit. needed: the requests or tokens that the request needs. fits_in_s: seconds until `needed` is available; None: never,
    because the request needs more than the whole limit."""

    limit: str
    left: Left
    needed: int
    fits_in_s: float | None


class Charge:
    """The record of one admitted request, by which the tokens that it generates are counted against its tenant's limits. num_made:
    returns the number of tokens that the request has generated so far."""

    __slots__ = ("_num_counted", "num_made", "tenant")

    def __init__(self, tenant: Tenant, num_made: Callable[[], int]) -> None:
        self.tenant, self.num_made = tenant, num_made
        self._num_counted = 0

    def uncounted(self) -> int:
        """Returns the number of tokens that the request has generated since the last call."""
        num_made = self.num_made()
        num_new, self._num_counted = num_made - self._num_counted, num_made
        return num_new


class _Bucket:
    """A token bucket for one limit per minute. Its level is the amount that may be taken now, at most a minute's worth; it starts
    full and refills continuously. A level below 0 is a debt. Times are monotonic seconds."""

    __slots__ = ("_at_s", "_level")

    def __init__(self) -> None:
        self._level, self._at_s = float("inf"), 0.0

    def level(self, per_minute: int, now_s: float) -> float:
        refilled = self._level + max(0.0, now_s - self._at_s) * per_minute / 60
        self._level, self._at_s = min(float(per_minute), refilled), now_s
        return self._level

    def take(self, amount: int, per_minute: int | None, now_s: float) -> None:
        if per_minute is not None:
            self._level = self.level(per_minute, now_s) - amount

    def left(self, per_minute: int | None, now_s: float) -> Left | None:
        if per_minute is None:
            return None
        level = self.level(per_minute, now_s)
        return Left(per_minute, max(0, int(level + _ROUNDING)), (per_minute - level) * 60 / per_minute)

    def lacks(self, amount: int, per_minute: int, now_s: float) -> float:
        """Returns the seconds until `amount` may be taken, 0 if it may be taken now. per_minute: the bucket's size and refill.
        now_s: monotonic seconds."""
        missing = amount - self.level(per_minute, now_s)
        return missing * 60 / per_minute if missing > _ROUNDING else 0.0


class _Account:
    """One tenant's use of its limits. requests, tokens: the buckets for requests and for tokens a minute. open: the charges of its
    running requests."""

    __slots__ = ("open", "requests", "tokens")

    def __init__(self) -> None:
        self.requests, self.tokens = _Bucket(), _Bucket()
        self.open: set[Charge] = set()


class Quotas:
    """Counts what all tenants use of their limits, and decides which requests are admitted. All calls must come from one thread."""

    def __init__(self, refused: Callable[[str, str], None] = lambda tenant, limit: None) -> None:
        """refused: called with a tenant's and a limit's name for each request that is not admitted."""
        self._refused = refused
        self._accounts: dict[str, _Account] = {}
        self._day = 0  # days since 1970, in UTC
        self._used: dict[str, int] = {}  # tenant -> tokens on that day

    def admit(self, tenant: Tenant, num_prompt_tokens: int, num_made: Callable[[], int], now: Moment) -> Charge | OverLimit:
        """Admits a request, or refuses it because of a limit. Returns a Charge after counting one request and the tokens of its
        prompts; the caller has to pass the Charge to `end`. Returns OverLimit, and counts nothing, if a limit is exceeded.
        num_prompt_tokens: the tokens of all its prompts. num_made: returns the number of tokens that the request has generated so
        far; it is called until `end` has returned."""
        account, limits = self._current_account(tenant, now), tenant.limits
        over = self._over(account, tenant, num_prompt_tokens, now)
        if over is not None:
            self._refused(tenant.name, over.limit)
            return over
        account.requests.take(1, limits.requests_per_minute, now.monotonic_s)
        self._take(account, tenant, num_prompt_tokens, now)
        charge = Charge(tenant, num_made)
        account.open.add(charge)
        return charge

    def is_over(self, tenant: Tenant, now: Moment) -> bool:
        """Returns whether even a request with a prompt of one token would now be refused because of a limit of the tenant. Counts
        no request."""
        return self._over(self._current_account(tenant, now), tenant, 1, now) is not None

    def readmit(self, tenant: Tenant, num_made: Callable[[], int], now: Moment) -> Charge:
        """Returns a Charge for a request that an earlier process has admitted. The request and its prompt are not counted again,
        but the tokens that it generates from now on are. num_made: returns the number of tokens that this process has generated for
        it."""
        charge = Charge(tenant, num_made)
        self._current_account(tenant, now).open.add(charge)
        return charge

    def end(self, charge: Charge, num_unused: int, now: Moment) -> None:
        """Counts the tokens that a request has generated since they were last counted, and ends its Charge. It must be called once,
        at the request's end. num_unused: the prompt tokens that never reached an engine; they are given back."""
        account = self._current_account(charge.tenant, now)
        account.open.discard(charge)
        self._take(account, charge.tenant, charge.uncounted() - num_unused, now)

    def standing(self, tenant: Tenant, now: Moment) -> Standing:
        account, limits = self._current_account(tenant, now), tenant.limits
        return Standing(
            account.requests.left(limits.requests_per_minute, now.monotonic_s),
            account.tokens.left(limits.tokens_per_minute, now.monotonic_s),
            self._day_left(tenant, now),
        )

    def used_today(self, now: Moment) -> Mapping[str, int]:
        """Returns the tokens that each tenant has used today (UTC), by the tenant's name. Tokens of a running request are included
        only up to the last time its tenant's use was counted."""
        self._turn(now)
        return self._used

    def restore(self, day: int, used: Mapping[str, int]) -> None:
        """Sets the tokens used on a day, as an earlier process saved them. day: days since 1970 in UTC. used: tenant -> tokens."""
        self._day, self._used = day, dict(used)

    def day(self, now: Moment) -> int:
        """Returns the number of days from 1970 to today, in UTC."""
        self._turn(now)
        return self._day

    def _current_account(self, tenant: Tenant, now: Moment) -> _Account:
        """Returns the tenant's account after counting the tokens that its running requests have generated."""
        self._turn(now)
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = _Account()
        if tenant.limits.on_tokens:
            for charge in account.open:
                self._take(account, tenant, charge.uncounted(), now)
        return account

    def _take(self, account: _Account, tenant: Tenant, num_tokens: int, now: Moment) -> None:
        account.tokens.take(num_tokens, tenant.limits.tokens_per_minute, now.monotonic_s)
        self._used[tenant.name] = max(0, self._used.get(tenant.name, 0) + num_tokens)

    def _turn(self, now: Moment) -> None:
        day = int(now.unix_s // DAY_S)
        if day != self._day:
            self._day, self._used = day, {}

    def _day_left(self, tenant: Tenant, now: Moment) -> Left | None:
        limit = tenant.limits.tokens_per_day
        if limit is None:
            return None
        return Left(limit, max(0, limit - self._used.get(tenant.name, 0)), DAY_S - now.unix_s % DAY_S)

    def _over(self, account: _Account, tenant: Tenant, num_tokens: int, now: Moment) -> OverLimit | None:
        """Returns the limit that the next request would exceed, and of several the one for which it would have to wait longest;
        None if it may start. num_tokens: the tokens of its prompts."""
        limits, found = tenant.limits, list[OverLimit]()
        for limit, bucket, per_minute, needed in (
            ("requests_per_minute", account.requests, limits.requests_per_minute, 1),
            ("tokens_per_minute", account.tokens, limits.tokens_per_minute, num_tokens),
        ):
            if per_minute is not None and (wait_s := bucket.lacks(needed, per_minute, now.monotonic_s)) > 0:
                left = bucket.left(per_minute, now.monotonic_s)
                assert left is not None
                found.append(OverLimit(limit, left, needed, None if needed > per_minute else wait_s))
        day = self._day_left(tenant, now)
        if day is not None and num_tokens > day.remaining:
            found.append(OverLimit("tokens_per_day", day, num_tokens, None if num_tokens > day.limit else day.full_in_s))
        return max(found, key=lambda over: float("inf") if over.fits_in_s is None else over.fits_in_s, default=None)
