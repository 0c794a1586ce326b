"""A journal as a source of airflow-cdc-provider: a table of SQLite whose rows stay, and are numbered as they come."""
