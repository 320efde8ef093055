"""Every supported minor version of transformers in an environment of its own, and the tests of tests/versions in each.

    python scripts/transformers_versions.py              all of them, from the oldest that is supported to the newest
    python scripts/transformers_versions.py 4.48 5.22    only these

An environment has transformers and what it needs in another version; the rest is read from the environment that runs this.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

from attemper._files import OLDEST

ROOT = Path(__file__).parents[1]
TOO_OLD = "4.46"
ENVIRONMENTS = ROOT / ".venv-transformers"


def main() -> int:
    failed = []
    for minor in sys.argv[1:] or minors():
        done = subprocess.run(
            [str(environment(minor)), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "tests/versions"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"transformers {minor}: {(done.stdout.strip().splitlines() or [done.stderr])[-1]}", flush=True)
        if done.returncode:
            print(done.stdout, done.stderr, flush=True)
            failed.append(minor)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


def minors() -> list[str]:
    """The minor versions that the package index has, from the oldest that is supported; and one that is too old."""
    listed = pip("index", "versions", "transformers").stdout
    found = {(int(major), int(minor)) for major, minor in re.findall(r"\b(\d+)\.(\d+)\.\d+\b", listed)}
    return [
        TOO_OLD,
        *(f"{major}.{minor}" for major, minor in sorted(found) if (major, minor) >= OLDEST["transformers"]),
    ]


def environment(minor: str) -> Path:
    """The interpreter of an environment with this version, which is made where there is none."""
    place = ENVIRONMENTS / minor
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        venv.create(place, clear=True, symlinks=True)
        packages = next((place / "lib").glob("python*/site-packages"))
        ours = next(path for path in sys.path if path.endswith("site-packages"))
        (packages / "ours.pth").write_text(ours + "\n")
        pip("--python", str(python), "install", "--quiet", "--no-compile", f"transformers=={minor}.*")
        (place / "ready").touch()
    return python


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"pip {' '.join(words)}: {done.stderr}")
    return done


if __name__ == "__main__":
    sys.exit(main())
