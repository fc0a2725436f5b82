"""The supervisor, with roles that are one-line Python scripts."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seedx.program import Program, Role
from seedx.supervisor import Limits, supervise

ROOT = Path(__file__).parent.parent
FAST = Limits(restarts=2, backoff_s=0.02, grace_s=60.0, second_interrupt_s=0.1)

SLEEP = "time.sleep(60)"
# Ends as `code` says as soon as file `name` is there.
WAIT_FOR = "while not (os.path.exists({name!r}) and os.path.getsize({name!r})): time.sleep(0.01)\n"
NOTE_PID = "open('pid', 'a').write(f'{os.getpid()}\\n')\n"
TIED = "from seedx.parent import die_with_parent; die_with_parent()\n"


def role(run_dir: Path, name: str, code: str) -> Role:
    """A role that runs `code` in the run directory."""
    kind = "learner" if name == "learner" else "actor"
    code = f"import os, signal, subprocess, sys, time\nos.chdir({str(run_dir)!r})\n{code}"
    env = {"PYTHONPATH": str(ROOT)}
    return Role(name=name, kind=kind, command=(sys.executable, "-c", code), restart=kind == "actor", env=env)


def program(run_dir: Path, learner: str, *actors: str) -> Program:
    roles = [role(run_dir, "learner", learner), *(role(run_dir, f"actor-{i}", code) for i, code in enumerate(actors))]
    return Program(run_dir=str(run_dir), address="unix:nowhere", roles=tuple(roles))


@contextlib.contextmanager
def supervisor(program: Program, limits: Limits = FAST):
    """A supervisor in a process group of its own, as a shell starts it."""
    code = f"""
import sys
from seedx.program import Program, Role
from seedx.supervisor import Limits, supervise
sys.exit(supervise({program!r}, {limits!r}))
"""
    process = subprocess.Popen(
        (sys.executable, "-c", code), cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def wait_for(*files: Path, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(f.exists() and f.stat().st_size for f in files):
        assert time.monotonic() < deadline, f"{files} did not appear"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def wait_until_dead(pids: list[int], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"of {pids} there live {[p for p in pids if alive(p)]}"
        time.sleep(0.01)


def pids(run_dir: Path) -> list[int]:
    return [int(line) for line in (run_dir / "pid").read_text().splitlines()]


def test_the_run_ends_with_its_learner(tmp_path):
    code = supervise(program(tmp_path, WAIT_FOR.format(name="pid"), NOTE_PID + SLEEP), FAST)
    assert code == 0
    assert not any(map(alive, pids(tmp_path)))


def test_the_learner_prints_to_our_stdout_and_all_else_goes_to_logs(tmp_path, capfd):
    learner = WAIT_FOR.format(name="pid") + "print('to console'); print('to log', file=sys.stderr)"
    actor = "print('out'); print('err', file=sys.stderr); sys.stdout.flush()\n" + NOTE_PID + SLEEP
    assert supervise(program(tmp_path, learner, actor), FAST) == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("to console\n", "")
    assert (tmp_path / "logs/learner.log").read_text() == "to log\n"
    assert sorted((tmp_path / "logs/actor-0.log").read_text().split()) == ["err", "out"]


def test_a_killed_actor_is_restarted_and_one_line_says_so(tmp_path, capfd):
    actor = "if not sys.argv[1:]: os.kill(os.getpid(), 9)\nopen('again', 'w').write(str(sys.argv[1:]))\n" + SLEEP
    assert supervise(program(tmp_path, WAIT_FOR.format(name="again"), actor), FAST) == 0
    assert (tmp_path / "again").read_text() == "['--restart', '1']"
    log = tmp_path / "logs/actor-0.log"
    expected = f"seedx: actor-0 died with signal 9 (SIGKILL); restart 1 of 2 in 0.02 s; log: {log}\n"
    assert capfd.readouterr().err == expected


def test_an_actor_that_is_done_is_not_restarted(tmp_path, capfd):
    assert supervise(program(tmp_path, WAIT_FOR.format(name="pid") + "time.sleep(0.3)", NOTE_PID), FAST) == 0
    assert len(pids(tmp_path)) == 1
    assert capfd.readouterr().err == ""


def test_used_up_restarts_stop_the_run_with_the_last_traceback(tmp_path, capfd):
    actor = WAIT_FOR.format(name="ready") + NOTE_PID + "raise ValueError(f'boom {len(open(\"pid\").readlines())}')"
    learner = (
        "signal.signal(15, lambda *_: (open('saved', 'w'), os._exit(143)))\nopen('ready', 'w').write('x')\n" + SLEEP
    )
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    assert supervise(program(tmp_path, learner, actor), FAST) == 1
    err = capfd.readouterr().err
    assert re.findall(r"restart (\d) of 2 in ([\d.]+) s", err) == [("1", "0.02"), ("2", "0.04")]
    assert "ValueError: boom 3" in err
    assert "boom 1" not in err
    assert "boom 2" not in err
    assert f"--resume --run-dir {tmp_path}" in err
    assert (tmp_path / "logs/actor-0.log").read_text().count("ValueError: boom") == 3
    assert (tmp_path / "saved").exists(), "the learner could not write its checkpoint"


def test_each_actor_has_restarts_of_its_own_and_old_ones_are_forgotten(tmp_path):
    actor = "n = open('{0}', 'a'); n.write('x'); n.flush()\nif os.path.getsize('{0}') < {1}: sys.exit(1)\n" + SLEEP
    learner = "while sum(os.path.getsize(f) for f in 'ab' if os.path.exists(f)) < 6: time.sleep(0.01)\n"
    assert supervise(program(tmp_path, learner, actor.format("a", 3), actor.format("b", 3)), FAST) == 0

    forgetful = Limits(restarts=1, window_s=1e-9, backoff_s=0.01)
    (tmp_path / "forgetful").mkdir()
    assert supervise(program(tmp_path / "forgetful", learner, actor.format("a", 6)), forgetful) == 0


def test_an_actor_that_was_replaced_is_not_restarted_and_one_line_says_so(tmp_path, capfd):
    learner = WAIT_FOR.format(name="pid") + "time.sleep(0.3)"
    assert supervise(program(tmp_path, learner, NOTE_PID + "sys.exit(77)"), FAST) == 0
    assert len(pids(tmp_path)) == 1
    log = tmp_path / "logs/actor-0.log"
    expected = f"seedx: actor-0 was replaced by another actor with its id and is not restarted; log: {log}\n"
    assert capfd.readouterr().err == expected


def test_by_default_a_broken_environment_ends_the_run_within_seconds(tmp_path, capfd):
    assert supervise(program(tmp_path, SLEEP, "1 / 0")) == 1
    err = capfd.readouterr().err
    assert re.findall("restart . of 5 in (.*) s;", err) == ["0.1", "0.2", "0.4", "0.8", "1.6"]
    assert "ZeroDivisionError" in err


@pytest.mark.parametrize("name", ["learner", "actor-0"])
def test_a_user_error_stops_the_run_at_once(tmp_path, capfd, name):
    fails = NOTE_PID + "print('env Foo-v1 does not exist', file=sys.stderr); sys.exit(2)"
    codes = (fails, SLEEP) if name == "learner" else (SLEEP, fails)
    assert supervise(program(tmp_path, *codes), FAST) == 2
    err = capfd.readouterr().err
    assert "env Foo-v1 does not exist" in err
    assert "--resume" not in err
    assert len(pids(tmp_path)) == 1


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("1 / 0", 1, "ZeroDivisionError"),
        ("sys.exit(7)", 7, "learner ended with code 7"),
        ("os.kill(os.getpid(), 9)", 137, "learner died with signal 9 (SIGKILL)"),
    ],
)
def test_the_learners_death_stops_the_run_and_names_resume(tmp_path, capfd, end, code, words):
    learner = WAIT_FOR.format(name="pid") + end
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    assert supervise(program(tmp_path, learner, NOTE_PID + SLEEP), FAST) == code
    err = capfd.readouterr().err
    assert words in err
    assert f"--resume --run-dir {tmp_path}" in err
    assert not any(map(alive, pids(tmp_path)))


def test_learner_and_actor_end_between_two_looks(tmp_path):
    # Both are zombies until the supervisor, which is stopped meanwhile, looks again.
    learner = WAIT_FOR.format(name="pid") + (
        "parent, actor = os.getppid(), int(open('pid').read()); os.kill(parent, signal.SIGSTOP)\n"
        "ended = ' && '.join(f'grep -q ^State:.Z /proc/{pid}/status' for pid in (os.getpid(), actor))\n"
        "wake = f'until {ended}; do sleep 0.01; done; kill -CONT {parent}'\n"
        "subprocess.Popen(['sh', '-c', wake], start_new_session=True)\n"
        "os.kill(actor, 9)"
    )
    with supervisor(program(tmp_path, learner, NOTE_PID + SLEEP)) as process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


LET_IN = "signal.pthread_sigmask(signal.SIG_UNBLOCK, {2})\n"  # as seedx.run does
NOTE_SIGNALS = """
def note(number, _):
    open({file!r}, 'a').write(f'{{number}} {{os.path.exists("saved")}}\\n')
    {then}
signal.signal(signal.SIGINT, note); signal.signal(signal.SIGTERM, note)
""" + LET_IN.replace("{2}", "{{2}}")
SAVE = "time.sleep(0.3); open('saved', 'w').write('x'); os._exit(128 + number)"


@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGINT, 2), (signal.SIGTERM, 15), (signal.SIGHUP, 15)], ids=lambda n: str(int(n))
)
def test_a_signal_reaches_the_learner_once_and_the_actors_after_its_checkpoint(tmp_path, number, told):
    learner = NOTE_SIGNALS.format(file="learner", then=SAVE) + NOTE_PID + "while True: time.sleep(60)"
    actor = NOTE_SIGNALS.format(file="actor", then="os._exit(143)") + "open('ready', 'w').write('x')\n" + SLEEP
    with supervisor(program(tmp_path, learner, actor)) as process:
        wait_for(tmp_path / "pid", tmp_path / "ready")
        os.killpg(process.pid, number)  # As a terminal does: everyone in the supervisor's process group.
        assert process.wait(60) == 128 + told
    assert (tmp_path / "learner").read_text() == f"{told} False\n"
    assert (tmp_path / "actor").read_text() == "15 True\n"


def test_a_run_under_nohup_outlives_its_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with supervisor(program(tmp_path, NOTE_PID + WAIT_FOR.format(name="end"))) as process:
            wait_for(tmp_path / "pid")
            process.send_signal(signal.SIGHUP)
            time.sleep(0.2)
            assert process.poll() is None
            (tmp_path / "end").write_text("x")
            assert process.wait(60) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_failure_to_write_the_last_checkpoint_is_a_failure(tmp_path):
    learner = "signal.signal(15, lambda *_: (print('disk full', file=sys.stderr), sys.exit(5)))\n" + NOTE_PID + SLEEP
    with supervisor(program(tmp_path, learner)) as process:
        wait_for(tmp_path / "pid")
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "disk full" in err


def test_an_interrupt_before_the_learner_has_handlers_waits_for_them(tmp_path):
    learner = NOTE_PID + WAIT_FOR.format(name="loaded") + "signal.signal(2, signal.SIG_DFL)\n" + LET_IN + SLEEP
    with supervisor(program(tmp_path, learner)) as process:
        wait_for(tmp_path / "pid")
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        (tmp_path / "loaded").write_text("x")
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_whoever_ignores_the_signal_is_killed_in_the_end(tmp_path):
    stubborn = "signal.signal(15, signal.SIG_IGN)\n" + NOTE_PID + SLEEP
    limits = Limits(grace_s=0.2)
    with supervisor(program(tmp_path, stubborn, stubborn), limits) as process:
        while not (tmp_path / "pid").exists() or len(pids(tmp_path)) < 2:
            time.sleep(0.01)
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "learner is killed 0.2 s after signal 15" in err
    assert "actor-0 is killed 0.2 s after signal 15" in err
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.slow
def test_a_learner_is_waited_for_while_it_writes_a_checkpoint_and_killed_when_it_hangs(tmp_path):
    learner = """
def save(number, _):
    os.makedirs('checkpoints')
    for i in range(60):
        os.utime('checkpoints')
        open('written', 'a').write('x')
        time.sleep(0.1)
    time.sleep(60)
signal.signal(signal.SIGTERM, save)
"""
    with supervisor(program(tmp_path, learner + NOTE_PID + SLEEP), Limits(grace_s=5.0)) as process:
        wait_for(tmp_path / "pid")
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert (tmp_path / "written").read_text() == "x" * 60
    assert process.returncode == 143
    assert "learner is killed 5 s after signal 15" in err


@pytest.mark.slow
def test_a_second_interrupt_kills_at_once_but_a_forwarded_copy_of_the_first_does_not(tmp_path):
    learner = NOTE_SIGNALS.format(file="learner", then="pass") + NOTE_PID + "while True: time.sleep(60)"
    limits = Limits(grace_s=60.0, second_interrupt_s=5.0)
    with supervisor(program(tmp_path, learner), limits) as process:
        wait_for(tmp_path / "pid")
        process.send_signal(signal.SIGINT)
        wait_for(tmp_path / "learner")
        process.send_signal(signal.SIGINT)
        time.sleep(5.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not any(map(alive, pids(tmp_path)))


def test_a_signal_while_children_still_start(tmp_path):
    with supervisor(program(tmp_path, NOTE_PID + SLEEP, *[TIED + NOTE_PID + SLEEP] * 12)) as process:
        wait_for(tmp_path / "pid")
        process.terminate()
        assert process.wait(60) == 143
    wait_until_dead(pids(tmp_path))


def test_no_orphan_when_the_supervisor_is_killed(tmp_path):
    tied = TIED + "signal.signal(15, signal.SIG_IGN)\n" + NOTE_PID + SLEEP
    with supervisor(program(tmp_path, tied, tied, tied)) as process:
        while not (tmp_path / "pid").exists() or len(pids(tmp_path)) < 3:
            time.sleep(0.01)
        process.kill()
        process.wait()
        wait_until_dead(pids(tmp_path))


def test_what_a_dead_actor_had_started_dies_too(tmp_path):
    actor = (
        "if os.path.exists('grandchild'): time.sleep(60)\n"
        "p = subprocess.Popen(['sleep', '60']); open('grandchild', 'w').write(str(p.pid)); os.kill(os.getpid(), 9)"
    )
    learner = WAIT_FOR.format(name="grandchild") + "time.sleep(0.5)"
    assert supervise(program(tmp_path, learner, actor), FAST) == 0
    wait_until_dead([int((tmp_path / "grandchild").read_text())])


def test_die_with_parent_ends_a_child_that_came_too_late_and_spares_one_without_supervisor():
    code = TIED + "import os; sys = __import__('sys'); sys.exit(9 if 'SEEDX_PARENT_PID' in os.environ else 0)"
    for parent, expected in (("1", 1), (str(os.getpid()), 0), (None, 0)):
        env = {**os.environ, **({"SEEDX_PARENT_PID": parent} if parent else {})}
        assert subprocess.run((sys.executable, "-c", code), cwd=ROOT, env=env, check=False).returncode == expected
