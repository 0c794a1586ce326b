"""The sections of a pipeline file that do not depend on the kind of source or sink."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from airflow_cdc_provider.engine.core.section import Section, without_password
from airflow_cdc_provider.engine.core.section_values import (
    as_positive_integer,
    as_positive_seconds,
    as_seconds,
    as_text,
    one_of,
)
from airflow_cdc_provider.engine.pipeline.restart_strategy import Restart, Strategy


@dataclass(frozen=True)
class SnapshotSettings:
    """The settings of the initial copy: chunks of ``chunk_rows`` rows, ``parallelism`` of them copied at a time."""

    mode: Literal["initial", "never", "only"] = "initial"
    chunk_rows: int = 500_000
    parallelism: int = 2


@dataclass(frozen=True)
class StreamSettings:
    """The settings of the stream; ``trigger`` and ``heartbeat`` in seconds, sizes in bytes.

    :param restart: the strategy for restarting a failed job, of stream or snapshot.
    :param max_retained_wal: bytes of log that the source may retain for the slot before the action
        ``on_max_retained_wal`` is taken.
    """

    trigger: float = 2.0
    max_batch_bytes: int = 64 << 20
    heartbeat: float = 10.0
    restart: Restart = field(default_factory=Restart)
    max_retained_wal: int = 10 << 30
    on_max_retained_wal: Literal["warn", "stop", "drop-slot"] = "warn"


@dataclass(frozen=True)
class MetricsSettings:
    """The settings of metrics; ``prometheus`` is the host and port of the endpoint for Prometheus, if there is one."""

    prometheus: tuple[str, int] | None = None


@dataclass(frozen=True)
class MessageSettings:
    """The settings of messages; ``values`` is whether they show values of rows and bounds of keys."""

    values: bool = True


def as_restart(section: Section) -> Restart:
    """Parse a restart strategy with the keys that belong to it."""
    default = Restart()
    checks: dict[str, dict[str, Callable[[object], Any]]] = {
        "fixed-delay": {"attempts": as_positive_integer, "delay": as_seconds},
        "failure-rate": {"failures": as_positive_integer, "interval": as_positive_seconds, "delay": as_seconds},
        "none": {},
    }
    strategy = section.take("strategy", one_of(*checks), default.strategy)
    if strategy not in checks:  # a variable that is not set here; the other keys depend on it
        return default
    given = {name: section.take(name, check, getattr(default, name)) for name, check in checks[strategy].items()}
    section.finish()
    return dataclasses.replace(default, strategy=cast(Strategy, strategy), **given)


def as_address(value: object) -> tuple[str, int]:
    wanted = "an address such as `127.0.0.1:9464`, of this host"
    try:
        parts = urlsplit(f"//{as_text(value)}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(wanted) from None
    if not host or port is None or parts.netloc != value or parts.username is not None:
        raise ValueError(wanted)
    return host, port


def as_state_url(value: object) -> str:
    text = without_password(as_text(value))
    return text if "://" in text else f"file://{Path(text).absolute()}"
