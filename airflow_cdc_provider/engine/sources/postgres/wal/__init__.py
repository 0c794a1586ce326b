"""The log of changes: read from the slot, cut into pieces that end at commits, decoded."""
