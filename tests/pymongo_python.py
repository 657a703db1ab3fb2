#!/usr/bin/env python3
"""Print the path of a python that has PyMongo.

The one that runs this wins if it has; otherwise one in a venv in the cache folder, into which pip installs PyMongo once,
as your pip is configured. The cache folder is that of tests/mongod.py.

Standard output has the path and nothing else. Exit code 1, with one paragraph on standard error, when there is none to be had.
"""

import importlib.util
import subprocess
import sys
import venv

import fetch
from fetch import Unavailable, run, say

PACKAGE = "pymongo==4.15.3"


def find():
    if importlib.util.find_spec("pymongo"):
        return sys.executable
    cache = fetch.cache_folder()
    folder = cache / PACKAGE.replace("==", "-")
    python = folder / "bin" / "python"
    with fetch.locked(cache, "pymongo"):
        if not python.exists() or run(str(python), "-c", "import pymongo")[0] != 0:
            say(f"installing {PACKAGE} once, with pip")
            try:
                venv.create(folder, with_pip=True, clear=True)
            except (OSError, SystemExit, ValueError, subprocess.CalledProcessError) as error:
                raise Unavailable("no venv could be made for PyMongo. Install python3-venv, or PyMongo itself.") from error
            code, output = run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE)
            if code != 0:
                raise Unavailable(f"pip could not install {PACKAGE}: {' '.join(output.split())[-400:]}")
    return python


if __name__ == "__main__":
    sys.exit(fetch.main(__doc__, find))
