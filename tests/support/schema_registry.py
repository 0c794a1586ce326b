"""A schema registry with Confluent's API: Apicurio's, from Maven Central, in its own process."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.jars import HOME
from local_servers.process import end_guard, find_free_port, start_guard

ARTIFACT = "io.apicurio:apicurio-registry-app:3.0.9:tar.gz:all"
SHA256 = "2b28181501a20cbf6efcd77f9b7153908fc01f3d3a7c32024c0bd9e1b04c8a43"
SECONDS = 90.0


@contextmanager
def registry_at(directory: Path) -> Iterator[str]:
    """Run an empty registry as long as it is used.

    :param directory: directory for its log.
    :returns: its URL.
    """
    home, port = _installed(), find_free_port()
    java = Path(os.environ["JAVA_HOME"]) / "bin" / "java" if "JAVA_HOME" in os.environ else "java"
    settings = {
        "quarkus.http.host": "127.0.0.1",
        "quarkus.http.port": str(port),
        "quarkus.datasource.jdbc.url": f"jdbc:h2:mem:registry{port}",
    }
    options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    with (directory / "registry.log").open("ab") as log:
        process = subprocess.Popen(
            [
                str(java),
                *options,
                *(f"-D{k}={v}" for k, v in settings.items()),
                "-jar",
                next(home.glob("*-runner.jar")).name,
            ],
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    guard = start_guard(process.pid, signals=("TERM", "KILL"))
    url = f"http://127.0.0.1:{port}/apis/ccompat/v7"

    def answers() -> bool:
        assert process.poll() is None, (directory / "registry.log").read_text()[-3000:]
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/subjects", timeout=5):
            return True
        return False

    try:
        assert await_condition(answers, SECONDS), (directory / "registry.log").read_text()[-3000:]
        yield url
    finally:
        process.kill()
        process.wait()
        end_guard(guard)


def _installed() -> Path:
    """Return the folder into which it is unpacked, once."""
    home = HOME / "registry"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "fetching").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        app = home / "app"
        if not app.exists():
            if shutil.which("mvn") is None:
                pytest.skip("no mvn to fetch a schema registry with (on Debian: apt-get install maven)")
            fetched = subprocess.run(
                ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={ARTIFACT}", f"-DoutputDirectory={home}"],
                capture_output=True,
                text=True,
                check=False,
            )
            if fetched.returncode != 0:
                pytest.skip(f"{ARTIFACT} cannot be fetched: {fetched.stdout[-400:]}")
            (archive,) = home.glob("*.tar.gz")
            if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
                archive.unlink()
                pytest.fail(f"{ARTIFACT} is not the file whose sum is known here")
            unpacked = home / "unpacking"
            shutil.rmtree(unpacked, ignore_errors=True)
            with tarfile.open(archive) as file:
                file.extractall(unpacked, filter="data")
            archive.unlink()
            unpacked.rename(app)
    return app
