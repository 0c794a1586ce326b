"""Files as a sink: changelogs as Parquet or JSON files below a path."""
