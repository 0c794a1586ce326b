"""How messages are written: JSON, Avro, and the events of Debezium."""
