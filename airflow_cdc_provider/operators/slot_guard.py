"""The slot guard: checks all slots of a server, as a task that runs every minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.hooks.cdc import airflow_failures, failure

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_cdc_provider.engine.postgres.slots import Slots

MEMORY = Asset("cdc_slot_guard")
"""The asset whose state stores since when slots have been idle, because Postgres before 17 does not report it."""


class CdcSlotGuardOperator(BaseOperator):
    """A check of all slots of a server, which fails if a finding is critical or a slot was dropped.

    It is critical if a slot is lost or about to be lost, exceeds its budget, or has no reader. There are warnings for a
    slot at four fifths of its budget, and for transactions, also prepared ones, that have been open for long and hold
    the slots back. Temporary slots are ignored.

    :param conn_id: a connection of type ``postgres_cdc`` or ``postgres``; only members of ``pg_monitor`` see
        transactions of other roles. (templated)
    :param budget: WAL that a slot may retain, in bytes or as text such as ``10GiB``. (templated)
    :param dead_seconds: seconds that a slot may be without a reader. (templated)
    :param transaction_seconds: seconds that a transaction may be open. (templated)
    :param on_findings: called with the context and the findings if there are any: a function, or a notifier of Airflow,
        whose context has them as ``findings``.
    :param drop_beyond: drop slots that retain more WAL than this, in bytes or as text: their pipelines have to read all
        tables again, but the source's disk does not fill up. Off by default. (templated)
    :param drop_active: whether to drop such slots even if they have a reader. (templated)
    """

    template_fields: Sequence[str] = (
        "conn_id",
        "budget",
        "dead_seconds",
        "transaction_seconds",
        "drop_beyond",
        "drop_active",
    )

    def __init__(
        self,
        *,
        conn_id: str,
        budget: int | str = "10GiB",
        dead_seconds: float | str = 3600,
        transaction_seconds: float | str = 900,
        on_findings: Callable[..., Any] | None = None,
        drop_beyond: int | str | None = None,
        drop_active: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"inlets": [MEMORY]} | kwargs)
        self.conn_id = conn_id
        self.budget = budget
        self.dead_seconds = dead_seconds
        self.transaction_seconds = transaction_seconds
        self.on_findings = on_findings
        self.drop_beyond = drop_beyond
        self.drop_active = drop_active

    def execute(self, context: Context) -> dict[str, Any]:
        """Check once; return the findings, and the names of the slots that were dropped."""
        import psycopg2

        from airflow_cdc_provider.engine.postgres.connection import connected
        from airflow_cdc_provider.engine.postgres.driver_errors import driver_failure
        from airflow_cdc_provider.engine.postgres.slot_health import Limits, break_circuit, inspect, read_holders
        from airflow_cdc_provider.engine.postgres.slots import read_slots
        from airflow_cdc_provider.hooks.postgres_cdc import PostgresCdcHook

        with airflow_failures():
            limits = Limits(
                _bytes("budget", self.budget),
                _seconds("dead_seconds", self.dead_seconds),
                _seconds("transaction_seconds", self.transaction_seconds),
            )
            hard_limit = None if self.drop_beyond in (None, "", "None") else _bytes("drop_beyond", self.drop_beyond)
            dropped: list[str] = []
            try:
                with connected(PostgresCdcHook(self.conn_id).get_uri(), "airflow-cdc slot guard") as connection:
                    slots = read_slots(connection)
                    findings = inspect(slots, read_holders(connection), limits, self._idle(context, slots))
                    if hard_limit is not None:
                        dropped, kept = break_circuit(connection, slots, hard_limit, str(self.drop_active) == "True")
                        findings = kept + findings
            except psycopg2.Error as e:
                raise driver_failure(e, "the slots cannot be read") from e
        for finding in findings:
            log = self.log.error if finding.severity == "critical" else self.log.warning
            log("%s. %s", finding.message, finding.solution)
        drops = [
            f"slot {name!r} was dropped because it retained more than {self.drop_beyond}. Its pipeline has to read all"
            " tables again: run `airflow-cdc resnapshot --all`."
            for name in dropped
        ]
        for line in drops:
            self.log.error(line)
        result = {"findings": [finding.as_dict() for finding in findings], "dropped": dropped}
        critical = [f"{finding.message}. {finding.solution}" for finding in findings if finding.severity == "critical"]
        critical += drops
        if critical:
            context["ti"].xcom_push("return_value", result)
        if self.on_findings is not None and (findings or dropped):
            self.on_findings({**context, **result})
        if critical:
            raise AirflowFailException("\n".join(critical))
        self.log.info("%s slots, nothing critical.", len(slots.states))
        return result

    def _idle(self, context: Context, slots: Slots) -> Mapping[str, float]:
        """Return the seconds that slots have had no reader, as seen by earlier runs; a slot that advanced had one."""
        stores: Any = context.get("asset_state_store")
        if stores is None:
            return {}
        store, now = stores[MEMORY], time.time()
        before: Any = store.get(self.conn_id) or {}
        idle: dict[str, dict[str, Any]] = {}
        for name, state in slots.states.items():
            lsn = format_lsn(max(state.restart_lsn, state.confirmed_flush_lsn))
            known = before.get(name)
            if not state.active:
                idle[name] = known if known and known["lsn"] == lsn else {"since": now, "lsn": lsn}
        store.set(self.conn_id, idle)
        return {name: now - seen["since"] for name, seen in idle.items()}


def _bytes(name: str, value: object) -> int:
    from airflow_cdc_provider.engine.core.section_values import parse_bytes

    try:
        return parse_bytes(value)
    except ValueError as e:
        raise failure(f"the argument {name} is {value!r}", f"Give {e}.", "fail") from None


def _seconds(name: str, value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise failure(f"the argument {name} is {value!r}", "Give a number of seconds.", "fail") from None
