"""Formats of messages: JSON, Avro, and Debezium's events."""
