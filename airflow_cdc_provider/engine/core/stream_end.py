"""Where a stream ends, in the words of users."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn

CAUGHT_UP, FOREVER = "caught up", "forever"
# "stopped" is what "forever" was called before.
_WORDS = {"caught-up": CAUGHT_UP, "forever": FOREVER, "stopped": FOREVER}


@dataclass(frozen=True)
class Ending:
    """Where a stream ends: with neither parameter when it is stopped.

    :param caught_up: once all that had been committed when it began is in the sink.
    :param lsn: at this position, or unit.
    """

    caught_up: bool = False
    lsn: LogPosition | None = None

    @classmethod
    def parse(cls, text: str) -> Ending:
        """Read an ending.

        :param text: ``caught up`` or ``forever``, also with ``-`` or ``_`` for the space; or ``X/Y`` or ``lsn:X/Y``.
        :raises ConfigError: when it is none of these.
        """
        word = _WORDS.get(text.strip().lower().replace("_", "-").replace(" ", "-"))
        if word is not None:
            return cls(caught_up=word == CAUGHT_UP)
        try:
            return cls(lsn=parse_lsn(text.removeprefix("lsn:")))
        except ValueError as e:
            raise ConfigError(
                f"--until {text!r} is not valid", "Give `forever`, `caught-up`, or an LSN such as `0/16B3748`."
            ) from e

    def __str__(self) -> str:
        """Return the argument of ``--until``, which has no space in it."""
        if self.lsn is not None:
            return f"lsn:{format_lsn(self.lsn)}"
        return "caught-up" if self.caught_up else FOREVER
