#!/usr/bin/env bash
# Install everything that Quire needs into this clone, without root: uv into .quire/tools, packages into .venv.
#
#   deploy/local/bootstrap.sh engine|dev [--device auto|cpu|cuda] [--python PYTHON]
#
# `engine` is what `make up` needs, `dev` adds what `make test` and `make check` need. The versions and hashes are
# those of requirements/*.txt. Nothing happens when they are installed already. Exit codes: 0 ok, 1 failed, 2 usage.
set -euo pipefail

UV_VERSION=0.13.8
UV_OLDEST=0.9.0 # an uv on PATH that is at least this is used
NEED_CPU_MIB=8000
NEED_CUDA_MIB=14000
CA_FILES=(/etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem /etc/ssl/cert.pem)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
tools=$root/.quire/tools
venv=$root/.venv
stamp=$venv/quire-installed

say() { printf '[install] %s\n' "$*" >&2; }
fail() { # WHAT, then lines of WHAT TO DO
  printf '[install] FAILED: %s\n' "$1" >&2
  shift
  printf '[install]   %s\n' "$@" >&2
  exit 1
}
usage() {
  echo "usage: bootstrap.sh engine|dev [--device auto|cpu|cuda] [--python PYTHON]" >&2
  exit 2
}

# The operating system's certificate store: tools with roots of their own do not know a company's CA.
use_system_certificates() {
  local file
  if [[ -z ${SSL_CERT_FILE:-} ]]; then
    for file in "${CA_FILES[@]}"; do
      if [[ -s $file ]]; then export SSL_CERT_FILE=$file; break; fi
    done
  fi
  if [[ -n ${SSL_CERT_FILE:-} ]]; then export PIP_CERT=${PIP_CERT:-$SSL_CERT_FILE}; fi
}

# A python that really runs, with the modules that a venv needs: a pyenv shim may exist and fail.
works() {
  "$1" -I -c 'import ctypes, ssl, sys, zlib
ok = sys.implementation.name == "cpython" and sys.version_info[:2] in ((3, 11), (3, 12)) and sys.maxsize > 2**32
sys.exit(0 if ok else 1)' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${wanted_python:+"$wanted_python"} python3.11 python3.12 python3 python \
    /usr/bin/python3.11 /usr/bin/python3.12 /usr/local/bin/python3.11 /usr/local/bin/python3.12 \
    "${HOME:-/}"/.pyenv/versions/3.1[12].*/bin/python "${HOME:-/}"/.local/share/uv/python/cpython-3.1[12].*/bin/python; do
    if command -v "$candidate" >/dev/null 2>&1 && works "$candidate"; then
      "$candidate" -I -c 'import os, sys; print(os.path.realpath(sys.executable))'
      return
    fi
    if [[ -n $wanted_python && $candidate == "$wanted_python" ]]; then
      fail "$wanted_python is no working CPython 3.11 or 3.12" "name another one: make install PYTHON=/path/to/python3.11"
    fi
  done
  fail "no working CPython 3.11 or 3.12 found" \
    "Debian and Ubuntu: apt-get install python3 (24.04 and Debian 12 have a right one)" \
    "or name one: make install PYTHON=/path/to/python3.11"
}

newer_or_same() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n1) == "$2" ]]; }
uv_version() { "$1" --version 2>/dev/null | awk 'NR == 1 { print $2 }'; }
uv_fits() {
  local version
  version=$(uv_version "$1") && [[ -n $version ]] && newer_or_same "$version" "$UV_OLDEST"
}

find_uv() {
  local found
  for found in "$(command -v uv || true)" "$tools/uv/bin/uv"; do
    if [[ -n $found ]] && uv_fits "$found"; then echo "$found"; return; fi
  done
  get_uv
}

# Three ways, because a bare Debian python has neither venv nor pip.
get_uv() {
  local log=$tools/uv.log
  mkdir -p "$tools"
  say "getting uv $UV_VERSION into .quire/tools"
  rm -rf "$tools/uv"
  if "$python" -m venv "$tools/uv" >"$log" 2>&1 &&
    "$tools/uv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION" >>"$log" 2>&1; then
    :
  elif rm -rf "$tools/uv" && "$python" -m pip install --quiet --disable-pip-version-check --target "$tools/uv" \
    "uv==$UV_VERSION" >>"$log" 2>&1; then
    :
  elif rm -rf "$tools/uv" && curl --proto '=https' --tlsv1.2 -LsSf --max-time 120 \
    "https://astral.sh/uv/$UV_VERSION/install.sh" -o "$tools/uv-install.sh" 2>>"$log" &&
    UV_UNMANAGED_INSTALL="$tools/uv/bin" sh "$tools/uv-install.sh" >>"$log" 2>&1; then
    :
  fi
  if ! uv_fits "$tools/uv/bin/uv"; then
    tail -n 5 "$log" >&2
    fail "cannot get uv $UV_VERSION (tried python -m venv, pip and curl; log: $log)" \
      "check the network and proxy settings, or install uv yourself: https://docs.astral.sh/uv/"
  fi
  echo "$tools/uv/bin/uv"
}

choose_device() {
  case $device in
    cpu | cuda) echo "$device" ;;
    auto) if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
      echo cuda
    else
      echo cpu
    fi ;;
    *) usage ;;
  esac
}

# Files that lock a set, which `dev` has of `engine` but for its own in dev.txt, and `engine-cpu` of `runtime`; both kinds
# of engine have most in engine.txt.
locks() {
  local set
  if [[ $device == cpu ]]; then echo "$root/requirements/runtime.txt"; fi
  echo "$root/requirements/engine.txt"
  if [[ $1 == dev ]]; then echo "$root/requirements/dev.txt"; fi
  for set in $([[ $1 == dev ]] && echo "dev engine" || echo "$1"); do echo "$root/requirements/$set-$device.txt"; done
}

digest() { # PYTHON, set
  local files
  mapfile -t files < <(locks "$2")
  "$1" -I -c 'import hashlib, sys; print(hashlib.sha256(b"".join(open(p, "rb").read() for p in sys.argv[1:])).hexdigest())' \
    "${files[@]}"
}

# `dev` contains `engine` of the same device, so either stamp will do for `engine`.
is_installed() {
  local set
  [[ -f $stamp && -x $venv/bin/python ]] || return 1
  for set in "$kind" dev; do
    if grep -qxF "$set-$device $(digest "$venv/bin/python" "$set")" "$stamp"; then return 0; fi
  done
  return 1
}

check_disk() {
  local free need=$NEED_CPU_MIB
  if [[ $device == cuda ]]; then need=$NEED_CUDA_MIB; fi
  if [[ -f $stamp ]]; then return; fi
  free=$(df -Pm "$root" | awk 'NR == 2 { print $4 }')
  if ((free < need)); then
    fail "only $free MiB are free at $root, the packages need about $need MiB" "free some space, or clone elsewhere"
  fi
}

make_venv() {
  local old=""
  if [[ -f $stamp ]]; then old=$(awk '{ sub(/^.*-/, "", $1); print $1; exit }' "$stamp"); fi
  if [[ -n $old && $old != "$device" ]]; then
    say "replacing .venv: it holds the $old build of vLLM"
    rm -rf "$venv"
  elif [[ -d $venv ]] && ! works "$venv/bin/python"; then
    say "replacing .venv: its python does not work"
    rm -rf "$venv"
  fi
  if [[ ! -d $venv ]]; then
    "$uv" venv --quiet --no-python-downloads --python "$python" "$venv" ||
      fail "cannot make .venv with $python" "remove $venv and run the command again"
  fi
}

install_packages() {
  local file=$root/requirements/$kind-$device.txt files
  mapfile -t files < <(locks "$kind")
  say "installing $(cat "${files[@]}" | grep -c '==') locked packages from requirements/$kind-$device.txt (the first time: minutes)"
  rm -f "$stamp"
  "$uv" pip install --python "$venv/bin/python" --no-deps --require-hashes -r "$file" ||
    fail "the packages of requirements/$kind-$device.txt could not be installed" \
      "what uv said above names the package and the reason; often it is the network, a proxy or a full disk" \
      "run the same command again: what was downloaded is kept"
  printf '%s-%s %s\n' "$kind" "$device" "$(digest "$venv/bin/python" "$kind")" >"$stamp"
}

# The project itself, editable: a path file and a launcher. No build, no index. Each is there at every moment: others
# use them while `make` does this once more.
link_project() {
  local site
  site=$("$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$root" >"$site/quire.pth.$$"
  mv -f "$site/quire.pth.$$" "$site/quire.pth"
  # without bytecode, where the environment forbids it, every start would compile vLLM anew (14 CPU-seconds)
  printf '#!/bin/sh\nunset PYTHONDONTWRITEBYTECODE\n_QUIRE_TYPED=$0 exec "%s" -P -m deploy.local "$@"\n' "$venv/bin/python" >"$venv/bin/quire.$$"
  chmod 755 "$venv/bin/quire.$$"
  mv -f "$venv/bin/quire.$$" "$venv/bin/quire"
}

main() {
  kind=${1:-}
  [[ $kind == engine || $kind == dev ]] || usage
  shift
  device=auto wanted_python=""
  while (($#)); do
    (($# > 1)) || usage
    case $1 in
      --device) device=${2:-auto}; shift 2 ;;
      --python) wanted_python=$2; shift 2 ;;
      *) usage ;;
    esac
  done
  cd "$root"
  device=$(choose_device)
  if ! is_installed; then
    mkdir -p "$tools"
    if command -v flock >/dev/null 2>&1; then
      exec 9>"$tools/install.lock"
      flock -n 9 || { say "waiting for another installation in this clone"; flock 9; }
    fi
    if ! is_installed; then
      use_system_certificates
      check_disk
      python=$(find_python)
      say "python: $python; device: $device"
      uv=$(find_uv)
      say "uv: $uv ($(uv_version "$uv"))"
      if "$uv" --help 2>/dev/null | grep -q -- --system-certs; then export UV_SYSTEM_CERTS=1; else export UV_NATIVE_TLS=1; fi
      make_venv
      install_packages
      say "done"
    fi
  fi
  link_project
}

main "$@"
