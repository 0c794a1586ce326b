"""Measures what waiting costs: the queries and the CPU time of sensors that wait in one triggerer.

Run it with ``python -m benchmarks.waiting``. The triggers run in this process as in a triggerer, against a server whose
log counts the statements. Nothing changes at the source, so all of it is the cost of waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import psycopg
import structlog

from airflow_cdc_provider.engine.core.text_output import text_table
from airflow_cdc_provider.triggers.slots import ExpectationTrigger
from local_servers.postgres import PostgresServer


async def wait(count: int, slots: int, seconds: float, interval: float) -> float:
    """Let some sensors wait, and return the CPU time of this process per minute."""
    triggers = [
        ExpectationTrigger(
            kind="progress",
            interval=interval,
            timeout=seconds,
            conn_id="bench",
            slot=f"s{i % slots}",
            restart_lsn="FFFFFFFF/0",
        )
        for i in range(count)
    ]

    async def end(trigger: ExpectationTrigger) -> None:
        async for _ in trigger.run():
            pass

    before = time.process_time()
    await asyncio.gather(*map(end, triggers))
    return (time.process_time() - before) * 60 / seconds


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Measure the cost of sensors that wait in one triggerer.")
    parser.add_argument("--sensors", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--slots", type=int, default=10, help="number of slots that the sensors share")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration for each number of sensors")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between two checks of a sensor")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    body = []
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as directory:
        Path(directory).chmod(0o755)
        settings = {"log_statement": "all", "max_replication_slots": str(options.slots)}
        with PostgresServer.create(Path(directory) / "server", settings=settings) as server:
            os.environ["AIRFLOW_CONN_BENCH"] = server.dsn()
            with psycopg.connect(server.dsn(), autocommit=True) as connection:
                for i in range(options.slots):
                    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [f"s{i}"])
            asyncio.run(wait(1, 1, 2.0, 1.0))  # imports and other first-time costs
            for count in options.sensors:
                before = statements(server)
                cpu = asyncio.run(wait(count, options.slots, options.seconds, options.interval))
                queries = (statements(server) - before) * 60 / options.seconds
                body.append([str(count), f"{queries:.1f}", f"{cpu * 1000:.0f}"])
    print(text_table(["sensors", "statements per minute", "CPU ms per minute"], body))
    return 0


def statements(server: PostgresServer) -> int:
    """Return the number of statements in a server's log."""
    return server.log_file.read_text(encoding="utf-8", errors="replace").count("LOG:  statement:")


if __name__ == "__main__":
    sys.exit(main())
