"""Recorded output of other programs, with the programs that produced it."""
