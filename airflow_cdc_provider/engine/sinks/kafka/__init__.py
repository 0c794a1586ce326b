"""The Kafka sink: changes of tables as messages, each unit in all topics at once, in one transaction."""
