#!/usr/bin/env bash
# Install schemathesis: `prepare.sh FOLDER`. It has an environment of its own, since its requirements are not ours.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
mkdir -p "$folder"
stamp="$folder/.prepared"
digest=$(sha256sum < "$here/requirements.txt")
[ "$(cat "$stamp" 2>/dev/null || true)" = "$digest" ] && exit 0
[ -x "$folder/python/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder/python"
"$folder/python/bin/python" -m pip install --quiet --no-deps -r "$here/requirements.txt"
echo "$digest" > "$stamp"
