"""Checks the views of the pipeline file in a MySQL sink, before anything is touched.

The server checks a SELECT only if its tables exist, because DDL could not be undone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from airflow_cdc_provider.engine.core.findings import Caution, Checks
from airflow_cdc_provider.engine.core.lsn import LOG_START
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.mysql.session import Session
from airflow_cdc_provider.engine.sinks.mysql.view_checks import check_parsed
from airflow_cdc_provider.engine.sinks.mysql.view_store import MysqlViewStore
from airflow_cdc_provider.engine.views.settings import ViewSettings


def check_views(
    checks: Checks, sink: Session, views: Sequence[ViewSettings], pipeline: str, targets: Sequence[Target]
) -> None:
    """Check the views of the file, one finding each."""
    known = {target.table.label: target for target in targets} | _recorded(sink, pipeline)
    for view in views:
        checks.run(f"view {view.label}", partial(_view, sink, pipeline, list(known.values()), view))


def _recorded(sink: Session, pipeline: str) -> dict[str, Target]:
    """Return the targets as they are recorded; the source may have changed since."""
    if not sink.exists("airflow_cdc", "tables"):
        return {}
    found = sink.rows(
        "SELECT definition, target_schema, target_table FROM airflow_cdc.tables WHERE pipeline = %s", [pipeline]
    )
    targets = [Target(Table.from_dict(json.loads(definition)), schema, name) for definition, schema, name in found]
    return {target.table.label: target for target in targets}


def _view(sink: Session, pipeline: str, targets: Sequence[Target], view: ViewSettings) -> str:
    by_label = {target.table.label: target for target in targets}
    store = MysqlViewStore(sink, pipeline, (view,), by_label, LOG_START, nullcontext)
    with store.excusing(view):
        parsed = store.parse(view, {label: target.table for label, target in by_label.items()})
        check_parsed(sink, view, parsed, by_label)
        used = [by_label[label] for label in parsed.columns]
        if not sink.exists("airflow_cdc", "tables") or not all(sink.exists(each.schema, each.name) for each in used):
            return f"View {view.label} can be parsed. The sink checks it when its tables exist."
        store.check()
    missing = list(store.lacking_indexes(parsed))
    if missing and view.indexes == "print":
        raise Caution(f"View {view.label} needs indexes that do not exist: {' '.join(f'{each};' for each in missing)}")
    made = f"; {len(missing)} indexes will be created for it" if missing else ""
    return f"View {view.label} can be kept equal to its SELECT{made}."
