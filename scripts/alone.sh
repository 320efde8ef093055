#!/usr/bin/env bash
# The library without the lab: a wheel, installed in an environment of its own that reads the torch of .venv, attemper_lab deleted from
# it, and the tests of the library run on what is left. Prints lines by package, the wheel's size and the time of an import.
set -euo pipefail
cd "$(dirname "$0")/.."
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
python=.venv/bin/python
for package in attemper attemper_lab; do
    printf '%s: %s lines of Python\n' "$package" "$(git ls-files "src/$package/*.py" | xargs cat | wc -l)"
done
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$home" .
ls -l "$home"/*.whl | awk '{printf "wheel: %.1f MB\n", $5 / 1e6}'
scripts/beside.sh "$python" "$home/alone"
alone=$home/alone/bin/python
site=$("$alone" -c 'import site; print(site.getsitepackages()[0])')
"$alone" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$home"/*.whl
rm -r "$site/attemper_lab"
cp -r tests docs scripts pyproject.toml "$home/"
rm -r "$home"/tests/{lab,page,explain,bench,figures,install,surface,public/test_imports.py,scores/test_surface.py,scan/test_widths.py}
cd "$home"
export PYTHONPATH= OMP_NUM_THREADS=1
"$alone" -c '
import time
start = time.perf_counter(); import torch; middle = time.perf_counter()
import attemper; attemper.attention
print(f"import: torch {middle - start:.2f} s, attemper.attention {time.perf_counter() - middle:.2f} s more; from {attemper.__file__}")
assert "explain" not in attemper.__all__'
"$alone" -m attemper --help
"$alone" -m pytest -q -p no:cacheprovider -n "$(getconf _NPROCESSORS_ONLN)" --dist loadgroup -m "not exhaustive" "${@:-tests}"
