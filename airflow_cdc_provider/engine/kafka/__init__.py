"""A Kafka cluster: addresses, client, message ranges, schema registry."""
