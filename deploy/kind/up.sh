#!/usr/bin/env bash
# A kind cluster with Pagestream: deploy/kind/up.sh [helm's arguments...]. It needs docker, kind, kubectl and helm.
# The gateways answer at 127.0.0.1:8000 (HTTP) and 127.0.0.1:50051 (gRPC).
# `kind delete cluster --name pagestream` removes it.
set -euo pipefail
cd "$(dirname "$0")/../.."

for tool in docker kind kubectl helm; do
  command -v "$tool" >/dev/null || { echo "up.sh: $tool is not on the PATH" >&2; exit 1; }
done
PAGESTREAM_IMAGE_BUILDER=docker deploy/images/build.sh
kind get clusters | grep -qx pagestream || kind create cluster --config deploy/kind/kind.yaml --wait 120s
for archive in build/images/pagestream-{gateway,operator,engine}.tar; do
  kind load image-archive --name pagestream "$archive"
done
helm --kube-context kind-pagestream upgrade --install pagestream helm/pagestream --wait --timeout 5m "$@"
# The chart sets no node ports; kind.yaml needs these two.
kubectl --context kind-pagestream patch service pagestream-gateway --patch '{"spec": {"type": "NodePort", "ports": [
  {"name": "http", "port": 8000, "nodePort": 30080}, {"name": "grpc", "port": 50051, "nodePort": 30051}]}}'
helm --kube-context kind-pagestream get notes pagestream
