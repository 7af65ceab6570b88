"""CUDA MPS for several processes, with a fake control program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aida_lab.workers import mps

#: Like the real program, exits with code 1 if no daemon runs in the folder that the environment names.
CONTROL = """#!/bin/sh
running="${CUDA_MPS_PIPE_DIRECTORY:-$FAKE_DEFAULT}/running"
echo "$@" >> "$FAKE_LOG"
if [ "$1" = "-d" ]; then
    [ -n "$FAKE_BROKEN" ] && { echo "no permission"; exit 1; }
    touch "$running"; exit 0
fi
[ -f "$running" ] || { echo "Cannot find MPS control daemon process" >&2; exit 1; }
read word
echo "$word" >> "$FAKE_LOG"
[ "$word" = quit ] && rm "$running"
exit 0
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A folder with a fake control program, which writes the commands it gets to ``log``."""
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_DEFAULT", str(tmp_path))
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mps, "_CLIENT", "pass")
    return tmp_path


def commands(folder: Path) -> list[str]:
    return (folder / "log").read_text().split()


def test_without_the_program_training_continues_and_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps.shared_gpu() as sharing:
        assert sharing.report == (
            "without CUDA MPS: nvidia-cuda-mps-control is not installed; the runs take turns on the GPU"
        )
        assert not sharing.environment


def test_a_started_daemon_has_private_folders_and_stops_with_this_process(control):
    with mps.shared_gpu() as sharing:
        assert sharing.report == "CUDA MPS: started for these runs"
        folder = Path(sharing.environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert (folder / "running").exists()
        assert folder.stat().st_mode & 0o077 == 0
        assert sharing.environment["CUDA_MPS_LOG_DIRECTORY"] == str(folder)
    assert commands(control)[-1] == "quit"
    assert not folder.exists()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


@pytest.mark.parametrize(
    ("visible", "theirs"), [(None, None), ("3", "0"), ("2, 5", "0,1"), ("GPU-8f6e", None), ("", None)]
)
def test_devices_are_renumbered_as_the_daemon_shows_them(control, monkeypatch, visible, theirs):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with mps.shared_gpu() as sharing:
        assert sharing.environment.get("CUDA_VISIBLE_DEVICES") == theirs


def test_a_running_daemon_is_used_and_not_stopped(control):
    (control / "running").touch()
    with mps.shared_gpu() as sharing:
        assert sharing.report == "CUDA MPS: using the daemon that already runs"
    assert commands(control) == ["get_server_list"]
    assert (control / "running").exists()


@pytest.mark.parametrize(
    ("problem", "line"),
    [("FAKE_BROKEN", "-d failed (no permission)"), ("client", "no process could open the GPU through it")],
)
def test_a_broken_daemon_is_stopped_and_not_used(control, monkeypatch, problem, line):
    monkeypatch.setenv("FAKE_BROKEN", "1" if problem == "FAKE_BROKEN" else "")
    if problem == "client":
        monkeypatch.setattr(mps, "_CLIENT", "raise SystemExit(1)")
    with mps.shared_gpu() as sharing:
        assert sharing.report.startswith("without CUDA MPS: ")
        assert line in sharing.report
        assert not sharing.environment
        assert not sharing.fds
    if problem == "client":
        assert commands(control)[-1] == "quit"


def test_the_daemon_runs_until_the_last_process_has_saved(control):
    """A killed process cannot stop the daemon itself."""
    code = """
import os, subprocess, sys, time
from aida_lab.workers import mps
mps._CLIENT = "pass"
with mps.shared_gpu() as sharing:
    subprocess.Popen(["sleep", "1.5"], pass_fds=sharing.fds)
    print(sharing.environment["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    time.sleep(60)
"""
    ours = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    folder = Path(ours.stdout.readline().strip())
    ours.send_signal(signal.SIGKILL)
    ours.wait()
    time.sleep(0.3)
    assert (folder / "running").exists()
    end = time.monotonic() + 20
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert commands(control)[-1] == "quit"
    assert not folder.exists()


def test_the_client_imports_no_module_from_the_working_directory(control, monkeypatch):
    monkeypatch.chdir(control)
    (control / "ctypes.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(mps, "_CLIENT", "import ctypes")
    with mps.shared_gpu() as sharing:
        assert sharing.report == "CUDA MPS: started for these runs"
