"""A Postgres server: connections, errors, locks, privileges, slots, and its text format of values."""
