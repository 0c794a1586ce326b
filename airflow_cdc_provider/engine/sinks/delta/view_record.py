"""The views in the record of a Delta sink.

A Delta sink with views adds sections to the log, see :mod:`.record_contents`:

===============  ==============================================================================
``views``        by number of a version: ``settings`` and the parsed ``view``
``view_states``  by number of a version: how far it is, see :class:`DeltaView`
``moves``        by label of a table that views read: number of entries that have changed it
===============  ==============================================================================
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion

_VIEWS, _STATES, _MOVES = "views", "view_states", "moves"


@dataclass(frozen=True)
class Pin:
    """A version of a mirror table.

    :param id: Delta's id of the table, because a table that is created again begins with version 0.
    """

    id: str
    version: int


@dataclass(frozen=True)
class Moment:
    """The mirror after an entry of the log.

    :param number: number of the commit that brings a view there; it grows from one moment of a view to the next.
    :param applied: the applied LSN.
    :param pins: by label the version of each table that the view reads; ``None`` if it has not been created.
    :param moves: by label the number of entries that have changed the table.
    """

    number: int
    applied: str
    pins: Mapping[str, Pin | None] = field(default_factory=dict)
    moves: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Moment:
        """Read a moment from JSON values."""
        pins = {label: None if pin is None else Pin(**pin) for label, pin in values["pins"].items()}
        return cls(**{**values, "pins": pins})


@dataclass(frozen=True)
class DeltaView:
    """A version of a view.

    :param number: number of the version, unique in the pipeline.
    :param kept: whether it moves with the mirror.
    :param reached: the moment whose SELECT its table has; ``None`` until it is built.
    :param next: the moment that it is brought to. Whether that has been done is known only from the table, so it is
        always done again, or replaced by a rebuild.
    :param rebuild: whether all rows are computed for ``next``, not only those that differ from ``reached``.
    :param units: number of commits that changed it. :param anchors: number of anchors that were computed for them.
    :param seconds: time that they took.
    """

    number: int
    settings: ViewSettings
    view: View
    kept: bool = True
    reached: Moment | None = None
    next: Moment | None = None
    rebuild: bool = False
    units: int = 0
    anchors: int = 0
    seconds: float = 0.0

    def moved(self, contents: Contents) -> bool:
        """Return whether a table that it reads has changed since the moment that it has reached."""
        return self.reached is None or dict(self.reached.moves) != moves_of(contents, self.view.columns)

    def version(self, contents: Contents) -> ViewVersion:
        """Return the version as commands show it."""
        relation, behind = "", None
        if self.reached is not None:
            relation = self.view.name
            behind = parse_lsn(self.reached.applied) if self.moved(contents) or not self.kept else None
        elif self.next is not None:
            relation = f"{self.view.name}#{self.number}"  # it is being built; no table has this name
        return ViewVersion(
            self.number,
            self.settings,
            self.view,
            relation,
            complete=self.reached is not None,
            kept=self.kept,
            behind=behind,
            units=self.units,
            anchors=self.anchors,
            seconds=self.seconds,
        )


def views_of(contents: Contents) -> list[DeltaView]:
    """Return the recorded versions in the order of their numbers."""
    states = contents.get(_STATES, {})
    return sorted((_view(int(n), each, states[n]) for n, each in contents.get(_VIEWS, {}).items()), key=_number)


def _number(view: DeltaView) -> int:
    return view.number


def _view(number: int, definition: Mapping[str, Any], state: Mapping[str, Any]) -> DeltaView:
    moments = {name: None if state[name] is None else Moment.from_dict(state[name]) for name in ("reached", "next")}
    return DeltaView(
        number,
        ViewSettings(**definition["settings"]),
        View.from_dict(definition["view"]),
        **{**state, **moments},
    )


def changed(contents: Contents, views: Iterable[DeltaView]) -> Change:
    """Return the change that makes ``views`` the recorded versions."""
    before = {view.number: view for view in views_of(contents)}
    after = {view.number: view for view in views}
    definitions, states = {}, {}
    for number, view in after.items():
        old = before.get(number)
        if old is None or (old.settings, old.view) != (view.settings, view.view):
            definitions[str(number)] = {"settings": dataclasses.asdict(view.settings), "view": view.view.to_dict()}
        if old is None or _state(old) != _state(view):
            states[str(number)] = _state(view)
    gone = [str(number) for number in before.keys() - after.keys()]
    values = {_VIEWS: definitions, _STATES: states}
    return Change(
        {name: section for name, section in values.items() if section},
        {_VIEWS: gone, _STATES: gone} if gone else {},
    )


def _state(view: DeltaView) -> dict[str, Any]:
    values = dataclasses.asdict(replace(view, settings=ViewSettings("", "", "")))
    return {name: value for name, value in values.items() if name not in ("number", "settings", "view")}


def moved(contents: Contents, labels: Iterable[str]) -> Change:
    """Return the change that counts an entry that changes tables, if a view reads them."""
    read = {label for view in views_of(contents) for label in view.view.columns}
    counts = moves_of(contents, sorted(read & set(labels)))
    return Change({_MOVES: {label: count + 1 for label, count in counts.items()}}) if counts else Change()


def moves_of(contents: Contents, labels: Iterable[str]) -> dict[str, int]:
    """Return by label the number of entries that have changed a table since views read it."""
    found = contents.get(_MOVES, {})
    return {label: found.get(label, 0) for label in labels}


def next_moment(view: DeltaView, contents: Contents, pins: Mapping[str, Pin | None]) -> Moment:
    """Return the present moment, for the next commit to a view's table.

    Its number is greater than those of all versions of the view. It is a time, so it is also greater than those in an
    earlier record of the pipeline.
    """
    versions = [each for each in views_of(contents) if each.view.label == view.view.label]
    moments = [moment for each in versions for moment in (each.reached, each.next) if moment is not None]
    last = max((moment.number for moment in moments), default=0)
    number = max(last + 1, int(time.time() * 1_000_000))
    return Moment(number, contents["head"]["applied"], pins, moves_of(contents, view.view.columns))


def is_consistent(contents: Contents, labels: Collection[str]) -> bool:
    """Return whether some tables are in a state that the source once had."""
    chunks = [each for each in contents.get("chunks", {}).values() if each["definition"]["table"] in labels]
    applied = parse_lsn(contents["head"]["applied"])
    return all("snapshot" in chunk and parse_lsn(chunk["high"]) <= applied for chunk in chunks)
