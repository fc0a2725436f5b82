"""One host of a language model's learner that is fed recorded batches, as all hosts are:
`python learn_text_together.py OUT.npz ZERO FSDP [HOST COUNT COORDINATOR]`.

Writes the parameters after the last update, and its figures.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from decode_harness import CONFIG, make_params
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from text_fakes import random_items

from seedx import sharding
from seedx.agents.grpo import grpo_loss
from seedx.grpo_config import GrpoConfig, TextLearnerConfig
from seedx.hosts import Hosts
from seedx.learner.text_learner import TextLearner, shapes_of
from seedx.learner.token_logprobs import Model
from seedx.learner.trainable import Trainable
from seedx.llm_setup import layout_of
from seedx.metrics import Metrics

GROUPS, GROUP_SIZE, UPDATES = 8, 4, 4


def main(out, zero, fsdp, index=0, count=1, coordinator=""):
    hosts = Hosts(coordinator, int(count), int(index))
    lifeline = hosts.join("the same", 60.0, lambda: False, print)
    devices = np.array(jax.devices()).reshape(-1, int(fsdp), 1)
    mesh = Mesh(devices, (sharding.DATA, sharding.FSDP, sharding.TENSOR), axis_types=(AxisType.Auto,) * 3)
    settings = GrpoConfig(group_size=GROUP_SIZE, kl_cost=0.1)
    # Of Adam: where a gradient is rounding alone, its sign must not decide.
    config = TextLearnerConfig(batch_size=GROUPS, microbatches=2, learning_rate=0.01, epsilon=1e-3, zero=int(zero))
    layout = layout_of(CONFIG, mesh, config.zero)
    params = jax.tree.map(
        lambda leaf, at: jax.make_array_from_callback(leaf.shape, at, lambda part: np.asarray(leaf)[part] / 2),
        make_params(0, CONFIG),
        layout,
    )
    model = Model(CONFIG, layout=layout)
    trainable = Trainable(CONFIG, mesh, reference=True, split=config.zero == 3)
    shapes = shapes_of(config, GROUP_SIZE, 4, 8, sharding.row_groups(mesh))
    loss, metrics, directory = partial(grpo_loss, model, settings), Metrics(), Path(out).parent
    learner = TextLearner(
        model, loss, trainable, settings, config, mesh, params, shapes, lambda *_: None, metrics, directory
    )
    hosts.meet("learning", 60.0)
    learner.state = learner.begin(params)
    learner.compile()
    for i in range(UPDATES):
        learner.step(random_items(i, num_groups=GROUPS, vocab=CONFIG.vocab_size))
    learned = learner.state.params
    if not hosts.alone:
        learned = multihost_utils.process_allgather(learned, tiled=True)
    leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(learned))}
    row = metrics.snapshot()
    figures = {name: row[f"learner/{name}"] for name in ("loss", "grad_norm")}
    np.savez(out, updates=learner.state.updates, **figures, **leaves)
    lifeline.end()
    hosts.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
