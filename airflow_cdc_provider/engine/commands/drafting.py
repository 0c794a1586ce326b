"""``init``: writes a first pipeline file, from what the source's catalog says about its tables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from airflow_cdc_provider.engine.commands.pipeline_draft import PipelineDraft
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError
from airflow_cdc_provider.engine.core.findings import Checks, Finding, require
from airflow_cdc_provider.engine.core.section import Section
from airflow_cdc_provider.engine.core.section_values import PIPELINE_NAME
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.driver_checks import convert_driver_errors
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import find
from airflow_cdc_provider.engine.sources.postgres.catalog.table_sizes import sizes_of_tables
from airflow_cdc_provider.engine.sources.postgres.provision.preflight import check_tables
from airflow_cdc_provider.engine.sources.postgres.provision.readiness import check_settings
from airflow_cdc_provider.engine.sources.postgres.settings import PostgresSourceSettings

_EVERYTHING = ("*.*",)


def init(
    file: str | os.PathLike[str],
    *,
    source_conn_id: str,
    sink_conn_id: str,
    tables: Sequence[str] = (),
    mode: str = "mirror",
    state: str | None = None,
) -> tuple[dict[str, Any], list[Finding]]:
    """Write a pipeline file that copies tables of one Postgres server to another.

    The source is read and not changed; the sink is not needed yet.

    :param file: a path; its name without the suffix names the pipeline.
    :param source_conn_id: the Airflow connection of the source; ``AIRFLOW_CONN_<ID>`` must be set.
    :param sink_conn_id: the Airflow connection of the sink.
    :param tables: patterns as in ``source.tables``; all tables that can be captured by default. The file names each.
    :param mode: ``mirror`` or ``changelog``.
    :param state: URL of the state directory; one below ``/var/lib/airflow-cdc`` by default.
    :returns: the result as JSON values, and the findings of the source's checks. Errors among them do not prevent the
        file, since an administrator has to resolve them.
    :raises ConfigError: if the file exists, or if a named table does not exist or cannot be captured.
    """
    path = Path(file)
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already", "Give --pipeline another file, or remove this one.")
    if not PIPELINE_NAME.fullmatch(path.stem):
        raise ConfigError(
            f"{path.stem!r} cannot be the name of a pipeline",
            "Name the file after the pipeline, with 1 to 40 of the characters a-z, 0-9 and _, such as shop.yaml.",
        )
    section = {"conn_id": source_conn_id, "tables": list(tables or _EVERYTHING)}
    settings = PostgresSourceSettings.parse(Section("source", section, os.environ, True), path.stem)
    checks = Checks(convert_driver_errors)
    with connected(settings.dsn, "airflow-cdc init") as source, convert_driver_errors("tables"):
        if not check_settings(checks, source, settings):
            require(checks.findings)
        found = find(source, settings.tables)
        if not tables and not found.tables:
            raise ConfigError(
                "the source has no table that can be captured"
                + "".join(f"; {error.message}" for error in found.errors.values()),
                "Connect to another database, or give the tables a primary key or REPLICA IDENTITY FULL.",
            )
        for error in found.fatal:
            raise error
        captured = list(found.tables.values())
        sizes = sizes_of_tables(source, captured)
        draft = PipelineDraft(
            path.stem,
            source_conn_id,
            list(zip(captured, sizes, strict=True)),
            found.errors,
            sink_conn_id,
            mode,
            state or f"file:///var/lib/airflow-cdc/{path.stem}",
        )
        check_tables(checks, source, Pipeline.parse(yaml.safe_load(draft.text()), resolve=False))
    _warn(checks, captured, list(found.errors.values()))
    _write(path, draft.text())
    shown = [
        {"table": table.label, "rows": size.rows, "bytes": size.bytes, "key": list(table.key)}
        for table, size in draft.tables
    ]
    left_out = {label: {"message": error.message, "solution": error.solution} for label, error in found.errors.items()}
    return {"file": str(path), "tables": shown, "left_out": left_out, "next": _next(path, draft)}, checks.findings


def _warn(checks: Checks, captured: Sequence[Table], left_out: Sequence[CdcError]) -> None:
    """Warn of tables that are left out, or that cost more than others."""
    for error in left_out:
        checks.warn("tables", f"Left out: {error.message}. {error.solution}")
    for table in captured:
        if not table.key:
            checks.warn(
                "key", f"{table.label} has no key: each batch that updates or deletes its rows scans the target table."
            )
        elif table.replica_identity == "f":
            checks.warn("key", f"{table.label} has REPLICA IDENTITY FULL: the log has the old rows as a whole.")
        own = sorted({column.type for column in table.columns if not column.builtin})
        if own:
            checks.warn(
                "types",
                f"{table.label} has types that do not come with Postgres ({', '.join(own)}): create them in the"
                " target, otherwise their columns become text.",
            )


def _next(path: Path, draft: PipelineDraft) -> list[str]:
    variable = f"AIRFLOW_CONN_{draft.sink_conn_id.upper()}"
    unset = [] if variable in os.environ else [f"export {variable}=postgresql://USER@HOST:PORT/DATABASE"]
    file = shlex.quote(str(path))
    return [*unset, *(f"airflow-cdc {command} --pipeline {file}" for command in ("preflight", "run", "status"))]


def _write(path: Path, text: str) -> None:
    """Create the file.

    :raises ConfigError: if it exists, or if it cannot be created.
    """
    try:
        with path.open("x", encoding="utf-8") as created:
            created.write(text)
    except OSError as e:
        raise ConfigError(f"{path} cannot be created: {e.strerror}", "Give --pipeline a file that can be.") from e
