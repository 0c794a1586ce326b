"""Reports source tables and their targets to OpenLineage, if its provider is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

    from airflow_cdc_provider.engine.core.record import Record, Target


@dataclass(frozen=True)
class LineageDataset:
    """A table as OpenLineage names it.

    :param server: for a table of Postgres ``postgres://host:port``.
    :param table: for a table of Postgres ``database.schema.table``.
    """

    server: str
    table: str


Flow = tuple[LineageDataset, LineageDataset]
"""A source table or topic, and the table that its rows go to."""


def read_flows(pipeline: Pipeline, tables: Collection[str] | None = None) -> tuple[Flow, ...]:
    """Return the flows of a pipeline from its commit record; none if OpenLineage's provider is not installed.

    :param tables: the source tables' labels, ``schema.table``; all by default.
    :raises CdcError: if the sink cannot be reached.
    """
    if not is_wanted():
        return ()
    from airflow_cdc_provider.engine.runs.commit_records import existing_record

    return tuple(
        (place, LineageDataset(*branch.sink.dataset(branch.name, target.schema, target.name)))
        for branch in pipeline.branches
        for record in [existing_record(branch)]
        for target in record.targets
        if tables is None or target.table.label in tables
        for place in _sources(pipeline, record, target)
    )


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

    inputs = {source: None for source, _ in flows}
    outputs = {target: None for _, target in flows}
    return OperatorLineage(
        inputs=[Dataset(namespace=place.server, name=place.table) for place in inputs],
        outputs=[Dataset(namespace=place.server, name=place.table) for place in outputs],
    )
