"""Builds the optional C kernel of the fused CPU path. pyproject.toml has the rest of the build.

The kernel is loaded with ctypes and does not use Python's C API, so one wheel per platform serves every Python version.
Without it the package still works: the CPU then takes the foreach path. So a failed build is a warning, and Windows,
whose MSVC knows neither GCC's attributes nor OpenMP's simd reductions, gets a wheel in pure Python.
AIDA_REQUIRE_KERNEL=1 turns the warning into an error; the release builds set it.
"""

from __future__ import annotations

import os
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

COMPILE = ["-std=gnu11", "-O3", "-g0", "-fvisibility=hidden"]
# lets the compiler vectorize square roots and comparisons; NaN and infinity keep their meaning
COMPILE += ["-fno-math-errno", "-fno-trapping-math"]
# Linux: uses torch's OpenMP threads. The runtime is not linked; its symbols are found in torch at load time.
COMPILE += ["-fopenmp" if sys.platform == "linux" else "-fopenmp-simd"]


class PlainLibrary(build_ext):
    """A shared object without a Python version in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


class AnyPython(bdist_wheel):
    """A wheel for every Python 3, and for one platform if it holds the kernel."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


KERNEL = Extension(
    "aida.backends._cpu",
    sources=["src/aida/backends/_cpu.c"],
    depends=["setup.py", *sorted(glob("src/aida/backends/_cpu*.h"))],
    extra_compile_args=COMPILE,
    libraries=["m"],
    optional=os.environ.get("AIDA_REQUIRE_KERNEL") != "1",
)

setup(
    ext_modules=[] if sys.platform == "win32" else [KERNEL],
    cmdclass={"build_ext": PlainLibrary, "bdist_wheel": AnyPython},
)
