#!/usr/bin/env bash
# prepare.sh CACHE: what the Docker tests need beside a running engine: the compose plugin and the public images.
# Programs that have to be built go to CACHE and are built once (about six minutes of two cores). Needs Go only
# where no registry can be reached.
set -euo pipefail
cache=$(realpath -m "$1") here=$(dirname "$(realpath "$0")")
JAEGER=${JAEGER_IMAGE:-jaegertracing/jaeger:2.13.0}
JAEGER_MODULE_VERSION=v1.76.0 # the Go module of release 2.13.0
COMPOSE_VERSION=v2.40.3
mkdir -p "$cache"

if ! docker compose version > /dev/null 2>&1; then
  echo "prepare: building docker compose $COMPOSE_VERSION"
  compose=github.com/docker/compose/v2
  "$here/build_go_binary.sh" "$compose" "$COMPOSE_VERSION" "$compose/cmd" "$cache/docker-compose" \
    "-X $compose/internal.Version=$COMPOSE_VERSION"
  plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
  mkdir -p "$plugins"
  ln -sf "$cache/docker-compose" "$plugins/docker-compose"
fi
if ! docker image inspect "$JAEGER" > /dev/null 2>&1 && ! timeout 300 docker pull -q "$JAEGER" 2> /dev/null; then
  echo "prepare: building Jaeger $JAEGER_MODULE_VERSION"
  jaeger=github.com/jaegertracing/jaeger
  "$here/build_go_binary.sh" "$jaeger" "$JAEGER_MODULE_VERSION" "$jaeger/cmd/jaeger" "$cache/jaeger"
fi
"$here/stand_ins.sh" "$cache"
