"""Runs this host's part of a run on several hosts, which learn together. The same line is started on every host:

    python launch/pod.py --agent impala --hosts h0,h1,h2,h3
    python launch/pod.py --hosts h0:8476,h1 --host-index I --resume --run-dir RUN_DIR

Each host serves its own `--num-actors` actors and gives its part of `--learner.batch-size`. Which host this is says
`--host-index`, else the place of this machine in `--hosts`, else SLURM_PROCID, TPU_WORKER_ID or JOB_COMPLETION_INDEX.
Host 0's run directory is RUN_DIR and holds the checkpoints; host I's is RUN_DIR/host-I. The other flags and the exit
codes are those of launch/local.py; after a signal to one host, all end with its code. launch/recipes/ start it.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence

# As `python -m` does, so that `--env my_env:make` finds the user's module; the roles are run with -m in this directory.
sys.path.insert(0, os.getcwd())

_OPEN = (
    "the hosts reach each other, at host 0's port and at others, without credentials or encryption; let nobody else "
    "reach them (docs/operations.md)."
)
_PORT = 8476  # of host 0, for jax's coordinator, as on Cloud TPUs
_INDEX_VARIABLES = ("SLURM_PROCID", "TPU_WORKER_ID", "JOB_COMPLETION_INDEX")  # the last is Kubernetes's


def main(argv: list[str]) -> int:
    """Parses the flags, runs the program of this host, and returns the exit code."""
    from seedx import bucket, cli, launcher
    from seedx.checks import ConfigError
    from seedx.hosts import Hosts
    from seedx.llm_config import LlmConfig
    from seedx.roll_call import is_loopback

    own = launcher.own_flags()
    own.add_argument("--hosts", default=os.environ.get("TPU_WORKER_HOSTNAMES", ""))
    own.add_argument("--host-index", "--host_index", type=int)
    own.add_argument("--run-dir", "--run_dir")
    flags, rest = own.parse_known_args(argv)
    try:
        if "--help" in rest or "-h" in rest:
            cli.parse(rest, description=__doc__ or "")
        names = [name for name in flags.hosts.split(",") if name]
        if not names:
            raise ConfigError("--hosts must name all hosts, the same on each: --hosts h0,h1,h2,h3")
        index = find_index(names, os.environ) if flags.host_index is None else flags.host_index
        host, port = split_port(names[0])
        hosts = Hosts(f"{host}:{port}", len(names), index)
        if flags.run_dir is not None:
            rest += ["--run-dir", host_dir(flags.run_dir, index)]
        with bucket.kept(rest) as kept:
            config = cli.parse(kept)
            if config.run_dir is None:
                config = dataclasses.replace(config, run_dir=host_dir(cli.default_run_dir(config), index))
            if isinstance(config, LlmConfig):
                raise ConfigError("an LLM run has one host; use launch/local.py.")
            print(f"pod.py: this is {hosts}, {names[index]}; host 0 is at {hosts.coordinator}", file=sys.stderr)
            if not is_loopback(host):
                print(f"pod.py: {_OPEN}", file=sys.stderr)
            return launcher.launch(config, "pod.py", hosts, flags.address, flags.start_actors)
    except (ConfigError, bucket.BucketError) as error:
        return launcher.report("pod.py", error)


def host_dir(run_dir: str, index: int) -> str:
    """The run directory of a host: hosts may share a file system, or none."""
    return os.path.join(run_dir, f"host-{index}") if index else run_dir


def split_port(name: str) -> tuple[str, int]:
    """Host and port of `host`, `host:port`, `[v6]` or `[v6]:port`."""
    host, colon, port = name.rpartition(":")
    return (host, int(port)) if colon and port.isdecimal() and not name.endswith("]") else (name, _PORT)


def find_index(names: Sequence[str], env: Mapping[str, str]) -> int:
    """Which of the hosts this machine is.

    Raises:
        ConfigError: none or several of them are, and no scheduler says which.
    """
    from seedx.checks import ConfigError

    mine = [index for index, name in enumerate(names) if is_here(split_port(name)[0])]
    if len(mine) == 1:
        return mine[0]
    for variable in _INDEX_VARIABLES:
        if env.get(variable, "").isdecimal():
            return int(env[variable])
    raise ConfigError(
        f"this machine, {socket.gethostname()}, is {len(mine) or 'none'} of --hosts {','.join(names)}; say which one "
        "with --host-index."
    )


def is_here(name: str) -> bool:
    """Whether a name or address is this machine's: only its own addresses can be bound."""
    full = socket.gethostname()
    if name in (full, full.partition(".")[0]):
        return True
    try:
        for family, kind, _, _, address in socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    except OSError:
        pass
    return False


if __name__ == "__main__":
    from seedx.signals import on_stop

    on_stop(lambda number: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
