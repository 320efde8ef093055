"""Builds the CPU kernel where there is a C compiler; without one attemper installs all the same, and `attemper env` says so."""

from pathlib import Path

from setuptools import Extension, setup

HERE = Path("src/attemper/kernels/cpu/c")

# Each file names its own instruction set, so nothing here depends on the machine that builds. No -ffast-math: inf and NaN count.
FLAGS = ["-std=gnu11", "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"]

setup(
    ext_modules=[
        Extension(
            "attemper.kernels.cpu.c._native",
            sources=sorted(str(path) for path in HERE.rglob("*.c")),
            depends=sorted(str(path) for path in HERE.rglob("*.h")),
            extra_compile_args=FLAGS,
            optional=True,
        )
    ]
)
