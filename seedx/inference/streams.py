"""Which actor holds which slots, and who replaces whom. Pure bookkeeping of the stream front-end's one thread."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from seedx.inference.wire import ActionCodec, TimestepCodec
from seedx.types import EnvSpec


class Status(Enum):
    """Why a call is refused or a stream ends; the front-end turns it into a gRPC status."""

    FINISHED = "finished"
    INVALID_ARGUMENT = "invalid argument"
    FAILED_PRECONDITION = "failed precondition"
    ALREADY_EXISTS = "already exists"
    RESOURCE_EXHAUSTED = "resource exhausted"
    ABORTED = "aborted"
    UNAVAILABLE = "unavailable"


class Refused(Exception):  # noqa: N818  not an error of this process
    """A call or stream is turned away, with a status and a message for the other side."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Stream:
    """One environment group's place in the server.

    Attributes:
        slots: Its rows in the server's tables.
        rows: How many they are.
        session: How many connections this actor had before in this server.
        last_seen: When it last asked or was answered, on the monotonic clock.
        asking: Whether a request of it is with the server.
        ended: Set once; a gone stream's results are dropped.
    """

    actor_id: int
    group: int
    session: int
    slots: np.ndarray
    first_env: int
    evaluation: bool
    timesteps: TimestepCodec
    actions: ActionCodec
    task: asyncio.Task | None = None
    last_seen: float = field(default_factory=time.monotonic)
    asking: bool = False
    ended: Refused | None = None
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = len(self.slots)


@dataclass(eq=False)
class _Actor:
    run_id: tuple[int, int]
    start: int
    groups: int
    envs_per_group: int
    evaluation: bool
    session: int
    streams: dict[int, Stream] = field(default_factory=dict)

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.groups * self.envs_per_group)


class Streams:
    """The connected actors and their slots.

    Args:
        num_slots: Environments that fit into the server's tables.
        max_streams: Streams that are accepted.

    Attributes:
        num_streams: Attached streams.
    """

    UNUSED_AFTER_S = 30.0  # an actor that said hello but opened no stream gives its slots back

    def __init__(self, num_slots: int, max_streams: int) -> None:
        self._max_streams = max_streams
        self._actors: dict[int, _Actor] = {}
        self._sessions: dict[int, int] = {}
        self._unused: dict[int, float] = {}  # actors without a stream, oldest first: when they said hello
        self._free = np.ones(num_slots, bool)
        self._codecs: dict[int, tuple[TimestepCodec, ActionCodec]] = {}  # by environments of a group
        self.num_streams = 0

    def hello(
        self, actor_id: int, run_id: tuple[int, int], groups: int, envs_per_group: int, evaluation: bool
    ) -> list[Stream]:
        """Admits an actor and gives it slots; the streams of an older run of it, which must end.

        Raises:
            Refused: a newer or equal run is connected, or there are no free slots.
        """
        old = self._actors.get(actor_id)
        if old is not None and (run_id < old.run_id or (old.streams and run_id == old.run_id)):
            raise Refused(
                Status.ALREADY_EXISTS,
                f"actor {actor_id} is connected already and was started later; give this one another id or stop "
                "the other one.",
            )
        self._drop_unused()
        start = self._find_slots(actor_id, groups * envs_per_group)
        session = self._sessions.get(actor_id, 0)
        self._sessions[actor_id] = session + 1
        replaced = [] if old is None else list(old.streams.values())
        self._remove(actor_id)
        actor = _Actor(run_id, start, groups, envs_per_group, evaluation, session)
        self._actors[actor_id] = actor
        self._unused[actor_id] = time.monotonic()
        self._free[actor.place] = False
        return replaced

    def attach(self, actor_id: int, run_id: tuple[int, int], group: int, spec: EnvSpec) -> Stream:
        """Opens the stream of one group of an admitted actor.

        Raises:
            Refused: the actor did not say hello, was replaced, or has no such group free.
        """
        actor = self._actors.get(actor_id)
        if actor is not None and run_id < actor.run_id:
            raise Refused(Status.ABORTED, f"replaced by a newer run of actor {actor_id}.")
        if actor is None or actor.run_id != run_id:
            raise Refused(
                Status.FAILED_PRECONDITION, f"actor {actor_id} must say Hello with this run_id before it opens streams."
            )
        if not 0 <= group < actor.groups or group in actor.streams:
            raise Refused(
                Status.INVALID_ARGUMENT,
                f"attach.group ({group}) must be one of 0 to {actor.groups - 1} and not yet attached.",
            )
        if self.num_streams >= self._max_streams:
            raise Refused(
                Status.RESOURCE_EXHAUSTED,
                f"the server accepts {self._max_streams} streams; raise --inference.max-streams.",
            )
        count = actor.envs_per_group
        if count not in self._codecs:
            self._codecs[count] = TimestepCodec(spec, count), ActionCodec(spec, count)
        timesteps, actions = self._codecs[count]
        first = group * count
        stream = Stream(
            actor_id=actor_id,
            group=group,
            session=actor.session,
            slots=np.arange(actor.start + first, actor.start + first + count, dtype=np.int32),
            first_env=first,
            evaluation=actor.evaluation,
            timesteps=timesteps,
            actions=actions,
        )
        actor.streams[group] = stream
        self._unused.pop(actor_id, None)
        self.num_streams += 1
        return stream

    def detach(self, stream: Stream) -> None:
        """Forgets a stream; the actor's slots are free once all its streams are gone."""
        actor = self._actors.get(stream.actor_id)
        if actor is None or actor.streams.get(stream.group) is not stream:
            return  # it was replaced
        del actor.streams[stream.group]
        self.num_streams -= 1
        if not actor.streams:
            self._remove(stream.actor_id)

    def all(self) -> list[Stream]:
        """Every attached stream."""
        return [stream for actor in self._actors.values() for stream in actor.streams.values()]

    def actors(self) -> set[int]:
        """Ids of the connected actors."""
        return {actor_id for actor_id, actor in self._actors.items() if actor.streams}

    def live_rows(self, now: float, silent_after_s: float, withheld: set[Stream]) -> int:
        """Rows that can be expected to ask: neither silent for so long nor waiting for a withheld reply."""
        return sum(
            stream.rows
            for stream in self.all()
            if stream not in withheld and (stream.asking or now - stream.last_seen < silent_after_s)
        )

    def heard_at(self, now: float) -> float:
        """When a training stream asked or was answered last, -inf if there is none; `now` while one waits for us."""
        training = (stream for stream in self.all() if not stream.evaluation)
        return max((now if stream.asking else stream.last_seen for stream in training), default=-math.inf)

    def _drop_unused(self) -> None:
        now = time.monotonic()
        while self._unused:
            actor_id, since = next(iter(self._unused.items()))
            if now - since <= self.UNUSED_AFTER_S:
                return
            self._remove(actor_id)

    def _remove(self, actor_id: int) -> None:
        """Forgets an actor, if it is there."""
        actor = self._actors.pop(actor_id, None)
        if actor is not None:
            self._unused.pop(actor_id, None)
            self._free[actor.place] = True
            self.num_streams -= len(actor.streams)

    def _find_slots(self, actor_id: int, count: int) -> int:
        """The actor's own place (actor_id * count), so that runs repeat; the first free one if it is taken."""
        free = self._free.copy()
        if actor_id in self._actors:
            free[self._actors[actor_id].place] = True  # it is about to be replaced
        own = actor_id * count
        if own + count <= len(free) and free[own : own + count].all():
            return own
        run = 0
        for slot, is_free in enumerate(free):
            run = run + 1 if is_free else 0
            if run == count:
                return slot - count + 1
        raise Refused(
            Status.RESOURCE_EXHAUSTED,
            f"actor {actor_id} asks for {count} slots; {int(free.sum())} of {len(free)} are free, not enough in "
            "one piece. Start fewer actors, or the server with a larger --num-actors or --envs-per-actor.",
        )
