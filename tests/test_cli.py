"""Flags, their defaults, the run directory, and launch/local.py up to the start of its roles."""

import dataclasses
import importlib.util
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seedx import cli, rundir
from seedx.checks import ConfigError
from seedx.config import Config, NetworkConfig
from seedx.config_file import from_json, load_recipe, to_json
from seedx.llm_config import LlmConfig

ROOT = Path(__file__).parent.parent
LOCAL = ROOT / "launch" / "local.py"
RECIPES = ROOT / "configs"

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}

RECIPE = """
from seedx.config import Config, LearnerConfig
def config():
    return Config(env="catch", num_actors=3, learner=LearnerConfig(batch_size=48, unroll_length=5))
"""


def local(*flags: str, cwd: Path) -> subprocess.CompletedProcess:
    """Runs launch/local.py as a user does."""
    command = (sys.executable, str(LOCAL), *flags)
    return subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("flags", "recipe"),
    [
        ([], "impala_cartpole"),
        (["--agent", "impala"], "impala_cartpole"),
        (["--env", "Pong-v5"], "impala_atari"),
        (["--env", "Pendulum-v1"], "impala_pendulum"),
        (["--env", "MiniGrid-DoorKey-5x5-v0"], "impala_minigrid"),
        (["--env=catch"], "impala_catch"),
        (["--env", "memory"], "impala_memory"),
        (["--agent", "r2d2"], "r2d2_memory"),
        (["--agent", "r2d2", "--env", "Pong-v5"], "r2d2_atari"),
        (["--agent", "apex"], "apex_cartpole"),
        (["--agent", "apex", "--env", "Pong-v5"], "apex_atari"),
    ],
)
def test_defaults_come_from_the_recipe_that_fits(flags, recipe):
    assert cli.parse(flags) == load_recipe(RECIPES / f"{recipe}.py")


@pytest.mark.parametrize(
    ("task", "goal"),
    [
        ("sums", 0.93),
        ("sums?reward=task", 0.93),
        ("sums?reward=my:reward", None),
        ("sums?reward=task&reward=my:r", None),
    ],
)
def test_a_built_in_task_has_its_recipe_with_other_rewards_too_but_not_their_goal(task, goal):
    recipe = load_recipe(RECIPES / "grpo.py")
    assert cli.parse(["--agent", "grpo", "--task", task]) == dataclasses.replace(recipe, task=task, stop_at_reward=goal)
    assert cli.parse(["--agent", "grpo", "--task", "my:sums?reward=task"]).stop_at_reward is None
    given = cli.parse(["--agent", "grpo", "--task", task, "--stop-at-reward", "0.5"])
    assert given == dataclasses.replace(recipe, task=task, stop_at_reward=0.5)


@pytest.mark.parametrize("agent", ["apex", "r2d2"])
@pytest.mark.parametrize("env", [[], ["--env", "Pong-v5"], ["--env", "my:env"]], ids=str)
def test_the_table_that_an_agent_has_without_more_ado_fits_a_laptop(agent, env):
    config = cli.parse(["--agent", agent, *env])
    assert config.table.max_size * config.learner.stride <= 100_000  # transitions
    assert config.table.max_bytes <= 2**30


def test_without_a_recipe_that_fits_or_without_recipes_the_defaults_are_plain(monkeypatch, tmp_path):
    assert cli.parse(["--env", "Ant-v5"]) == Config(env="Ant-v5")
    assert cli.parse(["--agent", "my:agent"]) == Config(agent="my:agent")
    monkeypatch.setattr(cli, "RECIPES", tmp_path)  # As in an installed wheel.
    assert cli.parse(["--env", "Pong-v5"]) == Config(env="Pong-v5")


def test_flags_win_over_the_recipe_that_wins_over_the_defaults(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(RECIPE)
    made = cli.parse(["--config", str(recipe), "--learner.batch-size", "64", "--env", "Pong-v5"])
    assert (made.learner.batch_size, made.env) == (64, "Pong-v5")
    assert (made.learner.unroll_length, made.num_actors) == (5, 3)
    assert made.learner.learning_rate == Config().learner.learning_rate


def test_every_flag_that_scripts_rely_on():
    made = cli.parse(
        shlex.split(
            "--agent impala --env CartPole-v1 --num-actors 1 --envs-per-actor 4 --steps 1000 --seconds 2 --seed 5"
            " --stop-at-return 9 --run-dir d --replay embedded --deterministic --network.hidden 8 16"
        )
    )
    assert made == dataclasses.replace(
        load_recipe(RECIPES / "impala_cartpole.py"),
        num_actors=1,
        envs_per_actor=4,
        steps=1000,
        seconds=2.0,
        stop_at_return=9.0,
        run_dir="d",
        seed=5,
        deterministic=True,
        network=NetworkConfig(torso="mlp", hidden=(8, 16)),
    )


def test_a_limit_of_the_recipe_can_be_taken_away():
    assert cli.parse(["--stop-at-return", "None"]).stop_at_return is None


def test_atari_is_told_by_name_as_envpool_has_it():
    registration = pytest.importorskip("envpool.registration")
    specs = registration.registry.specs
    atari = {name for name, spec in specs.items() if "envpool.atari" in spec}
    assert len(atari) > 50
    assert {name for name in specs if cli.is_atari(name)} == atari
    assert not any(map(cli.is_atari, ("gym:Pong-v5", "my:env-v5", "gym:ALE/Pong-v5", "Pong-v4", "catch", "-v5", "")))


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["--learnr.batch-size", "3"], ["Unrecognized", "--learner.batch-size"]),
        (["--num-actor", "3"], ["Unrecognized", "--num-actors"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--learner.batch-size", "30", "--learner.microbatches", "4"], ["30", "divisible", "4"]),
        (["--envs-per-actor", "3"], ["envs_per_actor (3) must be divisible by actor.groups (2)", "--actor.groups 1"]),
        (["--agent", "r2d2", "--deterministic"], ["deterministic runs need a queue", "--agent impala"]),
        (["--config", "nowhere.py"], ["'nowhere.py' does not exist"]),
        (["--resume"], ["--resume needs", "--run-dir"]),
        (["--run-dir", "file/x"], ["'file/x' cannot be used", "another --run-dir"]),
    ],
)
def test_a_wrong_flag_is_exit_code_2_with_a_remedy_and_no_traceback(tmp_path, flags, messages):
    (tmp_path / "file").write_text("")
    done = local(*flags, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for message in messages:
        assert message in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_help_shows_the_essentials_first(tmp_path):
    done = local("--help", cwd=tmp_path)
    assert done.returncode == 0
    flags = ("config", "agent", "env", "num-actors", "learner.batch-size")
    places = [done.stdout.index(f"│ --{flag} ") for flag in flags]
    assert places == sorted(places)
    assert "Environment steps to train for" in done.stdout  # From the docstring of Config.


def test_help_into_a_closed_pipe_is_silent(tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = (sys.executable, str(LOCAL), "--help")
    done = subprocess.run(command, cwd=tmp_path, env=ENV, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def started(run_dir: Path, *, checkpoint: bool) -> Config:
    """A run directory as an earlier run left it."""
    made = cli.prepare_run_dir(cli.parse(["--env", "catch", "--seed", "7", "--run-dir", str(run_dir)]))
    if checkpoint:
        (run_dir / "checkpoints" / "10").mkdir(parents=True)
    return made


def test_the_run_directory_holds_the_config(tmp_path):
    made = started(tmp_path / "a" / "b", checkpoint=False)
    assert from_json((tmp_path / "a" / "b" / "config.json").read_text()) == made
    assert (tmp_path / "a" / "b" / "logs").is_dir()


def test_a_second_start_in_a_directory_with_checkpoints_is_refused_with_both_remedies(tmp_path):
    started(tmp_path, checkpoint=False)
    before = to_json(started(tmp_path, checkpoint=True))
    with pytest.raises(ConfigError, match=r"already holds checkpoints.*--resume.*another --run-dir"):
        cli.prepare_run_dir(Config(run_dir=str(tmp_path)))
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize("resume", [False, True])
def test_the_config_of_a_live_run_is_left_alone(tmp_path, resume):
    before = to_json(started(tmp_path, checkpoint=resume))
    learner = rundir.claim(tmp_path)
    with pytest.raises(ConfigError, match="another learner is at work"):
        cli.prepare_run_dir(Config(run_dir=str(tmp_path), resume=resume, seed=8))
    assert (tmp_path / "config.json").read_text() == before
    os.close(learner)
    cli.prepare_run_dir(Config(run_dir=str(tmp_path), resume=resume, seed=8))
    assert from_json((tmp_path / "config.json").read_text()).seed == 8
    os.close(rundir.claim(tmp_path))  # nothing is held on to
    assert not list(tmp_path.glob("*.tmp"))


def test_resume_takes_the_runs_own_config_and_flags_win(tmp_path):
    first = started(tmp_path, checkpoint=True)
    flags = ["--resume", "--run-dir", str(tmp_path)]
    made = cli.prepare_run_dir(cli.parse(flags))
    assert made == dataclasses.replace(first, resume=True)
    assert cli.parse([*flags, "--steps", "9"]) == dataclasses.replace(made, steps=9)
    with pytest.raises(ConfigError, match="already holds checkpoints"):  # The stored resume is no standing consent.
        cli.prepare_run_dir(cli.parse(["--run-dir", str(tmp_path)]))


def test_resume_of_a_run_that_is_not_there_begins_it_and_says_so(tmp_path, capsys):
    flags = ["--env", "catch", "--seed", "7", "--resume", "--run-dir", str(tmp_path / "run")]
    made = cli.prepare_run_dir(cli.parse(flags))
    assert f"no run in '{tmp_path / 'run'}'; it begins one there" in capsys.readouterr().err
    assert (made.env, made.seed) == ("catch", 7)
    assert cli.prepare_run_dir(cli.parse(flags)) == made
    assert capsys.readouterr().err == ""


def test_resume_of_checkpoints_without_their_config_is_refused(tmp_path):
    started(tmp_path, checkpoint=True)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        cli.prepare_run_dir(cli.parse(["--resume", "--run-dir", str(tmp_path)]))


def test_resume_of_a_moved_run_stays_where_it_is_now(tmp_path):
    started(tmp_path / "old", checkpoint=True)
    (tmp_path / "old").rename(tmp_path / "new")
    made = cli.prepare_run_dir(cli.parse(["--resume", "--run-dir", str(tmp_path / "new")]))
    assert made.run_dir == str(tmp_path / "new")
    assert not (tmp_path / "old").exists()


def test_resume_with_a_broken_config_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is not a run's config: Expecting"):
        cli.parse(["--resume", "--run-dir", str(tmp_path)])


def test_a_directory_with_a_config_json_of_others_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"is not a run's config"):
        cli.prepare_run_dir(Config(run_dir=str(tmp_path)))
    assert (tmp_path / "config.json").read_text() == '{"a": 1}'


def test_default_run_directories_have_speaking_names_and_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [cli.prepare_run_dir(Config(env="gym:ALE/Pong-v5")).run_dir for _ in range(3)]
    assert len(set(made)) == 3
    assert all(m is not None and m.startswith("runs/impala-gym_ALE_Pong-v5-20") for m in made)
    assert sorted(f"runs/{p.name}" for p in Path("runs").iterdir()) == sorted(made)
    long = cli.prepare_run_dir(LlmConfig(task="jsonl:my.jsonl?reward=judge:" + ",".join(["127.0.0.1:9000"] * 30)))
    assert long.run_dir.startswith("runs/grpo-jsonl_my.jsonl_reward_judge_127.0.0.1_9000_127.0")


def load_local():
    spec = importlib.util.spec_from_file_location("launch_local", LOCAL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("temp", ["short", "long" * 30])
def test_local_supervises_the_program_with_a_private_socket(tmp_path, monkeypatch, temp):
    seen = []

    def supervise(program):
        socket = Path(program.address.removeprefix("unix:"))
        seen.append((program, socket, stat.S_IMODE(socket.parent.stat().st_mode)))
        return 17

    (tmp_path / temp).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / temp))
    monkeypatch.setattr("seedx.supervisor.supervise", supervise)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert load_local().main(["--num-actors", "1", "--run-dir", "run"]) == 17
    [(program, socket, mode)] = seen
    assert [r.name for r in program.roles] == ["learner", "actor-0"]
    assert program.run_dir == str(tmp_path / "run")
    assert mode == 0o700
    assert len(os.fsencode(socket)) <= 107  # The kernel's limit.
    assert not socket.parent.exists()
    assert from_json(Path("run/config.json").read_text()).num_actors == 1
    assert sys.path[0] == str(tmp_path)


@pytest.mark.parametrize(
    ("code", "saves", "kept"),
    [(2, False, "former"), (2, True, "new"), (0, True, "new"), (0, False, "former"), (130, False, "former")],
)
def test_a_resume_that_learned_nothing_puts_the_config_back_and_a_refused_one_says_what_was_changed(
    tmp_path, monkeypatch, capsys, code, saves, kept
):
    started(tmp_path, checkpoint=True)
    former = (tmp_path / "config.json").read_text()
    during = []

    def supervise(program):
        during.append(from_json((tmp_path / "config.json").read_text()).network.hidden)
        if saves:
            (tmp_path / "checkpoints" / "20").mkdir()
        return code

    monkeypatch.setattr("seedx.supervisor.supervise", supervise)
    monkeypatch.setattr(sys, "path", list(sys.path))
    changes = ("--network.hidden", "32", "--learner.unroll-length", "7", "--impala.lambda_", "0.5", "--seconds", "9")
    assert load_local().main(["--resume", "--run-dir", str(tmp_path), *changes]) == code
    assert during == [(32,)]
    said = (
        "resumed with --network.hidden (32,) instead of (64, 64), --impala.lambda_ 0.5 instead of 1.0, "
        "--learner.unroll-length 7 instead of 10.\n"
    )
    assert capsys.readouterr().err == (f"local.py: this run was {said}" if (code, saves) == (2, False) else "")
    assert ((tmp_path / "config.json").read_text() == former) == (kept == "former")


@pytest.mark.parametrize(("code", "saves", "left"), [(2, False, False), (2, True, True), (1, False, True)])
def test_the_config_of_a_start_that_was_refused_is_not_what_a_resume_goes_by(tmp_path, monkeypatch, code, saves, left):
    def supervise(program):
        if saves:
            (tmp_path / "checkpoints" / "0").mkdir(parents=True)
        return code

    monkeypatch.setattr("seedx.supervisor.supervise", supervise)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_local().main(["--resume", "--run-dir", str(tmp_path), "--learner.devices", "3"]) == code
    assert (tmp_path / "config.json").is_file() == left


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_before_anything_runs_is_no_traceback(tmp_path, number, code):
    (tmp_path / "slow.py").write_text("import time\nopen('ready', 'w').close()\ntime.sleep(60)")
    command = (sys.executable, str(LOCAL), "--config", "slow.py")
    process = subprocess.Popen(command, cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "")


def test_no_launcher_shadows_a_package():
    for path in (ROOT / "launch").glob("*.py"):
        assert path.stem not in sys.stdlib_module_names
        assert importlib.util.find_spec(path.stem) is None, f"launch/{path.name} shadows the package {path.stem}"
