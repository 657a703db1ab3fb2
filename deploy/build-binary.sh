#!/usr/bin/env bash
# Builds the release binary for an image of its own, without any shared library, and puts it where the argument says.
#   deploy/build-binary.sh dist/denormd
#
# With Rust's musl target (on Alpine it is the machine's own; elsewhere `rustup target add x86_64-unknown-linux-musl` and
# musl-tools) it is linked against musl. Where that target cannot be had, against glibc, statically too: glibc 2.34 or
# later resolves host names without opening a library at run time, from /etc/hosts and DNS and nothing else.
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."

host=$(rustc -vV | sed -n 's/^host: //p')
musl=${host%-gnu}; musl=${musl%-musl}-musl
libraries=$(rustc --print target-libdir --target "$musl")
if compgen -G "$libraries/libstd-*.rlib" >/dev/null && { [ "$host" = "$musl" ] || command -v musl-gcc >/dev/null; }; then
    target=$musl
else
    target=$host
    echo "Rust's $musl target or musl-gcc is not there: linking glibc statically instead" >&2
    command -v cc >/dev/null || { echo "a C compiler (cc) is needed" >&2; exit 1; }
    [ -e "$(cc -print-file-name=libc.a)" ] || { echo "libc.a is missing too: on Fedora and RHEL, dnf install glibc-static" >&2; exit 1; }
fi

# Paths of this machine out of the binary: the same source gives the same bytes, wherever it is checked out.
cargo_home=${CARGO_HOME:-$HOME/.cargo}
# Separated by a character that no path has: a path may have spaces.
s=$'\x1f'
flags="-C${s}target-feature=+crt-static${s}--remap-path-prefix=$PWD=/denormd${s}--remap-path-prefix=$cargo_home=/cargo"
folder=${CARGO_TARGET_DIR:-target}
CARGO_ENCODED_RUSTFLAGS="$flags" ${CARGO:-cargo} build --locked --profile dist --package denormd --bin denormd --target "$target" \
    --target-dir "$folder"

mkdir -p "$(dirname "$out")"
cp "$folder/$target/dist/denormd" "$out"
echo "$out: $(stat -c %s "$out") bytes, $target" >&2
