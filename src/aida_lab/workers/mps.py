"""Start CUDA MPS, so that kernels of several training processes run concurrently on one GPU.

The daemon uses private folders and exits with the last process that uses it, even if this process is killed.
If MPS is not available, training continues without it and one line says why.
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

#: Timeout of a command of the daemon in seconds.
_TIMEOUT = 30.0

#: Stops the daemon when no process holds the other end of its stdin. A shell process survives a killed parent.
_GUARD = 'cat; echo quit | "$0"; rm -rf "$1"'

#: A client that only opens the GPU. In containers, for example, the daemon can start and its server still fail.
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

    report: str  #: one line for the user: whether MPS is used, or why not
    environment: Mapping[str, str] = field(default_factory=dict)  #: environment variables to set in each process
    fds: tuple[int, ...] = ()  #: File descriptors that each process inherits. The daemon runs as long as one is open.


@contextmanager
def shared_gpu() -> Iterator[Sharing]:
    """Start MPS, if available, for the processes that are started inside the context."""
    control = shutil.which(_CONTROL)
    if control is None:
        yield Sharing(f"without CUDA MPS: {_CONTROL} is not installed; the runs take turns on the GPU")
        return
    if _answers(control, os.environ):
        yield Sharing("CUDA MPS: using the daemon that already runs")
        return
    folder = Path(tempfile.mkdtemp(prefix="aida-mps-", dir=_short_folder()))
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    environment = {**os.environ, **pipes}
    clients = {**pipes, **_renumbered(os.environ.get("CUDA_VISIBLE_DEVICES", ""))}
    read_end, write_end = os.pipe()
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD, control, str(folder)],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    os.close(read_end)
    try:
        problem = _start(control, environment, folder) or _open_gpu({**environment, **clients})
        if problem:
            yield Sharing(f"without CUDA MPS: {problem}; the runs take turns on the GPU")
        else:
            yield Sharing("CUDA MPS: started for these runs", clients, (write_end,))
    finally:
        os.close(write_end)
        with suppress(subprocess.TimeoutExpired):  # a process still uses the daemon; the guard stops it later
            guard.wait(timeout=_TIMEOUT)


def _start(control: str, environment: Mapping[str, str], folder: Path) -> str:
    """Start the daemon. Returns the error message, empty on success."""
    output = folder / "start.log"
    try:
        # a file: the daemon keeps its output open, so a pipe would never reach its end
        with output.open("wb") as log:
            code = subprocess.run(
                [control, "-d"], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=_TIMEOUT
            ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_CONTROL} does not work here ({error})"
    last = output.read_text(errors="replace").strip().splitlines()[-1:]
    return f"{_CONTROL} -d failed" + "".join(f" ({line})" for line in last) if code else ""


def _open_gpu(environment: Mapping[str, str]) -> str:
    """Open the GPU through the daemon in a test process. Returns the error message, empty on success."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _CLIENT], env=environment, capture_output=True, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"its daemon started, but opening the GPU through it took more than {_TIMEOUT:g} s"
    return "its daemon started, but no process could open the GPU through it" if done.returncode else ""


def _renumbered(visible: str) -> dict[str, str]:
    """Renumber devices from 0, because clients see only the devices that the daemon sees."""
    devices = visible.split(",")
    if not all(device.strip().isdecimal() for device in devices):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(devices))))}


def _answers(control: str, environment: Mapping[str, str]) -> bool:
    """Whether a daemon already runs that processes with this environment would use."""
    try:
        asked = subprocess.run(
            [control], input=b"get_server_list\n", env=environment, capture_output=True, timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def _short_folder() -> str:
    # the path of a Unix socket is limited to about 100 bytes
    found = tempfile.gettempdir()
    return found if len(found) < 60 else "/tmp"
