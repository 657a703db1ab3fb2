"""What the scripts here share to fetch a file once: the cache folder, its lock, and a pip that checks the hash."""

import argparse
import contextlib
import fcntl
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path


class Unavailable(Exception):
    """Why it is not to be had, and what to do about it."""


def say(text):
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)


def run(*command, env=None):
    """The command's exit code and all it printed."""
    # A file and not a pipe: Wine's services outlive a command that started them, and keep its output open.
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, check=False
            )
        except FileNotFoundError as error:
            return 127, f"{command[0]}: {error.strerror}"
        output.seek(0)
        return done.returncode, output.read().decode(errors="replace")


def cache_folder():
    """The first that can be written of: $DENORMD_CACHE, else the user's cache folder and .cache in the project."""
    chosen = os.environ.get("DENORMD_CACHE")
    if chosen:
        candidates = [Path(chosen)]
    else:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        candidates = [Path(home) / "denormd", Path(__file__).resolve().parent.parent / ".cache"]
    for folder in candidates:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder.resolve()
    raise Unavailable(f"cannot write to {candidates[-1]}. Set DENORMD_CACHE to a folder that can be written.")


@contextlib.contextmanager
def locked(folder, name):
    """One process at a time; the kernel lets go of the lock when its holder dies."""
    with open(folder / f"{name}.lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download(requirement, sha256, scratch, otherwise, kind="wheel", options=()):
    """The path of the one file that pip downloads, as your pip configuration says, for a pinned requirement.

    pip compares the hash before it looks into the file: it runs a source package's own code for its metadata.
    `otherwise` says what to do instead when there is none. `options` are for pip, such as those that name another system.
    """
    python = sys.executable or "python3"
    if run(python, "-m", "pip", "--version")[0] != 0:
        python = python_with_pip(scratch, otherwise)
    pinned = scratch / "requirement.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    form = {"wheel": ("*.whl", "--only-binary=:all:"), "source": ("*.tar.gz", "--no-binary=:all:")}
    pattern, option = form[kind]
    code, output = run(
        python, "-m", "pip", "download", "--no-deps", option, "--disable-pip-version-check", "--no-cache-dir",
        "--progress-bar=off", "--require-hashes", "--dest", str(scratch), "--requirement", str(pinned), *options,
    )
    files = glob.glob(str(scratch / pattern))
    if code == 0 and files:
        return Path(files[0])
    last = " ".join(output.split())[-600:]
    if "DO NOT MATCH THE HASHES" in output:
        raise Unavailable(
            f"what pip downloaded as {requirement} does not have the sha256 {sha256}, so it was not used. "
            f"Look at the package index that pip is set up with (`pip config list`), or {otherwise}. pip said: {last}"
        )
    raise Unavailable(
        f"pip could not download {requirement}. Check the network and pip's configuration (`pip config list`), "
        f"or {otherwise}. pip said: {last}"
    )


def python_with_pip(scratch, otherwise):
    """Debian's python3 comes without pip, but its ensurepip, when it is there, can put one into a venv."""
    try:
        venv.create(scratch / "venv", with_pip=True)
    except (subprocess.CalledProcessError, OSError, SystemExit) as error:
        raise Unavailable(
            "python3 has no pip, and no venv could be made to get one. Install them (on Debian and Ubuntu: "
            f"`apt-get install python3-pip`), or {otherwise}."
        ) from error
    return str(scratch / "venv" / "bin" / "python")


def apt_install(packages, otherwise):
    """Installs Debian packages, as apt is configured. Only for root on Debian or Ubuntu."""
    say("installing " + " ".join(packages))
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    code, output = run(*command, env=env)
    if code != 0:
        # The image came without package lists, or with old ones.
        run("apt-get", "update", env=env)
        code, output = run(*command, env=env)
    if code != 0:
        raise Unavailable(f"`{' '.join(command)}` failed: {' '.join(output.split())[-400:]}. {otherwise}")


def unpacked_package(name, scratch, otherwise):
    """The Debian package, which apt-get downloads as it is configured, unpacked into `scratch`; nothing is installed.

    Returns the package's file and the folder with its files.
    """
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise Unavailable(f"there is no apt-get to fetch {name} with. {otherwise}")
    say(f"fetching Debian's package {name} once")
    # apt leaves its privileges behind for a download, and this folder is ours alone.
    command = ["sh", "-c", f"cd '{scratch}' && apt-get -o APT::Sandbox::User=root download {name}"]
    code, output = run(*command)
    if code != 0 and os.geteuid() == 0:
        # The image came without package lists, or with old ones.
        run("apt-get", "update")
        code, output = run(*command)
    packages = list(scratch.glob("*.deb"))
    if code != 0 or not packages:
        raise Unavailable(f"`apt-get download {name}` failed: {' '.join(output.split())[-400:]}. {otherwise}")
    run("dpkg-deb", "-x", str(packages[0]), str(scratch / "package"))
    return packages[0], scratch / "package"


def main(description, find, programs=()):
    """Prints what `find` returns, and nothing else, on standard output. The exit code.

    Where there are several programs, the first is found if none is named.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if programs:
        parser.add_argument("program", nargs="?", choices=programs, default=programs[0])
    named = vars(parser.parse_args()).values()
    try:
        print(find(*named))
    except Unavailable as error:
        text = f"{Path(sys.argv[0]).name}: {error}"
        print(textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
        return 1
    return 0
