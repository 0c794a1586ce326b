"""A run into Delta tables, in a process with its own Spark that can be killed: ``FILE [TABLE …]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from tests.support.delta_spark import delta_session
from tests.support.engine_parts import apply_stream, copy_chunk_of


def main(file: Path, reread: Sequence[str]) -> None:
    """Provision, copy what has not been copied, re-read some tables, and follow the stream forever."""
    pipeline = Pipeline.load(file)
    with delta_session(1):
        commands.provision(pipeline, takeover=True)
        for chunk in existing_record(pipeline).unfinished:
            copied = copy_chunk_of(pipeline, chunk)
            if isinstance(copied, CdcError):
                raise copied
        if reread:
            commands.resnapshot(pipeline, tables=reread, takeover=True)
        while True:
            with connected(pipeline.source.dsn, settings={"synchronous_commit": "local"}) as source:
                marker = emit_marker(source, "caught-up")
            apply_stream(pipeline, marker, takeover=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
