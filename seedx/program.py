"""The topology of a run as data: which roles there are, the commands that start them, and the address they meet at.

`python -m seedx.program --agent impala --num-actors 8 --format json` prints it, and with `--prepare` makes the run
directory too; `--format tables` prints what a Reverb server on another host is started with. Launchers turn it into
processes: `launch/local.py` on this machine, others on a cluster.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from seedx.checks import require
from seedx.config_file import AnyConfig
from seedx.hosts import ONE_HOST, Hosts
from seedx.llm_config import LlmConfig
from seedx.replay.description import table_description
from seedx.runlog import session_number

# Actors share the machine with each other and with the learner: one thread each, and never the accelerator.
ACTOR_ENV = {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}

DECODE_ENV = {"PYTHONUNBUFFERED": "1"}

# The checkout's; an installed wheel has none.
REVERB_SERVER = Path(__file__).parent.parent / "launch" / "reverb_server.py"
OPEN_REVERB = (
    "dm-reverb listens on all interfaces of this machine and asks for no credentials, as long as the run lasts; see "
    "docs/operations.md on how to fence it."
)


@dataclass(frozen=True)
class Role:
    """One process of a run.

    Attributes:
        name: Unique in the run; its log is logs/<name>.log.
        kind: "learner" (serves the policy, or the weights, and trains; the run ends with it), "actor", "decode" (a
            decode host), or "replay" (a Reverb server).
        command: Argument vector.
        restart: Whether a launcher starts it again when it fails; an actor the n-th time with `--restart n` at the end.
        env: Environment variables beside the inherited ones.
        serves: Address that it listens on, or None.
    """

    name: str
    kind: Literal["learner", "actor", "decode", "replay"]
    command: tuple[str, ...]
    restart: bool
    env: Mapping[str, str] = field(default_factory=dict)
    serves: str | None = None


@dataclass(frozen=True)
class Program:
    """All processes of a run.

    Attributes:
        run_dir: The run directory, absolute; every role reads its config.json.
        address: Where the policy server listens, "unix:/path" or "host:port"; actors may reach it by another name.
        roles: The learner first.
    """

    run_dir: str
    address: str
    roles: tuple[Role, ...]


def make_program(
    config: AnyConfig,
    run_dir: str | os.PathLike[str],
    address: str,
    python: str = sys.executable,
    server: str | None = None,
    hosts: Hosts = ONE_HOST,
    start_actors: int | None = None,
) -> Program:
    """The program of a run, or of one of its hosts: a learner, its Reverb server, actors and evaluation actors.

    An LLM run has no actors: what it acts in are texts, and rewards are computed by children of the learner.

    With `num_actors=0` the learner's process steps the environments of one actor itself. Of a resumed run, what
    `run_dir` holds numbers the session, so that environments get other seeds than before.

    Args:
        config: Of the run.
        run_dir: The run directory.
        address: Where the learner listens.
        python: The interpreter.
        server: Where actors find it; None: at `address`, or by this machine's name if that means "all interfaces".
        hosts: Whose learners learn together, and which of them this is. Each has so many actors, numbered through.
        start_actors: How many of the training actors are among the roles, the first ones; None: all.

    Raises:
        ConfigError: a Reverb server is asked for, and it cannot be started from here; there are not so many actors.
    """
    server = server or _reachable(address)
    run_dir = os.path.abspath(run_dir)
    run = (python, "-m", "seedx.run")
    resume = ("--resume",) if config.resume else ()
    session = ("--session", str(session_number(run_dir))) if config.resume else ()
    replays = [_reverb_server(config, run_dir, python)] if config.replay == "reverb" else []
    replay = ("--replay", *(f"reverb://{role.serves}" for role in replays)) if replays else ()
    together: tuple[str, ...] = ()
    if not hosts.alone:
        together = ("--coordinator", hosts.coordinator, "--num-hosts", str(hosts.count))
        together += ("--host-index", str(hosts.index))
    decoders = _decode_hosts(config, run_dir, address, run)
    found = tuple(word for role in decoders for word in ("--decode-host", str(role.serves)))
    learner = Role(
        name="learner",
        kind="learner",
        command=(*run, "learner", "--run-dir", run_dir, "--listen", address, *replay, *together, *found, *resume),
        restart=False,
        serves=address,
    )

    def actor(actor_id: int, evaluation: bool) -> Role:
        flags = ("--actor-id", str(actor_id), *(("--evaluation",) if evaluation else ()))
        return Role(
            name=f"{'eval-' if evaluation else ''}actor-{actor_id}",
            kind="actor",
            command=(*run, "actor", "--run-dir", run_dir, "--server", server, *flags, *session),
            restart=True,
            env=ACTOR_ENV,
        )

    actors = []
    if not isinstance(config, LlmConfig):
        training, started = max(config.num_actors, 1), config.num_actors if start_actors is None else start_actors
        require(
            0 <= started <= config.num_actors,
            f"--start-actors ({started}) must lie in 0 .. {config.num_actors}: so many of all actors are started here.",
        )
        first, first_evaluation = hosts.index * training, hosts.count * training + hosts.index * config.eval_actors
        actors = [actor(first + i, evaluation=False) for i in range(started)]
        actors += [actor(first_evaluation + i, evaluation=True) for i in range(config.eval_actors)]
    return Program(run_dir=run_dir, address=address, roles=(learner, *replays, *decoders, *actors))


def _decode_hosts(config: AnyConfig, run_dir: str, address: str, run: tuple[str, ...]) -> list[Role]:
    """What generates beside the learner, on sockets beside its own."""
    if not isinstance(config, LlmConfig):
        return []
    directory = os.path.dirname(address.removeprefix("unix:")) if address.startswith("unix:") else run_dir

    def role(index: int) -> Role:
        listens = f"unix:{directory}/decode-{index}.sock"
        where = ("--run-dir", run_dir, "--listen", listens, "--server", address, "--index", str(index))
        return Role(f"decode-{index}", "decode", (*run, "decode", *where), restart=True, env=DECODE_ENV, serves=listens)

    return [role(i) for i in range(config.decode_hosts)]


def _reverb_server(config: AnyConfig, run_dir: str, python: str) -> Role:
    """A Reverb server for this run alone, on a port that is free now; uv makes its environment."""
    require(
        importlib.util.find_spec("uv") is not None and REVERB_SERVER.is_file(),
        "--replay reverb starts a Reverb server, which needs a checkout of this repository and uv: install it with "
        "`pip install -e '.[reverb]'`, or start the server yourself and name it with --replay reverb://host:port.",
    )
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    where = ("--port", str(port), "--checkpoint-dir", f"{run_dir}/reverb")
    script = (python, "-m", "uv", "run", "--quiet", "--script", str(REVERB_SERVER))
    return Role(
        name="reverb",
        kind="replay",
        command=(*script, *where, "--config", tables_json(config), "--allow-unauthenticated"),
        restart=True,
        serves=f"localhost:{port}",
    )


def _reachable(address: str) -> str:
    """The address that other machines can connect to: nobody can connect to 0.0.0.0 or [::] but from here."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else address


def to_json(program: Program) -> str:
    """The program as JSON text."""
    return json.dumps(dataclasses.asdict(program), indent=2) + "\n"


def tables_json(config: AnyConfig) -> str:
    """The tables of a run as JSON text, for `launch/reverb_server.py --config`.

    Raises:
        ConfigError: a batch does not fit.
    """
    return json.dumps([table_description(config.table, config.learner.batch_size)])


def to_text(program: Program) -> str:
    """The program as shell commands, one role a line."""
    lines = []
    for role in program.roles:
        env = [f"{name}={shlex.quote(value)}" for name, value in role.env.items()]
        lines.append(" ".join([*env, shlex.join(role.command)]))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Prints the program of the flags of `launch/local.py`; starts nothing, and writes nothing without `--prepare`."""
    from seedx import cli  # Here, so that launchers can import the nouns above without a command line.
    from seedx.checks import ConfigError
    from seedx.security import check_listen_address

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--format", choices=("text", "json", "tables"), default="text")
    own.add_argument("--address", help="where the policy server listens; a socket in the run directory by default")
    own.add_argument("--server", help="where actors find it; this machine's name if --address is 0.0.0.0")
    own.add_argument("--prepare", action="store_true", help="make the run directory and write its config.json")
    flags, rest = own.parse_known_args(argv)
    try:
        config = cli.parse(
            rest,
            prog="python -m seedx.program",
            description="Prints the roles of a run: [--format text|json|tables] [--address unix:/path|host:port] "
            "[--server host:port] [--prepare: makes the run directory]; then:",
        )
        if flags.address is not None and not isinstance(config, LlmConfig):
            check_listen_address(flags.address, config.inference)
        config = cli.prepare_run_dir(config) if flags.prepare else config
        run_dir = os.path.abspath(config.run_dir or cli.default_run_dir(config))
        address = flags.address or f"unix:{run_dir}/learner.sock"
        if flags.format == "tables":
            text = f"{tables_json(config)}\n"
        else:
            program = make_program(config, run_dir, address, server=flags.server)
            if config.replay == "reverb":
                print(f"seedx.program: {OPEN_REVERB}", file=sys.stderr)
            text = {"text": to_text, "json": to_json}[flags.format](program)
    except ConfigError as error:
        print(f"seedx.program: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
