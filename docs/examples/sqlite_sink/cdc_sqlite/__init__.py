"""SQLite sink for airflow-cdc-provider: keeps mirrors in one database file."""
