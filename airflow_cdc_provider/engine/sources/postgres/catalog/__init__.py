"""Which tables a pipeline captures, how they are defined, and how the publication offers them."""
