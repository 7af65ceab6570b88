"""Kills a run again and again: ``python killed_runs.py SPEC_JSON OUT KILLS SEED``, a process of its own.

Everything heavy is imported once; each attempt is a fork, which starts in milliseconds. No thread runs
before the forks, or they would inherit its locks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from aida_lab.spec import RunSpec
from aida_lab.training.options import Options
from aida_lab.training.run import run

torch.set_num_threads(1)


def attempt(spec: RunSpec, out: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run(spec, out, Options(device="cpu", threads=1, checkpoint_seconds=0))
            code = 0
        finally:
            os._exit(code)
    return pid


def main() -> None:
    spec, out = RunSpec.from_json(json.loads(sys.argv[1])), Path(sys.argv[2])
    kills, chance = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    killed = 0
    while killed < kills:
        pid = attempt(spec, out)
        time.sleep(chance.uniform(0.02, 0.6))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            break  # it was done before
        killed += 1
    _, status = os.waitpid(attempt(spec, out), 0)
    print(json.dumps({"killed": killed, "code": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main()
