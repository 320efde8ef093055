#!/usr/bin/env bash
# A Chromium for the tests of the report: found, or installed where this is root on a machine with apt. Never fails.
#   scripts/browser.sh          see that there is one
#   scripts/browser.sh --path   where it is; nothing, and 1, where there is none
set -uo pipefail
for name in "${ATTEMPER_BROWSER:-}" chromium chromium-headless-shell chromium-browser google-chrome google-chrome-stable; do
    if [ -n "$name" ] && command -v "$name" >/dev/null; then
        if [ "${1:-}" = --path ]; then command -v "$name"; fi
        exit 0
    fi
done
if [ "${1:-}" = --path ]; then exit 1; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing chromium for the tests of the report (apt-get)."
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    if { apt-get install -y -qq chromium || { apt-get update -qq && apt-get install -y -qq chromium; }; } >"$log" 2>&1; then
        rm -f "$log"
        exit 0
    fi
    tail -n 3 "$log"
    rm -f "$log"
fi
echo "No Chromium here: the browser tests of the report will not run. Install chromium, or set ATTEMPER_BROWSER to one."
exit 0
