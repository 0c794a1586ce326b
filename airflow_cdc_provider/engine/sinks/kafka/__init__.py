"""Kafka as a sink: changes as messages, each unit in all topics in one transaction."""
