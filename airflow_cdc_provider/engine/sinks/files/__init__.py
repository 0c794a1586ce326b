"""Files as a sink: change logs as Parquet or JSON files below a path."""
