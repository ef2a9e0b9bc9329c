#!/usr/bin/env bash
# Builds the images that the cluster tests install, and loads them onto the cluster's nodes.
# PAGESTREAM_IMAGE_LOADER: a command that takes docker archives, such as "kind load image-archive".
# deploy/images/build.sh has the other variables.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ -z "${PAGESTREAM_IMAGE_LOADER:-}" ]; then
  echo "cluster-test: set PAGESTREAM_IMAGE_LOADER to a command that loads docker archives onto the nodes," \
    "such as 'kind load image-archive'" >&2
  exit 1
fi
if ! kubectl version >/dev/null; then
  echo "cluster-test: kubectl reaches no cluster; set KUBECONFIG" >&2
  exit 1
fi
collector=$(command -v otelcol || command -v otelcol-contrib || true)
if [ -z "$collector" ]; then
  echo "cluster-test: otelcol (the OpenTelemetry Collector) is not on the PATH" >&2
  exit 1
fi
context=build/images/otelcol
mkdir -p "$context"
cmp -s "$collector" "$context/otelcol" || install -m 755 "$collector" "$context/otelcol"
cp tests/cluster/images/otelcol.Dockerfile "$context/Dockerfile"

# Of the demo model and of the tests' own: all sizes take ten minutes more.
HEAD_DIMS="16 64" deploy/images/build.sh pagestream-{gateway,operator,engine} \
  pagestream-test-redis=tests/cluster/images/redis.Dockerfile pagestream-test-otelcol="$context/Dockerfile"
begin=$SECONDS
for archive in build/images/pagestream-*.tar; do
  # shellcheck disable=SC2086  # the loader may bring arguments
  $PAGESTREAM_IMAGE_LOADER "$archive" >/dev/null
done
echo "cluster-test: images loaded in $((SECONDS - begin)) s"
