"""What sinks share whose store has files and no transactions."""
