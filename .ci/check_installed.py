"""What an installed wheel must do: every path of a CPU agrees with the literal one. Needs torch alone, not NumPy.

Run it with the Python that has the wheel: ``python check_installed.py --kernel`` or ``--no-kernel`` says whether the
wheel must hold the C kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import aida
from aida.backends import cpu

PATHS = {"literal": {"foreach": False}, "foreach": {"foreach": True}, "default": {}, "fused": {"fused": True}}


def after_steps(dtype: torch.dtype, flags: dict[str, bool]) -> torch.Tensor:
    """A matrix large enough for several threads, after three steps."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(300, 200, dtype=dtype))
    optimizer = aida.Aida([weight], lr=0.1, clip_norm=1.0, **flags)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    return weight.detach()


def main(kernel: bool) -> None:
    source = Path(__file__).resolve().parents[1] / "src"
    assert source not in Path(aida.__file__).resolve().parents, f"{aida.__file__} is not an installed wheel"
    assert cpu.available() == kernel, f"the C kernel is {'missing' if kernel else 'there'}"
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        expected = after_steps(dtype, PATHS["literal"])
        for name, flags in PATHS.items():
            if kernel or name != "fused":
                gap = float((after_steps(dtype, flags) - expected).abs().max())
                assert gap < tolerance, f"{name} path, {dtype}: {gap} from the literal path"
    print(f"aida {aida.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}: kernel {kernel}, fine")


if __name__ == "__main__":
    main({"--kernel": True, "--no-kernel": False}[sys.argv[1]])
