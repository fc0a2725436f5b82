"""A plan of `python -m seedx.program` as a Launchpad program; imported in Launchpad's interpreter only, see lp.py."""

import os
import shutil

import launchpad
from launchpad.launch.local_multi_processing.commands import Command
from launchpad.nodes import base
from launchpad.nodes.python.addressing import bind_addresses_local


def make_program(plan: dict, tmux: bool = False) -> launchpad.Program:
    """The Launchpad program of a plan, for local_mp, and for test_mp in tests.

    Args:
        plan: The JSON of `python -m seedx.program`. Launchpad binds another address than the learner's there.
        tmux: Whether a tmux session will be the parent of the roles, not this process.
    """
    program = launchpad.Program("seedx")
    server = Server(plan["address"], launchpad.Address())
    for role in plan["roles"]:
        program.add_node(RoleNode(role, server, tmux), role["kind"])
    return program


class Server(base.Handle):
    """What the roles know of the learner: its address, in the plan and as Launchpad binds it."""

    def __init__(self, planned: str, address: launchpad.Address) -> None:
        self.planned, self.address = planned, address

    def dereference(self) -> str:
        """The address that is bound."""
        return self.address.resolve()


class RoleNode(base.Node):
    """A role: a command for another interpreter."""

    def __init__(self, role: dict, server: Server, tmux: bool) -> None:
        super().__init__()
        self._role, self._server, self._tmux = role, server, tmux
        if role["kind"] == "learner":
            server.address.assign(self)
        else:
            self._input_handles.append(server)

    def create_handle(self) -> Server:
        """The learner's handle: no other role serves where Launchpad says."""
        return self._track_handle(self._server)

    def bind_addresses(self, **_) -> None:
        """Chooses a free port for the learner."""
        bind_addresses_local(self.addresses)

    @staticmethod
    def to_executables(nodes, label, context) -> list:
        """The commands of a group of roles."""
        if context.launch_type.value not in ("local_mp", "test_mp"):
            raise NotImplementedError(f"{label} is a command: launch it with local_mp, or with test_mp in a test.")
        return [node.command() for node in nodes]

    def command(self) -> Command:
        """What runs the role, at the address that Launchpad has bound."""
        address = {self._server.planned: self._server.dereference()}
        words = [address.get(word, word) for word in self._role["command"]]
        if self._tmux:
            return Command(words, self._role["env"], self._role["name"])
        # A session of its own, since a terminal's Ctrl-C is for the launcher alone. It dies with the launcher.
        env = {**self._role["env"], "SEEDX_PARENT_PID": str(os.getpid())}
        return Command([shutil.which("setsid"), *words], env, f"{self._role['name']}.log")
