#!/usr/bin/env bash
# The stack of compose.yaml, with what can be had here.
#   deploy/stack.sh up      builds the image when it is not there, starts the stack, and says where everything listens
#   deploy/stack.sh down    takes it away, with its data
# DENORMD_IMAGE names another image of denormd. Images that are neither here nor to be pulled are left out (Prometheus,
# Grafana) or stood in for (MongoDB, by deploy/build-stand-in-image.sh), and that is said.
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

export DENORMD_IMAGE=${DENORMD_IMAGE:-denormd:dev}
if ! docker image inspect "$DENORMD_IMAGE" >/dev/null 2>&1; then
    ./build-image.sh "$DENORMD_IMAGE"
fi
docker image inspect --format "$DENORMD_IMAGE: {{.Size}} bytes" "$DENORMD_IMAGE"

services=(denormd)
for service in prometheus grafana; do
    image=$(image_of "${service^^}_IMAGE")
    if here "$image"; then services+=("$service"); else echo "left out: $service, because $image cannot be pulled"; fi
done

if here "${MONGO_IMAGE:-$(image_of MONGO_IMAGE)}"; then
    "${compose[@]}" up --detach "${services[@]}"
else
    echo "${MONGO_IMAGE:-$(image_of MONGO_IMAGE)} cannot be pulled: standing in for it"
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
