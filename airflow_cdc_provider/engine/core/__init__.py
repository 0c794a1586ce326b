"""The language of the engine: errors, LSNs, tables, chunks, row changes, effects and records, as plain data."""
