"""Bytes of a run's versions as deltas, over those in full: `python benchmarks/scaling.py delta -- FLAGS`.

Runs GRPO in this process with the launcher's flags, and encodes each version that it publishes as a publisher with
deltas does: cast to bfloat16, as `--learner.dtype bfloat16` publishes its float32 weights, and as they are.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seedx import cli
from seedx.llm_config import LlmConfig
from seedx.llm_session import LlmSession
from seedx.llm_setup import caster
from seedx.threads import Crew
from seedx.transport import transport_pb2 as pb
from seedx.transport.encode import Version, encode
from seedx.transport.manifest import WRITER_BYTES, VersionId
from seedx.transport.tree import flatten
from seedx.types import Tree


class Deltas:
    """Sizes of versions that follow one another."""

    def __init__(self) -> None:
        self.full, self.delta, self.seconds = [], [], []
        self.encodings: Counter[str] = Counter()
        self._last: Version | None = None

    def add(self, number: int, params: Tree) -> None:
        arrays = [(path, np.asarray(leaf, order="C")) for path, leaf in flatten(params)]
        began = time.perf_counter()
        version = encode(VersionId(bytes(WRITER_BYTES), number), arrays, self._last, True)
        if self._last is not None:
            encoded = version.delta or version.full
            self.seconds.append(time.perf_counter() - began)
            self.full.append(version.full.manifest.payload_bytes)
            self.delta.append(encoded.manifest.payload_bytes)
            self.encodings.update(pb.Tensor.Encoding.Name(tensor.encoding) for tensor in encoded.manifest.tensors)
        self._last = version

    def report(self, name: str) -> None:
        ratios = [delta / full for delta, full in zip(self.delta, self.full, strict=True)]
        print(f"RESULT delta_{name}_versions {len(ratios)} of {statistics.median(self.full):.0f} bytes")
        total = sum(self.delta) / sum(self.full)
        spread = f"({min(ratios):.4f} to {max(ratios):.4f}, median {statistics.median(ratios):.4f})"
        print(f"RESULT delta_{name}_over_full {total:.4f} ratio {spread}")
        print(f"RESULT delta_{name}_encode {1e3 * statistics.median(self.seconds):.1f} ms")
        print(f"RESULT delta_{name}_tensors {dict(self.encodings)}")


def main(argv: Sequence[str]) -> None:
    flags = [flag for flag in argv if flag != "--"]
    with tempfile.TemporaryDirectory() as directory:
        given = ["--agent", "grpo", "--run-dir", f"{directory}/run", *flags]
        config = cli.prepare_run_dir(cli.parse(given))
        assert isinstance(config, LlmConfig)
        crew = Crew()
        session = LlmSession(config, Path(directory) / "run", False, crew, [])
        bfloat16, float32 = Deltas(), Deltas()
        publish, cast = session._publish, caster("bfloat16")

        def also(version: int, params: Tree) -> None:
            publish(version, params)
            bfloat16.add(version, cast(params))
            float32.add(version, params)

        session._publish = also
        session.run(threading.Event())
        if crew.failure is not None:
            raise crew.failure
        assert float32.full, "the run published less than two versions; give it longer: --seconds"
    bfloat16.report("bfloat16")
    float32.report("float32")
