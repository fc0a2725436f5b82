"""The cost model of docs/scaling.md: unit costs, the shape of a run and a machine in, rates and lag out.

`predict` is all of it: each resource bounds the rate, and the least bound is the rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitCosts:
    """CPU seconds of the parts of a run, each measured alone.

    Attributes:
        env: An actor steps one group of environments.
        client: An actor sends a message and takes the reply.
        front_end: The learner's process takes a message and replies, without an agent.
        act: The same process's Python threads, for each message: batch, launch, unrolls.
        act_pool: XLA's threads for each message; 0 where an accelerator computes.
        learn: The same process's Python threads, for each update: batch, launch, publish.
        learn_pool: XLA's threads for each update; 0 where an accelerator computes.
    """

    env: float
    client: float
    front_end: float
    act: float
    act_pool: float
    learn: float
    learn_pool: float


@dataclass(frozen=True)
class Shape:
    """What one host of a run is made of.

    Attributes:
        actors: Actor processes.
        groups: Environment groups of each; each has a stream, and one message under way.
        rows: Environments of a group.
        batch_size: Unrolls of an update, from this host.
        unroll_length: Steps of an unroll.
        queue: Unrolls that the replay holds at most.
    """

    actors: int
    groups: int
    rows: int
    batch_size: int
    unroll_length: int
    queue: int

    @property
    def streams(self) -> int:
        """Of this host."""
        return self.actors * self.groups

    @property
    def slots(self) -> int:
        """Environments of this host."""
        return self.streams * self.rows


@dataclass(frozen=True)
class Machine:
    """One host.

    Attributes:
        cores: That the run has; a hardware thread beside another counts as half of one.
        busy: CPU seconds that Python's threads take in a run over those that they take alone: they wake each other and
            hand over one interpreter's lock. What computes (environments, XLA's threads) takes as long as alone.
        chips: Accelerators; 0: the cores compute.
        act_s: Seconds of one chip for each step acted.
        update_s: Seconds of one chip for each step learned from, all-reduce included.
        transfer_s: Seconds of the links between the host's memory and its chips, all together, for each step.
    """

    cores: float
    busy: float = 1.0
    chips: int = 0
    act_s: float = 0.0
    update_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Of one host.

    Attributes:
        bounds: Steps a second that each resource allows.
        lag: Updates between an action and the update that learns from it, mean.
    """

    bounds: dict[str, float]
    steps: float
    messages: float
    updates: float
    lag: float

    @property
    def bound(self) -> str:
        """The resource that limits the run."""
        return min(self.bounds, key=lambda name: self.bounds[name])


def predict(costs: UnitCosts, shape: Shape, machine: Machine) -> Rates:
    """Rates of a host in a steady state."""
    steps_of_update = shape.batch_size * shape.unroll_length
    actor = (costs.env + machine.busy * costs.client) / shape.rows
    learner = machine.busy * ((costs.front_end + costs.act) / shape.rows + costs.learn / steps_of_update)
    pool = costs.act_pool / shape.rows + costs.learn_pool / steps_of_update
    bounds = {
        "cores": machine.cores / (actor + learner + pool),
        "learner process": 1 / learner,  # its threads take turns at one interpreter
        "actors": shape.actors / actor,
    }
    if machine.chips:
        bounds["chips"] = machine.chips / (machine.act_s + machine.update_s)
        bounds["links to the chips"] = 1 / machine.transfer_s
    steps = min(bounds.values())
    updates = steps / steps_of_update
    return Rates(bounds, steps, steps / shape.rows, updates, lag(shape, learning_s(costs, shape, machine) * updates))


def learning_s(costs: UnitCosts, shape: Shape, machine: Machine) -> float:
    """From a whole batch to the published update."""
    on_chips = machine.update_s * shape.batch_size * shape.unroll_length / max(machine.chips, 1)
    return machine.busy * costs.learn + costs.learn_pool + on_chips


def lag(shape: Shape, learning: float) -> float:
    """Updates between an action and the update that learns from it, mean; while the replay is never full.

    A step waits half an unroll on average until the unroll is whole (S slots fill S / B batches meanwhile), then for
    the rest of a batch, if a group's unrolls are less than one, or for the batches before it, if they are more; and for
    its own update. That only whole updates count takes half of one off, and threads that hand over to each other add
    about as much: neither is in here.

    Args:
        shape: Of one host.
        learning: Share of the time in which the learner works.
    """
    batches = shape.rows / shape.batch_size  # that a group's unrolls make
    whole = shape.slots / shape.batch_size * (shape.unroll_length + 1) / shape.unroll_length / 2
    fill, before = max(0.0, (1 - batches) / 2), max(0.0, (batches - 1) / 2)
    return whole + fill + (before + 1) * min(learning, 1.0)


def full_lag(shape: Shape, learning: float) -> float:
    """The same while the replay is full: its items and the batches that are ready and in the making go first."""
    return lag(shape, learning) + shape.queue / shape.batch_size + 2
