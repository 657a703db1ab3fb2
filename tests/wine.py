"""Starts a Windows build of mongod under Wine with Microsoft's C++ runtime, and without Wine's services.

Wine 8.0's own runtime destroys an exception twice when the program rethrows it from a std::exception_ptr, which damages the
heap. mongod does that when it creates a collection that another client is just creating, and ends at the next exception.
The services, which nothing here needs, are eight more processes: on a busy machine they took longer to start than tests wait.
wineboot itself must run: without it, servers that start at the same moment wait for it for five minutes.
"""

import hashlib
import os
import shlex
import tempfile
import zipfile
from pathlib import Path

import fetch
from fetch import Unavailable, run, say

WHEEL = "msvc-runtime==14.40.33807"
WHEEL_SHA256 = "cedb4f71337a49fdc590684b5ed5d249ef6b3757b605e8841ca116bb2c943619"
SYSTEM = ("--platform=win_amd64", "--python-version=3.11", "--implementation=cp")
LIBRARIES = ("msvcp140", "vcruntime140", "vcruntime140_1")


def is_launcher(mongod):
    """True for a script that `launcher` made."""
    return Path(mongod).parent.name.startswith("wine-") and Path(mongod).parent.parent == fetch.cache_folder()


def launcher(mongod):
    """The path of a script that runs `mongod`, which itself starts Wine, with the runtime."""
    cache = fetch.cache_folder()
    script = cache / ("wine-" + hashlib.sha256(os.fsencode(mongod)).hexdigest()[:16]) / "mongod"
    # An empty order of loading turns a program off. wineboot starts services.exe, and that one the others.
    overrides = ",".join(LIBRARIES) + "=n;services.exe="
    text = f'#!/bin/sh\nexport WINEDLLOVERRIDES="{overrides}"\nexec {shlex.quote(mongod)} "$@"\n'
    with fetch.locked(cache, "wine-runtime"):
        # The prefix of the script that runs mongod: it has the same cache folder.
        install(cache / "wine" / "drive_c" / "windows" / "system32")
        if script.exists() and script.read_text(encoding="utf-8") == text:
            return str(script)
        script.parent.mkdir(exist_ok=True)
        part = script.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.chmod(0o755)
        code, output = run(str(part), "--version")
        if code != 0:
            raise Unavailable(f"{mongod} does not run with {WHEEL}: {' '.join(output.split())[-400:]}")
        os.replace(part, script)
    return str(script)


def install(system32):
    """Puts the libraries into a Wine prefix, beside Wine's own, which are still used where they are not overridden."""
    if not system32.is_dir():
        raise Unavailable(f"there is no Wine prefix with {system32}. Start the Windows build of mongod once.")
    if (system32 / f".{WHEEL}").exists():
        return
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=system32) as scratch:
        scratch = Path(scratch)
        say(f"fetching {WHEEL} (2 MB) once, with pip")
        wheel = fetch.download(WHEEL, WHEEL_SHA256, scratch, "set MONGOD to a mongod that runs without Wine", options=SYSTEM)
        with zipfile.ZipFile(wheel) as archive:
            for library in LIBRARIES:
                name = f"{library}.dll"
                member = next(each for each in archive.namelist() if each.endswith(f"/{name}"))
                (scratch / name).write_bytes(archive.read(member))
                os.replace(scratch / name, system32 / name)
    (system32 / f".{WHEEL}").touch()
