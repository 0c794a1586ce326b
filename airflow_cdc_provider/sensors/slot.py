"""A sensor for the progress of a replication slot.

A slot that does not move keeps the source's write-ahead log until the disk is
full. What decides is ``restart_lsn``; it follows the acknowledged
``confirmed_flush_lsn`` some ten to thirty seconds later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_cdc_provider.engine.lsn import parse_lsn
from airflow_cdc_provider.hooks.cdc import PostgresCdcHook, airflow_failures, failure, load_pipeline

if TYPE_CHECKING:
    from airflow.sdk import Context

_START_KEY = "slot_at_first_poke"

# As JSON, since the columns differ between versions of Postgres.
_SLOT = """
    SELECT to_jsonb(s), pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint
    FROM pg_replication_slots s WHERE s.slot_name = %s
"""


@dataclass(frozen=True)
class SlotState:
    """What ``pg_replication_slots`` says about a slot."""

    name: str
    restart_lsn: str | None
    confirmed_flush_lsn: str | None
    wal_status: str | None
    invalidation: str | None
    retained_bytes: int | None

    @classmethod
    def read(cls, dsn: str, name: str) -> SlotState | None:
        """The slot's state, none when it does not exist.

        :raises CdcError: when the server cannot be asked.
        """
        from airflow_cdc_provider.engine.connection import connected, rows

        with connected(dsn, "airflow-cdc-sensor") as connection:
            found = rows(connection, _SLOT, (name,))
        return cls._parse(name, *found[0]) if found else None

    @classmethod
    def _parse(cls, name: str, columns: Mapping[str, Any], retained_bytes: int | None) -> SlotState:
        conflict = "a conflict with recovery" if columns.get("conflicting") else None
        return cls(
            name=name,
            restart_lsn=columns["restart_lsn"],
            confirmed_flush_lsn=columns.get("confirmed_flush_lsn"),
            wal_status=columns.get("wal_status"),
            invalidation=columns.get("invalidation_reason") or conflict,
            retained_bytes=retained_bytes,
        )

    @property
    def lost(self) -> bool:
        """Whether nothing can be read from the slot any more."""
        return self.wal_status == "lost" or self.invalidation is not None or self.restart_lsn is None


class SlotProgressSensor(BaseSensorOperator):
    """Waits until a replication slot has moved, so that the source can remove WAL.

    Each of ``moved_since``, ``restart_lsn`` and ``confirmed_flush_lsn`` that is given must hold. When none is,
    the sensor waits until the slot's ``restart_lsn`` differs from what it was at the first poke. A slot that is
    missing or lost fails the task at once, without retries; with ``soft_fail`` it is not skipped, but tried again.

    :param pipeline: path of a pipeline file, whose slot is watched. (templated)
    :param conn_id: instead of ``pipeline``: a connection of type ``postgres_cdc`` or ``postgres``. (templated)
    :param slot: the slot's name, with ``conn_id``. (templated)
    :param moved_since: succeed when the slot's ``restart_lsn`` is beyond this LSN, for example
        ``"{{ ti.xcom_pull(task_ids='provision')['restart_lsn'] }}"``. (templated)
    :param restart_lsn: succeed when the slot's ``restart_lsn`` is at or beyond this LSN. (templated)
    :param confirmed_flush_lsn: succeed when the slot's ``confirmed_flush_lsn`` is at or beyond this LSN. (templated)
    """

    template_fields: Sequence[str] = (
        "pipeline",
        "conn_id",
        "slot",
        "moved_since",
        "restart_lsn",
        "confirmed_flush_lsn",
    )

    def __init__(
        self,
        *,
        pipeline: str | None = None,
        conn_id: str | None = None,
        slot: str | None = None,
        moved_since: str | None = None,
        restart_lsn: str | None = None,
        confirmed_flush_lsn: str | None = None,
        mode: str = "reschedule",
        poke_interval: float = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(mode=mode, poke_interval=poke_interval, **kwargs)
        if (pipeline is None) == (conn_id is None) or (conn_id is None) != (slot is None):
            raise ValueError("give either pipeline, or conn_id and slot")
        self.pipeline = pipeline
        self.conn_id = conn_id
        self.slot = slot
        self.moved_since = moved_since
        self.restart_lsn = restart_lsn
        self.confirmed_flush_lsn = confirmed_flush_lsn
        self._first_poke: str | None = None

    def poke(self, context: Context) -> bool:
        """Look at the slot once."""
        with airflow_failures():
            dsn, name = self._target()
            state = SlotState.read(dsn, name)
        if state is None or state.lost or state.restart_lsn is None:
            raise self._unusable(name, state)
        self.log.info(
            "Slot %s: restart_lsn %s, confirmed_flush_lsn %s, wal_status %s, retains %s bytes of WAL.",
            name,
            state.restart_lsn,
            state.confirmed_flush_lsn,
            state.wal_status,
            state.retained_bytes,
        )
        if state.wal_status == "unreserved":
            self.log.warning("Slot %s is about to be lost: it exceeds max_slot_wal_keep_size.", name)
        return self._reached(state, state.restart_lsn, context)

    def _target(self) -> tuple[str, str]:
        """The server and the slot's name."""
        if self.pipeline is not None:
            source = load_pipeline(self.pipeline).pipeline.source
            return source.dsn, source.slot
        return PostgresCdcHook(str(self.conn_id)).get_uri(), str(self.slot)

    def _reached(self, state: SlotState, restart_lsn: str, context: Context) -> bool:
        position = parse_lsn(restart_lsn)
        conditions = []
        if self.restart_lsn is not None:
            conditions.append(position >= _lsn_argument("restart_lsn", self.restart_lsn))
        if self.confirmed_flush_lsn is not None:
            confirmed = parse_lsn(state.confirmed_flush_lsn) if state.confirmed_flush_lsn else 0
            conditions.append(confirmed >= _lsn_argument("confirmed_flush_lsn", self.confirmed_flush_lsn))
        if self.moved_since is not None:
            conditions.append(position > _lsn_argument("moved_since", self.moved_since))
        if not conditions:
            conditions.append(position > parse_lsn(self._at_first_poke(restart_lsn, context)))
        return all(conditions)

    def _at_first_poke(self, restart_lsn: str, context: Context) -> str:
        """The position at the first poke of this try; each rescheduled poke is a new process."""
        store = context.get("task_state_store")
        if store is None:
            self._first_poke = self._first_poke or restart_lsn
            return self._first_poke
        # What is stored outlives the clearing of a task, after which a new try begins.
        attempt = context["ti"].try_number
        stored = store.get(_START_KEY)
        if isinstance(stored, dict) and stored.get("try") == attempt:
            return str(stored["restart_lsn"])
        store.set(_START_KEY, {"try": attempt, "restart_lsn": restart_lsn})
        return restart_lsn

    def _unusable(self, name: str, state: SlotState | None) -> AirflowException:
        if state is None:
            text = (
                f"The replication slot {name} does not exist.\n"
                "If the pipeline was never provisioned, do that first. If the slot was dropped, changes are lost: "
                "`airflow-cdc resnapshot --all` makes it anew and copies the tables again."
            )
        else:
            why = state.invalidation or "WAL that it needs was removed"
            text = (
                f"The replication slot {name} is lost ({why}; wal_status {state.wal_status}).\n"
                "Changes can no longer be read from it: `airflow-cdc resnapshot --all` makes it anew and copies the "
                "tables again. Raise max_slot_wal_keep_size, or let the stream run more often, to prevent it."
            )
        # soft_fail turns AirflowFailException into a skip, which is right for a time-out and wrong here.
        return AirflowException(text) if self.soft_fail else AirflowFailException(text)


def _lsn_argument(name: str, value: str) -> int:
    try:
        return parse_lsn(value)
    except ValueError as e:
        raise failure(
            f"the argument {name} is {e}", "Give an LSN, or check that the task it comes from has run.", "fail"
        ) from e
