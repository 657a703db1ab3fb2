#!/usr/bin/env python3
"""Print a folder for NODE_PATH in which Node finds MongoDB's driver.

$NODE_PATH wins if the driver is there; otherwise, where this is root on Debian or Ubuntu, their packages are installed by
apt-get, as your apt is configured.

Standard output has the path and nothing else. Exit code 1, with one paragraph on standard error, when there is none to be had.
"""

import os
import shutil
import sys

import fetch
from fetch import Unavailable, run

DEBIAN = "/usr/share/nodejs"
OTHERWISE = "Install Node 18 or later and its package mongodb, and set NODE_PATH to the folder of the package."


def runs(folder):
    script = "require('mongodb'); fetch"
    return bool(shutil.which("node")) and run("node", "-e", script, env={**os.environ, "NODE_PATH": folder})[0] == 0


def find():
    for folder in (os.environ.get("NODE_PATH"), DEBIAN):
        if folder and runs(folder):
            return folder
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Unavailable(f"Node or its driver is not there. {OTHERWISE}")
    with fetch.locked(fetch.cache_folder(), "node-mongodb"):
        if not runs(DEBIAN):
            fetch.apt_install(["node-mongodb"] if shutil.which("node") else ["nodejs", "node-mongodb"], OTHERWISE)
    if not runs(DEBIAN):
        raise Unavailable(f"the driver was installed, and Node does not load it. {OTHERWISE}")
    return DEBIAN


if __name__ == "__main__":
    sys.exit(fetch.main(__doc__, find))
