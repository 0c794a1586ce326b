"""MySQL and MariaDB as a sink."""
