#!/usr/bin/env python3
"""Run a target of make in a clean clone of the last commit, and print how long it took.

    tests/clean_clone.py TARGET PATTERN [LIMIT]

Prints the seconds to the first line of output, to the first line that PATTERN matches, and to the end. Compiles and fetches
everything but crates that cargo has downloaded before: mongod is fetched anew unless MONGOD names one. With LIMIT, exit
code 1 if it took more seconds.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# They would lead out of the clone, or make the build another one.
OTHERS = ("CARGO_TARGET_DIR", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "RUSTFLAGS")


def main(target, pattern, limit=None):
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "denormd")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        environment = {name: value for name, value in os.environ.items() if name not in OTHERS}
        environment["DENORMD_CACHE"] = folder
        return report(target, *run(target, pattern, clone, environment), limit)


def run(target, pattern, clone, environment):
    """Seconds to the first line, to the pattern and to the end, and the exit code."""
    begun, first, shown = time.monotonic(), None, None
    process = subprocess.Popen(
        ["make", target], cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )
    for line in process.stdout:
        since = time.monotonic() - begun
        first = first or since
        if shown is None and re.search(pattern, line):
            shown = since
        print(line, end="", flush=True)
    code = process.wait()
    return first, shown, time.monotonic() - begun, code


def report(target, first, shown, end, code, limit):
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    said = lambda seconds: "never" if seconds is None else f"{seconds:.1f} s"
    print(f"\nmake {target} in a clean clone, on {cores} cores, exit code {code}:")
    print(f"  first line of output   {said(first)}")
    print(f"  first line of interest {said(shown)}")
    print(f"  end                    {said(end)}")
    print(f"  CPU time of it all     {used.ru_utime + used.ru_stime:.1f} s, load at the end {os.getloadavg()[0]:.1f}")
    if code == 0 and limit and end > float(limit):
        print(f"  which is more than {limit} s", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or not shutil.which("make"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
