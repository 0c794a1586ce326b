"""Questions and answers between processes of one machine: in memory that both map, or through the socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.sockets import Answering, ask, meeting_place


@pytest.fixture
def place() -> Iterator[str]:
    with meeting_place() as directory:
        yield directory


@pytest.mark.parametrize("mapped", [True, False])
def test_answers_of_any_size_come_whole(place: str, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not mapped:
        monkeypatch.delattr(os, "memfd_create")
    large = os.urandom(5 << 20)
    answers = {b"nothing": [], b"empty": [b"", b""], b"parts": [b"one ", memoryview(b"two"), bytearray(b"!")]}
    with closing(Answering(place, "test", lambda question: answers.get(bytes(question), [large, question]))):
        before = len(os.listdir("/proc/self/fd"))
        for question, answer in answers.items():
            assert ask(place, "test", question) == b"".join(map(bytes, answer))
        found = ask(place, "test", b"large")
        assert found == large + b"large"
        assert ask(place, "test") == large
        assert len(os.listdir("/proc/self/fd")) == before + mapped  # the one that is still held
    assert found == large + b"large"  # it stays with whoever has it


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("mapped", [True, False])
def test_who_cannot_be_answered_is_refused(place: str, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not mapped:
        monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="No such file"):
        ask(place, "test")

    def fail(question: bytearray) -> list[bytes]:
        raise RuntimeError("no")

    with closing(Answering(place, "test", fail)), pytest.raises(OSError, match=r"no answer came|did not come"):
        ask(place, "test")


def test_who_hangs_up_leaves_the_others_their_answers(place: str) -> None:
    with closing(Answering(place, "test", lambda question: [question])):
        for sent in (b"", b"\x05\0", b"\x05" + bytes(7) + b"he"):
            with closing(socket.socket(socket.AF_UNIX)) as client:
                client.connect(str(Path(place) / "test"))
                with suppress(OSError):
                    client.sendall(sent)
        assert ask(place, "test", b"hello") == b"hello"
