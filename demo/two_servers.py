"""Two temporary Postgres servers: one with a small shop, one empty.

Prints the variables that ``shop.yaml`` needs and the command for psql, and removes everything on Ctrl+C.
"""

import tempfile
import threading
from pathlib import Path

import psycopg

from demo import shop
from local_servers.postgres import PostgresServer


def main() -> None:
    """Run the servers until interrupted."""
    with tempfile.TemporaryDirectory(prefix="cdc-quickstart-") as name:
        directory = Path(name)
        directory.chmod(0o755)  # if root starts this program, the servers run as `nobody`
        source_server = PostgresServer.create(directory / "source")
        target_server = PostgresServer.create(directory / "target")
        with source_server as source, target_server as target:
            with psycopg.connect(source.dsn()) as connection:
                shop.create_schema(connection)
            rows = shop.load(source.dsn(), scale=0.02)
            print(
                f"# {rows:,} rows are in the source. Paste this into another terminal, and press Ctrl+C here to stop."
            )
            print(f"export AIRFLOW_CONN_SHOP_PG={source.dsn()}")
            print(f"export AIRFLOW_CONN_DW_PG={target.dsn()}")
            print(f"export CDC_STATE={directory / 'state'}")
            print(f"export PATH=$PATH:{source.binaries}  # for psql", flush=True)
            threading.Event().wait()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("Removed.")
