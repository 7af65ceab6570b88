"""An Optuna storage with retries, whose password never appears in messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote, quote_plus, unquote

Result = TypeVar("Result")
Args = ParamSpec("Args")

#: Seconds to retry during a search; a database server restarts in less.
TIMEOUT = 120.0
#: Seconds to retry when opening. Longer would only hide a wrong address; two workers that both create the tables of a
#: new database need less.
_OPEN_TIMEOUT = 10.0
#: First and longest pause between tries, in seconds. Far below the heartbeat timeout: a trial whose creation was
#: not acknowledged sends no heartbeat until the next try finds it.
_PAUSE, _LONGEST_PAUSE = 0.25, 1.0
#: Seconds to wait for a lock on the SQLite file.
_SQLITE_TIMEOUT = 60.0


class StorageError(Exception):
    """The storage cannot be opened or stopped responding. The message says what to do."""


def missing_packages(address: str | None) -> str:
    """One line that names missing packages and how to install them; empty if there are none."""
    needed = {"optuna": "Optuna"}
    if address is not None and address.startswith("postgres"):
        needed["psycopg"] = "psycopg"
    missing = [title for module, title in needed.items() if find_spec(module) is None]
    return f"aida search needs {' and '.join(missing)}: pip install '.[search]' in a clone" if missing else ""


class Storage:
    """An Optuna storage at an address: an SQLite file or a PostgreSQL server.

    Failed operations are retried. The first try may have succeeded with only its reply lost, so operations must be
    safe to repeat.
    """

    def __init__(
        self,
        address: str,
        timeout: float = TIMEOUT,
        note: Callable[[str], None] = lambda text: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        import optuna
        import sqlalchemy

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        url = _url(address)
        #: For messages: without the password and without the query, which may contain one.
        self.title = url.set(query={}).render_as_string(hide_password=True)
        self._secrets = _secrets(url)
        self._errors = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.DBAPIError)
        self._timeout, self._note, self._cancelled = timeout, note, cancelled
        try:
            self.rdb = self._retry(partial(_connect, url), min(timeout, _OPEN_TIMEOUT))
        except (*self._errors, sqlalchemy.exc.SQLAlchemyError, ImportError, OSError, ValueError, RuntimeError) as error:
            raise StorageError(f"{self.title} cannot be used: {self._message(error)}") from error

    def retry(self, operation: Callable[Args, Result], *args: Args.args, **named: Args.kwargs) -> Result:
        """Return the result of ``operation``, with retries. Raises StorageError after the timeout."""
        try:
            return self._retry(partial(operation, *args, **named), self._timeout)
        except self._errors as error:
            raise StorageError(
                f"{self.title} stopped responding: {self._message(error)}. Nothing is lost: trained runs are saved; "
                "run the same command again when the storage is back"
            ) from error

    def try_once(self, operation: Callable[Args, Result], *args: Args.args, **named: Args.kwargs) -> Result | None:
        """Return the result of ``operation``, or None if the storage fails."""
        with suppress(*self._errors):
            return operation(*args, **named)
        return None

    def _retry(self, operation: Callable[[], Result], timeout: float) -> Result:
        end, pause = time.monotonic() + timeout, _PAUSE
        while True:
            try:
                return operation()
            except self._errors as error:  # noqa: PERF203 - the loop retries
                if time.monotonic() > end or self._cancelled():
                    raise
                if pause == _PAUSE:
                    self._note(f"{self.title}: {self._message(error)}; retrying for {timeout:g} s")
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        self.rdb.remove_session()
        self.rdb.engine.dispose()

    def _message(self, error: BaseException) -> str:
        """The first line of the database's own error, without passwords."""
        cause = error.__cause__ or error
        lines = str(getattr(cause, "orig", None) or cause).strip().splitlines()
        line = lines[0].rstrip(".") if lines else type(cause).__name__
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return line


def sqlite_in(out: Path) -> str:
    """The address of the SQLite storage in the folder of the runs, which may have any name."""
    import sqlalchemy

    path, query = str(out / "search.db"), {}
    if "?" in path:  # would start the query of the address; the URI form of SQLite allows it
        path, query = f"file:{quote(path)}", {"uri": "true"}
    return sqlalchemy.URL.create("sqlite", database=path, query=query).render_as_string()


def _url(address: str) -> Any:
    """Parse the address. PostgreSQL without a driver gets the one that the extra ``search`` installs."""
    import sqlalchemy

    try:
        url = sqlalchemy.make_url(address)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        url = None
    if url is None or (url.get_backend_name() != "sqlite" and _may_leak(address, url)):
        raise StorageError(
            "--storage is not a valid address (not shown, because it may contain a password); use "
            "postgresql://USER@HOST/DATABASE or sqlite:///FILE, and write @, / or ? in a password as %40, %2F or %3F"
        )
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    return url


def _may_leak(address: str, url: Any) -> bool:
    """Whether part of a password may have been parsed as the name of the user, the host or the database."""
    names = f"{url.username}{url.host}{url.database}"
    return "@" in names or "=" in names or "?" in address.rpartition("@")[0]


def _secrets(url: Any) -> set[str]:
    """Passwords that must not be printed, plain and URL-encoded."""
    hidden = {url.password or "", *(str(value) for name, value in url.query.items() if "pass" in name.lower())}
    return {form for each in hidden - {""} for form in (each, quote(each, safe=""), quote_plus(each))}


def _connect(url: Any) -> Any:
    import optuna

    # pre-ping: the server may have restarted since a pooled connection was opened
    settings: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_backend_name() == "sqlite":
        if url.database:
            file = unquote(url.database.removeprefix("file:")) if "uri" in url.query else url.database
            Path(file).parent.mkdir(parents=True, exist_ok=True)
        settings["connect_args"] = {"timeout": _SQLITE_TIMEOUT}
    elif url.get_driver_name() == "psycopg":
        # keep-alives, because TCP alone notices a lost server only after hours
        settings["connect_args"] = {"connect_timeout": 10, "keepalives_idle": 30, "tcp_user_timeout": 30_000}
    # Optuna formats the address as a template, and a password may contain braces
    escaped = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    rdb = optuna.storages.RDBStorage(escaped, engine_kwargs=settings)
    if url.get_backend_name() == "sqlite":
        _lock_on_begin(rdb.engine)
    return rdb


def _lock_on_begin(engine: Any) -> None:
    """Lock the SQLite file at the start of every transaction.

    Python's sqlite3 begins a transaction only before the first write. Another process could change the state of a trial
    between a read and that write, and both processes would believe that they had set it.
    """
    from sqlalchemy import event

    engine.dispose()  # existing connections would keep the old behaviour

    @event.listens_for(engine, "connect")
    def disable_implicit_begin(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
