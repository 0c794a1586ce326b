"""Journal source for airflow-cdc-provider: reads an append-only SQLite table with ascending row numbers."""
