"""Finds the models that are to be loaded now because a time of day in their setting `warm` has come, by the host's local time. Each
time of day comes once a day, even if the clock jumps."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, time, timedelta

MOST_LATE = timedelta(hours=2)  # a time that the clock jumped over is left out if it is longer ago than this
ONE_DAY = timedelta(days=1)


class WarmTimes:
    """Finds the times of day that have come since the last call of `due`, each once a day. Times are naive and local, so a change
    to or from summer time is a jump of the clock like any other: in spring, a time within the missing hour comes at the hour's end;
    in autumn, a time within the repeated hour comes once."""

    def __init__(self, now: datetime) -> None:
        self._last = now
        self._came: dict[tuple[str, time], date] = {}

    def due(self, wanted: Iterable[tuple[str, time]], now: datetime) -> list[tuple[str, time]]:
        """Returns the (model, time) pairs whose time has come since the last call, or since WarmTimes was made. A time that came
        more than MOST_LATE ago, or came already on the same day, is left out. wanted: all models with their times of day. now: the
        host's local time."""
        before, self._last = self._last, now
        wanted = list(wanted)
        # a day that was noted while the clock was wrong must not suppress a time for years
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
    """Returns the next moment at which one of the times comes, if the clock does not jump; None if there are no times."""
    moments = [datetime.combine(day, at) for at in times for day in (now.date(), now.date() + ONE_DAY)]
    return min((moment for moment in moments if moment > now), default=None)
