"""Checks a Delta sink; changes nothing except for a probe file, which is removed.

Spark is started only to examine tables that others have created, to ask a catalog for tables, and to analyze views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.sinks.delta.sink import DeltaSink
from airflow_cdc_provider.engine.sinks.delta.table_layout import require_apart, require_possible
from airflow_cdc_provider.engine.sinks.record_log.record_contents import targets_of
from airflow_cdc_provider.engine.views.settings import ViewSettings


def check(settings: DeltaSettings, sink: DeltaSink, checks: Checks, targets: Sequence[Target] | None) -> None:
    """Check the sink, and whether it can have the targets."""

    def writable() -> str:
        sink.root.require_create()
        return f"sink {settings.place} can be written, and creates files only if they are absent."

    def known() -> str:
        labels = {target.table.label for target in targets or ()}
        for label, _ in settings.partition_by:
            if label not in labels:
                raise ConfigError(
                    f"sink.partition_by: the pipeline has no table {label!r}",
                    f"Name one of: {', '.join(sorted(labels))}.",
                )
        return "All tables in sink.partition_by are captured."

    def possible() -> str:
        record = sink.record()
        recorded = record.targets if record is not None else ()
        ours = {sink.layout.known_as(target.schema, target.name) for target in recorded}
        require_apart(sink.layout, targets or ())
        for target in targets or ():
            require_possible(sink.layout, target, settings.mode)
            if sink.layout.known_as(target.schema, target.name) not in ours:
                sink.require_usable(target)
        return "Every table can be a Delta table, and existing target tables fit."

    if checks.run("sink", writable) is not None and targets is not None:
        checks.run("sink partitions", known)
        checks.run("target tables", possible)
        for view in settings.views if checks.passed("target tables") else ():
            checks.run(f"view {view.label}", partial(_view, sink, targets, view))


def _view(sink: DeltaSink, targets: Sequence[Target], view: ViewSettings) -> str:
    """Check a view over the targets, recorded ones as they are recorded."""
    contents = sink.view_contents()
    by_label = {**{target.table.label: target for target in targets}, **targets_of(contents)}
    definitions = replace(sink, views=(view,)).view_definitions(contents, by_label)
    with definitions.excusing(view):
        definitions.check()
    return f"View {view.label} can be kept equal to its SELECT, as of versions of its tables."
