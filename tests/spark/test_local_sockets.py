"""Requests and answers between local processes: in shared memory, or through the socket."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.spark.local_sockets import Answering, ask, socket_directory


@pytest.fixture
def place() -> Iterator[str]:
    with socket_directory() as directory:
        assert Path(directory).stat().st_mode & 0o777 == 0o700
        yield directory
    assert not Path(directory).exists()


@pytest.fixture(params=["mapped", "not known", "not allowed"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Provide anonymous memory or disable it, and return whether the system has it."""

    def refuse(_: str) -> int:
        raise PermissionError("not allowed")

    if request.param == "not known":
        monkeypatch.delattr(os, "memfd_create")
    elif request.param == "not allowed":
        monkeypatch.setattr(os, "memfd_create", refuse)
    return bool(request.param == "mapped")


def mapped() -> int:
    """Return the number of open files of such memory in this process; other threads may close theirs meanwhile."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += "memfd:airflow-cdc" in os.readlink(link)
    return found


def test_answers_of_any_size_come_whole(place: str, memory: bool) -> None:
    large = os.urandom(5 << 20)
    answers = {b"nothing": [], b"empty": [b"", b""], b"parts": [b"one ", memoryview(b"two"), bytearray(b"!")]}
    with closing(Answering(place, "test", lambda question: answers.get(bytes(question), [large, question]))):
        for question, answer in answers.items():
            assert ask(place, "test", question) == b"".join(map(bytes, answer))
        for question in (b"", b"large", large):
            found = ask(place, "test", question)
            assert found == large + question
    assert mapped() == memory  # its owner keeps the last answer
    assert found == large + large
    with pytest.raises(OSError, match="Errno"):
        ask(place, "test", b"after the end")


def test_an_answer_that_fails_leaves_nobody_waiting(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: failed.append(arguments.exc_value))

    def answer(_: bytearray) -> list[bytes]:
        raise ValueError("not known")

    with closing(Answering(place, "failing", answer)):
        with pytest.raises(ConnectionError):
            ask(place, "failing")
        assert await_condition(lambda: bool(failed), 30.0)
        with pytest.raises(OSError, match="Errno"):
            ask(place, "failing")
    assert [str(error) for error in failed] == ["not known"]


@pytest.mark.parametrize("sent", [b"", b"\x05\0", b"\x05" + bytes(7) + b"he", bytes(8)])
def test_who_hangs_up_leaves_the_others_their_answers(place: str, sent: bytes, memory: bool) -> None:
    gone = threading.Event()

    def answer(question: bytearray) -> list[bytes]:
        assert gone.wait(30.0)
        return [question, b"!" * (1 << 20)]

    with closing(Answering(place, "test", answer)):
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(str(Path(place) / "test"))
            client.sendall(sent)
        gone.set()
        assert ask(place, "test", b"hello") == b"hello" + b"!" * (1 << 20)
    assert mapped() == 0


def test_a_reader_ends_after_a_driver_that_has_removed_the_directory() -> None:
    with socket_directory() as directory:
        answering = Answering(directory, "test", lambda question: [question])
        assert ask(directory, "test", b"hello") == b"hello"
    ending = threading.Thread(target=answering.close, daemon=True)
    ending.start()
    ending.join(30.0)
    assert not ending.is_alive()
