"""The work on tables that an entry of the log contains, as JSON values.

A Delta sink adds a section to the log, see :mod:`.record_contents`: ``made``, the labels of tables whose targets have
been created.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, targets_of

_MADE = "made"


@dataclass(frozen=True)
class StagedFiles:
    """Staged files of one kind.

    :param files: names below the pipeline's directory, in the order in which they apply.
    :param constants: values of an event's columns that were unknown when the events were staged.
    """

    files: tuple[str, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)


def joined(parts: Iterable[StagedFiles]) -> tuple[StagedFiles, ...]:
    """Return parts in any order, one for all files with the same constants, because a plan grows with every part."""
    found: dict[tuple[tuple[str, Any], ...], tuple[str, ...]] = {}
    for part in parts:
        alike = tuple(part.constants.items())
        found[alike] = found.get(alike, ()) + part.files
    return tuple(StagedFiles(files, dict(alike)) for alike, files in found.items())


@dataclass(frozen=True)
class Alteration:
    """A change of a table's columns, which is skipped if it has been made.

    :param to: the new name, or the new type in SQL.
    """

    kind: Literal["rename", "drop", "add", "widen"]
    name: str
    to: str = ""


@dataclass(frozen=True)
class TableWork:
    """The work on one table: its columns are altered, then it is written to in a single commit.

    :param label: the source table.
    :param kind: ``merge`` effects, ``append`` rows or events, ``replace`` rows and columns, ``fill`` columns.
    :param emptied: the same commit deletes all earlier rows.
    :param create: the table may be missing.
    :param values: values to fill columns with, as texts of Postgres.
    :param target: the new definition of the target; ``None`` for the recorded one.
    """

    label: str
    kind: Literal["merge", "append", "replace", "fill", "alter"]
    parts: tuple[StagedFiles, ...] = ()
    emptied: bool = False
    create: bool = False
    alterations: tuple[Alteration, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    target: Target | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the work as JSON values; :meth:`from_dict` reads them back."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["parts"] = [dataclasses.asdict(part) for part in self.parts]
        values["alterations"] = [dataclasses.asdict(each) for each in self.alterations]
        if self.target is not None:
            definition = self.target.table.to_dict()
            values["target"] = {"definition": definition, "schema": self.target.schema, "name": self.target.name}
        return {name: value for name, value in values.items() if value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TableWork:
        """Return the work from the values of :meth:`to_dict`."""
        given = dict(values)
        given["parts"] = tuple(StagedFiles(tuple(p["files"]), p["constants"]) for p in given.get("parts", ()))
        given["alterations"] = tuple(Alteration(**each) for each in given.get("alterations", ()))
        if target := given.get("target"):
            given["target"] = Target(Table.from_dict(target["definition"]), target["schema"], target["name"])
        return cls(**given)


def is_made(contents: Contents, label: str) -> bool:
    """Return whether the target of a table has been created; if it is missing nevertheless, it was dropped."""
    return label in contents.get(_MADE, {})


def made(labels: Iterable[str]) -> Change:
    """Return the change that marks targets as created."""
    found = dict.fromkeys(labels, True)
    return Change({_MADE: found}) if found else Change()


def unmade(labels: Iterable[str]) -> Change:
    """Return the change that marks targets to be created with their next rows, unless they exist."""
    return Change(removed={_MADE: list(labels)})


def to_json(tables: Sequence[TableWork]) -> dict[str, Any]:
    """Return the work of a step as JSON values."""
    return {"tables": [table.to_dict() for table in tables]}


def of_step(contents: Contents, work: Mapping[str, Any]) -> list[tuple[Target, TableWork]]:
    """Return the work of a step by table, with the definition of each target after it."""
    recorded = targets_of(contents)
    tables = map(TableWork.from_dict, work["tables"])
    return [(table.target or recorded[table.label], table) for table in tables]
