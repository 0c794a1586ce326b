"""Links from a task to the page of its pipeline and to Spark's pages."""
