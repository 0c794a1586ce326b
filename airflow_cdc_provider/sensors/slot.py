"""Sensors of a replication slot: it advances, it retains little log, or it is healthy.

A slot that does not advance retains the source's write-ahead log until the disk is full. The server keeps the log from
``restart_lsn`` on, which follows the acknowledged ``confirmed_flush_lsn`` some ten to thirty seconds later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_cdc_provider.sensors.base import CdcSensor


class SlotProgressSensor(CdcSensor):
    """A sensor that waits until a replication slot has advanced, so that the source can remove WAL.

    All given positions must be reached. If none is given, the sensor waits until the slot's ``restart_lsn`` differs
    from its value at the first observation. If the slot is missing or lost, the task fails immediately, without
    retries.

    :param moved_since: LSN beyond which the slot's ``restart_lsn`` must be, for example
        ``"{{ ti.xcom_pull(task_ids='provision')['restart_lsn'] }}"``. (templated)
    :param restart_lsn: LSN that the slot's ``restart_lsn`` must have reached. (templated)
    :param confirmed_flush_lsn: LSN that the slot's ``confirmed_flush_lsn`` must have reached. (templated)
    """

    template_fields: Sequence[str] = (*CdcSensor.template_fields, "moved_since", "restart_lsn", "confirmed_flush_lsn")
    kind = "progress"

    def __init__(
        self,
        *,
        moved_since: str | None = None,
        restart_lsn: str | None = None,
        confirmed_flush_lsn: str | None = None,
        **kwargs: Any,
    ) -> None:
        positions = {
            "moved_since": moved_since,
            "restart_lsn": restart_lsn,
            "confirmed_flush_lsn": confirmed_flush_lsn,
        }
        super().__init__(arguments=positions, **kwargs)


class SlotRetainedWalSensor(CdcSensor):
    """A sensor that waits until the source retains less WAL for a replication slot than a budget.

    :param below: the budget, in bytes or as text such as ``10GiB``; with ``pipeline``, the default is the file's
        ``stream.max_retained_wal``. (templated)
    """

    template_fields: Sequence[str] = (*CdcSensor.template_fields, "below")
    kind = "retained"

    def __init__(self, *, below: int | str | None = None, **kwargs: Any) -> None:
        super().__init__(arguments={"below": below}, **kwargs)
        if below is None and self.pipeline is None:
            raise ValueError("give below, or pipeline, whose file has a budget")


class SlotHealthySensor(CdcSensor):
    """A sensor that waits until the source retains all WAL of a slot and is not about to remove it (``wal_status``)."""

    kind = "healthy"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(arguments={}, **kwargs)
