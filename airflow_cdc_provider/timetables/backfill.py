"""A schedule for backfills alone."""

from __future__ import annotations

from airflow.timetables.base import DagRunInfo, DataInterval, TimeRestriction
from airflow.timetables.interval import CronDataIntervalTimetable


class BackfillTimetable(CronDataIntervalTimetable):
    """Divides time into the intervals of a cron expression, as a backfill needs it, and starts no run by itself.

    Airflow refuses to backfill a Dag without a schedule, and gives one that has a schedule a run for each interval. Of
    a Dag that reads rows again only what somebody asks for must run. The Dag needs ``catchup=False``, by which the
    scheduler's question is told from a backfill's.

    :param cron: the expression.
    :param timezone: in which it is meant.
    """

    def next_dagrun_info(
        self, *, last_automated_data_interval: DataInterval | None, restriction: TimeRestriction
    ) -> DagRunInfo | None:
        """The next interval, if a backfill asks."""
        if not restriction.catchup:
            return None
        return super().next_dagrun_info(
            last_automated_data_interval=last_automated_data_interval, restriction=restriction
        )
