"""Reads tables again as a task: repair, backfill, and starting over."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from airflow_cdc_provider.engine.core.errors import ConfigError, Fenced, Retry, SecondWriter
from airflow_cdc_provider.hooks.cdc import airflow_failures, failure, load_pipeline
from airflow_cdc_provider.operators.base import CdcOperator
from airflow_cdc_provider.triggers.request import RequestTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_cdc_provider.engine.core.table import Table
    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

ROWS = ("all", "time", "key", "where")

_REQUEST_KEY = "request"
# The trigger withdraws the request at its deadline; Airflow's own timeout is only for a trigger that no longer runs.
_OVERTIME_SECONDS = 60.0


class CdcResnapshotOperator(CdcOperator):
    """A re-read of tables, or of some of their rows, while the stream continues.

    A live stream does the re-read between two units; the task leaves a request and defers until it has the outcome. If
    no stream is alive, the task reads the rows itself, in its worker; while another job writes, it defers until that
    job has ended. Only keys that the source does not have are deleted, and readers never see an older version of a row.
    The same rows may be read any number of times, also concurrently. The result has the number of ``rows``, and those
    of each table in ``tables``.

    With ``everything``, publication and slot are created again, and nothing is read yet: the result has the ``epoch``
    under which :class:`.CdcPlanOperator` and :class:`.CdcSnapshotOperator` then copy all tables.

    :param pipeline: path of the pipeline file. (templated)
    :param tables: a list or a JSON list of ``schema.table``; all tables of the pipeline if it is empty. (templated)
    :param rows: ``all``; ``time``: rows whose ``time_column`` is in [``start``, ``end``); ``key``: rows whose key, or
        the first column of it, is in that range; ``where``: rows that match a condition on either side. (templated)
    :param where: an SQL condition, for rows ``where``. (templated)
    :param time_column: a column of type timestamp or date, for rows ``time``. (templated)
    :param start: a time as ISO 8601 (UTC if it has no zone), by default the start of the run's data interval; for rows
        ``key`` a value of the key, by default the first one. (templated)
    :param end: the same for the end, which is excluded. (templated)
    :param everything: whether to create publication and slot again, for all tables: the repair for a lost slot.
    """

    template_fields: Sequence[str] = (
        *CdcOperator.template_fields,
        "tables",
        "rows",
        "where",
        "time_column",
        "start",
        "end",
    )

    def __init__(
        self,
        *,
        tables: Sequence[str] | str = (),
        rows: str = "all",
        where: str | None = None,
        time_column: str | None = None,
        start: str | None = None,
        end: str | None = None,
        everything: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tables = tables
        self.rows = rows
        self.where = where
        self.time_column = time_column
        self.start = start
        self.end = end
        self.everything = everything
        self._withdraw: Callable[[], object] | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Ask the stream to read, or read directly; return the numbers of rows."""
        limit = self.execution_timeout
        return self._proceed(context, None if limit is None else time.time() + limit.total_seconds())

    def resume(self, context: Context, event: dict[str, Any], deadline: float | None) -> dict[str, Any]:
        """Continue when there is an outcome, or no other job is running any more."""
        if event["status"] == "timeout":
            raise failure(
                f"the rows have not been read within {self.execution_timeout}: "
                + (event.get("waiting") or "other jobs were running all the time"),
                "Set a longer execution_timeout for the task. Its request has been withdrawn.",
                Retry.RETRY.value,
            )
        return self._proceed(context, deadline)

    def on_kill(self) -> None:
        """Withdraw the request, if there is one."""
        if self._withdraw is not None:
            self._withdraw()

    def _proceed(self, context: Context, deadline: float | None) -> dict[str, Any]:
        from airflow_cdc_provider.engine import commands
        from airflow_cdc_provider.engine.runs.commit_records import existing_record
        from airflow_cdc_provider.engine.state import requests
        from airflow_cdc_provider.engine.state.files import State
        from airflow_cdc_provider.engine.state.requests import Standing

        with airflow_failures(self.pipeline, "resnapshot", ends_run=self.everything):
            pipeline = load_pipeline(self.pipeline).pipeline
            if self.everything:
                return commands.start_over(pipeline)
            state = State(pipeline.state)
            captured = [target.table for target in existing_record(pipeline).targets]
            labels = _listed(self.tables) or [table.label for table in captured]
            where = self._condition(context, [table for table in captured if table.label in labels])
            name = self._request(context, {"pipeline": pipeline.name, "tables": labels, "where": where})
            self._withdraw = lambda: requests.withdraw(state, name)
            standing = requests.standing(state, name)
            if standing in (Standing.FREE, Standing.ORPHANED):
                requests.withdraw(state, name)
                self.log.info("Reading again: %s%s.", ", ".join(labels), f" where {where}" if where else "")
                try:
                    result = commands.resnapshot(pipeline, tables=labels, where=where, request=name)
                except (SecondWriter, Fenced) as e:
                    self.log.info("Another job is running: %s", e.message)
                    self._wait(pipeline, name, deadline)
                if result["requested"] is None:
                    self.record_flows(pipeline, result["tables"])
                    return {"rows": result["rows"], "tables": result["tables"]}
        outcome = requests.outcome(state, name)
        if outcome is None:
            self._wait(pipeline, name, deadline)
        for table, count in outcome["rows"].items():
            self.log.info("%s: the stream has read %s rows again.", table, count)
        if "error" in outcome:
            if outcome["error"]["retry"] == Retry.RETRY.value:
                self._forget(context)
            raise failure(
                outcome["error"]["message"],
                outcome["error"]["solution"],
                outcome["error"]["retry"],
                outcome["error"]["kind"],
            )
        self.record_flows(pipeline, outcome["rows"])
        return {"rows": sum(outcome["rows"].values()), "tables": outcome["rows"]}

    def _wait(self, pipeline: Pipeline, name: str, deadline: float | None) -> NoReturn:
        self.defer(
            trigger=RequestTrigger(pipeline.state, name, deadline),
            method_name=self.resume.__name__,
            kwargs={"deadline": deadline},
            timeout=None if deadline is None else max(0.0, deadline - time.time()) + _OVERTIME_SECONDS,
        )

    def _request(self, context: Context, wanted: dict[str, Any]) -> str:
        """Return the name of the task's request.

        It is the name of an earlier try, unless the task was cleared or its parameters have changed. It is stored
        before the request is written, so that no request is orphaned if the worker dies in between.
        """
        from airflow_cdc_provider.engine.state.requests import new_name

        store = context.get("task_state_store")
        if store is None:
            return new_name()
        # Stored values survive when a task is cleared. Clearing raises max_tries, a retry does not.
        this: dict[str, Any] = {
            "epoch": context["ti"].max_tries,
            "fingerprint": hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest(),
        }
        stored = store.get(_REQUEST_KEY)
        if isinstance(stored, dict) and {key: stored.get(key) for key in this} == this:
            return str(stored["name"])
        name = new_name()
        store.set(_REQUEST_KEY, {**this, "name": name})
        return name

    def _forget(self, context: Context) -> None:
        """Let the next try make a new request instead of finding this try's outcome."""
        store = context.get("task_state_store")
        if store is not None:
            store.delete(_REQUEST_KEY)

    def _condition(self, context: Context, tables: Sequence[Table]) -> str | None:
        """Return the SQL condition on the rows to read.

        :raises ConfigError: if the parameters do not fit together; names them.
        """
        from airflow_cdc_provider.engine.sources.postgres.reading import row_ranges

        if self.rows not in ROWS:
            raise ConfigError(f"rows is {self.rows!r}", f"Give one of: {', '.join(ROWS)}.")
        needed = {"where": self.where, "time": self.time_column}
        if self.rows in needed and not needed[self.rows]:
            name = {"where": "condition (where)", "time": "time column (time_column)"}[self.rows]
            raise ConfigError(f"rows is {self.rows!r}, but there is no {name}", "Give it, or choose other rows.")
        if self.rows == "time":
            column = str(self.time_column)
            start, end = self._interval(context)
            condition = row_ranges.time_condition(
                tables, column, row_ranges.parse_time(start), row_ranges.parse_time(end)
            )
            for label in row_ranges.nullable(tables, column):
                self.log.warning(
                    "Rows of %s without a value in %s are not in any interval; read them with rows 'where' and the"
                    " condition %s IS NULL, or read the whole table.",
                    label,
                    column,
                    column,
                )
            return condition
        if self.rows == "key":
            return row_ranges.key_condition(tables, self.start or None, self.end or None)
        return self.where if self.rows == "where" else None

    def _interval(self, context: Context) -> tuple[str, str]:
        """Return the given times, or the run's data interval."""
        if self.start and self.end:
            return self.start, self.end
        if self.start or self.end:
            raise ConfigError("only one end of the interval is given", "Give both, From and To, or none.")
        start, end = context.get("data_interval_start"), context.get("data_interval_end")
        if start is None or end is None:
            raise ConfigError(
                "the run has no data interval because it was triggered manually",
                "Give From and To (parameters start and end), or create a backfill.",
            )
        if start == end:
            raise ConfigError(
                f"the run's data interval is empty, at {start.isoformat()}",
                "Schedule the Dag with CronDataIntervalTimetable, or give start and end.",
            )
        return start.isoformat(), end.isoformat()


def _listed(tables: Sequence[str] | str) -> list[str]:
    """Return names of tables from a list, or from the JSON of a list that a template rendered.

    :raises ConfigError: if it is neither.
    """
    try:
        found = json.loads(tables) if isinstance(tables, str) else list(tables)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"tables is {tables!r}", 'Give a list of names, such as ["public.orders"].')
    return list(dict.fromkeys(found))
