#!/usr/bin/env bash
# Lays out the image's whole file system from a binary.
#   deploy/image-root.sh BINARY FOLDER
# A binary that is not static (a debug build, for tests) takes its libraries along. Times are SOURCE_DATE_EPOCH's, so that
# the same binary gives the same layer.
set -euo pipefail
binary=$1 root=$2
here=$(cd "$(dirname "$0")/.." && pwd)

rm -rf "$root"
mkdir -p "$root"/{usr/bin,usr/share/doc/denormd,etc/denormd}
cp "$binary" "$root/usr/bin/denormd"
strip "$root/usr/bin/denormd"
cp "$here/LICENSE" "$root/usr/share/doc/denormd/"
echo 'denormd:x:65532:65532:denormd:/:/nonexistent' >"$root/etc/passwd"
echo 'denormd:x:65532:' >"$root/etc/group"

# ldd names the loader by its path alone and the libraries after an arrow, and says "statically linked" of the others.
for library in $(ldd "$binary" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }'); do
    mkdir -p "$root${library%/*}"
    cp -L "$library" "$root$library"
done

chmod -R u=rwX,go=rX "$root"
find "$root" -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH:-0}" {} +
