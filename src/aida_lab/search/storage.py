"""Where searches are kept: an Optuna storage that is opened, asked with patience, and named without its password."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus, unquote

Result = TypeVar("Result")

#: Seconds that a storage may stay away during a search: a database server restarts in less.
PATIENCE = 120.0
#: Seconds at the start: longer waiting would only hide a wrong address. Two workers that both make the tables of
#: a new database are behind one another by then.
_AT_FIRST = 10.0
#: Seconds between two tries: the first, and the longest. Well under a worker's grace: a trial whose making went
#: unanswered is not beaten for until the next try finds it.
_PAUSE, _LONGEST_PAUSE = 0.25, 1.0
#: Seconds to wait for another process that writes to the same SQLite file.
_SQLITE_TIMEOUT = 60.0


class StorageError(Exception):
    """The storage cannot be used, or not any more; the message says what to do."""


def missing_packages(address: str | None) -> str:
    """What a search needs and is not installed, in one line with the way out; empty where all is there."""
    needed = {"optuna": "Optuna"}
    if address is not None and address.startswith("postgres"):
        needed["psycopg"] = "psycopg"
    missing = [title for module, title in needed.items() if find_spec(module) is None]
    return f"aida search needs {' and '.join(missing)}: pip install '.[search]' in a clone" if missing else ""


class Storage:
    """An Optuna storage by its address: SQLite's file or a PostgreSQL server.

    An operation that meets trouble is tried again for a while. It may then have been carried out before, with only
    the answer lost: whoever asks must see to it that a second time does no harm.
    """

    def __init__(
        self,
        address: str,
        patience: float = PATIENCE,
        note: Callable[[str], None] = lambda text: None,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        import optuna
        import sqlalchemy

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        url = _url(address)
        #: For people: without its password, and without a query, which may hold one.
        self.title = url.set(query={}).render_as_string(hide_password=True)
        self._secrets = _secrets(url)
        self._trouble = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.DBAPIError)
        self._patience, self._note, self._hurried = patience, note, hurried
        try:
            self.rdb = self._persist(lambda: _connected(address), min(patience, _AT_FIRST))
        except (
            *self._trouble,
            sqlalchemy.exc.SQLAlchemyError,
            ImportError,
            OSError,
            ValueError,
            RuntimeError,
        ) as error:
            raise StorageError(f"{self.title} cannot be used: {self._said(error)}") from error

    def ask(self, operation: Callable[[], Result]) -> Result:
        """What ``operation`` returns, as soon as the storage answers; StorageError when it stays away too long."""
        try:
            return self._persist(operation, self._patience)
        except self._trouble as error:
            raise StorageError(
                f"{self.title} does not answer any more: {self._said(error)}. Nothing is lost: what was trained is "
                "saved, and the same command goes on when the storage is back"
            ) from error

    def try_once(self, operation: Callable[[], Result]) -> Result | None:
        """What ``operation`` returns; None where there is trouble, for what can as well be done later."""
        with suppress(*self._trouble):
            return operation()
        return None

    def _persist(self, operation: Callable[[], Result], patience: float) -> Result:
        end, pause = time.monotonic() + patience, _PAUSE
        while True:
            try:
                return operation()
            except self._trouble as error:  # noqa: PERF203 - it is what the loop is for
                if time.monotonic() > end or self._hurried():
                    raise
                if pause == _PAUSE:
                    self._note(f"{self.title}: {self._said(error)}; trying again for {patience:g} s")
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        self.rdb.remove_session()
        self.rdb.engine.dispose()

    def _said(self, error: BaseException) -> str:
        """What the database said, not what Optuna and SQLAlchemy say around it, in one line without a password."""
        cause = error.__cause__ or error
        said = str(getattr(cause, "orig", None) or cause).strip().splitlines()
        line = said[0].rstrip(".") if said else type(cause).__name__
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return line


def sqlite_in(out: Path) -> str:
    """The address of the storage that lies with the runs, whatever characters the folder's name has."""
    import sqlalchemy

    path, query = str(out / "search.db"), {}
    if "?" in path:  # where an address has its query; SQLite's own form of an address knows a way
        path, query = f"file:{quote(path)}", {"uri": "true"}
    return sqlalchemy.URL.create("sqlite", database=path, query=query).render_as_string()


def _url(address: str) -> Any:
    """The address, with the driver that the extra ``search`` installs where it names none."""
    import sqlalchemy

    try:
        url = sqlalchemy.make_url(address)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        url = None
    if url is None or (url.get_backend_name() != "sqlite" and _is_torn(address, url)):
        raise StorageError(
            "--storage is no address (it is not shown, for it may hold a password); write it as "
            "postgresql://USER@HOST/DATABASE or sqlite:///FILE, and an @, / or ? of a password as %40, %2F or %3F"
        )
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    return url


def _is_torn(address: str, url: Any) -> bool:
    """Whether a password, or a part of one, may have become a name: of the user, the host or the database."""
    names = f"{url.username}{url.host}{url.database}"
    return "@" in names or "=" in names or "?" in address.rpartition("@")[0]


def _secrets(url: Any) -> set[str]:
    """What must not be printed, as it is and as an address has it."""
    hidden = {url.password or "", *(str(value) for name, value in url.query.items() if "pass" in name.lower())}
    return {form for each in hidden - {""} for form in (each, quote(each, safe=""), quote_plus(each))}


def _connected(address: str) -> Any:
    import optuna

    url = _url(address)
    settings: dict[str, Any] = {"pool_pre_ping": True}  # a pooled connection may be older than the server
    if url.get_backend_name() == "sqlite":
        if url.database:
            file = unquote(url.database.removeprefix("file:")) if "uri" in url.query else url.database
            Path(file).parent.mkdir(parents=True, exist_ok=True)
        settings["connect_args"] = {"timeout": _SQLITE_TIMEOUT}
    elif url.get_driver_name() == "psycopg":
        # keep-alives: a machine that vanished must not be waited for until TCP gives up, hours later
        settings["connect_args"] = {"connect_timeout": 10, "keepalives_idle": 30, "tcp_user_timeout": 30_000}
    rdb = optuna.storages.RDBStorage(_braced(url.render_as_string(hide_password=False)), engine_kwargs=settings)
    if url.get_backend_name() == "sqlite":
        _write_locked(rdb.engine)
    return rdb


def _braced(address: str) -> str:
    """Optuna fills the address as a template; a password may have braces."""
    return address.replace("{", "{{").replace("}", "}}")


def _write_locked(engine: Any) -> None:
    """Every transaction has the file for itself from its beginning.

    Python's sqlite3 begins one only before the first change: what was read before it, the state of a trial say,
    may then be another's by the time it is written, and both would believe to have set it.
    """
    from sqlalchemy import event

    engine.dispose()  # connections of before would have the old manner

    @event.listens_for(engine, "connect")
    def leave_transactions_to_us(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
