"""The page CDC: its endpoints that serve the state, and its scripts, which need no build."""
