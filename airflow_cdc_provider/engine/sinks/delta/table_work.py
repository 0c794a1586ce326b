"""What an entry of the log has decided to be done to tables: JSON values, which say it to whoever does it.

The log has a section of its own for a Delta sink, see :mod:`.record_contents`: ``made``, the labels of the tables whose
targets have been made.
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
class Part:
    """Staged files of one kind.

    :param files: their names below the pipeline's folder, in the order in which they apply.
    :param constants: of events, the values of columns that were not known when they were staged.
    """

    files: tuple[str, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)


def joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts whose order does not matter, one for all files that are read alike: a plan grows with every part."""
    found: dict[tuple[tuple[str, Any], ...], tuple[str, ...]] = {}
    for part in parts:
        alike = tuple(part.constants.items())
        found[alike] = found.get(alike, ()) + part.files
    return tuple(Part(files, dict(alike)) for alike, files in found.items())


@dataclass(frozen=True)
class Alteration:
    """A change of a table's columns, which is made unless it has been.

    :param to: the new name, or the new type as SQL.
    """

    kind: Literal["rename", "drop", "add", "widen"]
    name: str
    to: str = ""


@dataclass(frozen=True)
class TableWork:
    """What is to be done to one table: its columns are altered, then it is written to, in one commit of its own.

    :param label: the source table.
    :param kind: ``merge`` effects, ``append`` rows or events, ``replace`` rows and columns, ``fill`` columns.
    :param emptied: what was in the table goes in the same commit.
    :param create: the table may be missing.
    :param values: to fill columns with, as texts of Postgres.
    :param target: what the table becomes; ``None`` for what is recorded.
    """

    label: str
    kind: Literal["merge", "append", "replace", "fill", "alter"]
    parts: tuple[Part, ...] = ()
    emptied: bool = False
    create: bool = False
    alterations: tuple[Alteration, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    target: Target | None = None

    def to_dict(self) -> dict[str, Any]:
        """The work as JSON values; :meth:`from_dict` reads them back."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["parts"] = [dataclasses.asdict(part) for part in self.parts]
        values["alterations"] = [dataclasses.asdict(each) for each in self.alterations]
        if self.target is not None:
            definition = self.target.table.to_dict()
            values["target"] = {"definition": definition, "schema": self.target.schema, "name": self.target.name}
        return {name: value for name, value in values.items() if value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TableWork:
        """Read what :meth:`to_dict` wrote."""
        given = dict(values)
        given["parts"] = tuple(Part(tuple(p["files"]), p["constants"]) for p in given.get("parts", ()))
        given["alterations"] = tuple(Alteration(**each) for each in given.get("alterations", ()))
        if target := given.get("target"):
            given["target"] = Target(Table.from_dict(target["definition"]), target["schema"], target["name"])
        return cls(**given)


def is_made(contents: Contents, label: str) -> bool:
    """Whether the target of a table has been made, so that one that is not there is one that was dropped."""
    return label in contents.get(_MADE, {})


def made(labels: Iterable[str]) -> Change:
    """Targets have been made."""
    found = dict.fromkeys(labels, True)
    return Change({_MADE: found}) if found else Change()


def unmade(labels: Iterable[str]) -> Change:
    """Targets are made again with their next rows, unless they are there."""
    return Change(removed={_MADE: list(labels)})


def to_json(tables: Sequence[TableWork]) -> dict[str, Any]:
    """The work of a step."""
    return {"tables": [table.to_dict() for table in tables]}


def of_step(contents: Contents, work: Mapping[str, Any]) -> list[tuple[Target, TableWork]]:
    """The work of a step, table by table, with what each target is after it."""
    recorded = targets_of(contents)
    tables = map(TableWork.from_dict, work["tables"])
    return [(table.target or recorded[table.label], table) for table in tables]
