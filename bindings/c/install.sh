#!/usr/bin/env bash
# Installs the C library: header, shared and static library, files for pkg-config and CMake.
#
#   bindings/c/install.sh PREFIX              builds for release first
#   bindings/c/install.sh PREFIX LIBRARIES    takes the libraries that cargo has put into that folder
#
# DESTDIR goes before PREFIX, as packagers expect. The files may be moved afterwards, all together.
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 PREFIX [LIBRARIES]" >&2
    exit 2
fi
readonly PACKAGE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
readonly PREFIX="${DESTDIR:-}$1"

libraries="${2:-}"
if [ -z "$libraries" ]; then
    libraries="${CARGO_TARGET_DIR:-$PACKAGE/../../target}/release"
    cargo build --release --manifest-path "$PACKAGE/Cargo.toml"
fi

version="$(cargo pkgid --manifest-path "$PACKAGE/Cargo.toml")"
version="${version##*[@#]}"
soname="libsidelane_c.so.${version%.*}"

install -Dm644 "$PACKAGE/include/sidelane.h" -t "$PREFIX/include"
install -Dm755 "$libraries/libsidelane_c.so" "$PREFIX/lib/libsidelane_c.so.$version"
install -Dm644 "$libraries/libsidelane_c.a" -t "$PREFIX/lib"
strip --strip-unneeded "$PREFIX/lib/libsidelane_c.so.$version"
strip --strip-debug "$PREFIX/lib/libsidelane_c.a"
# Programs load the name with the minor version; linkers look for the name without one.
ln -sf "libsidelane_c.so.$version" "$PREFIX/lib/$soname"
ln -sf "$soname" "$PREFIX/lib/libsidelane_c.so"

# Writes a template of this package with the version filled in.
template() {
    mkdir -p "$(dirname "$2")"
    sed "s/@VERSION@/$version/" "$PACKAGE/install/$1.in" > "$2"
}
template sidelane.pc "$PREFIX/lib/pkgconfig/sidelane.pc"
for file in sidelane-config.cmake sidelane-config-version.cmake; do
    template "$file" "$PREFIX/lib/cmake/sidelane/$file"
done
