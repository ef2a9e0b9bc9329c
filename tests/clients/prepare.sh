#!/usr/bin/env bash
# Install the clients that test_clients.py runs: `prepare.sh FOLDER`. They have an environment of their own, since their
# requirements are not ours.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
mkdir -p "$folder"
stamp="$folder/.prepared"
example="$here/../../services/client/examples/resume.ts"
digest=$(cat "$here/requirements.txt" "$here/package-lock.json" "$here/agents/package-lock.json" "$here"/programs/*.mjs "$example" |
  sha256sum)
[ "$(cat "$stamp" 2>/dev/null || true)" = "$digest" ] && exit 0
[ -x "$folder/python/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder/python"
"$folder/python/bin/python" -m pip install --quiet --no-deps -r "$here/requirements.txt"
cp "$here/package.json" "$here/package-lock.json" "$here"/programs/*.mjs "$folder"
cp "$example" "$folder"
(
  cd "$folder"
  npm ci --silent --no-audit --no-fund
  npx tsc --strict --target es2022 --module nodenext --types node --outDir built resume.ts
)
mkdir -p "$folder/agents"
cp "$here"/agents/package*.json "$folder/agents"
(
  cd "$folder/agents"
  npm ci --silent --no-audit --no-fund
)
echo "$digest" > "$stamp"
