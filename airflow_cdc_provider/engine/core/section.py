"""Reads the sections of a pipeline file: takes and checks keys one by one, and refuses the remaining keys.

A check receives the value as YAML gives it. It returns the converted value, or raises :class:`ValueError` with a
description of valid values.

No message shows a text, a list or a mapping of the file, because it may be or contain a password that was written to
the wrong key. Messages show only numbers that are too small, and words that resemble one of the valid choices.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section_values import Misspelt, as_text, connection_uri, spelled

T = TypeVar("T")
VARIABLE = re.compile(r"\$\{(\w+)\}")
"""An environment variable in a value."""


_NAME = re.compile(r"[A-Za-z_][\w.\[\]-]{0,99}")
"""The form of a key or of a connection's id. Other texts may be passwords, or addresses that contain one."""


class Section:
    """A mapping of the document whose keys are taken one by one, so that the remaining keys are unknown ones.

    :param path: the prefix of its keys, for messages.
    :param environment: the environment in which variables and connections are looked up.
    :param resolve: whether to look them up; where Dags are parsed, they may be unset.
    """

    def __init__(self, path: str, value: object, environment: Mapping[str, str], resolve: bool) -> None:
        self._path = path
        self._resolve = resolve
        if not isinstance(value, dict):
            where = f"{path}: " if path else "the pipeline file "
            raise ConfigError(f"{where}must be a mapping, not {_kind(value)}", "Write it as `key: value` lines.")
        self._values: dict[Any, object] = dict(value)
        self._known: set[str] = set()
        self._environment = environment

    @property
    def path(self) -> str:
        """Return the path of the mapping, for messages."""
        return self._path

    def _full(self, key: str) -> str:
        shown = key if _NAME.fullmatch(key) else "…"
        return f"{self._path}.{shown}" if self._path else shown

    def take(self, key: str, check: Callable[[object], T], default: T | None = None, *, secret: bool = False) -> T:
        """Take the value of a key and return it checked; a key without a default is required.

        :param secret: whether messages must not show the value even if it is a number.
        :raises ConfigError: if the key is missing or its value is invalid; names the key's path and valid values.
        """
        self._known.add(key)
        if key not in self._values and default is not None:
            return default
        self._require(key)
        value = self._values[key]
        if not self._resolve and isinstance(value, str) and self._unset(value):
            return cast(T, self._values.pop(key))
        return self.take_literally(key, check, secret=secret)

    def take_literally(self, key: str, check: Callable[[object], T], *, secret: bool = False) -> T:
        """Take the value of a key and return it checked; its variables must be set wherever the file is read."""
        self._known.add(key)
        self._require(key)
        value = self._values.pop(key)
        try:
            return check(self._expand(key, value) if isinstance(value, str) else value)
        except ValueError as e:
            shown = _kind(value) if secret else _shown(value, e)
            raise ConfigError(f"{self._full(key)}: {shown} is not valid", f"Give {e}.") from None

    def section(self, key: str) -> Section:
        """Take the mapping at a key."""
        return self.take_literally(key, lambda value: self.inner(key, value))

    def sections(self, key: str) -> tuple[Section, ...]:
        """Take the mapping at a key, or each mapping of the list at a key."""

        def check(value: object) -> tuple[Section, ...]:
            if value == []:
                raise ValueError("a mapping, or a list of mappings")
            if isinstance(value, list):
                return tuple(self.inner(f"{key}[{n}]", each) for n, each in enumerate(value))
            return (self.inner(key, value),)

        return self.take_literally(key, check)

    def mappings(self, key: str) -> tuple[tuple[str, Section], ...]:
        """Take the mapping of names to mappings at a key, empty by default."""
        self._known.add(key)
        if key not in self._values:
            return ()
        section = self.inner(key, self._values.pop(key))
        return tuple((str(name), section.inner(str(name), value)) for name, value in section._values.items())

    def inner(self, name: str, value: object) -> Section:
        """Return a value of this section as a section."""
        return Section(self._full(name), value, self._environment, self._resolve)

    def texts(self, key: str, *, secret: bool = False) -> tuple[tuple[str, str], ...]:
        """Take the mapping of names to texts at a key, empty by default; its values may name environment variables.

        :param secret: whether messages must not show the values even if they are numbers.
        """
        self._known.add(key)
        if key not in self._values:
            return ()
        section = self.inner(key, self._values.pop(key))
        names = [str(name) for name in section._values]
        section._values = {str(name): spelled(value) for name, value in section._values.items()}
        return tuple((name, section.take(name, as_text, secret=secret)) for name in names)

    def settings(self, key: str, kind: type[T], **checks: Callable[[object], Any]) -> T:
        """Take the mapping at a key as a dataclass that has defaults for all its fields.

        :param checks: the checks of the keys; a key has the name of its field.
        """
        self._known.add(key)
        if key not in self._values:
            return kind()
        section = self.inner(key, self._values.pop(key))
        defaults = kind()
        given = {name: section.take(name, check, getattr(defaults, name)) for name, check in checks.items()}
        section.finish()
        return cast(T, dataclasses.replace(cast(Any, defaults), **given))

    def dsn(self, check: Callable[[object], str], scheme: str, kind: str, prefix: str = "") -> str:
        """Take the section's ``dsn``, or the Airflow connection that its ``conn_id`` names, as a checked URI.

        The result is empty if connections are not resolved.

        :param scheme: the scheme of the URIs.
        :param kind: the required kind of connection, for messages: ``Postgres``.
        :param prefix: a prefix of both keys; if given, neither key is required.
        """
        key, conn_id = f"{prefix}dsn", f"{prefix}conn_id"
        if prefix and not {key, conn_id} & self._values.keys():
            self._known |= {key, conn_id}
            return ""
        found = self.connection(key, kind, lambda connection: check(connection_uri(connection, scheme)), conn_id)
        if found is None and self._resolve:
            return self.take(key, check, secret=True)  # it may hold a password
        self._known.add(key)
        self._values.pop(key, None)
        return found or ""

    def connection(self, instead: str, kind: str, read: Callable[[str], T], key: str = "conn_id") -> T | None:
        """Read the Airflow connection that a key of the section names.

        The result is ``None`` if the section does not have the key, or if connections are not resolved.

        :param instead: the alternative key; one of both is required.
        :param kind: the required kind of connection, for messages: ``Postgres``.
        :param read: receives the connection as Airflow gives it, a URI or JSON; must not quote it in a message.
        """
        self._known |= {key, instead}
        if key in self._values and instead in self._values:
            raise ConfigError(
                f"{self._path} has both {instead} and {key}",
                f"Keep one of {self._full(instead)} and {self._full(key)}.",
            )
        if not (self._values.get(key) or self._values.get(instead)):
            raise ConfigError(
                f"{self._full(instead)} is missing from the pipeline file",
                f"Add the key `{self._full(instead)}`, or `{self._full(key)}`.",
            )
        if key not in self._values:
            return None
        conn_id = self.take(key, as_text)
        if not self._resolve:
            return None
        variable = f"AIRFLOW_CONN_{conn_id.upper()}"
        connection = self._environment.get(variable)
        if not _NAME.fullmatch(conn_id):  # a DSN, for one
            conn_id, variable = "…", "AIRFLOW_CONN_…"
        if connection is None:
            raise ConfigError(
                f"{self._full(key)}: connection {conn_id!r} is unknown: {variable} is not set",
                f"Set {variable} to the connection's URI, or run the pipeline from Airflow, which passes it on.",
            )
        try:
            return read(connection)
        except ValueError as e:
            raise ConfigError(
                f"{self._full(key)}: connection {conn_id!r} is not a {kind} connection", f"Give {e}."
            ) from None

    def _require(self, key: str) -> None:
        if key not in self._values:
            raise ConfigError(
                f"{self._full(key)} is missing from the pipeline file", f"Add the key `{self._full(key)}`."
            )

    def _unset(self, text: str) -> bool:
        return any(name not in self._environment for name in VARIABLE.findall(text))

    def _expand(self, key: str, text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            if match[1] not in self._environment:
                raise ConfigError(
                    f"{self._full(key)} names the environment variable {match[1]}, which is not set",
                    f"Set {match[1]} where the pipeline runs.",
                )
            return self._environment[match[1]]

        return VARIABLE.sub(replace, text)

    def finish(self) -> None:
        """Refuse keys that have not been taken.

        :raises ConfigError: if there are any; names the first one.
        """
        for key, value in self._values.items():
            raise ConfigError(
                f"{self._full(str(key))}: unknown key (its value is {_kind(value)})",
                f"Remove it, or use one of: {', '.join(sorted(self._known))}.",
            )


def _shown(value: object, error: ValueError) -> str:
    """Return a value for a message, or only its kind if it may be a secret that belongs to another key."""
    too_small = isinstance(value, int | float) and not isinstance(value, bool) and value <= 0
    return repr(value) if too_small or isinstance(error, Misspelt) else _kind(value)


def _kind(value: object) -> str:
    """Return the kind of a value, for messages that must not show the value."""
    kinds = {int: "a number", float: "a number", str: "a text", dict: "a mapping", list: "a list"}
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return kinds.get(type(value), "a value of another kind")


def without_password(url: str) -> str:
    """Check that a URL has no password, because messages may show it.

    :raises ValueError: if it has one.
    """
    user, at, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
    if at and ":" in user:
        raise ValueError("a URL without a password; the store's library finds it in the environment")
    return url
