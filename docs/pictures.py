"""Make the README's pictures from a real run: the status page by Chromium, and a terminal as SVG.

`make pictures` runs this beside a throw-away replica set: DENORMD_TEST_URI is its URI, the argument the denormd to run.
"""

import fcntl
import os
import pty
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from html import escape
from pathlib import Path

import pymongo

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "config/shop.yaml"
PARTS, PRODUCTS, HOSTS, MESSAGES = 200, 1000, 20, 4000
# How long the shop is busy before the picture is taken, in seconds.
BUSY = 150
COLUMNS = 104
# The terminal's colours, by their ANSI numbers.
COLOURS = {31: "#ff7b72", 32: "#56d364", 33: "#e3b341", 34: "#79c0ff", 35: "#d2a8ff", 36: "#76e3ea", 90: "#8b949e"}


def fill(db):
    """The shop of `make demo`, without what the rules copy."""
    names = ["Spoke", "Hub", "Rim", "Bell", "Lamp", "Tyre", "Chain", "Brake"]
    db.parts.insert_many({"_id": i, "name": f"{names[i % 8]} {100 + i}", "price": 10 + i / 2} for i in range(PARTS))
    draw = random.Random(1)
    db.products.insert_many(
        {"_id": i, "parts": [{"id": draw.randrange(PARTS), "quantity": 1 + i % 4} for _ in range(3)], "spares": draw.sample(range(PARTS), 2)}
        for i in range(PRODUCTS)
    )
    db.hosts.insert_many({"_id": i, "name": f"web-{i}.example.com", "ipaddr": f"10.0.0.{i}"} for i in range(HOSTS))
    db.logmsg.insert_many({"_id": i, "host": i % HOSTS, "message": "cpu is on fire!"} for i in range(MESSAGES))


def trade(db, stop):
    """Prices and names change, messages come, until it is told to stop."""
    draw, message = random.Random(2), MESSAGES
    while not stop.wait(1):
        part = draw.randrange(PARTS)
        db.parts.update_one({"_id": part}, {"$set": {"name": f"Part {part}.{draw.randrange(100)}", "price": draw.randrange(100)}})
        db.logmsg.insert_one({"_id": message, "host": message % HOSTS, "message": "disk is full"})
        message += 1
        if draw.random() < 0.05:
            db.hosts.update_one({"_id": draw.randrange(HOSTS)}, {"$set": {"ipaddr": f"10.0.1.{draw.randrange(250)}"}})


def typed(command, environment):
    """What a command prints on a terminal, colours included."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    printed = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        printed += part
    child.wait()
    # Progress is written over itself.
    lines = [re.split(r"\r|\x1b\[[0-9;]*[A-HJK]", line)[-1] for line in printed.decode().replace("\r\n", "\n").split("\n")]
    return re.sub(r"\x1b\[[0-9;?]*[hl]", "", "\n".join(lines)).rstrip("\n")


def spans(line):
    """The line's text as SVG, in its colours."""
    colour, bold, out = None, False, []
    for piece in re.split(r"(\x1b\[[0-9;]*m)", line):
        codes = re.fullmatch(r"\x1b\[([0-9;]*)m", piece)
        if codes:
            for code in (int(code or 0) for code in codes[1].split(";")):
                colour, bold = {0: (None, False), 1: (colour, True), 2: (COLOURS[90], bold)}.get(code, (COLOURS.get(code, colour), bold))
        elif piece:
            style = (f' fill="{colour}"' if colour else "") + (' font-weight="bold"' if bold else "")
            out.append(f"<tspan{style}>{escape(piece)}</tspan>")
    return "".join(out)


def terminal(session, file):
    """Writes commands and what they printed as a picture of a terminal."""
    lines = []
    for command, printed in session:
        lines += [f"\x1b[90m$\x1b[0m \x1b[1m{command}\x1b[0m", *printed.split("\n"), ""]
    lines.pop()
    width = 24 + 7.83 * max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines)
    height = 44 + 18 * len(lines)
    texts = "\n".join(f'<text x="12" y="{46 + 18 * i}" xml:space="preserve">{spans(line)}</text>' for i, line in enumerate(lines) if line)
    dots = "".join(f'<circle cx="{18 + 18 * i}" cy="15" r="5.5" fill="{fill}"/>' for i, fill in enumerate(("#ff5f57", "#febc2e", "#28c840")))
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" '
        "font-family=\"ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace\" font-size=\"13\" fill=\"#e6edf3\">\n"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{dots}\n{texts}\n</svg>\n',
        encoding="utf-8",
    )


def photograph(url, file, size):
    """A picture of a page, as Chromium shows it."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    options = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", f"--window-size={size}"]
    options += ["--virtual-time-budget=5000", f"--screenshot={file}", url]
    subprocess.run([browser, *options], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # A quarter of the size, where it is installed.
    if shutil.which("pngquant"):
        subprocess.run(["pngquant", "--speed", "1", "--force", "--output", file, "64", file], check=True)


def main():
    denormd, uri = sys.argv[1], os.environ["DENORMD_TEST_URI"]
    db = pymongo.MongoClient(uri).shop
    fill(db)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "127.0.0.1:%d" % free.getsockname()[1]
    environment = {**os.environ, "DENORMD__MONGODB__URI": uri, "DENORMD__HTTP__LISTEN": address, "DENORMD_CONFIG": str(CONFIG), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)

    def run(*arguments):
        return typed([denormd, *arguments], environment)

    session = [("denormd plan --apply", "\n".join(line for line in run("plan", "--apply").split("\n") if line.startswith("db.")))]
    with tempfile.TemporaryFile() as log:
        daemon = subprocess.Popen([denormd, "run"], env=environment, stdout=log, stderr=log)
        stop = threading.Event()
        busy = threading.Thread(target=trade, args=(db, stop))
        try:
            while "ready" not in run("health"):
                time.sleep(0.2)
            busy.start()
            time.sleep(BUSY)
            session.append(("denormd status", run("status").split("\n\naudit")[0]))
            photograph(f"http://{address}/", HERE / "pictures/page.png", "1120,920")
            stop.set()
            busy.join()
            run("wait")
            # Somebody writes a copy by hand.
            db.products.update_one({"_id": 7}, {"$set": {"parts.0.name": "Spooke"}})
            session.append(("denormd check --rule part-names", run("check", "--rule", "part-names")))
            session.append(("denormd explain part-names 7", run("explain", "part-names", "7")))
        finally:
            stop.set()
            daemon.terminate()
            daemon.wait()
    terminal(session, HERE / "pictures/terminal.svg")


if __name__ == "__main__":
    main()
