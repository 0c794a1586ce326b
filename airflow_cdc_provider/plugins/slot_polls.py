"""Asks source servers for slots that no job reports on, in the background, so that no page waits for them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from airflow_cdc_provider.engine.core.errors import CdcError, Retry
from airflow_cdc_provider.engine.core.lsn import LOG_START
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected, without_database
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.postgres.slots import Slots, SlotState, read_slots
from airflow_cdc_provider.engine.sources.postgres.settings import has_slot, postgres_settings
from airflow_cdc_provider.hooks.cdc import load_pipeline

POLL_SECONDS = 15.0
_ANSWER_SECONDS = 3
_SERVERS_AT_A_TIME = 4


@dataclass(frozen=True)
class SlotAnswer:
    """An answer about one slot, or the reason why there is none.

    :param at: seconds since 1970.
    :param slot: ``None`` if the server has no slot of this name.
    """

    at: float
    slot: SlotState | None = None
    error: CdcError | None = None


class SlotPolls:
    """A cache of the latest answers; outdated ones are fetched again on request, with one query for each server."""

    def __init__(self) -> None:
        self._polls: dict[Path, SlotAnswer] = {}
        self._asked: dict[Path, float] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_SERVERS_AT_A_TIME, thread_name_prefix="slot-poll")

    def look(self, paths: Iterable[Path]) -> Mapping[Path, SlotAnswer]:
        """Return the known answers for the slots of pipeline files, without waiting.

        :returns: the answers by file; files without an answer so far are missing.
        """
        wanted, now = list(paths), time.monotonic()
        with self._lock:
            due = [path for path in wanted if now - self._asked.get(path, -POLL_SECONDS) >= POLL_SECONDS]
            self._asked.update(dict.fromkeys(due, now))
            known = {path: self._polls[path] for path in wanted if path in self._polls}
        if due:
            self._pool.submit(self._ask, due)
        return known

    def _ask(self, paths: Iterable[Path]) -> None:
        servers: dict[str, dict[Path, Pipeline]] = defaultdict(dict)
        for path in paths:
            try:
                pipeline = load_pipeline(path).pipeline
            except CdcError as e:
                self._note({path: SlotAnswer(time.time(), error=e)})
            else:
                if has_slot(pipeline):
                    servers[without_database(postgres_settings(pipeline).dsn)][path] = pipeline
        for pipelines in servers.values():
            self._pool.submit(self._ask_server, pipelines)

    def _ask_server(self, pipelines: Mapping[Path, Pipeline]) -> None:
        dsn = postgres_settings(next(iter(pipelines.values()))).dsn
        slots = Slots(LOG_START, {})
        error: CdcError | None = None
        try:
            with connected(_with_short_timeout(dsn), settings={"statement_timeout": f"{_ANSWER_SECONDS}s"}) as source:
                slots = read_slots(source)
        except CdcError as e:
            error = e
        except DRIVER_ERRORS as e:
            error = driver_failure(e, "asking for the slots")
        if error is not None and error.retry is not Retry.RETRY and len(pipelines) > 1:
            # If one database refuses the query, the others may still answer it.
            for path, pipeline in pipelines.items():
                self._pool.submit(self._ask_server, {path: pipeline})
            return
        now = time.time()
        self._note(
            {path: SlotAnswer(now, slots.states.get(postgres_settings(p).slot), error) for path, p in pipelines.items()}
        )

    def _note(self, polls: Mapping[Path, SlotAnswer]) -> None:
        with self._lock:
            self._polls.update(polls)


def _with_short_timeout(dsn: str) -> str:
    """Return the DSN for a session with a shorter timeout than that of jobs."""
    separator = "&" if urlsplit(dsn).query else "?"
    return f"{dsn}{separator}connect_timeout={_ANSWER_SECONDS}"
