"""Two thousand runs of two hundred epochs: the report is made in a minute, in a gigabyte, and the page opens."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest

from aida_lab.experiments import experiments
from browser import Browser, find_chromium
from report_fixture import learning_curve, spec, write_run

pytestmark = pytest.mark.slow

EXPERIMENTS = ("vgg11-cifar10", "vgg11-cifar100", "resnet34-cifar10", "resnet34-cifar100")
METHODS = ("aida-k2", "aida-k1", "adabelief", "adam", "adamw", "radam", "sgd", "yogi", "msvag", "adabound")
CONFIGURATIONS, SEEDS, EPOCHS = 10, 5, 200

#: The command, which then says how many seconds of the processor (the same on a busy machine) and megabytes it took.
#: Asked from outside, the system would answer with the memory of the process that started it, where that is larger.
_COMMAND = """
import atexit, pathlib, re, resource, sys, time
def say():
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        most = int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) / 1e3
    else:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(time.process_time(), most, file=sys.stderr)
atexit.register(say)
from aida_lab.cli import main
main()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("many") / "runs"
    for name, (number, method), place in product(EXPERIMENTS, enumerate(METHODS), range(CONFIGURATIONS)):
        curve = learning_curve(90 - number / 2 - place / 4, EPOCHS, f"{name}{method}{place}")
        for seed in range(SEEDS):
            wanted = spec(
                method, seed, {"eps": 10.0 ** (-2 - place)}, experiment=name, epochs=EPOCHS,
                batch=experiments()[name].batch,
            )  # fmt: skip
            write_run(root, wanted, [round(value + seed / 50, 4) for value in curve], seconds=5.0 + number)
    return root


def test_a_report_of_two_thousand_runs_is_quick_and_small(runs):
    assert len(list(runs.iterdir())) == 2000
    out = runs.parent / "report"
    command = [sys.executable, "-c", _COMMAND, "report", str(runs), "--out", str(out)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "2"}, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds, megabytes = map(float, done.stderr.split()[-2:])
    page = out / "index.html"
    print(f"{seconds:.1f} s of processor time, {megabytes:.0f} MB, a page of {page.stat().st_size / 1e6:.2f} MB")
    assert seconds < 60
    assert megabytes < 1000
    assert page.stat().st_size < 15e6

    chromium = find_chromium()
    if chromium is None:
        return  # test_report_browser.py asks for one
    with Browser(chromium) as browser:
        browser.open(page)
        assert browser.run("document.querySelectorAll('svg [data-series]').length") >= len(METHODS)
        loaded = browser.run("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
        browser.run("document.querySelector('#runs details').open = true")
        browser.until("document.querySelectorAll('#all-runs tbody tr').length === 2000")
        print(f"the page is there after {loaded / 1000:.2f} s")
        assert loaded < 10_000
        assert browser.complaints == []
