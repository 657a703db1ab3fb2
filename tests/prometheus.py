#!/usr/bin/env python3
"""Print the folder of a prometheus and its promtool.

The first of these that is there wins:

  1. $PROMETHEUS, a folder;
  2. both on PATH;
  3. both in the cache folder;
  4. Debian's package `prometheus`, which apt-get downloads as your apt is configured, unpacked into the
     cache folder: nothing is installed, and no service is started.

The cache folder is that of tests/mongod.py. Standard output has the path and nothing else. Exit code 1,
with one paragraph on standard error, when there is none to be had.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import fetch
from fetch import Unavailable, run

PROGRAMS = ("prometheus", "promtool")
OTHERWISE = "Install Prometheus (on Debian and Ubuntu: `apt-get install prometheus`), or set PROMETHEUS to the folder of both programs."


def runs(folder):
    try:
        return all(run(str(Path(folder) / program), "--version")[0] == 0 for program in PROGRAMS)
    except OSError:
        return False


def from_environment():
    named = os.environ.get("PROMETHEUS")
    if named and not runs(named):
        raise Unavailable(f"PROMETHEUS is {named!r}, a folder without a prometheus and a promtool that run.")
    return named


def from_path():
    found = [shutil.which(program) for program in PROGRAMS]
    if not all(found):
        return None
    folder = os.path.dirname(found[0])
    return folder if os.path.dirname(found[1]) == folder and runs(folder) else None


def from_cache_or_package(cache):
    folder = cache / "prometheus"
    if not runs(folder):
        with fetch.locked(cache, "prometheus"):
            if not runs(folder):
                unpack(cache, folder)
    return str(folder)


def unpack(cache, folder):
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as scratch:
        package, files = fetch.unpacked_package("prometheus", Path(scratch), OTHERWISE)
        programs = files / "usr" / "bin"
        if not runs(programs):
            raise Unavailable(f"the programs in {package.name} do not run here. {OTHERWISE}")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(programs, folder)


def find():
    return from_environment() or from_path() or from_cache_or_package(fetch.cache_folder())


if __name__ == "__main__":
    sys.exit(fetch.main(__doc__, find))
