"""What requests take of their tenant's limits, by clocks that the test sets."""

from __future__ import annotations

import pytest

from daemon.access import limit_headers
from daemon.access.limit_refusal import error_of
from daemon.access.quotas import DAY_S, Charge, Left, OverLimit, Quotas, Standing
from daemon.access.tenant import Limits, Tenant
from daemon.process.moment import Moment

NOON = 20_000 * DAY_S + DAY_S // 2


def at(seconds: float) -> Moment:
    return Moment(1000.0 + seconds, NOON + seconds)


def none_made() -> int:
    return 0


def tenant(**limits: int) -> Tenant:
    return Tenant("t", limits=Limits(**limits))


def admitted(found: Charge | OverLimit) -> Charge:
    assert isinstance(found, Charge), found
    return found


def refused(found: Charge | OverLimit) -> OverLimit:
    assert isinstance(found, OverLimit)
    return found


def test_a_minutes_requests_come_at_once_and_refill_continuously() -> None:
    quotas, one = Quotas(), tenant(requests_per_minute=60)
    for _ in range(60):
        admitted(quotas.admit(one, 5, none_made, at(0)))
    over = refused(quotas.admit(one, 5, none_made, at(0)))
    assert (over.limit, over.left.limit, over.left.remaining) == ("requests_per_minute", 60, 0)
    assert over.fits_in_s == pytest.approx(1.0)
    refused(quotas.admit(one, 5, none_made, at(0.9)))
    admitted(quotas.admit(one, 5, none_made, at(1)))
    refused(quotas.admit(one, 5, none_made, at(1)))
    for _ in range(60):
        admitted(quotas.admit(one, 5, none_made, at(600)))
    refused(quotas.admit(one, 5, none_made, at(600)))


def test_what_is_refused_takes_nothing() -> None:
    told: list[tuple[str, str]] = []
    quotas, one = Quotas(lambda *about: told.append(about)), tenant(requests_per_minute=60, tokens_per_minute=100)
    admitted(quotas.admit(one, 100, none_made, at(0)))
    for _ in range(200):
        refused(quotas.admit(one, 60, none_made, at(0)))
    assert quotas.standing(one, at(0)).requests_per_minute == Left(60, 59, 1.0)
    admitted(quotas.admit(one, 60, none_made, at(36)))
    assert told == 200 * [("t", "tokens_per_minute")]


def test_waiting_as_long_as_was_said_suffices() -> None:
    quotas, one, now = Quotas(), tenant(tokens_per_minute=997), 0.0
    for size in range(1, 990, 7):
        found = quotas.admit(one, size, none_made, at(now))
        if isinstance(found, OverLimit):
            assert found.fits_in_s is not None
            now += found.fits_in_s
            admitted(quotas.admit(one, size, none_made, at(now)))


def test_output_counts_at_the_end_and_is_paid_off() -> None:
    quotas, one, made = Quotas(), tenant(tokens_per_minute=600), 0
    charge = admitted(quotas.admit(one, 100, lambda: made, at(0)))
    made = 1700
    quotas.end(charge, 0, at(0))
    assert quotas.standing(one, at(0)).tokens_per_minute == Left(600, 0, 180.0)
    over = refused(quotas.admit(one, 100, none_made, at(0)))
    assert over.fits_in_s == pytest.approx(130.0)
    admitted(quotas.admit(one, 100, none_made, at(130)))
    assert quotas.used_today(at(130)) == {"t": 1900}


def test_output_counts_while_it_is_made() -> None:
    """A second request finds what the first has made so far, and the first's end counts only what came after."""
    quotas, one, made = Quotas(), tenant(tokens_per_minute=1000, tokens_per_day=10_000), 0
    charge = admitted(quotas.admit(one, 100, lambda: made, at(0)))
    made = 850
    over = refused(quotas.admit(one, 100, none_made, at(0)))
    assert over.left.remaining == 50
    made = 900
    quotas.end(charge, 0, at(0))
    assert quotas.used_today(at(0)) == {"t": 1000}
    assert quotas.standing(one, at(0)).tokens_per_minute == Left(1000, 0, 60.0)


def test_a_prompt_that_no_engine_got_is_given_back() -> None:
    quotas, one = Quotas(), tenant(tokens_per_minute=1000, requests_per_minute=10)
    quotas.end(admitted(quotas.admit(one, 700, none_made, at(0))), 700, at(0))
    standing = quotas.standing(one, at(0))
    assert standing.tokens_per_minute == Left(1000, 1000, 0.0)
    assert standing.requests_per_minute == Left(10, 9, 6.0)
    assert quotas.used_today(at(0)) == {"t": 0}


def test_a_prompt_above_the_whole_limit_never_fits() -> None:
    quotas = Quotas()
    for limits, limit in (({"tokens_per_minute": 100}, "tokens_per_minute"), ({"tokens_per_day": 100}, "tokens_per_day")):
        over = refused(quotas.admit(tenant(**limits), 101, none_made, at(0)))
        assert (over.limit, over.fits_in_s) == (limit, None)
        error = error_of(over, "t", "messages")
        assert (error.status, error.code, error.param) == (400, "request_over_limit", "messages")
        assert "has 101 tokens, 1 more than" in error.message
        assert limit in error.message
        admitted(quotas.admit(tenant(**limits), 100, none_made, at(0)))
        quotas = Quotas()


def test_a_day_is_one_of_utc() -> None:
    quotas, one = Quotas(), tenant(tokens_per_day=1000)
    admitted(quotas.admit(one, 900, none_made, at(0)))
    over = refused(quotas.admit(one, 101, none_made, at(3600)))
    assert (over.limit, over.fits_in_s) == ("tokens_per_day", 11 * 3600)
    error = error_of(over, "t", "prompt")
    assert (error.status, error.code, error.type, error.retry_after_s) == (429, "rate_limit_exceeded", "tokens", 39600)
    assert error.message == (
        "The tenant 't' may use 1000 tokens a day (tokens_per_day); 100 are left, and the prompt (prompt) has 101; "
        "it fits in 11h0m0s, at 00:00 UTC."
    )
    admitted(quotas.admit(one, 100, none_made, at(3600)))
    admitted(quotas.admit(one, 1000, none_made, at(12 * 3600)))
    assert quotas.used_today(at(12 * 3600)) == {"t": 1000}


def test_the_limit_that_is_waited_for_longest_is_told() -> None:
    quotas, one = Quotas(), tenant(requests_per_minute=1, tokens_per_minute=100, tokens_per_day=150)
    admitted(quotas.admit(one, 100, none_made, at(0)))
    assert refused(quotas.admit(one, 10, none_made, at(0))).limit == "requests_per_minute"
    assert refused(quotas.admit(one, 51, none_made, at(0))).limit == "tokens_per_day"
    assert refused(quotas.admit(one, 101, none_made, at(0))).limit == "tokens_per_minute", "it never fits"


def test_a_reload_changes_limits_at_once() -> None:
    """A raised limit refills what is owed at the new rate; a lowered one holds no more than a minute's worth of its own."""
    quotas, made = Quotas(), 0
    charge = admitted(quotas.admit(tenant(tokens_per_minute=100), 100, lambda: made, at(0)))
    made = 1000
    quotas.end(charge, 0, at(0))
    admitted(quotas.admit(tenant(tokens_per_minute=2000), 1000, none_made, at(60)))
    assert quotas.standing(tenant(tokens_per_minute=10), at(120)).tokens_per_minute == Left(10, 10, 0.0)
    assert quotas.standing(tenant(), at(120)) == Standing(None, None, None)
    admitted(quotas.admit(tenant(requests_per_minute=1), 5, none_made, at(120)))


def test_tenants_do_not_share_limits() -> None:
    quotas, limits = Quotas(), Limits(requests_per_minute=1)
    for name in ("a", "b"):
        admitted(quotas.admit(Tenant(name, limits=limits), 5, none_made, at(0)))
        refused(quotas.admit(Tenant(name, limits=limits), 5, none_made, at(0)))


def test_a_days_count_goes_on_after_a_restart() -> None:
    quotas, one = Quotas(), tenant(tokens_per_day=100)
    quotas.restore(20_000, {"t": 60})
    assert refused(quotas.admit(one, 41, none_made, at(0))).left.remaining == 40
    quotas.restore(19_999, {"t": 60})
    admitted(quotas.admit(one, 100, none_made, at(0)))


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    quotas, one = Quotas(), tenant(requests_per_minute=1)
    admitted(quotas.admit(one, 5, none_made, at(0)))
    over = refused(quotas.admit(one, 5, none_made, Moment(at(0).monotonic_s, NOON - 3 * DAY_S)))
    assert over.fits_in_s == pytest.approx(60)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (0.9999, "1s"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3605, "1h0m5s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert limit_headers.duration(seconds) == text


def test_headers() -> None:
    standing = Standing(Left(60, 59, 1.0), None, Left(1000, 0, 7200.0))
    assert limit_headers.openai(standing, NOON) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens-day": "1000",
        "x-ratelimit-remaining-tokens-day": "0",
        "x-ratelimit-reset-tokens-day": "2h0m0s",
    }
    assert limit_headers.anthropic(standing, NOON) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2024-10-04T12:00:01Z",
        "anthropic-ratelimit-tokens-day-limit": "1000",
        "anthropic-ratelimit-tokens-day-remaining": "0",
        "anthropic-ratelimit-tokens-day-reset": "2024-10-04T14:00:00Z",
    }


def test_who_is_over_a_limit_is_told_without_taking_anything() -> None:
    quotas, one = Quotas(), tenant(requests_per_minute=1, tokens_per_day=10)
    for _ in range(5):
        assert not quotas.is_over(one, at(0))
    admitted(quotas.admit(one, 5, none_made, at(0)))
    assert quotas.is_over(one, at(0)), "no request is left"
    assert not quotas.is_over(one, at(60))
    admitted(quotas.admit(one, 5, none_made, at(60)))
    assert quotas.is_over(one, at(600)), "no token is left"
