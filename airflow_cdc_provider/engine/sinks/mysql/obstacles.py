"""Finds reasons why a target table in MySQL or MariaDB would refuse rows, before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.mysql.session import Session


def find_obstacle(opened: Session, target: Target, wanted: Collection[str], required: Collection[str]) -> str:
    """Return why an existing table would refuse every row; empty if it would not.

    :param wanted: names of the columns that are written.
    :param required: names of written columns that have a value in every row.
    """
    where = [target.schema, target.name]
    (kind,) = opened.one(
        "SELECT table_type FROM information_schema.tables WHERE table_schema = %s AND table_name = %s", where
    )
    if str(kind) not in ("BASE TABLE", "SYSTEM VERSIONED"):
        return f"it is not a table but a {str(kind).lower()}"
    columns = opened.rows(
        "SELECT column_name, is_nullable, column_default IS NOT NULL OR extra LIKE '%%auto_increment%%',"
        " COALESCE(generation_expression, '') <> '' FROM information_schema.columns"
        " WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position",
        where,
    )
    written, filled = ({name.lower() for name in names} for names in (wanted, required))
    for name, nullable, has_default, generated in columns:
        known = str(name).lower()
        if generated:
            if known in written:
                return f"column {name} is generated"
        elif str(nullable) == "NO" and known in written - filled:
            return f"column {name} is NOT NULL"
        elif str(nullable) == "NO" and known not in written and not has_default:
            return f"column {name} is not in the source, is NOT NULL and has no default"
    return ""


def find_triggers(opened: Session, targets: Sequence[Target]) -> list[str]:
    """Return the triggers on target tables, which change the written rows; each runs as its definer."""
    found = []
    for target in targets:
        query = (
            "SELECT trigger_name, definer FROM information_schema.triggers"
            " WHERE event_object_schema = %s AND event_object_table = %s ORDER BY 1"
        )
        for name, definer in opened.rows(query, [target.schema, target.name]):
            found.append(f"{target.schema}.{target.name} has the trigger {name} (definer {definer})")
    return found
