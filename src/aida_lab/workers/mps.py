"""CUDA MPS for several training processes on one GPU: their kernels then run side by side, not in turns.

A daemon of our own is started with private folders and ends with the last process that uses it, even if
this one is killed. Where MPS cannot be had, training goes on without it; one line says which.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"

#: Seconds a command of the daemon may take before it counts as not working.
_PATIENCE = 30.0

#: Ends the daemon when the last holder of its stdin has gone. A shell, so that it outlives a killed parent.
_GUARD = 'cat; echo quit | "$0"; rm -rf "$1"'

#: A client that does no more than open the GPU: a daemon may start and its server still fail, in containers say.
_CLIENT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
sys.exit(int(cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
             or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)) != 0)
"""


@dataclass(frozen=True)
class Sharing:
    """How processes share the GPU."""

    #: What was found or started, for the user.
    report: str
    #: For the environment of each process.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: File descriptors each process inherits: while one is open, the daemon stays.
    held: tuple[int, ...] = ()


@contextmanager
def shared_gpu() -> Iterator[Sharing]:
    """Start MPS for the processes that are made inside, where it can be had."""
    control = shutil.which(_CONTROL)
    if control is None:
        yield Sharing(f"without CUDA MPS: {_CONTROL} is not installed; the runs take turns on the GPU")
        return
    if _answers(control, os.environ):
        yield Sharing("CUDA MPS: the daemon that already runs is used")
        return
    folder = Path(tempfile.mkdtemp(prefix="aida-mps-", dir=_short_folder()))
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    environment = {**os.environ, **pipes}
    clients = {**pipes, **_renumbered(os.environ.get("CUDA_VISIBLE_DEVICES", ""))}
    watched, held = os.pipe()
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD, control, str(folder)],
        stdin=watched,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    os.close(watched)
    try:
        trouble = _start(control, environment, folder) or _open_gpu({**environment, **clients})
        if trouble:
            yield Sharing(f"without CUDA MPS: {trouble}; the runs take turns on the GPU")
        else:
            yield Sharing("CUDA MPS: started for these runs", clients, (held,))
    finally:
        os.close(held)
        with suppress(subprocess.TimeoutExpired):  # a process still holds on: the guard ends the daemon after it
            guard.wait(timeout=_PATIENCE)


def _start(control: str, environment: Mapping[str, str], folder: Path) -> str:
    """Start the daemon; returns what went wrong, empty for nothing."""
    said = folder / "start.log"
    try:
        # to a file: the daemon keeps its output open, and a pipe would have no end
        with said.open("wb") as log:
            code = subprocess.run(
                [control, "-d"], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=_PATIENCE
            ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_CONTROL} does not work here ({error})"
    last = said.read_text(errors="replace").strip().splitlines()[-1:]
    return f"{_CONTROL} -d failed" + "".join(f" ({line})" for line in last) if code else ""


def _open_gpu(environment: Mapping[str, str]) -> str:
    """Open the GPU through the daemon, in a process; returns what went wrong, empty for nothing."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _CLIENT], env=environment, capture_output=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return f"its daemon started, but a process waited {_PATIENCE:g} s for the GPU in vain"
    return "its daemon started, but no process could open the GPU through it" if done.returncode else ""


def _renumbered(visible: str) -> dict[str, str]:
    """The daemon shows its clients only the devices it sees itself, counted from 0."""
    devices = visible.split(",")
    if not all(device.strip().isdecimal() for device in devices):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(devices))))}


def _answers(control: str, environment: Mapping[str, str]) -> bool:
    """Whether a daemon runs that processes of this environment would find."""
    try:
        asked = subprocess.run(
            [control], input=b"get_server_list\n", env=environment, capture_output=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def _short_folder() -> str:
    # the address of a socket has room for about a hundred bytes
    found = tempfile.gettempdir()
    return found if len(found) < 60 else "/tmp"
