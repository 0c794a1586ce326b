"""Delta Lake as a sink: tables written by Spark, committed together with an entry of the log."""
