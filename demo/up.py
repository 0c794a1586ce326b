"""An Airflow for exploring: the shop, customers who continue to buy, and a pipeline that is ready to run.

``python -m demo.up`` runs until it is interrupted. Everything that it has started then ends, including Spark jobs, and
nothing is left behind.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack
from types import FrameType
from urllib.parse import urlsplit

from airflow_cdc_provider.engine.core.errors import CdcError
from demo import shop_writers
from demo.screen import Screen
from demo.tables import ShopStage, set_stage
from demo.work_directory import DAG, work_directory

SCALE = 0.1
TRANSACTIONS_PER_SECOND = 20.0
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

ADVICE = """
Airflow   {airflow}   (no login needed)
source    {source}
target    {target}
pipeline  {file}

Trigger the Dag {dag}: its form is filled in. With "forever" as its end, the stream runs until it is stopped.
Everything runs until you press Ctrl-C, which stops and removes it."""


def main() -> int:
    """Set the stage and wait for an interrupt; return 0 after one."""
    for number in INTERRUPTS:
        signal.signal(number, _interrupt)
    screen = Screen(sys.stdout)
    try:
        with work_directory(None) as directory, ExitStack() as started:
            stage = set_stage(started, directory, screen, scale=SCALE)
            started.enter_context(shop_writers.Writers(stage.source, TRANSACTIONS_PER_SECOND))
            open_house(stage)
            screen.print(
                ADVICE.format(
                    airflow=stage.airflow.base_url,
                    source=stage.source,
                    target=stage.warehouse.address,
                    file=stage.file,
                    dag=DAG,
                )
            )
            while True:
                signal.pause()
    except CdcError as error:
        screen.tell_failure(error)
    except KeyboardInterrupt:
        screen.say("Everything has been stopped and removed.")
        return 0
    return 1


def open_house(stage: ShopStage) -> None:
    """Unpause the Dag, and add the connections to the UI, which does not show those of environment variables."""
    client = stage.airflow.client
    client.await_dag(DAG)
    client.pause(DAG, False)
    for use, dsn in (("source", stage.source), ("target", stage.warehouse.address)):
        address = urlsplit(dsn)
        client.call(
            "POST",
            "/connections",
            json={
                "connection_id": f"shop_{use}",
                "conn_type": "postgres_cdc",
                "host": address.hostname,
                "port": address.port,
                "login": address.username,
                "schema": address.path[1:],
                "extra": json.dumps({"use": use}),
            },
        )


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End in order after any of the signals, and ignore further ones."""
    for each in INTERRUPTS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
