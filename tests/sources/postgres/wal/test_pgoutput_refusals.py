"""Broken input of the decoder: refused with a named error, or decoded, and nothing else."""

from __future__ import annotations

import struct

import pytest

from airflow_cdc_provider.engine.core.errors import ProtocolError
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode, parse_relation
from airflow_cdc_provider.engine.sources.postgres.wal.wal_piece import OpenTransaction, Piece
from tests.sources.postgres.wal.pgoutput_messages import (
    NOTE,
    START,
    START_FULL,
    TABLE,
    UNCHANGED,
    begin,
    change,
    commit,
    insert,
    piece,
    truncate,
)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([b"S" + bytes(30)], ["message 0", "'S'", "protocol version 1"]),
        ([*START, change(b"I", 1, (b"N", ["1"]))], ["message 2", "public.t1", "1 values for 2 columns", "7"]),
        ([*START, b"I\0\0\0\1N\0\2t\0\0\0\1ab\0\0\0\1c"], ["'b'", "body", "public.t1", "0/10"]),
        ([*START, b"I\0\0\0\1N\0\2nx"], ["'x'", "body"]),
        ([*START, insert(1, ["1", "abc"])[:-1]], ["cut short", "3 bytes for body", "2 are left"]),
        ([*START, b"I\0\0\0\1N\0\2nt\xff\xff\xff\xff"], ["-1 bytes for body"]),
        ([*START, insert(1, ["1", "abc"])[:-8]], ["cut short", "body"]),
        ([*START, insert(1, ["1", "abc"]) + b"?"], ["1 bytes too many"]),
        ([*START, change(b"D", 1, (b"K", ["1", None])) + b"?"], ["1 bytes too many"]),
        ([*START, change(b"U", 1, (b"O", ["1", "N"]))], ["public.t1"]),
        ([*START, change(b"I", 1, (b"K", ["1", "a"]))], ["kind 'K'"]),
        ([*START, change(b"D", 1, (b"N", ["1", "a"]))], ["kind 'N'"]),
        ([*START, change(b"U", 1, (b"X", ["1", "a"]))], ["kind 'X'"]),
        ([*START_FULL, change(b"U", 1, (b"O", ["1", "a"]))], ["no new row"]),
        ([*START, change(b"U", 1, (b"K", ["1", None]), (b"O", ["1", "a"]))], ["no new row"]),
        ([*START_FULL, change(b"D", 1, (b"O", ["1", UNCHANGED]))], ["old value of body"]),
        ([*START, change(b"D", 1, (b"O", ["1", "a"]))], ["kind 'O'", "replica identity 'd'"]),
        ([*START_FULL, change(b"D", 1, (b"K", ["1", None]))], ["kind 'K'", "replica identity 'f'"]),
        ([*START, change(b"D", 1, (b"K", [None, None]))], ["message 2", "old key lacks id"]),
        ([*START, change(b"D", 1, (b"K", ["1", "a"]))], ["message 2", "old key has body"]),
        ([*START, commit(17)], ["message 2", "another transaction"]),
        ([*START, commit(16, 6)], ["message 2", "another transaction"]),
        ([*START, commit(16), begin(8, 16)], ["message 3", "does not come after"]),
        ([*START, commit(16) + b"?"], ["message 2", "bytes too many"]),
        ([*START, truncate(1)[:5] + b"\x04" + truncate(1)[6:]], ["message 2", "1 relations"]),
        ([begin(7, 16), insert(1, ["1", "a"])], ["message 1", "relation 1", "described"]),
        ([*START, truncate(1, 99)], ["message 2", "relation 99", "described"]),
        ([TABLE, insert(1, ["1", "a"])], ["message 1", "outside a transaction"]),
        ([TABLE, truncate(1)], ["message 1", "outside a transaction"]),
        ([*START, commit(16), insert(1, ["1", "a"])], ["message 3", "outside a transaction"]),
        ([commit(16)], ["message 0", "commits outside"]),
        ([*START, begin(8, 17)], ["message 2", "inside another"]),
        ([*START, truncate(1)[:-1]], ["message 2", "1 relations"]),
        ([*START, TABLE.replace(b"\0d\0", b"\0z\0")], ["b'z'"]),
        ([*START, TABLE.replace(b"body", b"bo\xffy")], ["Relation"]),
        ([*START, TABLE.replace(b"\0body", b"\2body")], ["Relation", "flags"]),
    ],
)
def test_refusals_name_what_is_wrong(messages: list[bytes], words: list[str]) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode(piece(messages))
    assert [word for word in words if word not in refused.value.message] == []
    assert refused.value.solution


@pytest.mark.parametrize(
    "body",
    [
        begin(8, 17),
        commit(16),
        TABLE,
        insert(1, ["1", "long enough not to be inlined"]),
        change(b"U", 1, (b"N", ["1", None])),
        change(b"U", 1, (b"K", ["1", None]), (b"N", ["2", UNCHANGED])),
        change(b"D", 1, (b"K", ["1", None])),
        truncate(1, 1),
    ],
    ids=lambda body: chr(body[0]),
)
@pytest.mark.parametrize("more", [[], [NOTE]], ids=["last", "followed"])
def test_every_shorter_message_is_refused(body: bytes, more: list[bytes]) -> None:
    before = [] if body[:1] == b"B" else [*START, insert(1, ["0", "a"])]
    decode(piece([*before, body, *more]))
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            decode(piece([*before, body[:length], *more]))


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ProtocolError, match="26 bytes, its data 27"):
        decode(Piece(commit(1) + b"?", struct.pack("<i", 26), (), OpenTransaction(1, 2, 3, 0)))
    with pytest.raises(ProtocolError, match="message 0 of the piece has -1 bytes"):
        decode(Piece(b"", struct.pack("<2i", -1, 1), (), None))


@pytest.mark.parametrize("body", [b"", b"R", TABLE[:20], TABLE + b"?", b"I" + TABLE[1:]])
def test_malformed_relations_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed Relation"):
        parse_relation(body)


def test_packed_pieces_that_are_damaged_are_refused() -> None:
    packed = Piece(b"data", b"len!", (TABLE, b"R2"), OpenTransaction(2**32 - 1, 2**62, -5, 3)).to_bytes()
    for damaged in (*(packed[:length] for length in range(len(packed))), packed + b"?", b"\xff" * 100):
        with pytest.raises(ProtocolError):
            Piece.from_bytes(damaged)
