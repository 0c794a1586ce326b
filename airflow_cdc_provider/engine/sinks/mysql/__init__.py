"""The MySQL and MariaDB sink; see :mod:`.sink`."""
