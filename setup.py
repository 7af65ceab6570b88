"""The optional C kernel of the fused CPU path; everything else about the build is in pyproject.toml.

The kernel needs nothing of Python but a place in the package: it is loaded with ctypes. So one file,
and one wheel, serve every Python version of a platform.
"""

from __future__ import annotations

import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

COMPILE = ["-std=gnu11", "-O3", "-g0", "-fvisibility=hidden"]
# square roots and comparisons in a vector loop; NaN and infinities keep their meaning
COMPILE += ["-fno-math-errno", "-fno-trapping-math"]
# Linux: the threads of torch. The runtime is not linked, its symbols are found in torch when the kernel is loaded.
COMPILE += ["-fopenmp" if sys.platform == "linux" else "-fopenmp-simd"]


class PlainLibrary(build_ext):
    """A shared object without the tag of a Python version in its name."""

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
            optional=True,  # without a compiler the package installs all the same, and takes its foreach path
        )
    ],
    cmdclass={"build_ext": PlainLibrary, "bdist_wheel": AnyPython},
)
