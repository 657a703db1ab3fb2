#!/usr/bin/env python3
"""Plant one bug after another in a copy of the source, and demand that the tests notice each.

The bugs are in mutants.toml. The working tree is copied once, as git lists it; each bug is planted in the copy, built,
tried with the tests that must fail on it, and taken out again. The copy and what is built of it are kept in
target/mutants of the project, so a second run builds only what differs.

Before that the same tests run without any bug, to show that it is the bug they fail on.

    --list            say which bugs there are
    --only NAME       only these, several with commas between
    --skip-unplanted  do not run the tests without a bug first
    --simulate SEEDS  try the bugs of the engine with so many seeds of the simulator instead, and say which seed found each;
                      without --only, only the bugs without `unseen`

Exit code 1 when a bug goes unnoticed, or when it could not be tried: it no longer fits the source, it does not build,
or its tests did not end.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import fetch

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
CARGO = os.environ.get("CARGO", "cargo")
# A test that takes longer hangs.
PATIENCE_SECONDS = 600
# The tests on the simulated server, which need no other, and their share of the seeds: those with faults take longer.
SIMULATED = "meaning::histories::simulated::all_rules_converge_"
SIMULATIONS = [("on_the_model", 1), ("whatever_fails", 0.25), ("on_the_model_in_three_partitions", 0.25)]


def say(text=""):
    print(text, flush=True)


class Untried(Exception):
    """Why a mutant says nothing about the tests."""


def environment():
    """What cargo and the tests see: one target folder, and no seeds but those that a mutant asks for."""
    env = dict(os.environ, CARGO_TARGET_DIR=str(PROJECT / "target/mutants/build"))
    for name in ("DENORMD_SEED", "DENORMD_FIRST", "DENORMD_HISTORIES"):
        env.pop(name, None)
    if "MONGOD" not in env:
        found = subprocess.run(
            [sys.executable, str(HERE / "mongod.py")], stdout=subprocess.PIPE, text=True, check=False
        )
        if found.returncode != 0:
            sys.exit(1)
        env["MONGOD"] = found.stdout.strip()
    return env


def copied():
    """The working tree, as git lists it, in a folder of its own. Only what has changed gets a new date."""
    copy = PROJECT / "target/mutants/source"
    listed = subprocess.run(
        ["git", "-C", str(PROJECT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        stdout=subprocess.PIPE, check=True,
    )
    wanted = {name.decode() for name in listed.stdout.split(b"\0") if name}
    wanted = {name for name in wanted if (PROJECT / name).is_file()}
    for old in [path for path in copy.rglob("*") if path.is_file() or path.is_symlink()]:
        if str(old.relative_to(copy)) not in wanted:
            old.unlink()
    for name in wanted:
        source, target = PROJECT / name, copy / name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return copy


def planted(mutant, text):
    """The text of the file with the bug in it."""
    count = text.count(mutant["old"])
    if count != 1:
        raise Untried(f"what it replaces is {count} times in {mutant['file']}")
    return text.replace(mutant["old"], mutant["new"])


def finish(command, copy, env, log, patience=None):
    """Runs a command to its end in a group of its own; returns its exit code, or None when it took too long."""
    with subprocess.Popen(
        command, cwd=copy, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            return process.wait(patience)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


def tried(mutant, copy, env, logs):
    """The names of the tests that failed, in what is there now. Stops after the first run that fails."""
    name, runs = mutant["name"], mutant.get("runs") or [(mutant["test"], mutant.get("env", {}))]
    with open(logs / f"{name}.log", "wb") as log:
        test = runs[0][0].split()
        if finish([CARGO, "test", *test[:2 if test[0] == "--test" else 3], "--no-run"], copy, env, log) != 0:
            raise Untried(f"it does not build: see {log.name}")
    for test, more in runs:
        command = [CARGO, "test", *test.split()]
        if command[2] == "--test" and "runs" not in mutant:
            command = [str(Path(env["CARGO_TARGET_DIR"]) / "debug/denormd-fixture"), "run", "--", *command]
        begin = Path(log.name).stat().st_size
        with open(logs / f"{name}.log", "ab") as log:
            code = finish(command, copy, dict(env, **more), log, PATIENCE_SECONDS)
        if code is None:
            raise Untried(f"its tests did not end in {PATIENCE_SECONDS} seconds: see {log.name}")
        text = Path(log.name).read_bytes()[begin:].decode("utf-8", errors="replace")
        ran = sum(int(passed) + int(failed) for passed, failed in re.findall(r"(\d+) passed; (\d+) failed", text))
        failed = sorted(set(re.findall(r"^test (\S+) \.\.\. FAILED$", text, re.MULTILINE)))
        if ran == 0 or (code != 0) != bool(failed):
            raise Untried(f"no test said what it found: see {log.name}")
        if failed:
            break
    return failed


def unplanted(mutants, copy, env, logs):
    """Runs every test that a mutant names, without a bug. Returns whether all pass."""
    seen, good = set(), True
    for mutant in mutants:
        run = str(mutant.get("runs") or (mutant["test"], mutant.get("env")))
        if run in seen:
            continue
        seen.add(run)
        start = time.monotonic()
        try:
            failed = tried(dict(mutant, name="unplanted"), copy, env, logs)
        except Untried as why:
            failed = [str(why)]
        outcome = "passes" if not failed else f"FAILS: {', '.join(failed)}"
        tests = "the simulator" if "runs" in mutant else mutant["test"]
        say(f"without a bug, {tests} {outcome} ({time.monotonic() - start:.0f} s)")
        good &= not failed
    return good


def simulated(mutant, seeds):
    """The same bug, to be found by the simulator."""
    def run(test, share):
        env = {"DENORMD_SIMULATIONS": str(max(1, int(seeds * share))), "DENORMD_FIRST": "1", "DENORMD_RELOADS": "1"}
        return f"--test main -- --nocapture --exact {SIMULATED}{test}", dict(env, DENORMD_SHRINK_MINUTES="0", RUST_LOG="error")

    return dict(mutant, runs=[run(*simulation) for simulation in SIMULATIONS])


def seed_found(log):
    """The lowest first seed of the clusters that a log says how to replay."""
    seeds = re.findall(r"DENORMD_CLUSTER='{\"(?:first|seed)\":(\d+)", log.read_text(encoding="utf-8", errors="replace"))
    return f" with a seed from {min(map(int, seeds))} on" if seeds else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", metavar="NAME")
    parser.add_argument("--skip-unplanted", action="store_true")
    parser.add_argument("--simulate", metavar="SEEDS", type=int)
    given = parser.parse_args()
    mutants = tomllib.loads((HERE / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    if given.only:
        only = given.only.split(",")
        unknown = set(only) - {mutant["name"] for mutant in mutants}
        if unknown:
            sys.exit(f"there is no mutant {', '.join(sorted(unknown))}: see --list")
        mutants = [mutant for mutant in mutants if mutant["name"] in only]
    if given.simulate:
        mutants = [mutant for mutant in mutants if mutant["file"].startswith("src/engine/")]
        unseen = [mutant for mutant in mutants if "unseen" in mutant and not given.only]
        mutants = [simulated(mutant, given.simulate) for mutant in mutants if mutant not in unseen]
        say(f"trying {len(mutants)} bugs; {len(unseen)} others cannot make a run fail (`unseen` in mutants.toml)")
    width = max(len(mutant["name"]) for mutant in mutants)
    if given.list:
        for mutant in mutants:
            say(f"{mutant['name']:{width}}  {mutant['story']}")
        return 0
    env, copy = environment(), copied()
    logs = PROJECT / "target/mutants/logs"
    logs.mkdir(parents=True, exist_ok=True)
    # One server for all tests of a run, as `make test` has it.
    subprocess.run([CARGO, "build", "--quiet", "--workspace", "--bin", "denormd-fixture"], cwd=copy, env=env, check=True)
    if not given.skip_unplanted and not unplanted(mutants, copy, env, logs):
        say("the tests fail without a bug: nothing can be said of the mutants")
        return 1
    rows = []
    for mutant in mutants:
        file, start = copy / mutant["file"], time.monotonic()
        true = file.read_text(encoding="utf-8")
        try:
            file.write_text(planted(mutant, true), encoding="utf-8")
            failed = tried(mutant, copy, env, logs)
            caught, by = bool(failed), failed[0] + (f" and {len(failed) - 1} more" if failed[1:] else "") if failed else "SURVIVES"
            if caught and given.simulate:
                by += seed_found(logs / f"{mutant['name']}.log")
        except Untried as why:
            caught, by = False, f"NOT TRIED: {why}"
        finally:
            file.write_text(true, encoding="utf-8")
        rows.append((mutant["name"], by, f"{time.monotonic() - start:.0f}", caught))
        say(f"{mutant['name']:{width}}  {by}")
    wide = max(len("caught by"), *(len(row[1]) for row in rows))
    say()
    say(f"{'mutant':{width}} | {'caught by':{wide}} | seconds")
    say(f"{'-' * width}-|-{'-' * wide}-|--------")
    for name, by, seconds, _ in rows:
        say(f"{name:{width}} | {by:{wide}} | {seconds:>7}")
    escaped = sum(not row[3] for row in rows)
    say(f"\n{len(rows) - escaped} of {len(rows)} caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    # Two at once would run each other's builds.
    (PROJECT / "target/mutants").mkdir(parents=True, exist_ok=True)
    with fetch.locked(PROJECT / "target/mutants", "run"):
        sys.exit(main())
