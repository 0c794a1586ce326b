"""What row changes do to a target: filter by snapshots, collapse by key, count, and tell what a schema change means."""
