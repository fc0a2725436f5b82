"""Serves a language model: gRPC (JetStream's Orchestrator and seedx's own service) and an OpenAI-style HTTP API.

    python launch/serve.py --model smollm2
    python launch/serve.py --model PATH.gguf --max-concurrent 32 --memory-budget 4GB
    python launch/serve.py --model tiny --host 0.0.0.0 --token-file token.txt

Only this machine may connect, unless --tls-cert and --tls-key or --token-file are given. SIGTERM lets requests finish,
Ctrl-C ends them. Exit codes: 2 wrong flags or model, 130 after Ctrl-C and 143 after SIGTERM or SIGHUP, else failure.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback


def main(argv: list[str]) -> int:
    """Parses the flags, serves, and returns the exit code."""
    from seedx import serve_config
    from seedx.checks import ConfigError

    try:
        config = serve_config.parse(argv, description=__doc__ or "")
        from seedx.serve_role import run_server  # loads gRPC, which `--help` does without

        return run_server(config)
    except ConfigError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2


def end(code: int) -> None:
    """Ends the process now: threads that wait inside native code must not hold it up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        end(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the server has its own handler
        end(130)
    except SystemExit as error:
        end(error.code if isinstance(error.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        end(1)
