#!/usr/bin/env bash
# Recompile every locked requirements file from pyproject.toml. Needs uv. Index addresses stay out of the files.
set -euo pipefail
cd "$(dirname "$0")"
compile() { # OUT, then uv arguments
  local out=$1; shift
  uv pip compile ../pyproject.toml --universal --python-version 3.11 --override overrides.txt \
    --no-emit-index-url --no-annotate --no-header --generate-hashes -q -o "$out" "$@"
}
compile dev-cpu.txt     --extra local --extra engine-cpu --extra dev --extra loadtest "$@"
compile engine-cpu.txt  --extra local --extra engine-cpu -c dev-cpu.txt "$@"
compile runtime.txt     -c dev-cpu.txt "$@"
compile engine-cuda.txt --extra local --extra engine-cuda "$@"
uv pip compile bench.in --universal --python-version 3.11 --no-emit-index-url --no-annotate --no-header --generate-hashes \
  -q -o bench.txt "$@" # LiteLLM, measured beside the gateway in an environment of its own
compile dev-cuda.txt    --extra local --extra engine-cuda --extra dev -c engine-cuda.txt "$@"
