"""What runs first in a sandbox: makes the namespaces and the file system, gives up all rights, starts the program.

A script that `seedx.envs.text.sandbox_process` runs by its path; it has the standard library alone. Processes, from
the outermost:

    launcher   outside; writes the id maps of
    outer      in all new namespaces but the pid namespace, which only its child enters; at SIGTERM, kills that
    init       pid 1: mounts, then waits for the program; with it the kernel kills all that is left in the sandbox
    program    an unprivileged user without capabilities

Each dies with the one above it. No tool is needed but the kernel, 5.12 or newer (mount_setattr).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

NOBODY = 65534
WORK = "/sandbox"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_ETC = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_BASE = "/sys"  # Any directory that is not needed, on which the new root is built.
_MAIN = "/main.py"

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/fcntl.h
_NAMESPACES = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x8000000}
_NAMESPACES["uts"] = 0x4000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000  # the number is the same everywhere
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_NOEXEC = 1, 2, 4, 8

_libc = ctypes.CDLL(None, use_errno=True)


def main(payload_fd: int, setup_fd: int, report_fd: int, parent: int) -> int:
    """Runs what the payload says; the exit code is the program's, 128 + n if signal n killed it.

    Args:
        payload_fd: JSON: see `sandbox_process.run_program`.
        setup_fd: Gets a message if the sandbox cannot be made.
        report_fd: The program has it, and its number as an argument, if the payload says so.
        parent: Process id of who started this.
    """
    _die_with_parent()
    if os.getppid() != parent:
        return 1
    with os.fdopen(payload_fd, "rb") as payload_file:
        payload = json.load(payload_file)
    for fd in (setup_fd, report_fd):
        os.set_inheritable(fd, False)
    if directory := payload["directory"]:
        _guarded(setup_fd, lambda: _execute(payload, report_fd, directory, directory + _MAIN))
    return _wait(_fork_with_maps(payload, setup_fd, report_fd))


def _fork_with_maps(payload: Mapping[str, Any], setup_fd: int, report_fd: int) -> int:
    """Forks the outer process and, once that has its user namespace, writes its maps."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # Until the outer process knows whom to kill.
    made_reads, made_writes = os.pipe()
    mapped_reads, mapped_writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(made_reads)
        os.close(mapped_writes)
        _guarded(setup_fd, lambda: _outer(payload, setup_fd, report_fd, made_writes, mapped_reads))
    os.close(made_writes)
    if os.read(made_reads, 1):
        _guarded(setup_fd, lambda: _write_maps(child), then_exit=False)
        os.write(mapped_writes, b"m")
    return child


def _outer(payload: Mapping[str, Any], setup_fd: int, report_fd: int, made_writes: int, mapped_reads: int) -> None:
    _die_with_parent()
    names = ", ".join(_NAMESPACES)
    _check(_libc.unshare(sum(_NAMESPACES.values())), f"unshare(2): new namespaces ({names})")
    os.write(made_writes, b"n")
    os.read(mapped_reads, 1)
    init = os.fork()
    if init == 0:
        _guarded(setup_fd, lambda: _init(payload, setup_fd, report_fd))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(init, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os._exit(_wait(init))  # Which is over when nothing in the sandbox lives.


def _write_maps(child: int) -> None:
    """Maps the ids of a process: root keeps all it has, so that it can become nobody; another user is nobody."""
    maps = {}
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        with open(f"/proc/self/{kind}_map") as file:
            ranges = [(int(inside), int(count)) for inside, _, count in map(str.split, file)]
        every = any(inside <= NOBODY < inside + count for inside, count in ranges) and os.geteuid() == 0
        maps[kind] = "".join(f"{i} {i} {n}\n" for i, n in ranges) if every else f"{NOBODY} {own} 1\n"
    if os.geteuid() != 0 or maps["gid"].startswith(f"{NOBODY} "):
        _write(f"/proc/{child}/setgroups", b"deny")
    for kind, text in maps.items():
        _write(f"/proc/{child}/{kind}_map", text.encode())


def _init(payload: Mapping[str, Any], setup_fd: int, report_fd: int) -> None:
    _die_with_parent()
    # A last resort, beyond who waits for the result.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + signal.SIGALRM))
    signal.alarm(math.ceil(payload["timeout_s"]) + 5)
    _build_root(payload["visible"], payload["work_bytes"], payload["program"].encode(errors="surrogatepass"))
    _check(
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(2): not dumpable"
    )  # Nothing of it for the program, in /proc either.
    program = os.fork()
    if program == 0:
        _guarded(setup_fd, lambda: _become_program(payload, report_fd))
    for fd in (0, 1, 2, setup_fd, report_fd):
        os.close(fd)
    os._exit(_wait(program))


def _build_root(visible: list[str], work_bytes: int, program: bytes) -> None:
    """A root of its own, read-only but for /sandbox, which is empty; of the machine, it shows what Python needs."""
    os.umask(0o022)
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _BASE, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={2**20 + 2 * len(program)},mode=755")
    _show_files(visible)
    _write(f"{_BASE}/etc/passwd", b"nobody:x:%d:%d::%s:/bin/sh\n" % (NOBODY, NOBODY, WORK.encode()))
    _write(f"{_BASE}/etc/group", b"nogroup:x:%d:\n" % NOBODY)
    _write(_BASE + _MAIN, program)
    for name in _DEVICES:
        _show(f"/dev/{name}", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NOEXEC)
    os.mkdir(_BASE + WORK)
    options = f"size={work_bytes},nr_inodes=4096,mode=755,uid={NOBODY},gid={NOBODY}"
    _mount("tmpfs", _BASE + WORK, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in ("/tmp", "/dev/shm"):
        if not os.path.lexists(_BASE + path):  # There is a /tmp if Python is below it.
            os.symlink(WORK, _BASE + path)
    os.mkdir(f"{_BASE}/proc")
    _mount("proc", f"{_BASE}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    # No further user namespaces, in which the program would have capabilities again.
    _write(f"{_BASE}/proc/sys/user/max_user_namespaces", b"0")
    _mount("none", _BASE, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir(_BASE)
    _check(_libc.pivot_root(b".", b"."), "pivot_root(2)")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2(2) of the old root")
    os.chdir("/")


def _show_files(visible: list[str]) -> None:
    for path in (*_SYSTEM, *visible):
        if os.path.lexists(_BASE + path):  # Inside of one before.
            continue
        if os.path.islink(path):
            os.makedirs(os.path.dirname(_BASE + path), exist_ok=True)
            os.symlink(os.readlink(path), _BASE + path)
        elif os.path.isdir(path):
            _show(path, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    os.makedirs(f"{_BASE}/etc", exist_ok=True)
    for path in _ETC:
        if os.path.exists(path):
            _show(path, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV | _ATTR_NOEXEC)


def _become_program(payload: Mapping[str, Any], report_fd: int) -> None:
    """Gives up all rights and executes the program."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _limit(resource.RLIMIT_NPROC, payload["processes"])  # Counted in the user namespace, and never of root.
    _execute(payload, report_fd, WORK, _MAIN)


def _execute(payload: Mapping[str, Any], report_fd: int, directory: str, main_file: str) -> NoReturn:
    os.chdir(directory)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(2): no new privileges")
    _limit(resource.RLIMIT_AS, payload["memory_bytes"])
    _limit(resource.RLIMIT_CPU, math.ceil(payload["timeout_s"]) + 1)
    _limit(resource.RLIMIT_FSIZE, payload["work_bytes"])
    _limit(resource.RLIMIT_NOFILE, 256)
    _limit(resource.RLIMIT_CORE, 0)
    os.set_inheritable(report_fd, payload["reports"])
    command = [payload["python"], "-I", "-B", main_file, *([str(report_fd)] if payload["reports"] else ())]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"}
    os.execve(payload["executable"], command, env)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _show(path: str, attributes: int) -> None:
    """Shows a file or directory of the machine under the new root, with what is mounted below it."""
    target = _BASE + path
    if os.path.isdir(path):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, b"")
    _mount(path, target, "", _MS_BIND | _MS_REC)
    attr = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    done = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(attr), ctypes.sizeof(attr)
    )
    _check(done, f"mount_setattr(2) of {path}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _check(done, f"mount(2) of {source} at {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(path: str, content: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(content)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait(pid: int) -> int:
    """Reaps whatever ends until `pid` does; its exit code."""
    while (ended := os.waitpid(-1, 0))[0] != pid:
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    return code if code >= 0 else 128 - code


def _guarded(setup_fd: int, act: Callable[[], None], then_exit: bool = True) -> None:
    """Runs a step of the set-up; what it raises is said over `setup_fd`."""
    try:
        act()
        if not then_exit:
            return
    except BaseException as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        os.write(setup_fd, f"{said}{where}".encode(errors="replace"))
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
