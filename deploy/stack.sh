#!/usr/bin/env bash
# Starts the stack of compose.yaml with the images that are on this machine or can be pulled.
#   deploy/stack.sh up      builds denormd's image if there is none, starts the stack, and prints its addresses
#   deploy/stack.sh down    stops the stack, and deletes its containers and data
# DENORMD_IMAGE names another image of denormd. Prometheus and Grafana are left out if their images cannot be pulled; for
# MongoDB, deploy/build-stand-in-image.sh builds a replacement. `up` prints what is left out or replaced.
set -euo pipefail
cd "$(dirname "$0")"

if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
compose+=(--project-name denormd-stack -f compose.yaml)
here() { docker image inspect "$1" >/dev/null 2>&1 || docker pull --quiet "$1" >/dev/null 2>&1; }
image_of() { sed -nE "s/^ *image: \\$\{$1:-(.*)\}/\1/p" compose.yaml | head -1; }

case "${1:-}" in
down) exec "${compose[@]}" down --volumes --remove-orphans ;;
up) ;;
*) sed -n '2,6s/^# *//p' "$0"; exit 2 ;;
esac

why=$(docker version 2>&1 >/dev/null) || { echo "$0: Docker does not answer: $why" >&2; exit 1; }
export DENORMD_IMAGE=${DENORMD_IMAGE:-denormd:dev}
if ! docker image inspect "$DENORMD_IMAGE" >/dev/null 2>&1; then
    ./build-image.sh "$DENORMD_IMAGE"
fi
docker image inspect --format "$DENORMD_IMAGE: {{.Size}} bytes" "$DENORMD_IMAGE"

services=(denormd)
for service in prometheus grafana; do
    image=$(image_of "$(tr '[:lower:]' '[:upper:]' <<<"$service")_IMAGE")
    if here "$image"; then services+=("$service"); else echo "left out: $service, because $image cannot be pulled"; fi
done

if here "${MONGO_IMAGE:-$(image_of MONGO_IMAGE)}"; then
    "${compose[@]}" up --detach "${services[@]}"
else
    echo "${MONGO_IMAGE:-$(image_of MONGO_IMAGE)} cannot be pulled: building a replacement"
    MONGO_IMAGE=$(./build-stand-in-image.sh | tail -1)
    export MONGO_IMAGE
    compose+=(-f compose/stand-in.yaml)
    "${compose[@]}" up --detach mongo-1 mongo-2 mongo-3
    ./initiate.py 127.0.0.1:27017 rs0 mongo-1:27017 mongo-2:27017 mongo-3:27017
    "${compose[@]}" up --detach "${services[@]}"
fi

for _ in $(seq 120); do
    if "${compose[@]}" exec -T denormd denormd health >/dev/null 2>&1; then
        echo "denormd is ready: http://127.0.0.1:9464/ (MongoDB at 127.0.0.1:27017, database shop)"
        for service in "${services[@]:1}"; do
            case $service in prometheus) echo "Prometheus: http://127.0.0.1:9090/" ;; grafana) echo "Grafana: http://127.0.0.1:3000/" ;; esac
        done
        exit 0
    fi
    sleep 0.5
done
"${compose[@]}" logs --tail 20 prepare denormd
echo "denormd did not become ready within a minute" >&2
exit 1
