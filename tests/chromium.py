#!/usr/bin/env python3
"""Print the path of a chromedriver whose chromium is installed too.

Both on PATH win; otherwise, where this is root on Debian or Ubuntu, their packages are installed by apt-get,
as your apt is configured. $CHROMEDRIVER, a path, comes first.

Standard output has the path and nothing else. Exit code 1, with one paragraph on standard error, when there
is none to be had.
"""

import os
import shutil
import sys

import fetch
from fetch import Unavailable, run

PACKAGES = ["chromium", "chromium-driver"]
OTHERWISE = "Install both (on Debian: `apt-get install chromium chromium-driver`), or set CHROMEDRIVER to the driver's path."


def from_path():
    driver = os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
    browser = any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return driver if driver and browser and run(driver, "--version")[0] == 0 else None


def find():
    found = from_path()
    if found:
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Unavailable(f"there is no chromium with a chromedriver on PATH. {OTHERWISE}")
    with fetch.locked(fetch.cache_folder(), "chromium"):
        if not from_path():
            fetch.apt_install(PACKAGES, OTHERWISE)
    found = from_path()
    if not found:
        raise Unavailable(f"chromium was installed and its driver does not run. {OTHERWISE}")
    return found


if __name__ == "__main__":
    sys.exit(fetch.main(__doc__, find))
