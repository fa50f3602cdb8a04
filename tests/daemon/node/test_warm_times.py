"""Times of day by a clock that may do anything: once a day, never twice."""

from __future__ import annotations

from datetime import datetime, time, timedelta

from daemon.node.warm_times import WarmTimes, next_of

START = datetime(2026, 3, 28, 12, 0)


def came(times: list[time], *clock: datetime) -> list[tuple[int, time]]:
    """(day, time) of each that came while the clock showed these."""
    made = WarmTimes(clock[0])
    wanted = [("mid", at) for at in times]
    return [(now.day, at) for now in clock[1:] for _, at in made.due(wanted, now)]


def ticking(start: datetime, until: datetime, step: timedelta = timedelta(seconds=10)) -> list[datetime]:
    num = int((until - start) / step)
    return [start + at * step for at in range(num + 1)]


def test_once_a_day_at_each_time() -> None:
    days = ticking(START, START + timedelta(days=3), timedelta(seconds=59))
    assert came([time(8), time(20, 30)], *days) == [
        (28, time(20, 30)),
        (29, time(8)),
        (29, time(20, 30)),
        (30, time(8)),
        (30, time(20, 30)),
        (31, time(8)),
    ]


def test_a_time_before_the_start_has_not_come() -> None:
    assert came([time(11, 59), time(12, 0)], *ticking(START, START + timedelta(hours=1))) == []


def test_midnight() -> None:
    assert came([time(0, 0)], *ticking(START, START + timedelta(days=2, hours=1), timedelta(minutes=7))) == [
        (29, time(0)),
        (30, time(0)),
    ]


def test_summer_time_begins() -> None:
    """02:00 becomes 03:00: 02:30 comes at 03:00, late but on that day."""
    night = datetime(2026, 3, 29)
    before, after = ticking(night, night + timedelta(hours=2)), ticking(night + timedelta(hours=3), night + timedelta(hours=5))
    assert came([time(2, 30), time(3, 0)], *before[:-1], *after) == [(29, time(2, 30)), (29, time(3, 0))]


def test_summer_time_ends() -> None:
    """03:00 becomes 02:00: the second 02:30 is none."""
    night = datetime(2026, 10, 25)
    before, after = ticking(night, night + timedelta(hours=3)), ticking(night + timedelta(hours=2), night + timedelta(hours=5))
    assert came([time(2, 30), time(3, 30)], *before[:-1], *after) == [(25, time(2, 30)), (25, time(3, 30))]


def test_a_clock_that_is_set_back_and_forth() -> None:
    at, minute = datetime(2026, 6, 2, 8, 0), timedelta(minutes=1)
    clock = [at - minute, at, at - minute, at + minute, at - timedelta(days=1, minutes=1), at - timedelta(days=1), at + minute]
    assert came([time(8)], *clock) == [(2, time(8))]
    assert came([time(8)], *clock, at + timedelta(days=1)) == [(2, time(8)), (3, time(8))]


def test_a_long_sleep_is_not_made_up_for() -> None:
    at = datetime(2026, 6, 2, 8, 0)
    assert came([time(8)], at - timedelta(hours=1), at + timedelta(hours=3)) == []
    assert came([time(8)], at - timedelta(hours=1), at + timedelta(hours=1)) == [(2, time(8))]


def test_a_clock_that_was_years_ahead() -> None:
    """Once it is right again, what came then does not count for years."""
    wrong, right = datetime(2036, 1, 1, 7, 59), datetime(2026, 6, 2, 7, 59)
    minute = timedelta(minutes=1)
    assert came([time(8)], wrong, wrong + minute, right, right + minute) == [(1, time(8)), (2, time(8))]


def test_the_next_time() -> None:
    assert next_of([time(8), time(13)], START) == datetime(2026, 3, 28, 13)
    assert next_of([time(12)], START) == datetime(2026, 3, 29, 12)
    assert next_of([], START) is None
