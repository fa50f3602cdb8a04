"""Which models are to be loaded ahead now, by the host's local time: each time of day once a day, whatever the clock does."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, time, timedelta

MOST_LATE = timedelta(hours=2)  # a time that is passed over by a larger jump of the clock is left out
ONE_DAY = timedelta(days=1)


class WarmTimes:
    """Remembers how far the clock was, and which times have come on which day. Times are naive and local, so that summer time is a
    jump like any other: where it begins, a time within the missing hour comes at the hour's end; where it ends, the second 02:30 of
    the day is none."""

    def __init__(self, now: datetime) -> None:
        self._last = now
        self._came: dict[tuple[str, time], date] = {}

    def due(self, wanted: Iterable[tuple[str, time]], now: datetime) -> list[tuple[str, time]]:
        """Returns the models whose time has come since the last call, each with the time. wanted: all of them."""
        before, self._last = self._last, now
        wanted = list(wanted)
        # a date from when the clock was wrong must not count for years
        self._came = {key: day for key, day in self._came.items() if key in wanted and day <= now.date() + ONE_DAY}
        found = []
        for model, at in wanted:
            for day in (now.date() - ONE_DAY, now.date()):
                moment = datetime.combine(day, at)
                if before < moment <= now and now - moment <= MOST_LATE and self._came.get((model, at), date.min) < day:
                    self._came[model, at] = day
                    found.append((model, at))
        return found


def next_of(times: Iterable[time], now: datetime) -> datetime | None:
    """Returns when the next of the times comes, if the clock does not jump."""
    moments = [datetime.combine(day, at) for at in times for day in (now.date(), now.date() + ONE_DAY)]
    return min((moment for moment in moments if moment > now), default=None)
