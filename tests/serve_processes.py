"""launch/serve.py and its command-line client, as processes."""

import re
import sys

from processes import ROOT

FLAGS = ("--model", "tiny", "--context", "256", "--max-concurrent", "2", "--memory-budget", "200MB")


def start(processes, *flags, command=(str(ROOT / "launch" / "serve.py"),), **options):
    """A server of a small model on free ports."""
    return processes.start(sys.executable, *command, *FLAGS, "--port", "0", "--http-port", "0", *flags, **options)


def addresses(server):
    """Where a server listens with gRPC and HTTP, once it is ready; None for HTTP that there is none of."""
    found = server.until(
        lambda: re.search(r"ready .* gRPC on (\S+?)(?:, OpenAI-style HTTP on (\S+))?[.] Try", server.out), "readiness"
    )
    return found[1], found[2]


def serve(processes, *flags, **options):
    """A server that is ready, and the address of its gRPC."""
    server = start(processes, *flags, **options)
    return server, addresses(server)[0]


def ask(processes, *flags):
    return processes.start(sys.executable, "-m", "seedx.inference.client", "decode", *flags)
