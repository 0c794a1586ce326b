"""``init``: the file that it writes, against real servers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from airflow_cdc_provider.engine.commands import cli
from tests.commands.command_line import SECRET
from tests.conftest import Databases, ServerMaker, as_pipeline_role
from tests.support.databases import execute

TABLES = (
    "CREATE SCHEMA shop",
    "CREATE TYPE shop.mood AS ENUM ('sad', 'happy')",
    "CREATE TABLE shop.customers (id int PRIMARY KEY, name text, mood shop.mood)",
    "INSERT INTO shop.customers SELECT n, 'customer ' || n, 'happy' FROM generate_series(1, 2000) n",
    "ANALYZE shop.customers",
    "CREATE TABLE shop.events (at timestamptz, body text)",
    "ALTER TABLE shop.events REPLICA IDENTITY FULL",
    "CREATE TABLE shop.orders (id int, day date, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)",
    "CREATE TABLE shop.orders_2026 PARTITION OF shop.orders FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')",
    'CREATE TABLE shop."a.b #*\n- c" ("k\n1: " int PRIMARY KEY)',
    "CREATE TABLE shop.keyless (body text)",
    'CREATE UNLOGGED TABLE shop."fast\n    - shop.keyless" (id int PRIMARY KEY)',
    "CREATE VIEW shop.names AS SELECT name FROM shop.customers",
)


def with_secret(dsn: str) -> str:
    """Return a URI with a password, which these servers do not ask for."""
    return dsn.replace("@", f":{SECRET}@", 1)


def run(capsys: pytest.CaptureFixture[str], command: str, file: Path, *options: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main([command, "--pipeline", str(file), *options])
    return code, *capsys.readouterr()


CONNECTIONS = ("--source-conn-id", "shop_pg", "--sink-conn-id", "dw_pg")


def test_the_file_names_all_tables_and_passes_preflight(
    databases: Databases, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(databases.source, *TABLES)
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", with_secret(databases.pipeline_source))
    monkeypatch.delenv("AIRFLOW_CONN_DW_PG", raising=False)
    file = tmp_path / "shop.yaml"
    options = (*CONNECTIONS, "--state", f"file://{tmp_path}/state")

    code, out, err = run(capsys, "init", file, *options)
    assert (code, err) == (0, "")
    text = file.read_text(encoding="utf-8")
    assert SECRET not in out + text
    assert re.search(r"^    - shop\.customers +# about 2,000 rows, .* KiB, key id$", text, re.MULTILINE)
    assert re.search(r"^    - shop\.events +# about 81 rows, 8\.0 KiB, no key$", text, re.MULTILINE)
    assert yaml.safe_load(text) == {
        "pipeline": "shop",
        "source": {
            "conn_id": "shop_pg",
            "tables": ['shop."a.b #*\n- c"', "shop.customers", "shop.events", "shop.orders"],
        },
        "sink": {"conn_id": "dw_pg", "mode": "mirror"},
        "state": f"file://{tmp_path}/state",
    }
    assert "    # shop.keyless has no key" in text
    assert "! Left out: shop.keyless has no key that identifies its rows" in out
    assert "ALTER TABLE shop.keyless ADD PRIMARY KEY" in out.replace('"', "")
    assert "    - shop.keyless is unlogged" in out
    assert "! shop.events has no key" in out
    assert "! shop.customers has types that do not come with Postgres (shop.mood)" in out
    assert "✓ wal_level is logical." in out
    assert "  export AIRFLOW_CONN_DW_PG=" in out
    assert f"  airflow-cdc preflight --pipeline {file}\n" in out

    monkeypatch.setenv("AIRFLOW_CONN_DW_PG", with_secret(databases.pipeline_target))
    code, out, err = run(capsys, "preflight", file, "--no-spark")
    assert (code, err) == (0, "")
    assert "Tables that can be captured: 4." in out

    code, out, err = run(capsys, "init", file, *options)
    assert (code, out) == (2, "")
    assert "exists already" in err
    assert file.read_text(encoding="utf-8") == text

    code, out, _ = run(capsys, "init", tmp_path / "only.yaml", *options, "--table", "shop.c*", "--json")
    result: dict[str, Any] = json.loads(out)
    assert code == 0
    assert [(t["table"], t["rows"], t["key"]) for t in result["tables"]] == [("shop.customers", 2000, ["id"])]
    assert result["next"][0].startswith("airflow-cdc preflight")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Shop 1.yaml", CONNECTIONS, "cannot be the name of a pipeline"),
        ("no/folder.yaml", CONNECTIONS, "cannot be created"),
        ("shop.yaml", (*CONNECTIONS, "--table", "public.nothing"), "public.nothing does not exist"),
        ("shop.yaml", ("--source-conn-id", "unset_pg", "--sink-conn-id", "dw_pg"), "AIRFLOW_CONN_UNSET_PG"),
    ],
)
def test_refusals(
    databases: Databases,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    execute(databases.source, "CREATE TABLE public.t (id int PRIMARY KEY)")
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", databases.pipeline_source)
    code, out, err = run(capsys, "init", tmp_path / name, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_an_address_in_place_of_an_id_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"postgresql://cdc:{SECRET}@db/shop"
    with pytest.raises(SystemExit):
        run(capsys, "init", tmp_path / "shop.yaml", "--source-conn-id", "shop_pg", "--sink-conn-id", address)
    assert SECRET not in capsys.readouterr().err


def test_a_server_that_is_not_ready_gets_a_file_and_remedies(
    make_server: ServerMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(settings={"wal_level": "replica"})
    execute(server.dsn(), "CREATE TABLE public.t (id int PRIMARY KEY)")
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", as_pipeline_role(server.dsn()))
    code, out, _ = run(capsys, "init", tmp_path / "shop.yaml", *CONNECTIONS)
    assert code == 0
    assert "✗ wal_level of the source is replica, not logical. Run: ALTER SYSTEM SET wal_level" in out
    assert yaml.safe_load((tmp_path / "shop.yaml").read_text(encoding="utf-8"))["source"]["tables"] == ["public.t"]
