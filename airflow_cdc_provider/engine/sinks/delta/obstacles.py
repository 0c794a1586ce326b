"""Finds reasons why an existing Delta table cannot have the rows. Pure decisions."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import types as t

from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.sinks.delta.table_layout import table_columns

_BOUNDED = "__CHAR_VARCHAR_TYPE_STRING"
_GENERATED = frozenset({"delta.generationExpression", "delta.identity.start"})
_FILLED = _GENERATED | {"CURRENT_DEFAULT"}
# The columns of a changelog that every event fills.
_ALWAYS = frozenset({"_op", "_commit_lsn"})


def obstacles(target: Target, mode: Mode, schema: t.StructType, properties: Mapping[str, str]) -> list[str]:
    """Return what the table would refuse or change: phrases, each about a column or a property.

    :param schema: the table's schema, as in its log.
    :param properties: properties of the table.
    """
    columns = {field.name.lower(): field for field in schema}
    row = "row" if mode == "mirror" else "event"
    filled = {column.name for column in target.table.columns if column.not_null} if mode == "mirror" else _ALWAYS
    found = []
    for name, wanted in table_columns(target, mode).items():
        field = columns.pop(name.lower(), None)
        if field is None:
            found.append(f"it has no column {name} {wanted}")
            continue
        if (kind := _type(field)) != wanted:
            found.append(f"{name} is {kind} but must be {wanted}")
        if _GENERATED & field.metadata.keys():
            found.append(f"{name} is generated")
        if not field.nullable and name not in filled:
            found.append(f"{name} is NOT NULL, but not every {row} has a value for it")
    found += [
        f"{name} is NOT NULL, but no {row} has such a column"
        for name, field in columns.items()
        if not (field.nullable or _FILLED & field.metadata.keys())
    ]
    if mode == "mirror" and properties.get("delta.appendOnly", "").lower() == "true":
        found.append("delta.appendOnly is true, but a mirror changes and deletes rows")
    return found


def _type(field: t.StructField) -> str:
    kind: str = field.metadata.get(_BOUNDED, field.dataType.simpleString())
    return kind.upper()
