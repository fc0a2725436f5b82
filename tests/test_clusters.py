"""The recipes of launch/recipes/, with ssh, gcloud and Slurm replaced by scripts that start processes here."""

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading

import pytest
import yaml
from namespaces import ADDRESSES
from processes import DEADLINE_S, QUICK, ROOT, TINY, Processes, free_port, last

from seedx.rundir import newest_update
from seedx.supervisor import USER_ERROR

RECIPES = ROOT / "launch" / "recipes"

FAKES = {
    "ssh": """
while [[ $1 == -* ]]; do shift; done
shift
exec bash -c "$*"
""",
    "gcloud": """
if [[ " $* " == *" describe "* ]]; then echo "$FAKE_HOSTS"; exit; fi
for id in 0 1; do TPU_WORKER_ID=$id bash -c "${@: -1}" & ids[id]=$!; done
wait "${ids[0]}" && wait "${ids[1]}"
""",
    "srun": """
shift 2
for id in 0 1; do SLURM_PROCID=$id "$@" & ids[id]=$!; done
worst=0
for id in "${ids[@]}"; do wait "$id"; code=$?; if ((code > worst)); then worst=$code; fi; done
exit "$worst"
""",
    "scontrol": """
if [ "$1" = show ]; then printf '%s\\n' localhost localhost; else echo "$*" >>"$FAKE_CALLS"; fi
""",
}


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def recipe(processes, tmp_path):
    """Starts a recipe with the fakes on its path."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name, text in FAKES.items():
        (bin_dir / name).write_text(f"#!/usr/bin/env bash{text}")
        (bin_dir / name).chmod(0o755)
    env = {"PATH": f"{bin_dir}:{os.environ['PATH']}", "DIRECTORY": str(ROOT), "PAUSE_S": "0.1", **QUICK}

    def start(name, *arguments, **more):
        in_checkout = ("bash", "-c", 'cd "$0" && exec "$@"', str(ROOT))
        return processes.start(*in_checkout, str(RECIPES / name), *map(str, arguments), env=env | more)

    return start


def summaries(run_dir):
    return [json.loads((place / "summary.json").read_text()) for place in (run_dir, run_dir / "host-1")]


def pods(processes):
    """The launcher's process of each host."""
    found = [process for process in processes.alive("launch/pod.py") if process.name().startswith("python")]
    assert len(found) == 2
    return found


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.sh")), ids=lambda path: path.name)
def test_shell_reads_the_recipe(path):
    subprocess.run(("bash", "-n", str(path)), check=True)
    assert os.access(path, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(("shellcheck", str(path)), check=True)


@pytest.mark.parametrize(("codes", "end", "runs"), [("0", 0, 1), ("1 143 0", 0, 3), ("1 2 0", 2, 2), ("1 1 1 1", 1, 3)])
def test_a_command_runs_again_until_that_is_of_no_use(tmp_path, codes, end, runs):
    (tmp_path / "codes").write_text("\n".join(codes.split()) + "\n")
    once = 'echo >>runs; code=$(head -1 codes); sed -i 1d codes; exit "$code"'
    command = ("bash", str(RECIPES / "again.sh"), "bash", "-c", once)
    env = os.environ | {"RESTARTS": "2", "PAUSE_S": "0"}
    assert subprocess.run(command, cwd=tmp_path, env=env, timeout=60).returncode == end
    assert len((tmp_path / "runs").read_text()) == runs


class Metadata:
    """Google Cloud's metadata server as machines see it; `said` is what it says of `what`."""

    def __init__(self, what, said):
        self.said = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.asked = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                assert self.headers["Metadata-Flavor"] == "Google"
                self.send_response(200)
                self.end_headers()
                self.wfile.write(server.said[self.path.rpartition("/")[2]].encode())
                server.asked.set()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
        self.url = f"http://localhost:{self._server.server_port}/instance"
        self._what, self._said = what, said
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def notice(self):
        self.said[self._what] = self._said

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def waiting(processes):
    """Starts what ends with 143 at SIGTERM, under notice.sh."""

    def start(metadata_url):
        command = "trap 'exit 143' TERM; echo at work; while :; do sleep 0.1; done"
        env = {"METADATA_URL": metadata_url, "POLL_S": "0.1"}
        return processes.start(str(RECIPES / "notice.sh"), "bash", "-c", command, env=env)

    return start


@pytest.mark.parametrize(
    ("what", "said"), [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")]
)
def test_a_machine_that_is_taken_away_ends_its_command_first(waiting, opened, what, said):
    metadata = Metadata(what, said)
    opened.append(metadata)
    started = waiting(metadata.url)
    started.until(lambda: "at work" in started.out, "work")
    metadata.notice()
    assert started.wait() == 143
    assert "is about to be taken away" in started.err

    metadata.asked.clear()
    again = waiting(metadata.url)
    assert metadata.asked.wait(DEADLINE_S)
    again.send(signal.SIGTERM)
    assert again.wait() == 143
    assert again.out == ""


def test_without_notices_it_only_passes_on_a_signal(waiting):
    started = waiting(f"http://localhost:{free_port()}")
    started.until(lambda: "at work" in started.out, "work")
    started.send(signal.SIGTERM)
    assert started.wait() == 143


@pytest.mark.slow
def test_over_ssh_a_run_goes_on_after_a_preemption(recipe, processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*TINY, "--steps", "2000")
    started = recipe("ssh.sh", f"localhost:{free_port()},localhost", run_dir, *flags)
    started.until(lambda: last(run_dir, "updates") > 5, "updates")
    pods(processes)[1].send_signal(signal.SIGTERM)
    assert started.wait() == 0, started.said
    assert started.err.count("again.sh: ended with 143; starting again") == 2
    assert "resumed at update" in started.out
    first, second = summaries(run_dir)
    assert first["exit"] == second["exit"] == "steps"
    assert first["updates"] == second["updates"]
    processes.wait_until_gone()


@pytest.mark.slow
def test_over_ssh_a_signal_here_ends_the_run_there(recipe, processes, tmp_path):
    run_dir = tmp_path / "run"
    started = recipe("ssh.sh", f"localhost:{free_port()},localhost", run_dir, *TINY)
    started.until(lambda: last(run_dir, "updates") > 5, "updates")
    started.send(signal.SIGTERM)
    assert started.wait() != 0
    assert [end["exit"] for end in summaries(run_dir)] == ["SIGTERM", "SIGTERM"]
    assert newest_update(run_dir) == summaries(run_dir)[0]["updates"]
    processes.wait_until_gone()


@pytest.mark.slow
def test_on_a_tpu_slice_hosts_find_themselves(recipe, processes, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*TINY, "--steps", "400")
    started = recipe("tpu_vm.sh", "tpu", "zone", run_dir, *flags, FAKE_HOSTS=f"localhost:{free_port()};localhost")
    assert started.wait() == 0, started.said
    assert [end["exit"] for end in summaries(run_dir)] == ["steps", "steps"]
    processes.wait_until_gone()


def free_job():
    """Number of a Slurm job whose port is free: jobs have one each."""
    for job in range(10000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", 20000 + job))
            return str(job)
    raise AssertionError("no port is free")


@pytest.mark.slow
def test_a_slurm_job_asks_for_its_next_turn_and_then_goes_on(recipe, processes, tmp_path):
    run_dir, calls = tmp_path / "run", tmp_path / "calls"
    env = {"SLURM_JOB_ID": free_job(), "SLURM_JOB_NODELIST": "n[0-1]", "FAKE_CALLS": str(calls)}
    flags = (*TINY, "--steps", "2000")
    first = recipe("slurm.sh", run_dir, *flags, **env)
    first.until(lambda: last(run_dir, "updates") > 5, "updates")
    pods(processes)[1].send_signal(signal.SIGTERM)
    assert first.wait() == 0, first.said
    assert calls.read_text() == f"requeue {env['SLURM_JOB_ID']}\n"

    second = recipe("slurm.sh", run_dir, *flags, SLURM_RESTART_COUNT="1", **env)
    assert second.wait() == 0, second.said
    assert "resumed at update" in second.out
    assert [end["exit"] for end in summaries(run_dir)] == ["steps", "steps"]
    assert calls.read_text().count("requeue") == 1

    wrong = recipe("slurm.sh", run_dir, "--learner.batch-size", "5", **env)
    assert wrong.wait() == 2, wrong.said
    assert calls.read_text().count("requeue") == 1
    processes.wait_until_gone()


def jobset():
    """The job of the JobSet, and its container."""
    made = yaml.safe_load((RECIPES / "jobset.yaml").read_text())
    [job] = made["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    return made, job, container


def test_a_jobset_is_consistent():
    made, job, container = jobset()
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    names = f"{made['metadata']['name']}-{job['name']}-0-"  # as JobSet numbers the pods of its first job
    [(first, end)] = re.findall(
        rf"{names}{{(\d+)\.\.(\d+)}}\.{made['spec']['network']['subdomain']}", container["command"][2]
    )
    assert (int(first), int(end) + 1) == (0, spec["parallelism"]) == (0, spec["completions"])
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert rows * columns == spec["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
    [code] = spec["podFailurePolicy"]["rules"]
    assert code["onExitCodes"]["values"] == [USER_ERROR]
    assert code["onExitCodes"]["containerName"] == container["name"]
    assert (pod["restartPolicy"], spec["backoffLimit"]) == ("Never", 0)  # JobSet restarts all or none


@pytest.mark.external
def test_the_pods_of_a_jobset_find_each_other(processes, cable, tmp_path):
    _, _, container = jobset()
    names = [f"seedx-host-0-{i}.seedx" for i in (0, 1)]
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, names, strict=True)))
    with_names = ("unshare", "--mount", "bash", "-c", 'mount --bind "$0" /etc/hosts && cd "$1" && shift && exec "$@"')
    env = {entry["name"]: entry["value"] for entry in container["env"]} | {"RUN_DIR": str(tmp_path / "run")}
    command = [word.replace("{0..3}", "{0..1}") for word in container["command"]]
    command += [*container["args"], *TINY, "--steps", "400"]
    started = [
        processes.start(
            *(*cable.inside(i), *with_names, str(hosts), str(ROOT), *command),
            env=env | QUICK | {"JOB_COMPLETION_INDEX": str(i)},
        )
        for i in (0, 1)
    ]
    for i, pod in enumerate(started):
        assert pod.wait() == 0, pod.said
        assert f"this is host {i} of 2, {names[i]}; host 0 is at {names[0]}:8476" in pod.err
    assert [end["exit"] for end in summaries(tmp_path / "run")] == ["steps", "steps"]
    processes.wait_until_gone()
