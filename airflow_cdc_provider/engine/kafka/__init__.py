"""What the Kafka sink and topics as a source have in common: how a cluster is named, and how it is talked to."""
