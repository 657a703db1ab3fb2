#!/usr/bin/env python3
"""Install, upgrade and remove the packages on this machine, and see the daemon copy a field, without changing the machine.

    deploy/try_packages.py BINARY

Builds the .deb (and the .rpm, where `rpm` is installed) from BINARY, lays a writable layer over the root file system for this
process alone (overlayfs, so it needs root or sudo), and changes its root to that. There it does what a user does, with the unit's own
command, environment and user, against the replica set in DENORMD_TEST_URI. Prints the time from the installation to the first copied
field. Exit code 1 if something is not as it should be or if that takes more than a minute.
"""

import configparser
import contextlib
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT = 60
UNIT = "usr/lib/systemd/system/denormd.service"
FILES = (
    "usr/bin/denormd", UNIT, "usr/lib/sysusers.d/denormd.conf", "etc/denormd/denormd.yaml",
    "usr/share/bash-completion/completions/denormd", "usr/share/fish/vendor_completions.d/denormd.fish",
    "usr/share/denormd/denormd.schema.json", "usr/share/doc/denormd/README.md", "usr/share/doc/denormd/docs/reference.md",
)


def say(text):
    print(text, flush=True)


def demand(what, holds):
    if not holds:
        sys.exit(f"{Path(__file__).name}: {what}: this does not hold")
    say(f"  {what}")


def until(what, holds, seconds=LIMIT):
    """Waits for a condition."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            sys.exit(f"{Path(__file__).name}: {what}: not within {seconds} s")
        time.sleep(0.05)
    say(f"  {what}")


class Layer:
    """A writable layer over this machine's root file system, for this process and those it starts."""

    def __init__(self, folder):
        run("mount", "-t", "tmpfs", "tmpfs", folder)
        self.upper, self.root = Path(folder, "upper"), Path(folder, "root")
        work = Path(folder, "work")
        for one in (self.upper, self.root, work):
            one.mkdir()
        run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={self.upper},workdir={work}", self.root)
        for name in ("proc", "dev"):
            run("mount", "--rbind", f"/{name}", self.root / name)
        # They may lie in a file system of its own, which is not in the layer.
        self.packages = self.root / "packages"
        self.packages.mkdir()

    def path(self, name):
        return self.root / name

    def run(self, *command, **options):
        return run("chroot", self.root, *command, **options)


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False, **options)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(str(word) for word in command)} exits with {done.returncode}:\n{done.stdout}")
    return done.stdout


class Service:
    """Does for the installed unit what systemd does: user, environment, command, readiness, SIGHUP, SIGTERM."""

    def __init__(self, layer):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str
        unit.read(layer.path(UNIT))
        self.section, self.layer, self.process = unit["Service"], layer, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = "127.0.0.1:%d" % free.getsockname()[1]

    @property
    def environment(self):
        # As a drop-in would: another daemon may run on this machine.
        return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "DENORMD__HTTP__LISTEN": self.address}

    def command(self, *words):
        user, group = self.section["User"], self.section["Group"]
        return ["chroot", str(self.layer.root), "setpriv", "--reuid", user, "--regid", group, "--init-groups", "--no-new-privs",
                *words]

    def start(self):
        """Returns when the daemon has notified that it is ready."""
        path = self.layer.path("run/denormd-notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, open(self.layer.path("log"), "ab") as log:
            path.unlink(missing_ok=True)
            notify.bind(str(path))
            path.chmod(0o777)
            notify.settimeout(LIMIT)
            command = self.command(*shlex.split(self.section["ExecStart"]))
            environment = {**self.environment, "NOTIFY_SOCKET": "/run/denormd-notify"}
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                while b"READY=1" not in notify.recv(4096):
                    pass
            except TimeoutError:
                sys.exit(f"the daemon is not ready within {LIMIT} s:\n{self.log()}")

    def stop(self):
        self.process.terminate()
        code = self.process.wait(timeout=LIMIT)
        demand("SIGTERM ends the daemon with 0", code == 0)

    def log(self):
        return self.layer.path("log").read_text(encoding="utf-8", errors="replace")[-4000:]

    def metric(self, name):
        """The sum of a metric of the running daemon."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError), direct.open(f"http://{self.address}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[ {{]", line))
        return 0


def inside(folder, uri, first, second, rpm):
    """What a user does. Runs in mounts of its own."""
    import pymongo

    layer = Layer(folder)
    for package in filter(None, (first, second, rpm)):
        shutil.copy(package, layer.packages)
    database = pymongo.MongoClient(uri)["shop"]
    database["customers"].insert_many([{"_id": 1, "name": "Ada"}, {"_id": 2, "name": "Grace"}])
    database["orders"].insert_many([{"_id": 10, "customer": 1}, {"_id": 11, "customer": 2}])
    order = lambda: database["orders"].find_one({"_id": 10}).get("customer_name")

    say("install")
    begun = time.monotonic()
    layer.run("dpkg", "--install", f"/packages/{first.name}")
    files(layer, "zsh/vendor-completions/_denormd", "man/man1/denormd-plan.1.gz")
    config, secret = layer.path("etc/denormd/denormd.yaml"), layer.path("etc/denormd/uri")
    group = layer.run("stat", "--format=%U:%G %a", "/etc/denormd/uri").strip()
    demand("the connection string is readable by root and the daemon alone", group == "root:denormd 640")
    enabled = list(layer.path("etc/systemd/system").glob("*.wants/denormd.service"))
    demand("the unit is not enabled", not enabled)
    secret.write_text(uri + "\n", encoding="utf-8")
    layer.run("denormd", "plan", "--apply", "--config", "/etc/denormd")

    say("start, with the example rule in shadow")
    service = Service(layer)
    service.start()
    until("the daemon compares", lambda: service.metric("denormd_shadow_differing_total") > 0)
    demand("and writes nothing", order() is None)

    say("the rule out of the shadow")
    text = config.read_text(encoding="utf-8")
    config.write_text("".join(line for line in text.splitlines(True) if "shadow: true" not in line), encoding="utf-8")
    os.kill(service.process.pid, 1)
    until("an existing order has its customer's name", lambda: order() == "Ada")
    taken = time.monotonic() - begun
    database["customers"].update_one({"_id": 1}, {"$set": {"name": "Ada Lovelace"}})
    until("a change arrives", lambda: order() == "Ada Lovelace")

    say("upgrade to a package whose own config has changed")
    edited = config.read_text(encoding="utf-8")
    layer.run("dpkg", "--force-confdef", "--force-confold", "--install", f"/packages/{second.name}")
    service.stop()
    service.start()
    demand("the edited config stays", config.read_text(encoding="utf-8") == edited)
    demand("the packaged one is beside it", config.with_name("denormd.yaml.dpkg-dist").exists())
    demand("the connection string stays", secret.read_text(encoding="utf-8") == uri + "\n")
    database["customers"].update_one({"_id": 1}, {"$set": {"name": "Augusta"}})
    until("a change arrives", lambda: order() == "Augusta")
    service.stop()

    say("remove, and purge")
    layer.run("dpkg", "--remove", "denormd")
    demand("the program is gone", not layer.path("usr/bin/denormd").exists())
    demand("config and connection string stay", config.exists() and secret.exists())
    layer.run("dpkg", "--purge", "denormd")
    demand("they are gone as well", not layer.path("etc/denormd").exists())

    if rpm:
        say("the .rpm: install and remove")
        layer.run("rpm", "--initdb")
        # Here dpkg has what it requires.
        layer.run("rpm", "--install", "--force-debian", "--nodeps", f"/packages/{rpm.name}")
        files(layer, "zsh/site-functions/_denormd", "man/man1/denormd-plan.1")
        demand("the program runs", layer.run("denormd", "--version").startswith("denormd "))
        demand("the connection string is readable by root and the daemon alone", stat.S_IMODE(secret.stat().st_mode) == 0o640)
        layer.run("rpm", "--erase", "--force-debian", "denormd")
        demand("the program is gone", not layer.path("usr/bin/denormd").exists())
    else:
        say("skipped, because rpm is not installed: the .rpm")

    say(f"\nfrom installation to the first copied field: {taken:.1f} s")
    demand(f"which is less than {LIMIT} s", taken < LIMIT)


def files(layer, *shared):
    names = [*FILES, *(f"usr/share/{name}" for name in shared)]
    missing = [name for name in names if not layer.path(name).exists()]
    demand(f"all files are there{': but not ' if missing else ''}{', '.join(missing)}", not missing)


def build(binary, folder):
    """The .deb, the same with a later version and another config, and the .rpm where it can be tried."""
    formats = ["deb", "rpm"] if shutil.which("rpm") else ["deb"]
    say(f"build {' and '.join(formats)}; cargo installs the tools for it the first time")
    subprocess.run([HERE / "build-packages.sh", folder, binary, *formats], check=True)
    first, second, tree = next(folder.glob("*.deb")), folder / "later.deb", folder / "later"
    run("dpkg-deb", "--raw-extract", first, tree)
    control, config = tree / "DEBIAN/control", tree / "etc/denormd/denormd.yaml"
    control.write_text(re.sub(r"(?m)^(Version: .*)$", r"\1.1", control.read_text(encoding="utf-8")), encoding="utf-8")
    config.write_text(config.read_text(encoding="utf-8") + "\n# A later version's.\n", encoding="utf-8")
    run("dpkg-deb", "--root-owner-group", "--build", tree, second)
    return first, second, next(folder.glob("*.rpm"), "")


def main(arguments):
    if arguments[:1] == ["--inside"]:
        folder, first, second, rpm = arguments[1:]
        return inside(folder, os.environ["DENORMD_TEST_URI"], Path(first), Path(second), Path(rpm) if rpm else None)
    if len(arguments) != 1 or not shutil.which("dpkg"):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        packages = build(Path(arguments[0]).resolve(), Path(folder))
        Path(folder, "layer").mkdir()
        sudo = [] if os.geteuid() == 0 else ["sudo", "--preserve-env=DENORMD_TEST_URI"]
        command = [*sudo, "unshare", "--mount", sys.executable, __file__, "--inside", f"{folder}/layer", *map(str, packages)]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
