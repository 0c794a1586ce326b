"""Postgres as a sink."""
