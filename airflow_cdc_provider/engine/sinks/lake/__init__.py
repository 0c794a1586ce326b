"""What sinks share whose store is files: paths, storage, and a log of entries."""
