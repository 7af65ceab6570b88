"""A real PostgreSQL server for the tests: its own data in a temporary folder, a free port, gone at the end."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

#: Debian keeps the server out of PATH.
_PLACES = "/usr/lib/postgresql/*/bin"
_HOW_TO_GET_IT = "apt-get install postgresql, or have the folder of its programs postgres and initdb on PATH"


def programs() -> Path | None:
    """The folder of the server's programs; None where there is none."""
    on_path = shutil.which("initdb")
    places = [Path(on_path).resolve().parent] if on_path else sorted(Path("/").glob(_PLACES[1:]), reverse=True)
    return next((place for place in places if (place / "postgres").exists()), None)


class Server:
    """One server; it can be restarted at its port."""

    def __init__(self, programs: Path, folder: Path, user: str | None) -> None:
        self._programs, self._folder, self._user = programs, folder, user
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        make = [programs / "initdb", "-D", folder / "data", "-U", "aida", "-A", "trust", "-E", "UTF8", "--locale=C"]
        made = subprocess.run([*make, "--no-sync"], **self._as_user(), capture_output=True, text=True)
        assert made.returncode == 0, made.stderr

    @property
    def address(self) -> str:
        return f"postgresql://aida@127.0.0.1:{self.port}/postgres"

    def database(self, name: str) -> str:
        """The address of a new, empty database."""
        import psycopg

        with psycopg.connect(self.address, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.address.removesuffix("postgres") + name

    def start(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "shared_buffers": "16MB",
            "max_connections": "40",
        }
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), "-p", str(self.port)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, **self._as_user(), stdout=log, stderr=log)
        self._wait_until_it_answers()

    def stop(self) -> None:
        """Fast: whoever is connected is cut off."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(30)
            self._process = None

    def _wait_until_it_answers(self) -> None:
        import psycopg

        end = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(self.address, connect_timeout=5).close()
                return
            except psycopg.OperationalError:  # noqa: PERF203 - it is what the loop is for
                said = (self._folder / "log").read_text()
                assert self._process is not None
                assert self._process.poll() is None, said
                assert time.monotonic() < end, said
                time.sleep(0.05)

    def _as_user(self) -> dict[str, object]:
        if self._user is None:
            return {}
        # a folder to be in that this user may enter
        return {
            "cwd": self._folder,
            "user": self._user,
            "group": pwd.getpwnam(self._user).pw_gid,
            "extra_groups": (),
        }


@contextmanager
def server() -> Iterator[Server]:
    """A server that runs. Where none is installed the test is left out; in CI that is a failure."""
    found = programs()
    if found is None:
        said = f"no PostgreSQL server is installed: {_HOW_TO_GET_IT}"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(said)
    # not in pytest's own folder, which is closed to others: a server refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="aida-postgres-"))
    user = "nobody" if os.geteuid() == 0 else None
    if user:
        shutil.chown(folder, user)
    started = None
    try:
        started = Server(found, folder, user)
        started.start()
        yield started
    finally:
        if started is not None:
            started.stop()
        shutil.rmtree(folder, ignore_errors=True)
