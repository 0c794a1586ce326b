"""Records truncates that are not written to a topic, because consumers of Debezium's events rarely expect them.

Under ``truncates``, by the table's label, the record contains the position of the last truncate among the changes. So
comparisons know which of the topic's events still count.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.core.effect import OP
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.kafka.formats.plain import META
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents

NOTED = "truncates"
"""The section of the record's contents."""


def split_truncates(rows: pa.Table) -> tuple[pa.Table, tuple[int, int] | None]:
    """Separate events from truncates.

    :returns: the other events, and LSN and number of the last truncate.
    """
    truncates = pc.equal(rows.column(OP), "t")
    if not pc.any(truncates).as_py():
        return rows, None
    last = rows.filter(truncates).slice(rows.filter(truncates).num_rows - 1)
    place = last.column("commit_lsn")[0].as_py(), last.column("seq")[0].as_py()
    return rows.filter(pc.invert(truncates)), place


def truncate_change(label: str, topic_id: str | None, lsn: LogPosition, seq: int) -> Change:
    """Return the change that records a truncate."""
    return Change({NOTED: {label: {"id": topic_id, "lsn": format_lsn(lsn), "seq": seq}}})


def last_truncate(contents: Contents, target: Target, topic_id: str) -> pa.RecordBatch | None:
    """Return the last truncate of a topic as an event; ``None`` if there is none.

    :param topic_id: id of the current topic; the recorded truncate may belong to a removed one.
    """
    found: dict[str, Any] | None = contents.get(NOTED, {}).get(target.table.label)
    if found is None or found["id"] not in (None, topic_id):
        return None
    names = [*(column.name for column in target.table.columns), *META]
    values = {"_op": "t", "_commit_lsn": found["lsn"], "_seq": str(found["seq"])}
    return pa.RecordBatch.from_pydict({name: pa.array([values.get(name)], pa.large_string()) for name in names})
