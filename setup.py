"""Builds the CPU kernel where there is a C compiler; without one attemper installs all the same, and `attemper env` says so."""

import re
import sys
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup

HERE = Path("src/attemper/kernels/cpu/c")

# Each file names its own instruction set, so nothing here depends on the machine that builds. No -ffast-math: inf and NaN count.
FLAGS = ["-std=gnu11", "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"]

# MSVC has no vector types: a wheel for Windows has no native kernel, and its tag keeps it from other systems
WINDOWS = sys.platform == "win32"

# one build serves Python 3.11 and every later version, except free-threaded ones, which have no stable interface
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")
TAGS = {"py_limited_api": "cp311"} if STABLE else {}


def readme() -> str:
    """README.md with links to the repository: PyPI shows it, and has no other file."""
    home = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
    text = re.sub(r"(!\[[^]]*\]\()(?!http)", rf"\1{home}/raw/main/", Path("README.md").read_text(encoding="utf-8"))
    return re.sub(r"(\]\()(?!http|#)", rf"\1{home}/blob/main/", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[]
    if WINDOWS
    else [
        Extension(
            "attemper.kernels.cpu._native",
            sources=sorted(str(path) for path in HERE.rglob("*.c")),
            depends=sorted(str(path) for path in HERE.rglob("*.h")),
            extra_compile_args=[*FLAGS, "-fvisibility=hidden"],  # Python looks for one name alone
            libraries=["m", "dl"],
            optional=True,
            py_limited_api=STABLE,
        )
    ],
    options={"bdist_wheel": {"plat_name": sysconfig.get_platform()} if WINDOWS else TAGS},
)
