#!/usr/bin/env bash
# Makes .venv: exact versions from constraints.txt, the packages named as arguments in editable form.
# PYTHON: the interpreter (>= 3.11). TORCH_INDEX: an index with PyTorch's CPU build, where one is wanted.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "setup: $("$python" --version 2>&1) was given, 3.11 or newer is needed: make setup PYTHON=/path/to/python3.11" >&2
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  echo "setup: $python has no venv module; on Debian: apt-get install python3-venv" >&2
  exit 1
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "setup: installing packages into .venv (minutes, most of them for torch)"
pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt)
"${pip[@]}" pip
if [ -n "${TORCH_INDEX:-}" ]; then
  .venv/bin/python -m pip install --quiet --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
fi
"${pip[@]}" --group dev
editable=()
for package in "$@"; do editable+=(--editable "./$package"); done
# One call for torch and all packages: pip must never see a chance to prefer a newer torch.
"${pip[@]}" --no-build-isolation "${editable[@]}"

# The C++ that processes on this machine compile at their first start, for the demo model's heads. It is kept by content
# in the user's cache (~/.cache/pagestream), which all checkouts share.
echo "setup: compiling the C++ kernels for this processor (30 s, once)"
PAGESTREAM_HEAD_DIMS=64 .venv/bin/python -m pagestream_engine.native_prebuild \
  pagestream_engine.attention.native.levels pagestream_engine.layers.native.levels \
  pagestream_engine.features.lora.native.levels pagestream_engine.sampler.native.levels \
  pagestream_worker.logs.library >/dev/null ||
  echo "setup: they are not compiled; engines on this CPU are slower until the first start that finds a compiler" >&2
