"""Connections of the Airflow under test."""

from __future__ import annotations

from contextlib import ExitStack

from airflow.sdk import Connection

from tests.airflow.client import Client


def connect(client: Client, ended: ExitStack, name: str, uri: str) -> None:
    """Create a connection of Airflow, and remove it at the end."""
    made = Connection.from_uri(uri, name)
    fields = ("conn_type", "host", "port", "login", "password", "schema", "extra")
    client.call("POST", "/connections", json={"connection_id": name} | {each: getattr(made, each) for each in fields})
    ended.callback(client.call, "DELETE", f"/connections/{name}")
