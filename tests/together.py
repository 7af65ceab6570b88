"""What each of several processes does: ``torchrun together.py SPECS_JSON DATA OUT`` carries runs out, together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from aida_lab.spec import RunSpec
from aida_lab.training.options import Options
from aida_lab.training.run import run

if __name__ == "__main__":
    options = Options(device="cpu", threads=1, workers=0, data_root=Path(sys.argv[2]), checkpoint_seconds=0)
    for spec in json.loads(sys.argv[1]):
        run(RunSpec.from_json(spec), Path(sys.argv[3]), options)
