"""A Postgres server: connections, errors, locks, privileges, slots, and how it writes values as text."""
