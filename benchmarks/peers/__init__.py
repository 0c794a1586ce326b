"""Other programs that read the same data, each checked as ours are."""
