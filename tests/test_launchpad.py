"""Runs as Launchpad programs; the real ones: pytest -m external tests/test_launchpad.py."""

import functools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from certificates import write_certificate
from processes import QUICK, ROOT, TINY, Processes, is_served, last
from reverb_harness import START_S, find_uv, missing

LP = ROOT / "launch" / "lp.py"
REAL = (pytest.mark.external, pytest.mark.slow)


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


def real(test):
    return functools.reduce(lambda marked, mark: mark(marked), REAL, test)


@functools.cache
def uv() -> str:
    """uv, which can make Launchpad's environment here; else the test is skipped or fails, as SEEDX_REQUIRE says."""
    found = find_uv("launchpad")
    tried = subprocess.run(
        (found, "run", "--script", str(LP), "--help"), capture_output=True, text=True, timeout=START_S
    )
    return found if tried.returncode == 0 else missing(f"Launchpad cannot run here: {tried.stderr}", "launchpad")


def start(processes, *flags: str, tiny=TINY, **env: str):
    """launch/lp.py as a user with an active environment starts it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = (uv(), "run", "--quiet", "--script", str(LP))
    return processes.start(*script, *tiny, "--num-actors", "2", *flags, env={**QUICK, "PATH": path, **env})


def refused(*flags: str, **env: str) -> str:
    """What lp.py says of wrong flags, before it comes to Launchpad."""
    lp = subprocess.run((sys.executable, str(LP), *flags), capture_output=True, text=True, env={**os.environ, **env})
    assert lp.returncode == 2, lp.stdout + lp.stderr
    assert "Traceback" not in lp.stderr
    return " ".join(lp.stderr.split())


def learning(processes, tmp_path, *flags: str):
    """A run that has begun to learn."""
    run_dir = tmp_path / "run"
    lp = start(processes, "--run-dir", str(run_dir), *flags)
    lp.until(lambda: last(run_dir, "updates") > 0, "updates", START_S)
    return lp, run_dir


@pytest.mark.parametrize("terminal", ["current_terminal", "xterm", "gnome-terminal", "byobu_session", "nonsense"])
def test_other_terminals_are_refused_with_the_reason(terminal):
    said = refused("--terminal", terminal)
    assert f"--terminal {terminal} must be output_to_files or tmux_session: in current_terminal Launchpad" in said


@pytest.mark.parametrize("flag", ["--address=0.0.0.0:7777", "--server", "--format", "--prepare"])
def test_addresses_are_launchpads(flag):
    assert f"{flag.partition('=')[0]} is not for Launchpad, which binds the address" in refused(flag)


def test_a_wrong_flag_gets_the_answer_of_seedx(tmp_path):
    own = ("--python", sys.executable)
    assert "envs_per_actor (3) must be divisible" in refused(
        *own, "--run-dir", str(tmp_path / "r"), "--envs-per-actor", "3"
    )
    assert "--no-such-flag" in refused(*own, "--run-dir", str(tmp_path / "r"), "--no-such-flag")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_roles_and_writes_nothing(tmp_path):
    flags = (
        "--dry-run",
        "--python",
        sys.executable,
        "--num-actors",
        "2",
        "--run-dir",
        "r",
        "--inference.token-file",
        "t",
    )
    dry = subprocess.run((sys.executable, str(LP), *flags), capture_output=True, text=True, cwd=tmp_path, check=True)
    learner, *actors = dry.stdout.splitlines()
    assert learner.endswith(f"-m seedx.run learner --run-dir {tmp_path}/r --listen localhost:0")
    assert [actor.partition(" --server ")[2] for actor in actors] == [f"localhost:0 --actor-id {i}" for i in range(2)]
    assert list(tmp_path.iterdir()) == []


def test_the_first_python_that_can_import_seedx_is_taken(tmp_path, monkeypatch):
    find_python = runpy.run_path(str(LP))["find_python"]
    for name, line in {
        "without": "exit 1",
        "with": f'exec {sys.executable} "$@"',
        "later": f'exec {sys.executable} "$@"',
    }.items():
        (tmp_path / name).mkdir()
        python = tmp_path / name / "python3"
        python.write_text(f"#!/bin/sh\n{line}\n")
        python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / name) for name in ("none", "without", "with", "later")))
    assert find_python(None) == str(tmp_path / "with" / "python3")
    monkeypatch.chdir(tmp_path)
    assert find_python("later/python3") == str(tmp_path / "later" / "python3")
    assert find_python("without/python3") is None
    monkeypatch.setenv("PATH", str(tmp_path / "without"))
    assert find_python(None) is None


def test_without_a_python_for_seedx_the_remedy_is_named(tmp_path):
    remedy = "import seedx; activate the environment that has it, or name its --python."
    assert f"no python3 on PATH can {remedy}" in refused(PATH=str(tmp_path))
    assert f"--python nowhere cannot {remedy}" in refused("--python", "nowhere")


@pytest.mark.parametrize(("required", "outcome"), [("reverb", pytest.skip), ("tls launchpad", pytest.fail)])
def test_tests_that_need_launchpad_fail_without_it_only_where_it_is_required(monkeypatch, required, outcome):
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SEEDX_REQUIRE", required)
    with pytest.raises(outcome.Exception, match=r"there is no uv: .*\[launchpad\]"):
        find_uv("launchpad")


@real
def test_a_program_runs_to_its_end_with_tls_and_a_token(processes, tmp_path):
    certificate, key = write_certificate(tmp_path, "learner")
    (tmp_path / "token").write_text("secret")
    tls = ("--inference.tls-cert", certificate, "--inference.tls-key", key)
    token = ("--inference.token-file", str(tmp_path / "token"))
    run_dir = tmp_path / "run"
    lp = start(processes, "--run-dir", str(run_dir), *tls, *token, "--steps", "3000")
    roles = lp.until(lambda: started(processes, 3), "the roles", START_S)
    assert sorted(process.cmdline()[3] for process in roles) == ["actor", "actor", "learner"]
    for process in roles:
        assert "cache/uv" not in process.environ()["PATH"].partition(":")[0]
        assert "VIRTUAL_ENV" not in process.environ()
        assert os.getpgid(process.pid) == process.pid  # a terminal's Ctrl-C is for the launcher alone
    words = [process.cmdline() for process in roles]
    [address] = {word for line in words for word in line if word.startswith("localhost:")}
    assert address != "localhost:0"
    lp.until(lambda: last(run_dir, "updates") > 0, "updates", START_S)
    assert not is_served(address)  # to those who come without
    assert lp.wait() == 0, lp.said
    processes.wait_until_gone()
    assert json.loads((run_dir / "summary.json").read_text())["exit"] == "steps"
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["actor-0.log", "actor-1.log", "learner.log"]
    assert "steps reached" in lp.out.splitlines()[-1]
    assert lp.err == ""


@real
def test_a_learner_that_fails_ends_the_program_with_its_code_and_reason(processes, tmp_path):
    run_dir = tmp_path / "run"
    lp = start(processes, "--run-dir", str(run_dir), "--agent", "faulty_agents:raising")
    lp.until(lambda: "a mistake in the loss" in log(run_dir), "the mistake", START_S)
    assert lp.wait() == 1, lp.said  # and the actors would wait for 120 s
    assert "a mistake in the loss" in lp.out
    assert f"learner ended with code 1, and so the run. Its log: {run_dir}/logs/learner.log" in lp.err
    processes.wait_until_gone()


def started(processes, count: int) -> list[psutil.Process]:
    """The roles, once there are so many and each is its interpreter; they load for seconds before they can end."""
    python = f"{Path(sys.executable).parent}/python3"
    roles = [process for process in processes.alive("seedx.run") if process.cmdline()[:1] == [python]]
    return roles if len(roles) == count else []


def log(run_dir: Path) -> str:
    path = run_dir / "logs" / "learner.log"
    return path.read_text() if path.exists() else ""


@real
@pytest.mark.parametrize(("victim", "code"), [("actor", 137), ("learner", 137)])
def test_a_role_that_is_killed_ends_the_program(processes, tmp_path, victim, code):
    lp, run_dir = learning(processes, tmp_path)
    processes.alive("seedx.run", victim)[0].kill()
    assert lp.wait() == code, lp.said
    assert f"{victim}" in lp.err
    assert "ended with code 137" in lp.err
    processes.wait_until_gone()
    assert bool(list((run_dir / "checkpoints").glob("[0-9]*"))) is (victim == "actor")


@real
@pytest.mark.parametrize(("how", "code"), [("SIGTERM", 143), ("Ctrl-C", 130), ("SIGHUP", 143)])
def test_a_signal_ends_everything_with_a_checkpoint(processes, tmp_path, how, code):
    lp, run_dir = learning(processes, tmp_path)
    if how == "Ctrl-C":
        lp.interrupt()
    else:
        lp.send(signal.Signals[how])
    assert lp.wait() == code, lp.said
    processes.wait_until_gone()
    assert list((run_dir / "checkpoints").glob("[0-9]*"))
    assert json.loads((run_dir / "summary.json").read_text())["exit"] == ("SIGINT" if how == "Ctrl-C" else "SIGTERM")
    assert "Traceback" not in lp.said


@real
@pytest.mark.parametrize("whom", ["uv", "the launcher"])
def test_a_launcher_that_is_killed_leaves_no_process(processes, tmp_path, whom):
    lp, _ = learning(processes, tmp_path)
    [launcher] = [child for child in psutil.Process(lp.popen.pid).children() if str(LP) in child.cmdline()]
    assert len(processes.alive("seedx.run")) == 3
    (psutil.Process(lp.popen.pid) if whom == "uv" else launcher).kill()
    processes.wait_until_gone()
    assert processes.alive() == []


@real
@pytest.mark.parametrize("hanging", ["actor", "learner"])
def test_a_role_that_hangs_is_killed(processes, tmp_path, hanging):
    lp, _ = learning(processes, tmp_path)
    for role in processes.alive("seedx.run", hanging):
        role.suspend()
    lp.send(signal.SIGTERM)
    assert lp.wait() == 143, lp.said
    processes.wait_until_gone()


@real
def test_a_second_ctrl_c_kills_at_once(processes, tmp_path):
    lp, _ = learning(processes, tmp_path)
    [learner] = processes.alive("seedx.run", "learner")
    learner.suspend()
    while lp.popen.poll() is None:
        lp.interrupt()
        time.sleep(0.6)
    assert lp.wait() == 130, lp.said  # 137 if it had been killed after 10 s
    processes.wait_until_gone()


@real
def test_a_run_with_a_reverb_server(processes, tmp_path):
    run_dir = tmp_path / "run"
    lp = start(processes, "--run-dir", str(run_dir), "--replay", "reverb", "--steps", "500")
    server = str(ROOT / "launch" / "reverb_server.py")
    lp.until(lambda: processes.alive(server), "a Reverb server", START_S)
    assert lp.wait() == 0, lp.said
    processes.wait_until_gone()
    assert json.loads((run_dir / "summary.json").read_text())["exit"] == "steps"
    assert "dm-reverb listens on all interfaces" in lp.err
    assert "serving" in (run_dir / "logs" / "reverb.log").read_text()


@real
def test_the_windows_of_tmux_end_with_the_launcher(processes, tmp_path):
    if shutil.which("tmux") is None:
        missing("there is no tmux", "launchpad")
    (tmp_path / "tmux").mkdir()
    run_dir = tmp_path / "run"
    flags = ("--run-dir", str(run_dir), "--terminal", "tmux_session")
    lp = start(processes, *flags, TMUX_TMPDIR=str(tmp_path / "tmux"), SHELL="/bin/sh")
    lp.until(lambda: last(run_dir, "updates") > 0, "updates", START_S)
    windows = subprocess.run(
        ("tmux", "list-windows", "-a", "-F", "#{window_name}"),
        env={**os.environ, "TMUX_TMPDIR": str(tmp_path / "tmux")},
        capture_output=True,
        text=True,
    ).stdout.split()
    assert {"learner", "actor-0", "actor-1"} <= set(windows)
    lp.interrupt()
    assert lp.wait() == 130, lp.said
    processes.wait_until_gone()
    assert list((run_dir / "checkpoints").glob("[0-9]*"))


@real
def test_test_mp_launches_the_program_in_a_test(processes, tmp_path):
    make = ("--prepare", "--format", "json", "--address", "localhost:0", "--run-dir", str(tmp_path / "run"))
    plan = processes.start(sys.executable, "-m", "seedx.program", *TINY, "--steps", "500", *make)
    assert plan.wait() == 0, plan.said
    (tmp_path / "plan.json").write_text(plan.out)
    script = (uv(), "run", "--quiet", "--script", str(ROOT / "tests" / "launchpad_test_mp.py"))
    test = processes.start(*script, str(tmp_path / "plan.json"), env=QUICK)
    assert test.wait(START_S) == 0, test.said
    assert '{"groups": {"learner": 1, "actor": 1}}' in test.out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == "steps"
    processes.wait_until_gone()
