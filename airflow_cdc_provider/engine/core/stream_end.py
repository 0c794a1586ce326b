"""Parses and formats the end of a stream as users write it."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn

CAUGHT_UP, FOREVER = "caught up", "forever"
# "stopped" is the former name of "forever".
_WORDS = {"caught-up": CAUGHT_UP, "forever": FOREVER, "stopped": FOREVER}


@dataclass(frozen=True)
class Ending:
    """The end of a stream; without parameters the stream runs until it is stopped.

    :param caught_up: whether it ends once everything that had been committed when it began is in the sink.
    :param lsn: the position, or unit, at which it ends.
    """

    caught_up: bool = False
    lsn: LogPosition | None = None

    @classmethod
    def parse(cls, text: str) -> Ending:
        """Parse an ending.

        :param text: ``caught up`` or ``forever``, also with ``-`` or ``_`` for the space; or ``X/Y`` or ``lsn:X/Y``.
        :raises ConfigError: if it is none of these.
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
