"""Delta Lake as a sink: tables that Spark writes, committed with the record's log."""
