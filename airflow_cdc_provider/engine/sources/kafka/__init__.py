"""Kafka topics as a source: a Spark SQL query turns messages into rows, and rows into units of a sink."""
