#!/usr/bin/env bash
# Builds an image, denormd-test/mongo:6.0.5, from the mongod that tests/mongod.py finds and the shared libraries that it
# needs: a stand-in for mongo:6.0 where Docker runs but can pull nothing. For tests only; it has no shell.
# The tag is the version of that mongod, and the last line of the output names the image.
set -euo pipefail
cd "$(dirname "$0")/.."

mongod=$(python3 tests/mongod.py)
version=$("$mongod" --version | sed -n 's/^db version v//p')
tag=denormd-test/mongo:$version
# One that is there already is not made again: the old one would stay behind without a name.
sum=$(sha256sum "$mongod" deploy/build-stand-in-image.sh | sha256sum | cut -c1-32)
if [ "$(docker image inspect --format '{{index .Config.Labels "denormd.of"}}' "$tag" 2>/dev/null)" = "$sum" ]; then
    echo "$tag"
    exit
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

mkdir -p "$root"/{usr/bin,etc,data/db,data/configdb}
mkdir -m 1777 "$root/tmp"
cp "$mongod" "$root/usr/bin/mongod"
printf 'root:x:0:0:root:/:\n' >"$root/etc/passwd"
printf 'root:x:0:\n' >"$root/etc/group"

# ldd names the loader by its path alone and the libraries after an arrow. Each keeps its path, which is where the
# loader looks; -L because most are links. The name services are opened at run time, so ldd does not know of them.
libraries=$(ldd "$mongod" | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }')
libc=$(grep '/libc\.so\.6$' <<<"$libraries")
for library in $libraries "${libc%/*}"/libnss_{files,dns}.so.2; do
    if [ -e "$library" ]; then
        mkdir -p "$root${library%/*}"
        cp -L "$library" "$root$library"
    fi
done

tar --numeric-owner --owner=0 --group=0 -C "$root" -c . |
    docker import --change "LABEL denormd.of=$sum" --change 'ENV PATH=/usr/bin' --change 'WORKDIR /data' --change 'VOLUME ["/data/db"]' \
        --change 'EXPOSE 27017' --change 'CMD ["mongod", "--bind_ip_all"]' - "$tag" >/dev/null
docker run --rm "$tag" mongod --version >/dev/null
echo "$tag"
