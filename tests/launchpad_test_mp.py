# /// script
# requires-python = "==3.10.*"
# dependencies = ["dm-launchpad==0.5.2", "tensorflow-cpu==2.8.4", "numpy<1.24", "protobuf<3.20"]
# ///
"""Launches the plan in a file as Launchpad's tests do. Run by test_launchpad.py."""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))

import launchpad
from absl.testing import absltest
from lp_program import make_program

PLAN = json.loads(Path(sys.argv.pop()).read_text())


class Launch(absltest.TestCase):
    def test_mp(self):
        program = make_program(PLAN)
        manager = launchpad.launch(program, launch_type="test_mp", test_case=self)
        manager.wait(["learner"])
        [learner] = program.groups["learner"]
        groups = {label: len(nodes) for label, nodes in program.groups.items()}
        assert groups["learner"] == 1
        assert re.fullmatch(r"localhost:[1-9]\d*", learner.create_handle().dereference())  # the plan says port 0
        print(json.dumps({"groups": groups}))

    def test_mt(self):
        with self.assertRaisesRegex(NotImplementedError, "learner is a command: launch it with local_mp"):  # noqa: PT027  no pytest here
            launchpad.launch(make_program(PLAN), launch_type="test_mt", test_case=self)


if __name__ == "__main__":
    absltest.main()
