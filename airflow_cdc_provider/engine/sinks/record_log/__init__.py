"""What sinks share whose store has no transactions: a commit record that is a log of entries."""
