"""Keys that move between chunks, into and out of what was read, and within one transaction."""

from __future__ import annotations

from typing import Any

import pytest

from tests.protocol.races.scene import Make, Mode, events
from tests.support.databases import transaction

pytestmark = pytest.mark.slow

MOVES: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[tuple[Any, ...]]]] = {
    # Neither chunk has the row, and the new half of the event lacks the value that has not changed.
    "from an unread chunk to a read one": ((1,), (0,), [("i", 105, None, ["big"])]),
    # Both chunks have the row, at its old key and at its new key.
    "from a read chunk to an unread one": ((0,), (1,), [("d", 5, 5, None)]),
    "between read chunks": ((0, 1), (), [("u", 105, 5, ["big"])]),
    "between unread chunks": ((), (0, 1), []),
}


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_a_key_that_moves(
    make_pipeline: Make, mode: Mode, move: tuple[tuple[int, ...], tuple[int, ...], list[tuple[Any, ...]]]
) -> None:
    before, after, expected = move
    pipeline = make_pipeline(mode=mode)
    pipeline.provision()
    if before:
        pipeline.copy(*before)
    pipeline.source("UPDATE public.t SET id = 105 WHERE id = 5")
    if after:
        pipeline.copy(*after)
    # A change of the moved row that passes every filter.
    pipeline.source("UPDATE public.t SET body = 'moved' WHERE id = 105")
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
        big = pipeline.target_rows("SELECT length(big) FROM public.t WHERE id = 105")
        assert big == [(260 * 32,)]
    else:
        assert events(pipeline) == [*expected, ("u", 105, None, ["big"])]
        copied = pipeline.target_rows("SELECT id FROM public.t WHERE _op = 'r' ORDER BY 1")
        assert len(copied) == len(set(copied)) == sum(chunk.rows for chunk in pipeline.record.chunks)
    # The same again after the filter is closed.
    pipeline.source("UPDATE public.t SET id = 205 WHERE id = 105", "UPDATE public.t SET body = 'on' WHERE id = 205")
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
    else:
        assert events(pipeline)[-2:] == [("u", 205, 105, ["big"]), ("u", 205, None, ["big"])]


def test_keys_within_one_transaction(make_pipeline: Make) -> None:
    """Two keys are swapped via a third, keys move in a chain, and a row is deleted and returns, with big values."""
    pipeline = make_pipeline()
    pipeline.provision()
    pipeline.copy(1)
    with transaction(
        pipeline.databases.source,
        "UPDATE public.t SET id = -1 WHERE id = 3",
        "UPDATE public.t SET id = 3 WHERE id = 13",
        "UPDATE public.t SET id = 13 WHERE id = -1",
        "DELETE FROM public.t WHERE id = 4",
        "INSERT INTO public.t VALUES (4, 'returned', 'small')",
        "UPDATE public.t SET id = id + 1000 WHERE id >= 15",
        "DELETE FROM public.t WHERE id <= 10 AND id > 4",
        "UPDATE public.t SET id = id - 1010, body = 'shifted' WHERE id > 1015",
    ) as shuffle:
        pipeline.copy(0)
        shuffle.commit()
    pipeline.apply()
    pipeline.assert_equal()
    with transaction(
        pipeline.databases.source,
        "UPDATE public.t SET id = -1 WHERE id = 3",
        "UPDATE public.t SET id = 3 WHERE id = 13",
        "UPDATE public.t SET id = 13 WHERE id = -1",
        "DELETE FROM public.t WHERE id = 13",
        "INSERT INTO public.t SELECT 13, body, big FROM public.t WHERE id = 3",
    ) as shuffle:
        shuffle.commit()
    pipeline.apply()
    pipeline.assert_equal()
