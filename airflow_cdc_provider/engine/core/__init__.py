"""The vocabulary of the engine as plain data: errors, LSNs, tables, chunks, row changes, effects and records."""
