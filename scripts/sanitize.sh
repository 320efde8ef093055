#!/usr/bin/env bash
# The kernel tests, and a fuzz run, on a build of the CPU kernel with AddressSanitizer and UBSan. Needs gcc; Linux.
#   scripts/sanitize.sh [arguments for pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=$(realpath -s "${PYTHON:-.venv/bin/python}")
BUILD=$(mktemp -d)
trap 'rm -rf "$BUILD"' EXIT
cp -r src setup.py pyproject.toml README.md LICENSE "$BUILD"
find "$BUILD" -name '_native*.so' -delete
(cd "$BUILD" && CC=gcc CFLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=all" \
    "$PYTHON" setup.py -q build_ext --inplace)

export PYTHONPATH="$BUILD/src" OMP_NUM_THREADS=1
export ASAN_OPTIONS=detect_leaks=0  # Python keeps what it has until it ends
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)"
"$PYTHON" -c 'import attemper.kernels.cpu as k; print("sanitized", k.variant, "from", k.__file__.split("/")[1])'
"$PYTHON" -m pytest -q -p no:cacheprovider -m "not exhaustive" -k "cpu or agreement" tests/kernels tests/definition "$@"
"$PYTHON" scripts/fuzz.py --cases "${FUZZ_CASES:-1000}"
