"""Reports source tables, their targets, and the views over them to OpenLineage, if its provider is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.hooks.views import visible_views

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

    from airflow_cdc_provider.engine.core.record import Record, Target
    from airflow_cdc_provider.engine.views.definition import View


@dataclass(frozen=True)
class LineageDataset:
    """A table as OpenLineage names it.

    :param server: for a table of Postgres ``postgres://host:port``.
    :param table: for a table of Postgres ``database.schema.table``.
    """

    server: str
    table: str


@dataclass(frozen=True)
class Flow:
    """Data that goes from some tables to another one.

    :param sources: the source table or topic of a target, or the targets that a view reads.
    :param columns: for each column of a view, the columns that it is computed from.
    """

    sources: tuple[LineageDataset, ...]
    target: LineageDataset
    columns: Mapping[str, Sequence[tuple[LineageDataset, str]]] = field(default_factory=dict)


def read_flows(pipeline: Pipeline, tables: Collection[str] | None = None) -> tuple[Flow, ...]:
    """Return the flows of a pipeline from its commit record; none if OpenLineage's provider is not installed.

    :param tables: the source tables' labels, ``schema.table``; all by default. Views over them are included.
    :raises CdcError: if the sink cannot be reached.
    """
    if not is_wanted():
        return ()
    from airflow_cdc_provider.engine.runs.commit_records import existing_record

    flows: list[Flow] = []
    for branch in pipeline.branches:
        record = existing_record(branch)
        targets = {target.table.label: _named(branch, target.schema, target.name) for target in record.targets}
        for target in record.targets:
            label = target.table.label
            if tables is None or label in tables:
                flows.append(Flow(tuple(_sources(pipeline, record, target)), targets[label]))
        for view in (version.view for version in visible_views(branch)):
            wanted = tables is None or view.columns.keys() & set(tables)
            if wanted and view.columns.keys() <= targets.keys():
                flows.append(_view_flow(branch, view, targets))
    return tuple(flows)


def _named(branch: Pipeline, schema: str, name: str) -> LineageDataset:
    return LineageDataset(*branch.sink.dataset(branch.name, schema, name))


def _view_flow(branch: Pipeline, view: View, targets: Mapping[str, LineageDataset]) -> Flow:
    columns = {each.name: [(targets[label], column) for label, column in each.columns] for each in view.outputs}
    return Flow(tuple(targets[label] for label in view.columns), _named(branch, view.schema, view.name), columns)


def _sources(pipeline: Pipeline, record: Record, target: Target) -> list[LineageDataset]:
    """Return the source tables or topics of a target's rows."""
    return [LineageDataset(*found) for found in pipeline.source.datasets(record.identity, target.table)]


def is_wanted() -> bool:
    """Return whether OpenLineage's provider is installed and enabled."""
    try:
        if importlib.util.find_spec("airflow.providers.openlineage") is None:
            return False
    except ModuleNotFoundError:
        return False
    from airflow.providers.openlineage.conf import is_disabled

    return not is_disabled()


def facets(flows: Collection[Flow]) -> OperatorLineage[Any, Any]:
    """Return flows as inputs and outputs of a task."""
    from airflow.providers.common.compat.openlineage.facet import Dataset
    from airflow.providers.openlineage.extractors import OperatorLineage

    inputs = {source: None for flow in flows for source in flow.sources}
    outputs = {flow.target: flow for flow in flows}
    return OperatorLineage(
        inputs=[Dataset(namespace=place.server, name=place.table) for place in inputs],
        outputs=[
            Dataset(namespace=place.server, name=place.table, facets=_column_facets(flow))
            for place, flow in outputs.items()
        ],
    )


def _column_facets(flow: Flow) -> dict[str, Any]:
    from airflow.providers.common.compat.openlineage.facet import ColumnLineageDatasetFacet, Fields, InputField

    if not flow.columns:
        return {}
    fields = {
        name: Fields(inputFields=[InputField(place.server, place.table, column) for place, column in sources])
        for name, sources in flow.columns.items()
    }
    return {"columnLineage": ColumnLineageDatasetFacet(fields=fields)}
