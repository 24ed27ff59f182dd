#!/usr/bin/env bash
# build_go_binary.sh MODULE VERSION PACKAGE OUT [LDFLAGS [EDITS]]
# Build a static program of a Go module that `go install PACKAGE@VERSION` refuses, because its go.mod holds
# replace or exclude directives. A throw-away main module requires it, repeats those directives, and starts from
# the release's own go.sum, so that every checksum is upstream's. EDITS: a program that is given a copy of the source.
# For tests, so nothing is optimized: half the time.
set -euo pipefail
module=$1 version=$2 package=$3 out=$(realpath -m "$4") ldflags=${5:-} edits=${6:-}
if [ -x "$out" ]; then exit 0; fi
if ! command -v go > /dev/null; then
  echo "build_go_binary: no go command: install Go 1.24 or newer to build $package $version" >&2
  exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
printf 'module build\n\ngo 1.24\n\nrequire %s %s\n' "$module" "$version" > go.mod
source=$(go mod download -json "$module@$version" | sed -n 's/.*"Dir": "\(.*\)",/\1/p')
cp "$source/go.sum" go.sum
chmod u+w go.sum
sed -i "s/^go .*/$(grep -m 1 '^go ' "$source/go.mod")/" go.mod
go mod edit -json "$source/go.mod" | python3 -c '
import json, sys
edits = json.load(sys.stdin)
for exclude in edits.get("Exclude") or []:
    print("exclude", exclude["Path"], exclude["Version"])
for replace in edits.get("Replace") or []:
    old, new = replace["Old"], replace["New"]
    if new.get("Version"):  # a local path is of use to its authors only
        print("replace", old["Path"], old.get("Version", ""), "=>", new["Path"], new["Version"])
' >> go.mod
if [ -n "$edits" ]; then
  cp -r "$source" edited
  chmod -R u+w edited
  "$edits" edited
  go mod edit -replace "$module=./edited"
fi
mkdir -p "$(dirname "$out")"
CGO_ENABLED=0 GOGC=400 nice go build -gcflags 'all=-N -l -dwarf=false' -mod=mod -trimpath -ldflags "-s -w $ldflags" -o "$out.part" "$package"
mv "$out.part" "$out"
