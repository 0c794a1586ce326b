"""Two sides of a table, and how they differ."""
