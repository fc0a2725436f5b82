# /// script
# requires-python = "==3.11.*"
# dependencies = ["dm-reverb[tensorflow]==0.14.0"]
# ///
"""Starts and stops Reverb servers for the tests; TensorFlow takes seconds to load, a server milliseconds.

Each line read is JSON: a list of tables starts a server, whose port is the answer; a port stops that server. A table
with a signature, an expression in `tf`, is a queue.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))

import reverb
import tensorflow as tf
from reverb_server import make_table


def make(table):
    if "signature" not in table:
        return make_table(reverb, table)
    return reverb.Table.queue(table["name"], table["max_size"], signature=eval(table["signature"], {"tf": tf}))


servers = {}
for line in sys.stdin:
    match json.loads(line):
        case list(tables):
            server = reverb.Server([make(table) for table in tables])
            servers[server.port] = server
            print(server.port, flush=True)
        case port:
            servers.pop(port).stop()
            print(port, flush=True)
