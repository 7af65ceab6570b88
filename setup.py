"""Builds the optional C kernel of the fused CPU path. pyproject.toml has the rest of the build.

The kernel is loaded with ctypes and does not use Python's C API, so one wheel per platform serves every Python version.
"""

from __future__ import annotations

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
        suffix = ".pyd" if sys.platform == "win32" else ".so"
        return fullname.replace(".", "/") + suffix


class AnyPython(bdist_wheel):
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "aida.backends._cpu",
            sources=["src/aida/backends/_cpu.c"],
            depends=["setup.py", *sorted(glob("src/aida/backends/_cpu*.h"))],
            extra_compile_args=COMPILE,
            libraries=[] if sys.platform == "win32" else ["m"],
            optional=True,  # without a compiler the package still installs and uses the foreach path
        )
    ],
    cmdclass={"build_ext": PlainLibrary, "bdist_wheel": AnyPython},
)
