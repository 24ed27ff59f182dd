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
compile dev-cuda.txt    --extra local --extra engine-cuda --extra dev --extra loadtest -c engine-cuda.txt "$@"

# What a file has of another one it names instead: each lock is there once. One of another marker is in both. Fails where
# versions differ.
shorten() { # OUT, the file that is in it
  python3 - "$@" <<'CODE'
import re, sys
from pathlib import Path
out, inner = map(Path, sys.argv[1:])
whole, part = (re.split(r"\n(?=\S)", path.read_text().strip()) for path in (out, inner))
left = [lock for lock in whole if lock not in part]
pins = [{lock.split()[0] for lock in locks if "==" in lock} for locks in (part, whole)]
assert pins[0] <= pins[1], f"{inner} is not in {out}: {pins[0] - pins[1]}"
out.write_text("\n".join([f"-r {inner}", *left]) + "\n")
CODE
}
shorten dev-cpu.txt engine-cpu.txt
shorten dev-cuda.txt engine-cuda.txt
shorten engine-cpu.txt runtime.txt

# What two files have both, a third one has for them.
common() { # ONE, OTHER, the file of what is in both
  python3 - "$@" <<'CODE'
import re, sys
from pathlib import Path
one, other, both = map(Path, sys.argv[1:])
locks = {path: re.split(r"\n(?=\S)", path.read_text().strip()) for path in (one, other)}
shared = [lock for lock in locks[one] if lock in locks[other]]
both.write_text("\n".join(shared) + "\n")
for path, whole in locks.items():
    includes = [lock for lock in whole if lock.startswith("-r ")]
    left = [lock for lock in whole if lock not in [*shared, *includes]]
    path.write_text("\n".join([*includes, f"-r {both}", *left]) + "\n")
CODE
}
common engine-cpu.txt engine-cuda.txt engine.txt

# What tests need is the same on every machine. Fails where it is not.
share() { # OUT, its inner file, the other OUT, its inner file, what both have
  python3 - "$@" <<'CODE'
import sys
from pathlib import Path
one, inner, other, inner_of_other, both = map(Path, sys.argv[1:])
rest = one.read_text().removeprefix(f"-r {inner}\n")
assert other.read_text() == f"-r {inner_of_other}\n{rest}", f"{one} and {other} differ"
both.write_text(rest)
one.write_text(f"-r {inner}\n-r {both}\n")
other.write_text(f"-r {inner_of_other}\n-r {both}\n")
CODE
}
share dev-cpu.txt engine-cpu.txt dev-cuda.txt engine-cuda.txt dev.txt
