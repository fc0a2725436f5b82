"""A policy server on a Unix socket in this process, environments with a script, and actors driven by hand."""

import contextlib
import threading

import jax
import numpy as np
import optree
from fakes import VECTOR, draw, step_types

from seedx import sharding
from seedx.config import Config, InferenceConfig, LearnerConfig
from seedx.inference.client import Connection
from seedx.inference.frontend import FrontEnd
from seedx.inference.policy import PolicyServer
from seedx.inference.streams import Streams
from seedx.metrics import Metrics
from seedx.replay.fifo import Fifo
from seedx.threads import Crew
from seedx.types import TimeStep
from seedx.weights import WeightStore

T = 4


def make_config(num_slots=8, envs_per_group=2, groups=2, devices=1, **fields):
    """A config whose server has `num_slots` slots and compiles sizes down to `envs_per_group`."""
    envs_per_actor = envs_per_group * groups
    fields.setdefault("inference", InferenceConfig(stream_timeout_s=0.5))
    return Config(
        num_actors=num_slots // envs_per_actor,
        envs_per_actor=envs_per_actor,
        learner=LearnerConfig(batch_size=8, unroll_length=T, devices=devices),
        **fields,
    ).replace_groups(groups)


class EchoPolicy:
    """Answers every request with zeros, on the thread that asks."""

    def __init__(self, front_end):
        self.front_end, self.requests = front_end, 0

    def attach(self, stream):
        pass

    def detach(self, stream):
        pass

    def watch(self, streams):
        pass

    def offer(self, request):
        self.requests += 1
        zeros = [column.spec.zeros(request.rows) for column in request.stream.actions.layout.columns]
        self.front_end.deliver([(request, request.stream.actions.encode(zeros, 3))])
