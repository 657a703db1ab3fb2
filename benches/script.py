#!/usr/bin/env python3
"""Keep `name` and `price` of each product equal to those of its part: the script that one writes by hand for one copy.

    script.py URI DATABASE

Reads a change stream of `parts`, and saves its resume token after every 100 events and when there are none: a restart loses no
event, and repeats some, which does no harm here.
"""

import sys

from pymongo import MongoClient


def main(uri, name):
    database = MongoClient(uri, w="majority")[name]
    tokens = database["tokens"]
    saved = tokens.find_one({"_id": "parts"})
    with database["parts"].watch(full_document="updateLookup", resume_after=saved and saved["token"]) as stream:
        events = 0
        while stream.alive:
            # Without an event it returns after a second, with a newer token.
            event = stream.try_next()
            events += event is not None
            # A part that is deleted, now or since the event, has no document.
            part = event and event.get("fullDocument")
            if part:
                copied = {"name": part["name"], "price": part["price"]}
                database["products"].update_many({"part": part["_id"]}, {"$set": copied})
            if event is None or events % 100 == 0:
                tokens.update_one({"_id": "parts"}, {"$set": {"token": stream.resume_token}}, upsert=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
