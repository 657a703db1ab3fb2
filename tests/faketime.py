#!/usr/bin/env python3
"""Print the path of libfaketime, a library that moves the wall clock of the programs that preload it.

The first of these that is there wins:

  1. $FAKETIME_LIBRARY, a path;
  2. that of an installed package, of Debian or Ubuntu;
  3. the one in the cache folder;
  4. Debian's package `libfaketime`, which apt-get downloads as your apt is configured, unpacked into the
     cache folder: nothing is installed.

The cache folder is that of tests/mongod.py. Standard output has the path and nothing else. Exit code 1,
with one paragraph on standard error, when there is none to be had.
"""

import glob
import os
import shutil
import sys
import tempfile
from pathlib import Path

import fetch
from fetch import Unavailable

# Debian's folder is named after the architecture.
PATTERNS = ("usr/lib/*/faketime/libfaketime.so.1", "usr/lib/faketime/libfaketime.so.1")
OTHERWISE = "Install it (on Debian and Ubuntu: `apt-get install libfaketime`), or set FAKETIME_LIBRARY to its path."


def in_folder(root):
    return next((found for pattern in PATTERNS for found in glob.glob(str(Path(root) / pattern))), None)


def from_environment():
    named = os.environ.get("FAKETIME_LIBRARY")
    if named and not os.path.exists(named):
        raise Unavailable(f"FAKETIME_LIBRARY is {named!r}, where there is no file.")
    return named


def from_cache_or_package(cache):
    library = cache / "libfaketime.so.1"
    if not library.exists():
        with fetch.locked(cache, "faketime"):
            if not library.exists():
                unpack(cache, library)
    return str(library)


def unpack(cache, library):
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as scratch:
        package, files = fetch.unpacked_package("libfaketime", Path(scratch), OTHERWISE)
        found = in_folder(files)
        if not found:
            raise Unavailable(f"{package.name} has no libfaketime.so.1. {OTHERWISE}")
        copy = Path(scratch) / "library"
        shutil.copy(found, copy)
        os.replace(copy, library)


def find():
    return from_environment() or in_folder("/") or from_cache_or_package(fetch.cache_folder())


if __name__ == "__main__":
    sys.exit(fetch.main(__doc__, find))
