"""The page CDC: its endpoints over the state, and its scripts, which need no build."""
