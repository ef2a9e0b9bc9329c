#!/usr/bin/env bash
# Builds images: deploy/images/build.sh [NAME=DOCKERFILE...]; without arguments the three of a CPU cluster.
#
# PAGESTREAM_IMAGE_BUILDER: docker, buildah (default: the one that is installed), or a command that is called as
#   COMMAND NAME:TAG ARCHIVE [arguments of docker build] CONTEXT and writes a docker archive.
# IMAGE_TAG (the packages' version), BASE_IMAGE (the Dockerfiles'), TORCH_INDEX (an index with PyTorch's CPU build).
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
images=("$@")
if [ ${#images[@]} = 0 ]; then
  images=(pagestream-{gateway,operator,engine})
fi

arguments=()
if [ -n "${BASE_IMAGE:-}" ]; then arguments+=(--build-arg "BASE_IMAGE=$BASE_IMAGE"); fi
if [ -n "${TORCH_INDEX:-}" ]; then arguments+=(--build-arg "TORCH_INDEX=$TORCH_INDEX"); fi

build() { # NAME DOCKERFILE CONTEXT
  local name=$1 archive=$out/$1.tar
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

mkdir -p "$out"
for image in "${images[@]}"; do
  name=${image%%=*} begin=$SECONDS
  file=deploy/images/${name#pagestream-}.Dockerfile context=.
  if [ "$image" != "$name" ]; then file=${image#*=} context=$(dirname "$file"); fi
  if ! build "$name" "$file" "$context" >"$out/$name.log" 2>&1; then
    tail -n 40 "$out/$name.log" >&2
    echo "images: $name can't be built; the whole log is $out/$name.log" >&2
    exit 1
  fi
  python3 deploy/images/archive.py "$out/$name.tar" usr/share/pagestream/sbom.cdx.json \
    >"$out/$name.cdx.json" 2>/dev/null || rm -f "$out/$name.cdx.json"
  echo "images: $name:$tag in $((SECONDS - begin)) s, $(du -h "$out/$name.tar" | cut -f1)"
done
