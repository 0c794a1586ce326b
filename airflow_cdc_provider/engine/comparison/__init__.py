"""The comparison of a source table with its copy."""
