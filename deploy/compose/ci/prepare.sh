#!/usr/bin/env bash
# prepare.sh CACHE: what the Docker tests need beside a running engine: the public images and the compose plugin.
# An image that is here is left alone; one that a registry gives is pulled; only where no registry answers is a
# stand-in made under its public name, and said so. Programs that have to be built stay in CACHE (about three minutes
# of two cores, once).
set -euo pipefail
cache=$(realpath -m "$1") here=$(dirname "$(realpath "$0")")
PYTHON=${PYTHON_IMAGE:-python:3.11-slim}
REDIS=${REDIS_IMAGE:-redis:7-alpine}
JAEGER=${JAEGER_IMAGE:-jaegertracing/jaeger:2.13.0}
JAEGER_MODULE_VERSION=v1.76.0 # the Go module of release 2.13.0
COMPOSE_VERSION=v2.40.3
PULL_DEADLINE_S=300
registry=unknown # after one failed pull the others are not tried: each could take its whole deadline
mkdir -p "$cache"

have() {
  docker image inspect "$1" > /dev/null 2>&1 && return
  [ "$registry" = none ] && return 1
  if timeout "$PULL_DEADLINE_S" docker pull -q "$1" 2> /dev/null; then return; fi
  registry=none
  return 1
}
build() { # the classic builder: no plugin is needed
  DOCKER_BUILDKIT=0 docker build -q "$@"
}

if ! have "$PYTHON"; then
  echo "prepare: no registry gives $PYTHON: made from this machine's packages"
  python3 "$here/base_image.py" "$PYTHON"
fi
if ! have "$REDIS"; then
  echo "prepare: no registry gives $REDIS: Debian's Redis instead"
  build -t "$REDIS" --build-arg "PYTHON_IMAGE=$PYTHON" -f "$here/Dockerfile.redis" "$here"
fi
if ! docker compose version > /dev/null 2>&1; then
  echo "prepare: building docker compose $COMPOSE_VERSION"
  compose=github.com/docker/compose/v2
  "$here/build_go_binary.sh" "$compose" "$COMPOSE_VERSION" "$compose/cmd" "$cache/docker-compose" \
    "-X $compose/internal.Version=$COMPOSE_VERSION"
  plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
  mkdir -p "$plugins"
  ln -sf "$cache/docker-compose" "$plugins/docker-compose"
fi
if ! have "$JAEGER"; then
  echo "prepare: no registry gives $JAEGER: the same release, without its other stores, built from source"
  jaeger=github.com/jaegertracing/jaeger
  "$here/build_go_binary.sh" "$jaeger" "$JAEGER_MODULE_VERSION" "$jaeger/cmd/jaeger" "$cache/jaeger/jaeger" "" \
    "$here/jaeger_edits.sh"
  build -t "$JAEGER" -f "$here/Dockerfile.jaeger" "$cache/jaeger"
fi
echo "prepare: done in $SECONDS s"
