#!/usr/bin/env bash
# jaeger_edits.sh SOURCE: leave out of Jaeger's source what deploy/compose/jaeger.yaml does not name: its other stores
# (Elasticsearch's client alone is a quarter of what would be compiled), receivers, exporters and processors. What is
# left is as released: OTLP in, traces in memory, the query API. Of release 2.13.0; a build that fails says what moved.
set -euo pipefail
cd "$1"
parts='kafka|prometheusexporter|spanmetrics|tailsampling|attributesprocessor|filterprocessor|jaegerreceiver|zipkinreceiver'
parts+='|sigv4auth|basicauth|pprofext|zpages|remotesampling|adaptivesampling|remotestorage|storagecleaner|expvar'
sed -E -i "/$parts/d" cmd/jaeger/internal/components.go
sed -E -i '/mappings/d' cmd/jaeger/main.go

# the old query service's flags, which name a store of every kind
sed -E -i -e '/v1\/factory"|v2\/v1adapter"|app\/querysvc(\/v2\/querysvc)?"|^type InitArchiveStorageFn/d' \
  -e '/^\/\/ BuildQueryServiceOptions/,/^}/d' cmd/query/app/flags.go

cd cmd/jaeger/internal/extension/jaegerstorage
sed -E -i -e '/metricstore\/|v2\/(badger|cassandra|clickhouse|elasticsearch|grpc)"|elasticsearch\/config"/d' \
  -e '/case cfg\.(Badger|Prometheus) /,/default:/{/default:/!d}' -e '/^\/\/ resolveAuthenticator/,/^}/d' \
  -e 's/for metricStorageName, cfg := range/for metricStorageName := range/' extension.go
sed -E -i -e '/cascfg |escfg|metricstore\/prometheus|v1\/(badger|cassandra|elasticsearch)"|v2\/(clickhouse|grpc)"/d' \
  -e '/^\t"time"$|\*(badger|grpc|cassandra|clickhouse)\./d' \
  -e '/IsSet\("(badger|prometheus)"\)/,/return conf/{/return conf/!d}' config.go
