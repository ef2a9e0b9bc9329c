#!/usr/bin/env bash
# Builds images: deploy/images/build.sh [--cuda] [NAME[=DOCKERFILE]...]; without names the three of a CPU cluster, with
# --cuda the engine for NVIDIA GPUs as well.
#
# PAGESTREAM_IMAGE_BUILDER: docker, buildah (default: the one that is installed), or a command that is called as
#   COMMAND NAME:TAG ARCHIVE [arguments of docker build] CONTEXT and writes a docker archive.
# IMAGE_TAG (the packages' version), TORCH_INDEX (an index with PyTorch's CPU build), TORCH_INDEX_CUDA (one with its CUDA
#   build), HEAD_DIMS (head sizes that the CPU engine's attention is compiled for, such as "64 128"; by default all),
#   BASE_IMAGE: by default that of deploy/images/base-image.txt if it names a digest; else the Dockerfiles' tag, pinned
#   for this run to the digest that docker or skopeo finds in its index. The images' labels name both.
# Writes build/images/NAME.tar, and beside it NAME.cdx.json, the list of contents that is also in the image.
set -euo pipefail
cd "$(dirname "$0")/../.."

tag=${IMAGE_TAG:-$(sed -nE 's/^version = "(.*)"/\1/p' services/engine/pyproject.toml)}
out=build/images
builder=${PAGESTREAM_IMAGE_BUILDER:-}
if [ -z "$builder" ]; then
  for each in docker buildah; do
    if command -v "$each" >/dev/null; then builder=$each; break; fi
  done
fi
if [ -z "$builder" ]; then
  echo "images: neither docker nor buildah is on the PATH; or name a command: make images IMAGE_BUILDER=COMMAND" >&2
  exit 1
fi
cuda=()
if [ "${1:-}" = --cuda ]; then cuda=(pagestream-engine-cuda); shift; fi
images=("$@")
if [ ${#images[@]} = 0 ]; then
  images=(pagestream-{gateway,operator,engine} "${cuda[@]}")
fi

digest_of() { # IMAGE: the digest of its index, or nothing where none can be reached
  if command -v skopeo >/dev/null; then
    timeout 30 skopeo inspect --format '{{.Digest}}' "docker://docker.io/library/$1" 2>/dev/null
  elif command -v docker >/dev/null; then
    timeout 30 docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$1" 2>/dev/null
  fi
}

base=${BASE_IMAGE:-}
if [ -z "$base" ]; then
  base=$(grep -v '^#' deploy/images/base-image.txt)
  if [[ $base != *@sha256:* ]]; then
    digest=$(digest_of "$base" || true)
    if [[ $digest == sha256:* ]]; then
      base=$base@$digest
    else
      echo "images: no index tells the digest of $base: images are built on the tag" >&2
      base=
    fi
  fi
fi
arguments=()
if [ -n "$base" ]; then # else the Dockerfiles' own, or what the builder puts in its place
  arguments+=(--build-arg "BASE_IMAGE=$base" --label "org.opencontainers.image.base.name=${base%@*}")
fi
if [[ $base == *@sha256:* ]]; then arguments+=(--label "org.opencontainers.image.base.digest=${base#*@}"); fi

build() { # NAME DOCKERFILE CONTEXT
  local name=$1 archive=$out/$1.tar index=${TORCH_INDEX:-}
  if [ "$name" = pagestream-engine-cuda ]; then index=${TORCH_INDEX_CUDA:-}; fi
  local arguments=("${arguments[@]}")
  if [ -n "$index" ]; then arguments+=(--build-arg "TORCH_INDEX=$index"); fi
  if [ "$name" = pagestream-engine ] && [ -n "${HEAD_DIMS:-}" ]; then
    arguments+=(--build-arg "HEAD_DIMS=$HEAD_DIMS")
  fi
  case $builder in
    docker)
      docker build --tag "$name:$tag" "${arguments[@]}" --file "$2" "$3"
      docker save --output "$archive" "$name:$tag" ;;
    buildah)
      buildah bud --layers --tag "localhost/$name:$tag" "${arguments[@]}" --file "$2" "$3"
      rm -f "$archive"
      buildah push --quiet "localhost/$name:$tag" "docker-archive:$archive:localhost/$name:$tag" ;;
    *)
      "$builder" "$name:$tag" "$archive" --layers "${arguments[@]}" --file "$2" "$3" ;;
  esac
}

make_image() { # NAME[=DOCKERFILE]
  local name=${1%%=*} begin=$SECONDS
  local file=deploy/images/${name#pagestream-}.Dockerfile context=.
  if [ "$1" != "$name" ]; then file=${1#*=} context=$(dirname "$file"); fi
  if ! build "$name" "$file" "$context" >"$out/$name.log" 2>&1; then
    tail -n 40 "$out/$name.log" >&2
    echo "images: $name can't be built; the whole log is $out/$name.log" >&2
    return 1
  fi
  python3 deploy/images/archive.py "$out/$name.tar" usr/share/pagestream/sbom.cdx.json \
    >"$out/$name.cdx.json" 2>/dev/null || rm -f "$out/$name.cdx.json"
  echo "images: $name:$tag in $((SECONDS - begin)) s, $(du -h "$out/$name.tar" | cut -f1)"
}

# The engine takes longer than all others together, which share their first layers: it is built beside them, after the
# first of them, with which a builder may prepare its base image.
mkdir -p "$out"
others=() engines=() running=() failed=0
for image in "${images[@]}"; do
  if [[ $image == pagestream-engine* ]]; then engines+=("$image"); else others+=("$image"); fi
done
if [ ${#others[@]} -gt 0 ]; then make_image "${others[0]}"; fi
for image in "${engines[@]}"; do
  make_image "$image" &
  running+=($!)
done
for image in "${others[@]:1}"; do make_image "$image" || failed=1; done
for each in "${running[@]}"; do wait "$each" || failed=1; done
exit $failed
