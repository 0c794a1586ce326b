"""Sensors of a pipeline: its sink keeps up with the source, or its snapshot is finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_cdc_provider.sensors.base import CdcSensor


class CdcLagSensor(CdcSensor):
    """A sensor that waits until the sink's lag is below a number of bytes of WAL, of seconds, or both.

    :param pipeline: path of the pipeline file. (templated)
    :param below_bytes: WAL between the applied LSN and the end of the source's WAL, in bytes or as text such as
        ``64MiB``. (templated)
    :param below_seconds: seconds since the sink last advanced, if it is behind. (templated)
    """

    template_fields: Sequence[str] = (*CdcSensor.template_fields, "below_bytes", "below_seconds")
    kind = "lag"

    def __init__(
        self,
        *,
        pipeline: str,
        below_bytes: int | str | None = None,
        below_seconds: float | str | None = None,
        **kwargs: Any,
    ) -> None:
        limits = {"below_bytes": below_bytes, "below_seconds": below_seconds}
        super().__init__(arguments=limits, pipeline=pipeline, **kwargs)
        if below_bytes is None and below_seconds is None:
            raise ValueError("give below_bytes, below_seconds or both")


class SnapshotFinishedSensor(CdcSensor):
    """A sensor that waits until all chunks of a pipeline's snapshot are in the sink.

    :param pipeline: path of the pipeline file. (templated)
    :param consistent: whether to wait also for the changes made while the chunks were read, so that the sink's tables
        together are in a state that the source once had. (templated)
    """

    template_fields: Sequence[str] = (*CdcSensor.template_fields, "consistent")
    kind = "finished"

    def __init__(self, *, pipeline: str, consistent: bool | str = False, **kwargs: Any) -> None:
        super().__init__(arguments={"consistent": consistent}, pipeline=pipeline, **kwargs)
