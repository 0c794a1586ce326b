"""A Spark session with its JVM and its Python processes."""
