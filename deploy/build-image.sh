#!/usr/bin/env bash
# Builds the sidecar's image where no base image can be pulled, by the last steps of deploy/Dockerfile.
#   deploy/build-image.sh                     builds the binary, then the image denormd:<version>
#   deploy/build-image.sh TAG [BINARY]        another tag; a binary that is there already (a debug build, for tests)
# The last line of the output names the image.
set -euo pipefail
cd "$(dirname "$0")/.."
why=$(docker version 2>&1 >/dev/null) || { echo "$0: Docker does not answer: $why" >&2; exit 1; }

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
commit=${DENORMD_COMMIT-$(git rev-parse HEAD 2>/dev/null || true)}
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
tag=${1:-denormd:$version}
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT

binary=${2:-}
if [ -z "$binary" ]; then
    binary=$context/denormd
    DENORMD_COMMIT=$commit deploy/build-binary.sh "$binary"
fi
deploy/image-root.sh "$binary" "$context/image"
sed -n '/^# ---- The image/,$p' deploy/Dockerfile | sed 's/--from=build //; s|/image/|image/|' >"$context/Dockerfile"
printf '*\n!image\n' >"$context/.dockerignore"

before=$(docker image inspect --format '{{.Id}}' "$tag" 2>/dev/null || true)

# The builder that is part of every Docker Engine; the newer one is a plugin, which may not be there.
built=$(DOCKER_BUILDKIT=0 docker build --quiet --tag "$tag" --build-arg "DENORMD_VERSION=$version" \
    --build-arg "DENORMD_COMMIT=$commit" --build-arg "SOURCE=${SOURCE:-}" "$context" 2>"$context/log") ||
    { cat "$context/log" >&2; exit 1; }
# What had the name before has none now, unless it is the same, has another one, or a container needs it.
if [ -n "$before" ] && [ "$before" != "$built" ]; then
    [ -n "$(docker image inspect --format '{{join .RepoTags ""}}' "$before")" ] || docker image rm "$before" >/dev/null 2>&1 || true
fi
echo "$built: $(docker image inspect --format '{{.Size}}' "$tag") bytes"
echo "$tag"
