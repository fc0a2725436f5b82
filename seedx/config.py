"""The list of knobs: one frozen dataclass for each component, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal


class ConfigError(ValueError):
    """A value that cannot work; the message names the field, the value, what is allowed and the fix."""


def require(ok: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)


def _positive(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        require(value > 0, f"{type(owner).__name__}.{name} ({value}) must be positive.")


def _finite(owner: Any) -> None:
    """Refuses NaN and infinity in any field: no comparison would notice, and JSON has no word for them."""
    for spec in fields(owner):
        value = getattr(owner, spec.name)
        if is_dataclass(value):
            _finite(value)
        elif isinstance(value, float):
            require(math.isfinite(value), f"{type(owner).__name__}.{spec.name} ({value}) must be a finite number.")


def _not_negative(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        require(value >= 0, f"{type(owner).__name__}.{name} ({value}) must not be negative.")


@dataclass(frozen=True)
class AtariConfig:
    """Atari pre-processing (EnvPool names them alike). Defaults: the settings of IMPALA's Atari runs (1802.01561).

    Attributes:
        frame_skip: Frames that one action lasts.
        img_size: Height and width of the greyscale frame, pixels.
        noop_max: Largest number of no-ops at the start of an episode.
        repeat_action_probability: Probability of a sticky action.
        episodic_life: Whether a lost life ends the episode.
        full_action_space: All 18 actions instead of the game's own.
        use_fire_reset: Presses FIRE after reset where the game needs it.
        max_episode_frames: Time limit, frames.
    """

    frame_skip: int = 4
    img_size: int = 84
    noop_max: int = 30
    repeat_action_probability: float = 0.0
    episodic_life: bool = False
    full_action_space: bool = False
    use_fire_reset: bool = True
    max_episode_frames: int = 108_000

    def __post_init__(self) -> None:
        _positive(self, "frame_skip", "img_size", "max_episode_frames")


@dataclass(frozen=True)
class ActorConfig:
    """An actor process.

    Attributes:
        groups: Environment groups that an actor alternates, so that stepping one overlaps the other's round trip.
        env_threads: EnvPool threads of each group.
        give_up_s: How long an actor retries a lost server, seconds.
        max_episode_steps: Time limit put on every environment, steps; None keeps the environment's own.
    """

    groups: int = 2
    env_threads: int = 1
    give_up_s: float = 120.0
    max_episode_steps: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "groups", "env_threads", "give_up_s")
        require(
            self.max_episode_steps is None or self.max_episode_steps > 0,
            f"actor.max_episode_steps ({self.max_episode_steps}) must be positive, or None: no limit of ours.",
        )


@dataclass(frozen=True)
class InferenceConfig:
    """The policy server.

    Attributes:
        max_batch_size: Largest batch of one forward pass, rows; 0 means all slots that the launch asks for.
        max_wait_ms: How long the oldest request may wait for company, milliseconds.
        in_flight: Batches on the device at a time.
        stream_timeout_s: A stream that is silent for so long is not waited for, seconds.
        hello_timeout_s: How long the server waits for its first actor, and later without any, seconds.
        max_streams: Streams that one server accepts.
        tls_cert: PEM file of the server's certificate chain; None: no TLS.
        tls_key: PEM file of the server's private key.
        tls_ca: PEM file of the authority that clients trust; None: the certificate itself.
        token_file: File that holds the shared token; None: no token.
    """

    max_batch_size: int = 0
    max_wait_ms: float = 5.0
    in_flight: int = 2
    stream_timeout_s: float = 0.25
    hello_timeout_s: float = 120.0
    max_streams: int = 16_384
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    token_file: str | None = None

    def __post_init__(self) -> None:
        _positive(self, "max_wait_ms", "in_flight", "stream_timeout_s", "hello_timeout_s", "max_streams")
        require(
            self.max_batch_size >= 0,
            f"inference.max_batch_size ({self.max_batch_size}) must be >= 0 (0: all slots).",
        )
        require(
            (self.tls_cert is None) == (self.tls_key is None),
            "inference.tls_cert and inference.tls_key go together; give both or neither.",
        )


@dataclass(frozen=True)
class NetworkConfig:
    """The policy and value network.

    Attributes:
        torso: "auto" (mlp for vectors, shallow for images), "mlp", "shallow" or "deep" (1802.01561 fig. 3), or
            "module:function" for a user's own.
        hidden: Widths of the MLP's layers.
        activation: Non-linearity of the MLP.
        lstm: Width of an LSTM between torso and heads; 0: none.
        frame_stack: Frames stacked on the channel axis, on the device; 1: none.
        previous_action: Feeds the last action and reward to the core.
        dueling_hidden: Width of the hidden layer in both streams of a dueling Q-network.
    """

    torso: str = "auto"
    hidden: tuple[int, ...] = (64, 64)
    activation: Literal["tanh", "relu"] = "tanh"
    lstm: int = 0
    frame_stack: int = 1
    previous_action: bool = False
    dueling_hidden: int = 128

    def __post_init__(self) -> None:
        _positive(self, "frame_stack", "dueling_hidden")
        require(self.lstm >= 0, f"network.lstm ({self.lstm}) must be >= 0 (0: no LSTM).")
        require(all(h > 0 for h in self.hidden), f"network.hidden {self.hidden} must be positive widths.")


@dataclass(frozen=True)
class ImpalaConfig:
    """V-trace actor-critic (1802.01561). Losses are means over executed transitions.

    Attributes:
        discount: gamma.
        lambda_: lambda of the trace.
        clip_rho: rho-bar of the value target, at least 1: c-bar is fixed at 1, and rho-bar >= c-bar.
        clip_pg_rho: rho-bar of the policy gradient.
        entropy_cost: Weight of the entropy bonus.
        value_cost: Weight of the value loss (half squared error).
        max_abs_reward: Rewards are clipped to +- this in the loss; 0: not clipped.
    """

    discount: float = 0.99
    lambda_: float = 1.0
    clip_rho: float = 1.0
    clip_pg_rho: float = 1.0
    entropy_cost: float = 0.01
    value_cost: float = 0.5
    max_abs_reward: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.discount <= 1, f"impala.discount ({self.discount}) must lie in [0, 1].")
        require(0 <= self.lambda_ <= 1, f"impala.lambda_ ({self.lambda_}) must lie in [0, 1].")
        require(
            self.clip_rho >= 1,
            f"impala.clip_rho ({self.clip_rho}) must be >= 1: V-trace needs rho-bar >= c-bar, and c-bar is 1.",
        )
        _positive(self, "clip_pg_rho")
        _not_negative(self, "max_abs_reward")


@dataclass(frozen=True)
class ApexConfig:
    """Ape-X DQN (1803.00933). An item must be `num_steps` transitions long (`learner.unroll_length`).

    Attributes:
        discount: gamma.
        num_steps: n of the n-step targets.
        epsilon: Exploration of the first environment; that of the last is epsilon^epsilon_power, geometric in between.
        epsilon_power: See `epsilon`.
        max_abs_reward: Rewards are clipped to +- this in the loss; 0: not clipped.
    """

    discount: float = 0.99
    num_steps: int = 3
    epsilon: float = 0.4
    epsilon_power: float = 8.0
    max_abs_reward: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.discount <= 1, f"{type(self).__name__}.discount ({self.discount}) must lie in [0, 1].")
        require(0 <= self.epsilon <= 1, f"{type(self).__name__}.epsilon ({self.epsilon}) must lie in [0, 1].")
        _positive(self, "num_steps", "epsilon_power")
        _not_negative(self, "max_abs_reward")


@dataclass(frozen=True)
class R2D2Config(ApexConfig):
    """Recurrent replay distributed DQN (Kapturowski et al., ICLR 2019, OpenReview r1lyTjAqYX).

    Attributes:
        discount: gamma.
        num_steps: n of the n-step targets.
        epsilon: Exploration of the first environment; that of the last is epsilon^epsilon_power, geometric in between.
        epsilon_power: See `epsilon`.
        max_abs_reward: Rewards are clipped to +- this in the loss; 0: not clipped.
        rescale: Whether values are learned under the rescaling h.
        priority_eta: Share of the largest error in a priority; the mean error has the rest.
    """

    discount: float = 0.997
    num_steps: int = 5
    rescale: bool = True
    priority_eta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.priority_eta <= 1, f"r2d2.priority_eta ({self.priority_eta}) must lie in [0, 1].")


@dataclass(frozen=True)
class LearnerConfig:
    """The learner.

    Attributes:
        batch_size: Unrolls of one update.
        unroll_length: T, transitions that an unroll is trained on; it has T+1 rows, and those of the burn-in before.
        burn_in: Rows at the start of an unroll that only warm up the recurrent state.
        period: Rows from the start of one unroll to that of the next; 0: T, so that every transition is trained on in
            one unroll.
        microbatches: Parts that a batch is split into; their gradients are accumulated.
        optimizer: "rmsprop" (eps outside the root, as PyTorch) or "adam".
        learning_rate: Step size at the start.
        learning_rate_end: Step size at `learning_rate_steps`, linear in between.
        learning_rate_steps: Environment steps of the schedule; 0: constant.
        rmsprop_decay: Decay of RMSProp's second moment.
        epsilon: Epsilon of the optimizer, against gradients of the mean loss.
        max_grad_norm: Global-norm clip of the mean loss's gradient; 0: none.
        target_period: Updates between copies of the network to the target network; 0: there is none.
        devices: Devices that learn; 0: all.
        inference_devices: Devices set aside for inference; 0: shared with learning.
    """

    batch_size: int = 32
    unroll_length: int = 20
    burn_in: int = 0
    period: int = 0
    microbatches: int = 1
    optimizer: Literal["rmsprop", "adam"] = "adam"
    learning_rate: float = 1e-3
    learning_rate_end: float = 0.0
    learning_rate_steps: int = 0
    rmsprop_decay: float = 0.99
    epsilon: float = 1e-5
    max_grad_norm: float = 0.5
    target_period: int = 0
    devices: int = 0
    inference_devices: int = 0

    def __post_init__(self) -> None:
        _positive(self, "batch_size", "unroll_length", "microbatches", "learning_rate", "epsilon")
        _not_negative(self, "learning_rate_end", "learning_rate_steps", "max_grad_norm", "target_period")
        _not_negative(self, "burn_in", "period")
        require(
            self.period <= self.unroll_length,
            f"learner.period ({self.period}) must not exceed learner.unroll_length ({self.unroll_length}): transitions "
            "in between would never be trained on.",
        )
        _not_negative(self, "devices", "inference_devices")
        require(0 <= self.rmsprop_decay < 1, f"learner.rmsprop_decay ({self.rmsprop_decay}) must lie in [0, 1).")
        require(
            self.batch_size % self.microbatches == 0,
            f"learner.batch_size ({self.batch_size}) must be divisible by learner.microbatches ({self.microbatches}).",
        )

    @property
    def rows(self) -> int:
        """Rows of an unroll."""
        return self.burn_in + self.unroll_length + 1

    @property
    def stride(self) -> int:
        """Rows from the start of one unroll to that of the next."""
        return self.period or self.unroll_length


@dataclass(frozen=True)
class TableConfig:
    """The table between acting and learning, in Reverb's words (2102.04736). Defaults: a queue of two batches.

    Attributes:
        sampler: Which items are sampled.
        remover: Which item makes room when the table is full.
        priority_exponent: alpha of the prioritized sampler: P(i) = p_i^alpha / sum p^alpha.
        importance_exponent: beta of the loss's weights (N P(i))^-beta, divided by the batch's largest; 0: all 1.
        max_size: Items that the table holds; 0: two batches.
        max_times_sampled: An item is removed when it was sampled so often; 0: never.
        min_size: Items before the first sample.
        samples_per_insert: How often an item is sampled on average, which inserts and samples wait for; 0: as it comes.
        error_buffer: Samples by which that may be exceeded or missed at a time; 0: four batches.
        max_bytes: Bytes that the table holds.
        give_up_s: How long a Reverb server that is not to be had is waited for, seconds.
    """

    sampler: Literal["fifo", "lifo", "uniform", "prioritized"] = "fifo"
    remover: Literal["fifo", "lifo", "uniform"] = "fifo"
    priority_exponent: float = 0.6
    importance_exponent: float = 0.4
    max_size: int = 0
    max_times_sampled: int = 1
    min_size: int = 1
    samples_per_insert: float = 0.0
    error_buffer: float = 0.0
    max_bytes: int = 2**30
    give_up_s: float = 120.0

    def __post_init__(self) -> None:
        _positive(self, "min_size", "max_bytes", "give_up_s")
        _not_negative(self, "max_size", "max_times_sampled", "samples_per_insert", "error_buffer")
        _not_negative(self, "priority_exponent", "importance_exponent")
        require(
            self.max_size == 0 or self.min_size <= self.max_size,
            f"table.min_size ({self.min_size}) must not exceed table.max_size ({self.max_size}).",
        )

    @property
    def is_queue(self) -> bool:
        """Whether items leave in the order in which they came, each exactly once."""
        return self.sampler == "fifo" and self.max_times_sampled == 1


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        interval_s: Seconds between checkpoints; 0: only at the end.
        keep: Checkpoints kept.
        replay_interval_s: Seconds between snapshots of the embedded replay; 0: only at the end.
        replay_max_bytes: Bytes that the items in its snapshots take on disk, best twice those in the table: room is
            needed for new ones before old ones go. 0: no snapshots.
    """

    interval_s: float = 60.0
    keep: int = 3
    replay_interval_s: float = 60.0
    replay_max_bytes: int = 2**31

    def __post_init__(self) -> None:
        _positive(self, "keep")
        require(self.interval_s >= 0, f"checkpoint.interval_s ({self.interval_s}) must be >= 0.")
        _not_negative(self, "replay_interval_s", "replay_max_bytes")


@dataclass(frozen=True)
class MetricsConfig:
    """What a run shows.

    Attributes:
        interval_s: Seconds between rows of metrics.jsonl and console lines.
        tensorboard: Writes TensorBoard events.
        return_window: Episodes that the mean return is taken over.
        profile_start_s: Seconds after the first update at which a jax.profiler trace starts; None: no trace.
        profile_seconds: Length of the trace, seconds.
    """

    interval_s: float = 1.0
    tensorboard: bool = True
    return_window: int = 100
    profile_start_s: float | None = None
    profile_seconds: float = 3.0

    def __post_init__(self) -> None:
        _positive(self, "interval_s", "return_window", "profile_seconds")


@dataclass(frozen=True)
class Config:
    """A whole run.

    Attributes:
        agent: "impala", "r2d2", "apex", or "module:function" (config, spec) -> Agent.
        env: EnvPool id, "gym:ID" for Gymnasium, "catch", "memory", or "module:function".
        num_actors: Actor processes; 0 steps the environments in the learner's process.
        envs_per_actor: Environments of one actor, all its groups together.
        eval_actors: Further actors whose environments act greedily and are kept out of training.
        steps: Environment steps to train for; None: no limit.
        seconds: Wall time to train for, seconds; None: no limit.
        stop_at_return: Stops when the mean return of the last `metrics.return_window` episodes reaches it.
        seed: Seed of everything.
        run_dir: Where the run is kept; None: runs/<agent>-<env>-<date>.
        resume: Continues from the last checkpoint in run_dir.
        replay: Where the table lives: "embedded" in the learner's process, "reverb" in a Reverb server that is started
            for the run, "reverb://host:port" (several with commas) in one that is running.
        deterministic: Lock-step: acting waits for learning, and two runs give the same parameters bit for bit.
    """

    agent: str = "impala"
    env: str = "CartPole-v1"
    num_actors: int = 2
    envs_per_actor: int = 32
    eval_actors: int = 0
    steps: int | None = None
    seconds: float | None = None
    stop_at_return: float | None = None
    seed: int = 1
    run_dir: str | None = None
    resume: bool = False
    replay: str = "embedded"
    deterministic: bool = False
    atari: AtariConfig = field(default_factory=AtariConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    impala: ImpalaConfig = field(default_factory=ImpalaConfig)
    r2d2: R2D2Config = field(default_factory=R2D2Config)
    apex: ApexConfig = field(default_factory=ApexConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    table: TableConfig = field(default_factory=TableConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        _finite(self)
        require(self.run_dir != "", "run_dir ('') must name a directory; leave --run-dir out for the default one.")
        require(self.num_actors >= 0, f"num_actors ({self.num_actors}) must be >= 0 (0: no actor processes).")
        require(self.eval_actors >= 0, f"eval_actors ({self.eval_actors}) must be >= 0.")
        _positive(self, "envs_per_actor")
        require(
            self.envs_per_actor % self.actor.groups == 0,
            f"envs_per_actor ({self.envs_per_actor}) must be divisible by actor.groups ({self.actor.groups}); "
            "use another number or --actor.groups 1.",
        )
        require(
            not (self.deterministic and self.inference.max_batch_size),
            f"deterministic runs act on all slots at once; inference.max_batch_size "
            f"({self.inference.max_batch_size}) must be 0.",
        )
        require(
            self.inference.max_batch_size == 0 or self.inference.max_batch_size >= self.envs_per_group,
            f"inference.max_batch_size ({self.inference.max_batch_size}) must hold a group of {self.envs_per_group} "
            "environments (envs_per_actor / actor.groups), or be 0: all of them.",
        )
        require(0 <= self.seed < 2**31, f"seed ({self.seed}) must lie in 0 .. 2**31-1.")
        require(
            self.replay in ("embedded", "reverb") or self.replay.startswith("reverb://"),
            f"replay ({self.replay!r}) must be 'embedded', 'reverb' (a server is started) or 'reverb://host:port'.",
        )
        require(self.steps is None or self.steps > 0, f"steps ({self.steps}) must be positive.")
        require(self.seconds is None or self.seconds > 0, f"seconds ({self.seconds}) must be positive.")

    @property
    def envs_per_group(self) -> int:
        """Environments of one group of one actor."""
        return self.envs_per_actor // self.actor.groups

    @property
    def num_slots(self) -> int:
        """Environments of the whole run, evaluation included (0 actors: the one in the learner's process)."""
        return (max(self.num_actors, 1) + self.eval_actors) * self.envs_per_actor
