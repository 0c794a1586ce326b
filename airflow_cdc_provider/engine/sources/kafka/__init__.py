"""Topics of Kafka as a source: messages become rows by a query of Spark SQL, and rows units of a sink."""
