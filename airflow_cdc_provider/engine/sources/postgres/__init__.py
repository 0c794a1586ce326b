"""Tables of Postgres as a source: their definitions, their snapshot, their slot, and the stream of their changes."""
