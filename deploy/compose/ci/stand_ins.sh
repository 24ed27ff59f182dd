#!/usr/bin/env bash
# stand_ins.sh CACHE: make sure that the three public images of compose.yaml exist.
# An image that is here already is left alone; one that a registry gives is pulled; only where no registry can be
# reached is a stand-in made under its public name, and said so. CACHE/jaeger is the built Jaeger program.
set -euo pipefail
cache=$1 here=$(dirname "$(realpath "$0")")
PYTHON=${PYTHON_IMAGE:-python:3.11-slim}
REDIS=${REDIS_IMAGE:-redis:7-alpine}
JAEGER=${JAEGER_IMAGE:-jaegertracing/jaeger:2.13.0}
PULL_DEADLINE_S=${PULL_DEADLINE_S:-300}

have() { docker image inspect "$1" > /dev/null 2>&1 || timeout "$PULL_DEADLINE_S" docker pull -q "$1" 2> /dev/null; }
build() { DOCKER_BUILDKIT=0 docker build -q "$@"; }  # the classic builder: no buildx is needed

if ! have "$PYTHON"; then
  echo "stand_ins: no registry for $PYTHON: made from this machine's packages"
  python3 "$here/base_image.py" "$PYTHON"
fi
if ! have "$REDIS"; then
  echo "stand_ins: no registry for $REDIS: Debian's Redis instead"
  build -t "$REDIS" --build-arg "PYTHON_IMAGE=$PYTHON" -f "$here/Dockerfile.redis" "$here"
fi
if ! have "$JAEGER"; then
  echo "stand_ins: no registry for $JAEGER: the same release, built from source"
  build -t "$JAEGER" -f "$here/Dockerfile.jaeger" "$cache"
fi
