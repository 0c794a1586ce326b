"""A Spark session, its JVM, and its Python processes."""
