"""Run folders as somebody else could hand them over: what was done to a good run, and what is said of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from odd_changes import (
    bind_socket,
    edit,
    emptied,
    linked,
    looped,
    moved,
    put,
    rehyper,
    rerow,
    respec,
    restep,
    revalue,
    session,
    sparse,
    without,
)  # fmt: skip
from report_fixture import spec, write_run, write_stepsizes

SECRET = "the secret that no link may lead to"
ESCAPE = "\x1b]0;owned\x07\x1b[31mred\x9b5n\u202egnol"
FILES = ("spec.json", "result.json", "curve.jsonl", "env.json", "failed.json", "stepsizes.jsonl")
VALUES = [90.0, 91.0, 90.5]


@dataclass(frozen=True)
class Case:
    name: str
    #: Changes the folder of a finished run.
    change: Callable[[Path], object]
    #: What is said of it; empty if it is a finished run all the same.
    said: str = ""
    #: What is said of its stepsizes, which it has if this is not None.
    stepsizes: str | None = None


def make(case: Case, root: Path, seed: int) -> Path:
    """The case's folder below ``root``; the folder next to ``root`` holds what its links lead to."""
    secret = root.parent / "secret"
    secret.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (secret / name).write_text(json.dumps({"state": "finished", "error": SECRET, "sessions": [{"device": SECRET}]}))
    wanted = spec("adam", seed, experiment="digits", epochs=len(VALUES))
    folder = write_run(root, wanted, VALUES)
    if case.stepsizes is not None:
        (folder / "stepsizes.jsonl").write_text(_measured())
    case.change(folder)
    return folder


@cache
def _measured() -> str:
    with TemporaryDirectory() as folder:
        write_stepsizes(Path(folder), "adam")
        return (Path(folder) / "stepsizes.jsonl").read_text()


# --- what can be done to a file


#: Something in the place of a file, and what is said of it.
THINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (lambda path: path.mkdir(), "it is a folder"),
    "a named pipe": (os.mkfifo, "it is a named pipe"),
    "a socket": (bind_socket, "it is a socket"),
    "a link to /dev/zero": (lambda path: path.symlink_to("/dev/zero"), "a symbolic link"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "a symbolic link"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "a symbolic link"),
    "a link out of the folder": (lambda path: path.symlink_to(f"../../secret/{path.name}"), "a symbolic link"),
    "a link within the folder": (lambda path: path.symlink_to("lock"), "a symbolic link"),
    "a tebibyte of nothing": (sparse, "at most"),
}

#: Bytes in the place of JSON.
TEXTS: dict[str, bytes | str] = {
    "nothing": b"", "zeros": bytes(5000), "garbage": bytes(range(256)) * 20, "a number": "5\n", "a word": '"x"\n',
    "null": "null\n", "a list": "[]\n", "half an object": '{"epoch": 1, "lo\n',
    "UTF-16": '{"epoch": 1}\n'.encode("utf-16"),
    "a deep list": "[" * 100_000 + "\n", "a deep object": '{"a":' * 3000 + "1" + "}" * 3000 + "\n",
    "a number of many digits": '{"epoch": ' + "9" * 5000 + "}\n", "no JSON at all": "<html>\n",
}  # fmt: skip


def _things() -> Iterable[Case]:
    for name in FILES:
        for kind, (place, said) in THINGS.items():

            def change(run: Path, name: str = name, place: Callable[[Path], object] = place) -> None:
                place(without(run, name))

            ours = name not in ("env.json", "failed.json", "stepsizes.jsonl")
            shown = said if ours or name == "failed.json" else ""
            yield Case(f"{kind} for {name}", change, shown, said if name == "stepsizes.jsonl" else None)
    for kind, (place, _) in THINGS.items():
        if kind != "a tebibyte of nothing":
            yield Case(f"{kind} for the lock", lambda run, place=place: place(without(run, "lock")))


def _texts() -> Iterable[Case]:
    for name in FILES:
        for kind, text in TEXTS.items():
            fine = name in ("env.json", "stepsizes.jsonl") or (name, kind) == ("failed.json", "UTF-16")
            said = "" if fine else name
            yield Case(
                f"{kind} in {name}", put(name, text), said, "no stepsize record" if name == "stepsizes.jsonl" else None
            )


# --- what can be done to a value


NESTED: list[Any] = []
for _ in range(20):
    NESTED = [NESTED]

_NO_NUMBERS: list[Any] = ["5", 1.5, True, None, [1], {"a": 1}, -(10**30), 10**400, float("nan"), float("inf")]
_NO_NAMES: list[Any] = ["", 5, None, ["x"], "x" * 10_000, ESCAPE, "two\nlines", "\ud800", "\0"]
_NO_SWITCHES: list[Any] = ["true", 1, None]


def _spec_fields() -> Iterable[Case]:
    wrong = {
        **dict.fromkeys(("experiment", "optimizer", "variant", "precision"), _NO_NAMES),
        **dict.fromkeys(("seed", "epochs", "batch", "probe_every"), _NO_NUMBERS),
        "limit": [value for value in _NO_NUMBERS if value is not None],
        "compiled": _NO_SWITCHES, "deterministic": _NO_SWITCHES,
        "hyper": [None, "lr", [1], {"lr": {"a": 1}}, {"lr": NESTED}, {"": 1}, {"a\nb": 1}, {"lr": ESCAPE},
                  {"lr": 10**400}, {f"h{number}": number for number in range(5000)}],
    }  # fmt: skip
    for field, values in wrong.items():
        for number, value in enumerate(values):
            yield Case(f"{field} of a spec, {number}: {ascii(value)[:20]}", respec(**{field: value}), f"{field} is ")
        yield Case(f"a spec without its {field}", respec(**{field: ...}), "of another version")
    for epochs in (0, -3, 2**60):
        yield Case(f"{epochs} epochs", respec(epochs=epochs), "epochs is ")
    yield Case("a field too many", respec(colour="red"), "fields missing or unknown: colour")
    yield Case("another format", respec(format=99), "no spec of format 1: format 99")
    yield Case("a spec edited", edit("spec.json", seed=77_777), "belongs in a folder named")
    yield Case("Aida without projections", respec(optimizer="aida"), "no number of projections")
    yield Case("Aida by the name of a column", respec(optimizer="aida-k2"), "what tables call Aida itself")


#: Names that are odd and no fault: nothing is said of them, and they must not break out of where they are shown.
NAMES = (
    "[/x]", "[bold]", ":smile:", r"$\frac{$", "$a$ and $b", "../../../outside", "/etc/outside", "..", ".hidden",
    "=1+1", "@cmd", "-x", "<script>alert(1)</script>", r"\input{/etc/passwd}", "]]>", "%s%n", "x" * 200,
    "ẞüñ 漢字", "a  b", "CON", "a/b\\c", "#", "'; drop table runs; --",
    "{{ 7 * 7 }}", "![x](http://127.0.0.1/x.png)", "__proto__", "constructor",
)  # fmt: skip


def _names() -> Iterable[Case]:
    for name in NAMES:
        yield Case(f"experiment {name[:30]}", respec(experiment=name))
        yield Case(f"optimizer {name[:30]}", respec(optimizer=name))
        yield Case(f"hyper-parameter {name[:30]}", rehyper(**{name: 0.5}))
    yield Case("a variant that is not known", respec(variant="../x"))
    yield Case("a precision that is not known", respec(precision=r"\fp[/]8"))
    yield Case("a class that does not exist", respec(optimizer="no.such.module:Class"))
    yield Case("a class of a module with side effects", respec(optimizer="this:Class"))
    yield Case("a value that is a word", rehyper(lr="=cmd|' /C calc'!A0"))
    for value in (
        float("inf"),
        float("-inf"),
        float("nan"),
        1e308,
        5e-324,
        -1.0,
        0,
        2**64,
        None,
        False,
        [],
        [0.9, None],
    ):
        yield Case(f"a class with lr={value}", respec(optimizer="torch.optim:NAdam", hyper={"lr": value}))
        yield Case(f"adam with lr={value}", rehyper(lr=value))


def _results() -> Iterable[Case]:
    wrong: list[Any] = ["91", True, [91], {"a": 1}, float("nan"), float("inf"), 10**400, 99.99, None, ...]
    for field in ("best", "last"):
        for value in wrong:
            yield Case(
                f"{field} of a result: {ascii(value)[:20]}", edit("result.json", **{field: value}), "does not fit curve"
            )
    for value in ("2", 2.5, True, -1, 0, 7, None, ...):
        yield Case(f"best epoch: {value}", edit("result.json", best_epoch=value), "does not fit curve")
    for value in ("3", 2, None, ..., [], 10**30):
        yield Case(f"epochs of a result: {value}", edit("result.json", epochs=value), "result.json counts")
    for value in (5, [], "", ESCAPE, "\ud800", "x" * 300):
        yield Case(f"metric of a result: {ascii(value)[:20]}", edit("result.json", metric=value), "its metric is")
    yield Case("another metric", edit("result.json", metric="loss", better="lower"), "does not fit curve")
    yield Case("no metric", edit("result.json", metric=...), "does not fit curve")
    for value in (..., "upwards", None, 1):
        yield Case(f"better of a result: {value}", edit("result.json", better=value), "is better")
    for value in ("done", None, ..., [], 1, ESCAPE):
        yield Case(f"state of a result: {ascii(value)[:20]}", edit("result.json", state=value), "its state is")
    yield Case("diverged for no reason", edit("result.json", state="diverged", reason=[NESTED]), "diverged")
    yield Case("diverged with escapes", edit("result.json", state="diverged", reason=ESCAPE), "diverged")
    yield Case(
        "the same key twice",
        put("result.json", '{"state": "finished", "best": 91.0, "best": 99.99, "epochs": 3}'),
        "fit",
    )
    yield Case(
        "failed with escapes",
        lambda run: (without(run, "result.json"), put("failed.json", json.dumps({"error": ESCAPE}))(run)),
        "owned",
    )
    yield Case(
        "failed with a list",
        lambda run: (without(run, "result.json"), put("failed.json", '{"error": [1, {}]}')(run)),
        "failed",
    )


def _rows() -> Iterable[Case]:
    for value in ("1", 1.0, True, None, ..., 0, -5, 2, 10**400, float("nan"), [], "[/x]"):
        yield Case(f"epoch of a row: {ascii(value)[:20]}", rerow(0, epoch=value), "line 1 has epoch")
    for number in (0.0, -0.0, 1e99, -1e99, 1e-99, 5e-324, 1.7e308, -1.7e308, 1e18, 10**30):
        yield Case(f"a metric of {number}", revalue(number, number, number))
        yield Case(f"a metric from {number} on", revalue(number, 91.0, 1.0))
    yield Case("a metric that differs in its last bit", revalue(91.0, 91.00000000000001, 91.0))
    for value in ("91", None, ..., float("nan"), float("inf"), [], {}, 10**400, True):
        yield Case(f"metric of a row: {ascii(value)[:20]}", rerow(1, accuracy=value), "does not fit curve")
    for value in ("1", ..., float("nan"), float("-inf"), [], 10**400, 1e308, -1e308, True, NESTED):
        yield Case(
            f"loss and times of a row: {ascii(value)[:20]}", rerow(1, loss=value, seconds=value, eval_seconds=value)
        )
    yield Case(
        "an epoch twice",
        lambda run: put("curve.jsonl", '{"epoch": 1}\n{"epoch": 1}\n{"epoch": 2}\n')(run),
        "line 2 has epoch 1",
    )
    yield Case(
        "an epoch missing", lambda run: put("curve.jsonl", '{"epoch": 1}\n{"epoch": 3}\n')(run), "line 2 has epoch 3"
    )
    yield Case(
        "a row cut off",
        lambda run: os.truncate(run / "curve.jsonl", (run / "curve.jsonl").stat().st_size - 5),
        "epoch 2, and",
    )
    yield Case("rows without a result", lambda run: without(run, "result.json"), "stopped")
    yield Case(
        "a carriage return in every row",
        lambda run: put("curve.jsonl", (run / "curve.jsonl").read_bytes().replace(b"\n", b"\r\n"))(run),
    )


def _sessions() -> Iterable[Case]:
    for value in (5, None, {}, [1], [[]], "x", [None]):
        yield Case(f"sessions: {value}", put("env.json", json.dumps({"sessions": value})))
    for value in (5, None, [], ESCAPE, "[/x]", "\ud800", "x" * 100_000, NESTED):
        yield Case(
            f"a device: {ascii(value)[:20]}",
            session(
                device=value, device_type=value, at_once=value, started=value, git=value, versions={"torch": value}
            ),
        )
    for value in ("9999-12-31T23:59:59", "0001-01-01T00:00:00", "2026-13-45", "now", 10**400):
        yield Case(f"begun {ascii(value)[:20]}", session(device="H200", device_type="cuda", at_once=1, started=value))


def _stepsizes() -> Iterable[Case]:
    wrong: dict[str, list[Any]] = {
        "mean": ["1", [], 10**400, 1e308], "method": [5, None, ESCAPE, "x" * 10_000],
        "step": ["1", -1, 1.5, 10**400, None],
        "at_bound": ["x", [1], 10**400], "elements": ["x", None, 0, -1, 1.5],
        "weight_norm": ["x", [1], 10**400], "update_norm": ["x"], "lost": [[1]],
    }  # fmt: skip
    for field, values in wrong.items():
        for value in values:
            yield Case(
                f"{field} of a stepsize: {ascii(value)[:20]}", restep(**{field: value}), "", "no stepsize record"
            )
    for field, values in {
        "method": ["[/x]", r"$\frac{$", ""], "hyper": [{"eps": "x", "projections": ESCAPE}, {}],
        "mean": [None, 0.0, -1.0],
        "bound": [-1.0, 1e300], "quantiles": [[], "x", [[1]]], "cosine": ["x"],
    }.items():  # fmt: skip
        for value in values:

            def change(run: Path, field: str = field, value: Any = value) -> None:
                rows = [json.loads(row) for row in (run / "stepsizes.jsonl").read_text().splitlines()]
                rows = [{**row, field: value} if field in row else row for row in rows]
                (run / "stepsizes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

            yield Case(f"{field} of a stepsize: {ascii(value)[:20]}", change, "", "")


# --- what can be done to the folder


def _folders() -> Iterable[Case]:
    yield Case("an empty folder", emptied, "spec.json is not there")
    yield Case("a folder that is a link to itself", looped, "cannot be read", "cannot be read")
    yield Case("a folder that is a link to a run", linked)
    yield Case("a copy", moved("copy of a run"), "belongs in a folder named")
    yield Case("a name with escapes", moved(f"x{ESCAPE}"), "belongs in a folder named")
    yield Case("a name with markup", moved("x [b] $\\frac{$"), "belongs in a folder named")
    yield Case("a name of two lines", moved("two\nlines"), "belongs in a folder named")
    yield Case(
        "a name that is no UTF-8",
        lambda run: os.rename(run, os.path.join(os.fsencode(run.parent), b"\xff\xfe")),
        "belongs in a folder",
    )
    yield Case("no rights", lambda run: run.chmod(0))  # which the superuser has all the same
    yield Case("a link to the folder above", lambda run: (run / "up").symlink_to(".."))
    yield Case("a file from the future", lambda run: os.utime(run / "result.json", (1e11, 1e11)))
    yield Case("checkpoints that are a link", lambda run: (run / "checkpoints").symlink_to("/etc"))


CASES: tuple[Case, ...] = (
    *_things(), *_texts(), *_spec_fields(), *_names(), *_results(), *_rows(), *_sessions(), *_stepsizes(), *_folders(),
)  # fmt: skip
