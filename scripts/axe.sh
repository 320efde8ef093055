#!/usr/bin/env bash
# axe-core for the page's tests of accessibility, in .venv/axe: installed by npm where there is one and it can be had. Never fails.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ -e .venv/axe/node_modules/axe-core/axe.min.js ] || ! command -v npm >/dev/null; then exit 0; fi
mkdir -p .venv/axe
npm install --prefix .venv/axe --no-audit --no-fund --ignore-scripts --silent axe-core@4 >/dev/null 2>&1 ||
    echo "axe-core could not be installed: the page's tests of accessibility will be skipped."
exit 0
