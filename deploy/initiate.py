#!/usr/bin/env python3
"""Make mongods a replica set, without mongosh and without a driver.

    deploy/initiate.py 127.0.0.1:27017 rs0 mongo-1:27017 mongo-2:27017 mongo-3:27017

Asks the mongod at the first address, and returns when the set takes writes. For throw-away sets without authentication.
"""

import socket
import struct
import sys
import time

LIMIT = 60


def bson(value):
    """A document of strings, integers, documents and lists of documents."""
    out = b""
    for key, item in value.items():
        name = key.encode() + b"\0"
        if isinstance(item, str):
            text = item.encode() + b"\0"
            out += b"\x02" + name + struct.pack("<i", len(text)) + text
        elif isinstance(item, int):
            out += b"\x10" + name + struct.pack("<i", item)
        elif isinstance(item, list):
            out += b"\x04" + name + bson({str(index): one for index, one in enumerate(item)})
        else:
            out += b"\x03" + name + bson(item)
    return struct.pack("<i", len(out) + 5) + out + b"\0"


def command(host, port, document):
    """The reply's bytes, by one OP_MSG on a connection of its own."""
    body = struct.pack("<IB", 0, 0) + bson({**document, "$db": "admin"})
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(struct.pack("<iiii", 16 + len(body), 1, 0, 2013) + body)
        reply = b""
        while len(reply) < 4 or len(reply) < struct.unpack_from("<i", reply)[0]:
            part = connection.recv(65536)
            if not part:
                raise OSError("the connection was closed")
            reply += part
    return reply


def main(address, name, *members):
    host, _, port = address.rpartition(":")
    members = [{"_id": index, "host": member} for index, member in enumerate(members)]
    initiate = {"replSetInitiate": {"_id": name, "members": members}}
    begun, last = time.monotonic(), ""
    while time.monotonic() - begun < LIMIT:
        try:
            # Refused once it is one; what counts is that there is a primary in the end.
            last = command(host, int(port), initiate)
            if b"\x02primary\0" in command(host, int(port), {"hello": 1}):
                return 0
        except OSError as error:
            last = str(error)
        time.sleep(0.3)
    print(f"initiate.py: no primary after {LIMIT} s, the last answer was {last!r}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
