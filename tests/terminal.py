#!/usr/bin/env python3
"""Runs a command on a terminal of its own, as a user would: waits for texts on its screen, and types.

usage: terminal.py COLUMNS ROWS STEPS COMMAND…

STEPS is a JSON list of [TEXT, ACTION]: once TEXT is on the screen, {"keys": "q"} types, {"stop": PID} freezes a process and
{"go": PID} lets it go on. Prints as JSON the exit status, whether the terminal is as it was before, and the screen at each step."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

PATIENCE = 60
# What the screen library sends: a position, a clearing of the screen, anything else that moves nothing, or a character.
SEQUENCE = re.compile(r"\x1b\[(\d+);(\d+)H|(\x1b\[2J)|(\x1b\[[?\d;]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>78])|([^\x1b])", re.S)


class Screen:
    def __init__(self, columns, rows):
        self.cells = [[" "] * columns for _ in range(rows)]
        self.at = (0, 0)
        self.rest = ""

    def write(self, text):
        text, end = self.rest + text, 0
        for found in SEQUENCE.finditer(text):
            if found.start() != end:
                break
            end = found.end()
            row, column, clear, _, char = found.groups()
            if row:
                self.at = (int(row) - 1, int(column) - 1)
            elif clear:
                self.cells = [[" "] * len(row) for row in self.cells]
            elif char and char.isprintable():
                row, column = self.at
                if row < len(self.cells) and column < len(self.cells[row]):
                    self.cells[row][column] = char
                self.at = (row, column + 1)
        # The beginning of a sequence whose end has not been read.
        self.rest = text[end:]

    def text(self):
        return "\n".join("".join(row).rstrip() for row in self.cells)


def act(action, master):
    if "keys" in action:
        os.write(master, action["keys"].encode())
    for name, number in (("stop", signal.SIGSTOP), ("go", signal.SIGCONT)):
        if name in action:
            os.kill(action[name], number)


def main():
    columns, rows, steps = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    before = termios.tcgetattr(slave)
    child = subprocess.Popen(sys.argv[4:], stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, "TERM": "xterm-256color"})
    screen, everything, screens, limit = Screen(columns, rows), "", [], time.monotonic() + PATIENCE
    decoder = __import__("codecs").getincrementaldecoder("utf-8")("replace")
    while time.monotonic() < limit:
        if select.select([master], [], [], 0.1)[0]:
            text = decoder.decode(os.read(master, 65536))
            everything += text
            screen.write(text)
        elif child.poll() is not None:
            break
        if steps and steps[0][0] in screen.text():
            screens.append(screen.text())
            act(steps.pop(0)[1], master)
            limit = time.monotonic() + PATIENCE
    if child.poll() is None:
        child.kill()
    after = termios.tcgetattr(slave)
    print(json.dumps({
        "code": child.wait(),
        "restored": before == after and everything.rfind("\x1b[?1049l") > everything.rfind("\x1b[?1049h") > -1 and everything.rfind("\x1b[?25h") > everything.rfind("\x1b[?25l"),
        "missed": [text for text, _ in steps],
        "screens": screens,
        "last": screen.text(),
    }))


main()
