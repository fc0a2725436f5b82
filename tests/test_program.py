"""The topology of a run."""

import json
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from seedx import cli, program
from seedx.checks import ConfigError
from seedx.config import Config
from seedx.config_file import read_config
from seedx.llm_config import LlmConfig
from seedx.program import make_program

ROOT = Path(__file__).parent.parent


def test_one_learner_then_actors_then_evaluation_actors():
    made = make_program(Config(num_actors=2, eval_actors=1), "/runs/x", "unix:/s", python="py")
    assert [(r.name, r.kind, r.restart, r.serves) for r in made.roles] == [
        ("learner", "learner", False, "unix:/s"),
        ("actor-0", "actor", True, None),
        ("actor-1", "actor", True, None),
        ("eval-actor-2", "actor", True, None),
    ]
    assert [" ".join(r.command) for r in made.roles] == [
        "py -m seedx.run learner --run-dir /runs/x --listen unix:/s",
        "py -m seedx.run actor --run-dir /runs/x --server unix:/s --actor-id 0",
        "py -m seedx.run actor --run-dir /runs/x --server unix:/s --actor-id 1",
        "py -m seedx.run actor --run-dir /runs/x --server unix:/s --actor-id 2 --evaluation",
    ]
    assert all(r.env["JAX_PLATFORMS"] == "cpu" and r.env["OMP_NUM_THREADS"] == "1" for r in made.roles[1:])
    assert made.roles[0].env == {}


def test_without_actor_processes_id_0_belongs_to_the_learners_process():
    made = make_program(Config(num_actors=0, eval_actors=1), "/runs/x", "unix:/s")
    assert [r.name for r in made.roles] == ["learner", "eval-actor-1"]


def test_decode_hosts_listen_beside_the_learner_and_are_told_to_it():
    made = make_program(LlmConfig(decode_hosts=2), "/runs/x", "unix:/d/learner.sock", python="py")
    assert [(r.name, r.kind, r.restart, r.serves) for r in made.roles] == [
        ("learner", "learner", False, "unix:/d/learner.sock"),
        ("decode-0", "decode", True, "unix:/d/decode-0.sock"),
        ("decode-1", "decode", True, "unix:/d/decode-1.sock"),
    ]
    assert [" ".join(r.command) for r in made.roles[:2]] == [
        "py -m seedx.run learner --run-dir /runs/x --listen unix:/d/learner.sock "
        "--decode-host unix:/d/decode-0.sock --decode-host unix:/d/decode-1.sock",
        "py -m seedx.run decode --run-dir /runs/x --listen unix:/d/decode-0.sock --server unix:/d/learner.sock "
        "--index 0",
    ]
    elsewhere = make_program(LlmConfig(decode_hosts=1), "/runs/x", "localhost:7", python="py").roles[1]
    assert elsewhere.serves == "unix:/runs/x/decode-0.sock"
    assert [r.name for r in make_program(LlmConfig(), "/runs/x", "unix:/s").roles] == ["learner"]
    with pytest.raises(ConfigError, match="decode_hosts"):
        LlmConfig(decode_hosts=-1)


def test_the_printed_program_lists_decode_hosts():
    flags = ("--agent", "grpo", "--decode-hosts", "1", "--format", "json")
    done = subprocess.run(
        [sys.executable, "-m", "seedx.program", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    roles = json.loads(done.stdout)["roles"]
    assert [(role["name"], role["kind"]) for role in roles] == [("learner", "learner"), ("decode-0", "decode")]
    assert roles[1]["serves"] in roles[0]["command"]


@pytest.mark.parametrize(("num_actors", "eval_actors"), [(0, 0), (0, 2), (1, 0), (3, 2)])
def test_actor_ids_stay_within_the_slots(num_actors, eval_actors):
    config = Config(num_actors=num_actors, eval_actors=eval_actors)
    ids = [int(r.command[r.command.index("--actor-id") + 1]) for r in make_program(config, "x", "h:1").roles[1:]]
    in_process = [] if num_actors else [0]
    assert sorted(in_process + ids) == list(range(config.num_slots // config.envs_per_actor))


def test_only_the_learner_of_a_resumed_run_is_told_so():
    made = make_program(Config(resume=True), "x", "h:1")
    assert ["--resume" in r.command for r in made.roles] == [True, False, False]


def test_a_launcher_may_start_some_of_the_actors(tmp_path):
    config = Config(num_actors=3, eval_actors=1)
    made = make_program(config, "x", "h:1", start_actors=2)
    assert [role.name for role in made.roles] == ["learner", "actor-0", "actor-1", "eval-actor-3"]
    with pytest.raises(ConfigError, match=r"--start-actors \(4\) must lie in 0 .. 3"):
        make_program(config, "x", "h:1", start_actors=4)


def test_actors_of_a_resumed_run_are_told_how_far_it_had_come(tmp_path):
    def sessions(config):
        commands = [role.command for role in make_program(config, tmp_path, "h:1").roles[1:]]
        return [command[command.index("--session") + 1] if "--session" in command else None for command in commands]

    resumed = Config(resume=True, num_actors=1, eval_actors=1)
    assert sessions(resumed) == ["0", "0"]  # stopped before its first checkpoint
    (tmp_path / "metrics.jsonl").write_text('{"updates": 7}\n{"updates": 8}\n')  # of a host without checkpoints
    assert sessions(resumed) == ["8", "8"]
    for name in ("9", "100", "200.damaged-5", "300.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert sessions(resumed) == ["100", "100"]
    assert sessions(Config(num_actors=1)) == [None]


def test_a_relative_run_directory_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = make_program(Config(), "here", "h:1")
    assert made.run_dir == str(tmp_path / "here")
    assert all(made.run_dir in r.command for r in made.roles)


def test_printed_as_json_it_is_the_program_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--agent", "impala", "--num-actors", "8", "--format", "json", "--address", "127.0.0.1:7", "--run-dir", "r"]
    assert program.main(flags) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["address"] == "127.0.0.1:7"
    assert [r["name"] for r in printed["roles"]] == ["learner", *(f"actor-{i}" for i in range(8))]
    assert printed["roles"][0]["command"] == [
        *(sys.executable, "-m", "seedx.run", "learner"),
        *("--run-dir", str(tmp_path / "r"), "--listen", "127.0.0.1:7"),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "server"),
    [
        (("--address", "0.0.0.0:7000"), f"{socket.gethostname()}:7000"),
        (("--address", "[::]:7000"), f"{socket.gethostname()}:7000"),
        (("--address", "10.0.0.1:7000"), "10.0.0.1:7000"),
        (("--address", "0.0.0.0:7000", "--server", "gateway:70"), "gateway:70"),
    ],
)
def test_actors_are_told_an_address_that_other_machines_can_reach(capsys, flags, server):
    assert program.main([*flags, "--num-actors", "1", "--run-dir", "r", "--inference.token-file", "t"]) == 0
    learner, actor = capsys.readouterr().out.splitlines()
    assert learner.endswith(f"--listen {shlex.quote(flags[1])}")
    assert f"--server {server} " in actor


def test_prepare_makes_the_run_directory_that_the_printed_roles_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--env", "catch", "--seed", "7", "--prepare", "--format", "json"]
    assert program.main([*flags, "--run-dir", "here"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["run_dir"] == str(tmp_path / "here")
    assert read_config(tmp_path / "here").seed == 7
    assert program.main(flags) == 0  # the default one, whose name is found when it is made
    made = json.loads(capsys.readouterr().out)["run_dir"]
    assert read_config(made).seed == 7
    (tmp_path / "here" / "checkpoints" / "5").mkdir(parents=True)
    assert program.main([*flags, "--run-dir", "here"]) == 2
    assert "already holds checkpoints" in capsys.readouterr().err


def test_printed_as_text_every_line_is_a_shell_command(capsys):
    assert program.main(["--num-actors", "1", "--run-dir", "/tmp/a b", "--address", "localhost:1"]) == 0
    learner, actor = capsys.readouterr().out.splitlines()
    assert learner.endswith("-m seedx.run learner --run-dir '/tmp/a b' --listen localhost:1")
    assert actor.startswith("JAX_PLATFORMS=cpu ")


def test_printed_tables_are_what_a_server_of_the_run_is_started_with(monkeypatch, capsys):
    flags = ["--agent", "r2d2", "--env", "Pong-v5", "--table.max-size", "700"]
    assert program.main([*flags, "--format", "tables"]) == 0
    printed = capsys.readouterr().out
    config = cli.parse([*flags, "--replay", "reverb"])
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: True)  # uv is not run here
    [server] = [role for role in make_program(config, "x", "h:1").roles if role.kind == "replay"]
    assert printed.strip() == server.command[server.command.index("--config") + 1]
    [table] = json.loads(printed)
    assert table["max_size"] == 700
    assert runpy.run_path(str(program.REVERB_SERVER))["check_table"](table) == table["name"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: [table | {"maxsize": 3}], "must be an object with max_diff, max_size"),
        (lambda table: [table | {"sampler": "priorityzed"}], "sampler 'priorityzed' must be one of fifo"),
        (lambda table: [table | {"max_size": -3}], "max_size -3 must be of type int and at least 1"),
        (lambda table: [table | {"min_size": 1.5}], "min_size 1.5 must be of type int"),
        (lambda table: [table | {"samples_per_insert": 0}], "samples_per_insert 0 must be of type float"),
        (lambda table: [3], "3 must be an object"),
        (lambda table: [table, table], "two of one name"),
        (lambda table: [table], "--checkpoint-dir /dev/null/tables cannot be used"),
    ],
)
def test_a_reverb_server_refuses_wrong_tables_before_it_loads_reverb(monkeypatch, capsys, tmp_path, change, words):
    assert program.main(["--format", "tables"]) == 0
    [table] = json.loads(capsys.readouterr().out)
    tables, directory = change(table), "/dev/null/tables" if "/dev/null" in words else str(tmp_path)
    flags = ("--port", "0", "--config", json.dumps(tables), "--checkpoint-dir", directory, "--allow-unauthenticated")
    monkeypatch.setattr(sys, "argv", ["reverb_server.py", *flags])
    assert runpy.run_path(str(program.REVERB_SERVER))["main"]() == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_tables_that_cannot_hold_a_batch_are_not_printed(capsys):
    assert program.main(["--table.max-size", "4", "--format", "tables"]) == 2
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "message"),
    [("0.0.0.0:7777", "refusing to listen on 0.0.0.0:7777"), ("nonsense", "neither unix:/path nor host:port")],
)
def test_an_address_that_the_learner_would_refuse_is_refused_before_all_else(tmp_path, capsys, address, message):
    assert program.main(["--prepare", "--address", address, "--run-dir", str(tmp_path / "r")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_bad_value_is_one_line_and_exit_code_2(capsys):
    assert program.main(["--envs-per-actor", "3"]) == 2
    assert "envs_per_actor (3) must be divisible" in capsys.readouterr().err


def test_launchers_import_neither_jax_nor_environments():
    code = (
        "import sys, seedx.launcher, seedx.program, seedx.cli, seedx.supervisor\n"
        "assert not {'jax', 'numpy', 'envpool', 'grpc'} & set(sys.modules), sorted(sys.modules)"
    )
    assert subprocess.run((sys.executable, "-c", code), cwd=ROOT).returncode == 0
