"""A run of a pipeline in its own process, without Spark: it can be killed, and starts quickly.

Provisioning, chunk tasks, slot reader, staging and commits are the engine's own. The work that Spark would distribute
runs here one task after the other. Processes are forked from a server that has imported all modules, so that a test can
afford hundreds of them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sinks.mysql import session as mysql_session
from airflow_cdc_provider.engine.sinks.postgres import fence
from airflow_cdc_provider.engine.sources.postgres.provision import provision_lock
from airflow_cdc_provider.engine.sources.postgres.reading import reread_requests
from tests.support.engine_parts import apply_stream, copy_chunk_of
from tests.support.patience import SECONDS

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.sparkless"])

DONE, FAILED = 0, 1


class SparklessRun:
    """``airflow-cdc run`` without Spark: provisions, copies missing chunks, re-reads requested tables, and catches up.

    :param failpoint: ``name:action`` that is armed in the process.
    :param reread: tables to re-read before the stream.
    :param asked: tables that the stream is asked to re-read.
    """

    def __init__(
        self,
        file: Path,
        failpoint: str | None = None,
        reread: Sequence[str] = (),
        takeover: bool = False,
        asked: Sequence[str] = (),
    ) -> None:
        self._log = file.with_name(f"run{len(list(file.parent.glob('run*[0-9]')))}")
        self._log.touch()
        self._stacks = _stacks_of(str(self._log))
        arguments = (str(file), failpoint, tuple(reread), takeover, tuple(asked), str(self._log))
        self.process: BaseProcess = _context.Process(target=_main, args=arguments, daemon=True)
        self.process.start()

    def wait(self) -> int:
        """Wait for its end and return the exit code, which is negative for the signal that killed it."""
        self.process.join(2 * SECONDS)
        assert self.process.exitcode is not None, f"the run did not end:\n{self._where()}"
        return self.process.exitcode

    def _where(self) -> str:
        """Return the current stacks of its threads."""
        if not self._stacks.exists() or self.process.pid is None:
            return "it has not begun"
        status = psutil.Process(self.process.pid).status()
        os.kill(self.process.pid, signal.SIGUSR1)
        await_condition(lambda: self._stacks.stat().st_size > 0, seconds=10)
        return f"it is {status}\n{self._stacks.read_text(encoding='utf-8')}"

    @property
    def message(self) -> str:
        """Return the message of the error that ended it, if it could leave one."""
        return self._log.read_text(encoding="utf-8")

    def await_pause(self) -> None:
        """Wait until a failpoint has halted it."""
        assert self.process.pid is not None
        process = psutil.Process(self.process.pid)
        assert await_condition(lambda: process.status() == psutil.STATUS_STOPPED, SECONDS), "it was not paused"

    def resume(self) -> None:
        """Continue after a halt."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


def _main(
    file: str, failpoint: str | None, reread: Sequence[str], takeover: bool, asked: Sequence[str], log: str
) -> None:
    faulthandler.register(signal.SIGUSR1, os.open(_stacks_of(log), os.O_WRONLY | os.O_CREAT))
    # The time that others are waited for determines the duration of a test of a halted run.
    fence.COMMIT_SECONDS = mysql_session.COMMIT_SECONDS = provision_lock._WAIT_SECONDS = 0.5
    if failpoint is not None:
        os.environ[VARIABLE] = failpoint
    try:
        _run(Pipeline.load(Path(file)), reread, takeover, asked)
    except CdcError as e:
        _end(log, f"{e.kind}: {e}")
    except DRIVER_ERRORS as e:  # as in the command line
        _end(log, f"{driver_failure(e, 'run')}")
    except BaseException:
        _end(log, traceback.format_exc())
    os._exit(DONE)


def _stacks_of(log: str) -> Path:
    """Return the file to which a run writes the stacks of its threads when it receives a signal."""
    return Path(f"{log}.stacks")


def _end(log: str, message: str) -> None:
    """Leave a message and exit at once, so that everything that a failpoint has left open stays open."""
    Path(log).write_text(message, encoding="utf-8")
    os._exit(FAILED)


def _run(pipeline: Pipeline, reread: Sequence[str], takeover: bool, asked: Sequence[str]) -> None:
    epoch = int(commands.provision(pipeline, takeover)["epoch"])
    with run_part(pipeline, "snapshot-0", epoch, takeover):
        for branch in pipeline.branches:
            for chunk in existing_record(branch).unfinished:
                copied = copy_chunk_of(branch, chunk, epoch)
                if isinstance(copied, CdcError):
                    raise copied
    if reread:
        commands.resnapshot(pipeline, tables=reread, takeover=takeover)
    for label in asked:
        reread_requests.request(pipeline, [label], None)
    with connected(pipeline.source.dsn, settings={"synchronous_commit": "local"}) as source:
        marker = emit_marker(source, "caught-up")
    apply_stream(pipeline, max(marker, existing_record(pipeline).high), takeover)
