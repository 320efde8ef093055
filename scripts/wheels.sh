#!/usr/bin/env bash
# The sdist and this platform's wheel, in dist/: built as a release builds them, and tested as users get them, without a C compiler.
#   scripts/wheels.sh [PYTHON ...]    other Pythons, with torch, to install the wheel for besides that of .venv
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/.venv-wheels/bin
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT

# what git knows, so that nothing that was built here comes along; the wheel is made from the sdist, so nothing is missing there
mkdir "$home/tree"
git ls-files -z --cached | tar --create --null --files-from - | tar --extract --directory "$home/tree"
"$tools/python" -m build --no-isolation --outdir "$home/built" "$home/tree" >"$home/log" 2>&1 || { tail -n 30 "$home/log"; exit 1; }
rm -rf dist
mkdir dist
mv "$home"/built/*.tar.gz dist/
if [ "$(uname)" = Linux ]; then
    "$tools/auditwheel" show "$home"/built/*.whl
    PATH=$tools:$PATH "$tools/auditwheel" repair --wheel-dir dist "$home"/built/*.whl
else
    mv "$home"/built/*.whl dist/
fi
"$tools/python" - dist/*.whl dist/*.tar.gz <<'CHECK'
import sys, tarfile, zipfile
wheel = zipfile.ZipFile(sys.argv[1]).namelist()
sdist = tarfile.open(sys.argv[2]).getnames()
assert [name.split("/")[-1] for name in wheel if name.endswith((".so", ".dylib"))] == ["_native.abi3.so"], "the wheel has no library, or several"
assert {name.split("/")[0].split("-")[0] for name in wheel} == {"attemper", "attemper_lab"}, "the wheel has other packages"
assert not [name for name in wheel if name.endswith((".c", ".h"))], "the wheel has sources"
assert [name for name in sdist if name.endswith("/neon_f32.c")] and [name for name in sdist if name.endswith("/simd.h")], "the sdist lacks sources"
CHECK
ls -l dist | awk 'NR > 1 {printf "%s: %.2f MB\n", $9, $5 / 1e6}'
for system in linux macos windows; do
    "$tools/cibuildwheel" --platform "$system" --print-build-identifiers | paste -sd ' '
done

# $1, installed for the Python $2, calls on the kernel $3; then tests. PATH has nothing but the environment
try() {
    rm -rf "$home/env"
    scripts/beside.sh "$2" "$home/env"
    bare=(env -u CC -u PYTHONPATH "PATH=$home/env/bin" OMP_NUM_THREADS=1)
    "${bare[@]}" python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$1"
    cp scripts/installed.py "$home/"
    (cd "$home" && "${bare[@]}" python installed.py "$3")
}
cp -r tests pyproject.toml "$home/"
for python in .venv/bin/python "$@"; do
    try dist/*.whl "$python" cpu
    (cd "$home" && "${bare[@]}" python -m pytest -q -p no:cacheprovider -m "not exhaustive" tests/kernels/test_agreement.py)
done
try dist/*.tar.gz .venv/bin/python blockwise
