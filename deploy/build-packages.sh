#!/usr/bin/env bash
# Builds denormd_VERSION_ARCH.deb and denormd-VERSION.ARCH.rpm from a binary, and prints their paths.
#   deploy/build-packages.sh FOLDER                  builds the static release binary first
#   deploy/build-packages.sh FOLDER BINARY [FORMAT…] a binary that is there; deb, rpm or both
# cargo-deb and cargo-generate-rpm are installed by cargo, once, unless they are on PATH.
set -euo pipefail
out=$(realpath -m "$1")
binary=${2:+$(realpath "$2")}
formats=("${@:3}")
[ "${#formats[@]}" -gt 0 ] || formats=(deb rpm)
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
CARGO_DEB=3.8.0
CARGO_GENERATE_RPM=0.21.1

# The folder that the metadata in Cargo.toml names: all that is not in the repository.
stage=target/package
rm -rf "$stage"
mkdir -p "$out" "$stage/completions"
if [ -n "$binary" ]; then cp "$binary" "$stage/denormd"; else deploy/build-binary.sh "$stage/denormd"; fi
strip "$stage/denormd"
"$stage/denormd" man --out "$stage/man"
for shell in bash fish zsh; do "$stage/denormd" completions "$shell" >"$stage/completions/denormd.$shell"; done

export PATH="$PWD/target/tools/bin:$PATH"
tool() {
    if ! command -v "$1" >/dev/null || ! "$1" --version 2>/dev/null | grep -qwF "$2"; then
        "$cargo" install --quiet --locked --root target/tools "$1@$2" >&2
    fi
}
for format in "${formats[@]}"; do
    case $format in
    deb)
        tool cargo-deb "$CARGO_DEB"
        cargo-deb deb --no-build --no-strip --quiet --output "$out/" ;;
    rpm)
        tool cargo-generate-rpm "$CARGO_GENERATE_RPM"
        cargo-generate-rpm generate-rpm --output "$out/"
        find "$out" -name 'denormd-*.rpm' ;;
    *) echo "$0: $format is neither deb nor rpm" >&2; exit 2 ;;
    esac
done
