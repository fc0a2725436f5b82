"""The sandbox against programs that try everything, as the user who runs the tests and, if that is root, as another.

Where the system refuses sandboxes tests are skipped, or fail if SEEDX_REQUIRE names `sandbox`.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import Processes, until

from seedx.checks import ConfigError
from seedx.envs.text import sandbox, sandbox_process
from seedx.envs.text.sandbox import SandboxError, SandboxLimits, SandboxResult, check_sandbox, run_asserts, run_pairs

pytestmark = pytest.mark.slow  # they start processes, some of which run until their deadline

ROOT = Path(__file__).parent.parent
S = 100.0  # bounds hanging alone
NOBODY = 65534
PATIENT = {"timeout_s": S}
NEEDED = ("checks.py", "__init__.py", "envs/__init__.py", "envs/text/__init__.py")
NEEDED += tuple(f"envs/text/{name}.py" for name in ("sandbox", "sandbox_process", "sandbox_init"))
ORDINARY = """
import json, sys
from seedx.envs.text import sandbox
kind, code, tests, limits = json.load(sys.stdin)
result = getattr(sandbox, kind)(code, tests, sandbox.SandboxLimits(**limits))
print(json.dumps(result))
"""


def missing(why):
    if "sandbox" in os.environ.get("SEEDX_REQUIRE", "").split():
        pytest.fail(f"SEEDX_REQUIRE names sandbox, and {why}")
    pytest.skip(why)


class Self:
    """Runs programs as the user who runs the tests."""

    def run(self, kind, code, tests, **limits):
        return getattr(sandbox, kind)(code, tests, SandboxLimits(**(PATIENT | limits)))

    def says(self, program, **limits):
        """What a program prints, which must end well."""
        result = self.run("run_pairs", program, [("", "")], **limits)
        assert result.status == 0, result
        return result.stdout


class Ordinary(Self):
    """Runs programs as a user without rights, in a process of its own; root may be able to read what it cannot."""

    def __init__(self, directory):
        directory.chmod(0o755)
        for name in NEEDED:
            target = directory / "seedx" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "seedx" / name, target)
        self._env = {**os.environ, "PYTHONPATH": str(directory)}
        self._user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        self._python = next(filter(self._can_run, (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")), None)
        if self._python is None:
            missing("there is no Python of 3.11 or newer that every user may run")

    def _can_run(self, python):
        check = "import sys; sys.exit(sys.version_info < (3, 11))"
        try:
            return subprocess.run([python, "-c", check], cwd="/", timeout=S, **self._user).returncode == 0
        except OSError:
            return False

    def run(self, kind, code, tests, **limits):
        done = subprocess.run(
            [self._python, "-c", ORDINARY],
            input=json.dumps([kind, code, tests, PATIENT | limits]),
            env={**os.environ, **self._env},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=S,
            **self._user,
        )
        assert done.returncode == 0, done.stderr
        return SandboxResult(*json.loads(done.stdout))


@pytest.fixture(scope="module")
def ordinary():
    if os.geteuid() != 0:
        pytest.skip("the tests themselves run as an ordinary user")
    with tempfile.TemporaryDirectory() as directory:
        yield Ordinary(Path(directory))


@pytest.fixture(params=["self", "ordinary"])
def box(request):
    try:
        check_sandbox()
    except SandboxError as error:
        missing(str(error))
    return Self() if request.param == "self" else request.getfixturevalue("ordinary")


@pytest.fixture
def mark():
    """A number of seconds that no other process sleeps for."""
    return f"600.{secrets.randbelow(10**12)}"


def commands():
    """The command lines of all processes of the machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace").split("\0"))
        except OSError:
            continue
    return found


def living(mark):
    return [command for command in commands() if mark in command]


def test_asserts_score_the_share_that_holds(box):
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 5", "add()", "assert add(0, 0) == 0"]
    result = box.run("run_asserts", "def add(a, b):\n    return a + b\nprint('loaded')", tests)
    assert (result.passed, result.status, result.why, result.stdout) == (0.5, 0, "wrong", "loaded\n")
    assert 'File "test 2", line 1' in result.stderr
    assert "TypeError" in result.stderr
    assert box.run("run_asserts", "def add(a, b): return a + b", tests[:1])[:3] == (1.0, 0, "ok")


@pytest.mark.parametrize(
    ("code", "why", "said"),
    [
        ("def add(a, b) return", "error", "SyntaxError"),
        ("1 / 0", "error", "ZeroDivisionError"),
        ("assert False", "error", "AssertionError"),
        ("raise SystemExit", "error", "SystemExit"),
        ("import os; os._exit(0)", "error", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "error", ""),
        ("import os, signal; os.kill(-1, signal.SIGKILL)", "error", ""),
        ("print('\udcff')", "error", ""),
        ("print('\x00')", "error", ""),
        ("bytearray(50 * 2**30)", "memory", "MemoryError"),
        ("import ctypes; ctypes.string_at(0)", "error", ""),
        ("import os; os.write(int(os.listdir('/proc/self/fd')[-2]), b'0 ok\\n1 ok\\n'); os._exit(0)", "error", ""),
        ("import sys; assert sys.stdin.read() == '' and __name__ == 'solution'; raise LookupError", "error", "Lookup"),
    ],
)
def test_code_that_does_not_get_to_its_tests_passes_none(box, code, why, said):
    result = box.run("run_asserts", code, ["pass", "pass"])
    assert (result.passed, result.why) == (0.0, why)
    assert said in result.stderr


def test_pairs_score_the_share_that_is_right(box):
    code = "n = int(input())\nprint(n * 2, ' ')\nif n == 3: raise SystemExit(4)\nif n == 4: print('more')"
    result = box.run("run_pairs", code, [("1\n", "2"), ("2", "4\n\n"), ("3", "6"), ("4", "8"), ("5", "10\n")])
    assert (result.passed, result.status, result.why, result.stdout) == (0.6, 4, "error", "6  \n")
    assert box.run("run_pairs", code, [("4", "8")]).why == "wrong"
    assert box.run("run_pairs", code, [("1", "2")])[:3] == (1.0, 0, "ok")
    assert box.run("run_pairs", "print(input())", [("é\udcff", "é?")]).why == "ok"
    assert box.run("run_pairs", "x = bytearray(2**40)", [("", "")]).why == "memory"


@pytest.mark.parametrize("code", ["while True: pass", "import os\nfor fd in 0, 1, 2: os.close(fd)\nwhile True: pass"])
def test_a_program_that_never_ends_is_ended(box, code):
    assert box.run("run_pairs", code, [("", ""), ("", "")], timeout_s=0.7)[:3] == (0.0, None, "timeout")
    result = box.run("run_asserts", "", ["pass", code], timeout_s=1.0)
    assert result[1:3] == (None, "timeout")


# Children in sessions of their own that ignore SIGTERM and outlive their parents.
LEAVES = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "{mark}"])
if os.fork() == 0:
    os.setsid()
    subprocess.Popen(["sleep", "{mark}"])
    os._exit(0)
os.wait()
print("started", flush=True)
"""


@pytest.mark.parametrize(
    ("then", "why"),
    [("pass", "ok"), ("while True: print('x' * 1000)", "output"), ("os.kill(os.getpid(), signal.SIGKILL)", "error")],
)
def test_all_that_a_program_started_dies_with_it(box, mark, then, why):
    result = box.run("run_pairs", LEAVES.format(mark=mark) + then, [("", "started")])
    assert result.why == why
    assert result.stdout.startswith("started")
    assert not living(mark)


def test_nothing_outlives_a_killed_caller(tmp_path, mark):
    code = LEAVES.format(mark=mark) + "time.sleep(600)"
    call = f"from seedx.envs.text.sandbox import *\nrun_pairs({code!r}, [('', '')], SandboxLimits(timeout_s=600))"
    with Processes(tmp_path) as processes:
        caller = processes.start(sys.executable, "-c", call)
        caller.until(lambda: len(living(mark)) == 2, "both children")
        caller.send(signal.SIGKILL)
        caller.wait()
        until(lambda: not living(mark), "the end of the children")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_is_cut(box, stream):
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 10_000)"
    result = box.run("run_asserts", code, ["pass"], output_bytes=5000)
    assert (result.passed, result.status, result.why) == (0.0, None, "output")
    assert getattr(result, stream) == "x" * 5000
    assert box.run("run_pairs", "print('x' * 9000)", [("", "x" * 9000)], output_bytes=5000).why == "ok"


def test_processes_are_bounded(box):
    code = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        made += 1
except BlockingIOError:
    print(made)
"""
    assert 1 <= int(box.says(code, processes=10)) <= 10


def test_a_fork_bomb_ends_with_its_time(box, mark):
    code = f"""
import os
while True:
    try:
        if os.fork() == 0 and os.fork() == 0:
            os.setsid()
            os.execlp("sleep", "sleep", "{mark}")
    except OSError:
        pass
"""
    assert box.run("run_pairs", code, [("", "")], timeout_s=1.5).why == "timeout"
    assert not living(mark)


def test_nothing_outside_its_directory_can_be_written(box, tmp_path):
    # What root can write, and what everybody can.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as public:
        os.chmod(public, 0o777)
        places = [
            str(tmp_path),
            public,
            str(ROOT),
            "/",
            "/usr/bin",
            "/usr/lib",
            "/etc",
            "/dev",
            "/proc",
            "/sys",
            "/var/tmp",
        ]
        places += [sys.prefix, sys.base_prefix, os.path.expanduser("~"), "/root", "/home"]
        code = f"""
import os
for place in {places}:
    for act in (lambda: open(place + "/seedx-escape", "w"), lambda: os.mkdir(place + "/seedx-escape")):
        try:
            act()
            print("wrote into", place)
        except OSError:
            pass
for path in "/etc/passwd", "/main.py", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/oom_score_adj":
    try:
        open(path, "r+")
        print("opened", path)
    except OSError:
        pass
open("/sandbox/a", "w").write("a")
import tempfile
tempfile.mkstemp(suffix="b")
print(len(os.listdir(".")), os.getcwd())
"""
        assert box.says(code) == "2 /sandbox\n"
        assert not os.listdir(public)
    assert box.says("import os; print(os.listdir('.'))") == "[]\n"


def test_its_directory_is_bounded(box):
    code = """
import errno
for name in "abc":
    try:
        open(name, "wb", buffering=0).write(bytes(700_000))
        open(name, "ab", buffering=0).write(bytes(700_000))
    except OSError as error:
        print(errno.errorcode[error.errno])
print(sum(os.path.getsize(name) for name in "abc") <= 2**20)
"""
    assert box.says("import os" + code, work_bytes=2**20).endswith("True\n")
    assert "ENOSPC" in box.says("import os" + code, work_bytes=2**20)


def test_files_of_the_machine_cannot_be_read(box, tmp_path):
    with tempfile.TemporaryDirectory() as public:
        os.chmod(public, 0o755)
        (Path(public) / "secret").write_text("secret")
        (tmp_path / "secret").write_text("secret")
        paths = [f"{public}/secret", f"{tmp_path}/secret", "/etc/shadow", "/etc/hostname", str(ROOT / "AGENTS.md")]
        code = f"import os; print([path for path in {paths} if os.path.exists(path)])"
        assert box.says(code) == "[]\n"
    assert box.says("print(*open('/etc/passwd'))").count(":/") == 2  # nobody alone


def test_there_is_no_network(box):
    with socket.create_server(("127.0.0.1", 0)) as tcp, tempfile.TemporaryDirectory() as public:
        os.chmod(public, 0o777)
        with socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as abstract:
            unix.bind(path := f"{public}/socket")
            abstract.bind(name := f"\0seedx-{secrets.token_hex(8)}")
            os.chmod(path, 0o777)
            for listener in (unix, abstract):
                listener.listen()
            code = f"""
import socket
addresses = [(socket.AF_INET, ("127.0.0.1", {tcp.getsockname()[1]})), (socket.AF_INET, ("192.0.2.1", 80))]
for family, address in [*addresses, (socket.AF_UNIX, {path!r}), (socket.AF_UNIX, {name!r})]:
    try:
        socket.socket(family).connect(address)
        print("reached", address)
    except OSError:
        pass
print([name for _, name in socket.if_nameindex()])
"""
            assert box.says(code) == "['lo']\n"


def test_secrets_of_the_caller_are_not_to_be_had(box, monkeypatch):
    monkeypatch.setenv("SEEDX_TEST_TOKEN", token := secrets.token_hex(16))
    code = """
import glob, os
for path in ["/proc/self/environ", *glob.glob("/proc/*/environ"), *glob.glob("/proc/*/cmdline")]:
    try:
        print(open(path).read())
    except OSError:
        pass
print(sorted(os.environ), [name for name in os.listdir("/proc") if name.isdigit()], os.getppid())
"""
    said = box.says(code)
    assert token not in said
    assert "['HOME', 'LANG', 'PATH', 'TMPDIR'] ['1', '2'] 1" in said


def test_a_program_has_no_rights_and_gets_none(box):
    code = """
import ctypes, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(*(int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")), int(status["NoNewPrivs"]))
libc = ctypes.CDLL(None)
unshared = [libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)]
print(unshared, libc.mount(b"x", b"/sandbox", b"tmpfs", 0, None))
print(libc.ptrace(16, 1, 0, 0), os.getuid(), os.getgid(), os.getgroups())
try:
    os.kill(1, 9)
except PermissionError:
    pass
for act in (lambda: os.setuid(0), lambda: open("/proc/1/mem", "rb"), lambda: os.listdir("/proc/1/fd")):
    try:
        act()
        print("could", act)
    except OSError:
        pass
print("alive")
"""
    assert box.says(code) == f"0 0 0 0 1\n[-1, -1, -1] -1\n-1 {NOBODY} {NOBODY} []\nalive\n"


def test_python_has_its_packages(box):
    assert box.says("import sys; print(sys.flags.isolated, sys.prefix)").split()[0] == "1"
    if isinstance(box, Ordinary):
        return
    assert box.says("import sys, numpy; print(sys.prefix, numpy.arange(3).sum())") == f"{sys.prefix} 3\n"


def test_threads_can_run_programs_at_the_same_time():
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda n: run_pairs(f"print({n})", [("", str(n))], SandboxLimits(S)), range(8)))
    assert [result.why for result in results] == ["ok"] * 8


REFUSED = """
import ctypes
assert ctypes.CDLL(None).unshare(0x10000000) == 0
open("/proc/sys/user/max_user_namespaces", "w").write("0")
from seedx.envs.text.sandbox import check_sandbox
check_sandbox()
"""


def test_where_namespaces_are_refused_so_are_programs_and_the_message_says_what_to_do():
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "SandboxError: This system refuses a sandbox for code: unshare(2)" in last
    assert "sysctl -w user.max_user_namespaces=" in last
    assert "--reward.sandbox unsafe" in last


@pytest.mark.parametrize("step", ["mount", "pivot_root", "umount2", "prctl"])
def test_a_step_that_fails_is_named_and_nothing_runs(tmp_path, monkeypatch, step):
    """A copy of the launcher whose calls of one kind fail."""
    broken = tmp_path / "sandbox_init.py"
    refuse = f"_libc.{step} = lambda *_: ctypes.set_errno(1) or -1\n"
    source = sandbox_process._INIT.read_text()
    broken.write_text(source.replace('\nif __name__ == "__main__":', f'\n{refuse}if __name__ == "__main__":'))
    monkeypatch.setattr(sandbox_process, "_INIT", broken)
    with pytest.raises(
        SandboxError, match=rf"refuses a sandbox for code: {step}\(2\).*: Operation not permitted"
    ) as raised:
        run_pairs("print(1)", [("", "1")], SandboxLimits(S))
    assert isinstance(raised.value, ConfigError)


def test_unsafe_programs_run_without_a_sandbox_but_with_limits(monkeypatch, capsys, mark):
    monkeypatch.setenv(sandbox.MODE, "unsafe")
    monkeypatch.setenv("SEEDX_TEST_TOKEN", "secret")
    check_sandbox.cache_clear()
    try:
        check_sandbox()
    finally:
        check_sandbox.cache_clear()
    assert "WARNING: --reward.sandbox unsafe" in capsys.readouterr().err
    box = Self()
    assert box.run("run_asserts", "def f(): return 1", ["assert f() == 1", "assert f() == 2"])[:3] == (0.5, 0, "wrong")
    where, secret, uid = box.says(
        "import os; print(os.getcwd(), 'SEEDX_TEST_TOKEN' in os.environ, os.getuid())"
    ).split()
    assert not os.path.exists(where)
    assert (secret, uid) == ("False", str(os.getuid()))
    assert box.run("run_asserts", "bytearray(50 * 2**30)", ["pass"]).why == "memory"
    code = f"import subprocess; subprocess.run(['sleep', '{mark}'])"
    assert box.run("run_pairs", code, [("", "")], timeout_s=1.0).why == "timeout"
    until(lambda: not living(mark), "the end of what it started")


@pytest.mark.parametrize("call", [lambda: run_asserts("", []), lambda: run_pairs("", [])])
def test_without_a_test_nothing_is_scored(call):
    with pytest.raises(ValueError, match="is empty"):
        call()


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"SandboxLimits.timeout_s \(0\) must be positive"):
        SandboxLimits(timeout_s=0)
