"""Two thousand runs of two hundred epochs: the report is made in a minute, in a gigabyte, and the page opens."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest

from aida.lab.experiments import experiments
from browser import Browser, find_chromium
from report_fixture import learning_curve, spec, write_run

pytestmark = pytest.mark.slow

EXPERIMENTS = ("vgg11-cifar10", "vgg11-cifar100", "resnet34-cifar10", "resnet34-cifar100")
METHODS = ("aida-k2", "aida-k1", "adabelief", "adam", "adamw", "radam", "sgd", "yogi", "msvag", "adabound")
CONFIGURATIONS, SEEDS, EPOCHS = 10, 5, 200


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
    command = [sys.executable, "-m", "aida", "report", str(runs), "--out", str(out)]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "2"})
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)  # or Popen would look for the child once more
    assert child.returncode == 0
    # of the processor, so that it says the same on a machine that is busy with other things
    seconds, megabytes = used.ru_utime + used.ru_stime, used.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
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
