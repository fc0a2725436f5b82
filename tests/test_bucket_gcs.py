"""A run that is kept in a Google Cloud Storage bucket, which an emulator serves over HTTP."""

import importlib.util
import json
import os
import shutil
import signal
import sys
import urllib.request

import pytest
from processes import QUICK, TINY, Processes, free_port, last

from seedx.bucket import Copy

pytestmark = [pytest.mark.external, pytest.mark.timeout(600)]
URL = "gs://bucket/runs/a"


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def emulated(processes, monkeypatch):
    """Environment of whoever is to find the bucket."""
    if not all(importlib.util.find_spec(name) for name in ("gcsfs", "gcp_storage_emulator")):
        if "gcs" in os.environ.get("SEEDX_REQUIRE", "").split():
            pytest.fail("SEEDX_REQUIRE names gcs, and gcsfs or gcp-storage-emulator is missing")
        pytest.skip("gcsfs or gcp-storage-emulator is missing")
    port = free_port()
    serve = "from gcp_storage_emulator.server import create_server as f; import sys;"
    serve += "f('localhost', int(sys.argv[1]), in_memory=True, default_bucket='bucket').run()"
    server = processes.start(sys.executable, "-c", serve, str(port))
    host = f"http://localhost:{port}"

    def answers():
        try:
            return urllib.request.urlopen(f"{host}/storage/v1/b/bucket", timeout=10).status == 200
        except OSError:
            return False

    server.until(answers, "an answer")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
    return {**QUICK, "STORAGE_EMULATOR_HOST": host}


def test_a_run_that_is_preempted_goes_on_on_another_machine(processes, emulated, tmp_path):
    def machine(name):
        return {**emulated, "XDG_CACHE_HOME": str(tmp_path / name)}

    run = processes.launch("local.py", *TINY, "--run-dir", URL, env=machine("first"))
    here = Copy(URL, tmp_path / "first" / "seedx" / "runs").here
    run.until(lambda: last(here, "updates") > 5, "updates")
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.said
    assert f"which is sent to {URL}" in run.err
    updates = json.loads((here / "summary.json").read_text())["updates"]
    shutil.rmtree(tmp_path / "first")

    again = processes.launch("local.py", *TINY, "--run-dir", URL, env=machine("second"))
    assert again.wait() == 2, again.said
    assert "already holds checkpoints; continue that run with --resume" in again.err
    resume = ("--resume", "--run-dir", URL, "--steps", str(40 * (updates + 50)))
    resumed = processes.launch("local.py", *resume, env=machine("second"))
    assert resumed.wait() == 0, resumed.said
    assert f"resumed at update {updates:,}" in resumed.out

    evaluation = processes.launch("evaluate.py", URL, "--episodes", "2", env=machine("third"))
    assert evaluation.wait() == 0, evaluation.said
    assert "over 2 episodes" in evaluation.out
    copy = Copy(URL, tmp_path / "fourth")
    copy.fetch()
    assert json.loads((copy.here / "evaluation.json").read_text())["update"] > updates
    assert json.loads((copy.here / "summary.json").read_text())["exit"] == "steps"


def test_a_bucket_that_is_not_there(processes, emulated):
    run = processes.launch("local.py", *TINY, "--run-dir", "gs://none/run", env=emulated)
    assert run.wait() == 2, run.said
    assert "local.py: gs://none/run cannot be written" in run.err
    assert "Traceback" not in run.said
