#!/usr/bin/env python3
"""Plant bugs in a copy of the source, and demand that the tests notice each.

The bugs are in mutants.toml. The working tree is copied, as git lists it, and all bugs are planted in the copy in one
build, in which an environment variable chooses the bug (switches.py). Then each is tried with the tests that must fail
on it. A bug that cannot be switched at run time, outside the body of a function, gets a build of its own after the
others. The copy and what is built of it are kept in target/mutants of the project, so a second run builds only what differs.

Before that the same tests run without any bug, to show that it is the bug they fail on.

    --list            say which bugs there are
    --only NAME       only these, several with commas between
    --skip-unplanted  do not run the tests without a bug first
    --simulate SEEDS  try the bugs of the engine with up to SEEDS seeds of the simulator instead, and say which seed found
                      each; without --only, only the bugs without `unseen`

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
import switches

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
CARGO = os.environ.get("CARGO", "cargo")
# A test that takes longer hangs.
PATIENCE_SECONDS = 600
# The same for a simulation: each of its clusters has a limit of its own.
SIMULATION_SECONDS = 3600
# One set of flags for the tests of all packages together: with others, cargo would build the dependencies again.
FLAGS = ["--workspace", "--features", "testcontainers"]
# The tests on the simulated server, which need no other, and their share of the seeds.
SIMULATED = "meaning::histories::simulated::all_rules_converge_"
SIMULATIONS = [("on_the_model", 1), ("whatever_fails", 1), ("on_the_model_in_three_partitions", 0.25)]
# The simulations take turns: most bugs are found in the first seeds of one of them.
TURNS = [100, 400, 1500, 5000]


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


def copied(besides):
    """The working tree, as git lists it, in a folder of its own. Only what has changed gets a new date. The files in `besides`
    are not updated: planted_together writes them."""
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
        if not target.is_file() or name not in besides and target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return copy


def planted(mutant, text):
    """The text of the file with the bug in it."""
    count = text.count(mutant["old"])
    if count != 1:
        raise Untried(f"what it replaces is {count} times in {mutant['file']}")
    return text.replace(mutant["old"], mutant["new"])


def planted_together(mutants, originals, copy, env, logs):
    """Plants the mutants in one build; returns the names of those that it contains. Leaves out what does not build."""
    chosen = [mutant for mutant in mutants if originals[mutant["file"]].count(mutant["old"]) == 1]
    log = logs / "build.log"
    while True:
        lines = {}
        for file, original in originals.items():
            text, of = switches.planted(original, [mutant for mutant in chosen if mutant["file"] == file])
            lines.update({name: (file, of[name]) for name in of})
            if (copy / file).read_text(encoding="utf-8") != text:
                (copy / file).write_text(text, encoding="utf-8")
        with open(log, "wb") as out:
            build = [CARGO, "test", *FLAGS, "--lib", "--bins", "--test", "main", "--no-run", "--message-format", "short"]
            if finish(build, copy, env, out) == 0:
                return set(lines)
        text = log.read_text(encoding="utf-8", errors="replace")
        errors = {(file, int(line)) for file, line in re.findall(r"^(src/\S+?):(\d+):\d+: error", text, re.MULTILINE)}
        broken = {name for name, (file, of) in lines.items() if any((file, line) in errors for line in of)}
        # An error outside of the mutants can be a consequence of one in the same file.
        broken = broken or {name for name, (file, _) in lines.items() if file in {file for file, _ in errors}}
        if not broken:
            sys.exit(f"the bugs do not build together: see {log}")
        say(f"built alone, because they do not build together with others: {', '.join(sorted(broken))}")
        chosen = [mutant for mutant in chosen if mutant["name"] in lines.keys() - broken]


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
    patience = SIMULATION_SECONDS if "runs" in mutant else PATIENCE_SECONDS
    with open(logs / f"{name}.log", "wb") as log:
        target = re.match(r"(--package \S+ )?--\S+( main)?", runs[0][0]).group().split()
        flags = FLAGS if target[0] == "--test" else []
        if finish([CARGO, "test", *flags, *target, "--no-run"], copy, env, log) != 0:
            raise Untried(f"it does not build: see {log.name}")
    for test, more in runs:
        command = [CARGO, "test", *flags, *test.split()]
        if flags and "runs" not in mutant:
            command = [str(Path(env["CARGO_TARGET_DIR"]) / "debug/denormd-fixture"), "run", "--", *command]
        begin = Path(log.name).stat().st_size
        with open(logs / f"{name}.log", "ab") as log:
            code = finish(command, copy, dict(env, DENORMD_MUTANT=name, **more), log, patience)
        if code is None:
            raise Untried(f"its tests did not end in {patience} seconds: see {log.name}")
        text = Path(log.name).read_bytes()[begin:].decode("utf-8", errors="replace")
        ran = sum(int(passed) + int(failed) for passed, failed in re.findall(r"(\d+) passed; (\d+) failed", text))
        failed = sorted(set(re.findall(r"^test (\S+) \.\.\. FAILED$", text, re.MULTILINE)))
        if "runs" in mutant:
            # A simulation repeats what the process of a cluster printed.
            failed = [name for name in failed if name == test.split()[-1]]
        if ran == 0 or (code != 0) != bool(failed):
            raise Untried(f"no test said what it found: see {log.name}")
        if failed:
            return failed
    return []


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
    def run(test, first, last):
        env = {"DENORMD_FIRST": str(first), "DENORMD_SIMULATIONS": str(last - first + 1), "DENORMD_RELOADS": "1"}
        return f"--test main -- --nocapture --exact {SIMULATED}{test}", dict(env, DENORMD_SHRINK_MINUTES="0", RUST_LOG="error")

    turns = [turn for turn in TURNS if turn < seeds] + [seeds]
    runs = []
    for done, turn in zip([0, *turns], turns):
        for test, share in SIMULATIONS:
            first, last = int(done * share) + 1, max(1, int(turn * share))
            runs.append(run(test, first, last))
    return dict(mutant, runs=runs)


def seed_found(log):
    """The lowest first seed of the clusters that a log says how to replay."""
    text = log.read_text(encoding="utf-8", errors="replace")
    seeds = re.findall(r"DENORMD_CLUSTER='{\"(?:first|seed)\":(\d+)", text)
    if not seeds:
        # Too many clusters need what the simulated server does not know, for example.
        raise Untried(f"the simulation failed, but no cluster diverged: see {log}")
    return min(map(int, seeds))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", metavar="NAME")
    parser.add_argument("--skip-unplanted", action="store_true")
    parser.add_argument("--simulate", metavar="SEEDS", type=int)
    given = parser.parse_args()
    mutants = everything = tomllib.loads((HERE / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
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
    files = {mutant["file"] for mutant in everything}
    originals = {file: (PROJECT / file).read_text(encoding="utf-8") for file in files}
    env, copy = environment(), copied(files)
    logs = PROJECT / "target/mutants/logs"
    logs.mkdir(parents=True, exist_ok=True)
    together = planted_together(everything, originals, copy, env, logs)
    if not given.simulate:
        # One server for all tests of a run, as `make test` has it.
        subprocess.run([CARGO, "build", "--quiet", *FLAGS, "--bin", "denormd-fixture"], cwd=copy, env=env, check=True)
    # Without a bug, the first turn of the simulations is enough: `make simulate` runs more.
    first = simulated(mutants[0], TURNS[0]) if given.simulate else None
    if not given.skip_unplanted and not unplanted([first] if first else mutants, copy, env, logs):
        say("the tests fail without a bug: nothing can be said of the mutants")
        return 1
    rows = []
    for mutant in sorted(mutants, key=lambda mutant: mutant["name"] not in together):
        file, start = copy / mutant["file"], time.monotonic()
        before = file.read_text(encoding="utf-8")
        try:
            if mutant["name"] not in together:
                file.write_text(planted(mutant, originals[mutant["file"]]), encoding="utf-8")
            failed = tried(mutant, copy, env, logs)
            caught, by = bool(failed), failed[0] if failed else "SURVIVES"
            if caught and given.simulate:
                by = f"{by.removeprefix(SIMULATED)} with a seed from {seed_found(logs / (mutant['name'] + '.log'))} on"
            elif failed[1:]:
                by += f" and {len(failed) - 1} more"
        except Untried as why:
            caught, by = False, f"NOT TRIED: {why}"
        finally:
            if mutant["name"] not in together:
                file.write_text(before, encoding="utf-8")
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
