#!/usr/bin/env bash
# An environment that reads the packages of another Python, without its editable attemper.
#   scripts/beside.sh PYTHON FOLDER
set -euo pipefail
"$1" -m venv "$2"
"$1" -c 'import site; print(site.getsitepackages()[0])' >"$("$2/bin/python" -c 'import site; print(site.getsitepackages()[0])')/torch.pth"
