"""A timetable that is only for backfills."""

from __future__ import annotations

from airflow.timetables.base import DagRunInfo, DataInterval, TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable


class BackfillTimetable(CronDataIntervalTimetable):
    """A timetable with the intervals of a cron expression, as a backfill needs them, that starts no run automatically.

    Airflow refuses to backfill a Dag without a schedule, and starts a run for each interval of a Dag that has one. But
    a Dag that reads rows again must run only on request. The Dag needs ``catchup=False``, which distinguishes calls by
    the scheduler from calls by a backfill.

    :param cron: the cron expression.
    :param timezone: the time zone of the expression.
    """

    def next_dagrun_info(
        self, *, last_automated_data_interval: DataInterval | None, restriction: TimeRestriction
    ) -> DagRunInfo | None:
        """Return the next interval if a backfill asks for it."""
        if not restriction.catchup:
            return None
        return super().next_dagrun_info(
            last_automated_data_interval=last_automated_data_interval, restriction=restriction
        )
