"""SQLite as a sink of airflow-cdc-provider: mirrors in one database file."""
