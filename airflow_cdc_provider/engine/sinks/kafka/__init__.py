"""Kafka as a sink: changes as messages; each unit is written to all topics in one transaction."""
