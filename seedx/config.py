"""The list of knobs: one frozen dataclass for each component, validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from seedx.agent_config import ApexConfig, ImpalaConfig, R2D2Config
from seedx.checks import finite, not_negative, positive, require
from seedx.learner_config import LearnerConfig
from seedx.reverb_address import SCHEME, parse_address
from seedx.table_config import TableConfig


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
        positive(self, "frame_skip", "img_size", "max_episode_frames")


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
        positive(self, "groups", "env_threads", "give_up_s")
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

    flag_prefix: ClassVar[str] = "--inference."

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
        positive(self, "max_wait_ms", "in_flight", "stream_timeout_s", "hello_timeout_s", "max_streams")
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
        positive(self, "frame_stack", "dueling_hidden")
        require(self.lstm >= 0, f"network.lstm ({self.lstm}) must be >= 0 (0: no LSTM).")
        require(all(h > 0 for h in self.hidden), f"network.hidden {self.hidden} must be positive widths.")

    @property
    def lead(self) -> int:
        """Rows at the start of an unroll that are there for their frames alone, which the next ones stack."""
        return self.frame_stack - 1


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        interval_s: Seconds between checkpoints; 0: only at the end.
        keep: Checkpoints kept.
        replay_interval_s: Seconds between snapshots of the replay, or checkpoints that Reverb servers write; 0:
            only at the end.
        replay_max_bytes: Bytes that the items in snapshots of the embedded replay take on disk, best twice those in the
            table: room is needed for new ones before old ones go. 0: no snapshots.
    """

    interval_s: float = 60.0
    keep: int = 3
    replay_interval_s: float = 60.0
    replay_max_bytes: int = 2**31

    def __post_init__(self) -> None:
        positive(self, "keep")
        require(self.interval_s >= 0, f"checkpoint.interval_s ({self.interval_s}) must be >= 0.")
        not_negative(self, "replay_interval_s", "replay_max_bytes")


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
        positive(self, "interval_s", "return_window", "profile_seconds")


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
        seconds: Wall time to train for, from the start of the learner's process on, so that loading, waiting for actors
            or a Reverb server, and compiling count too; a resumed run has as long again. None: no limit.
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
        finite(self)
        require(self.run_dir != "", "run_dir ('') must name a directory; leave --run-dir out for the default one.")
        require(self.num_actors >= 0, f"num_actors ({self.num_actors}) must be >= 0 (0: no actor processes).")
        require(self.eval_actors >= 0, f"eval_actors ({self.eval_actors}) must be >= 0.")
        positive(self, "envs_per_actor")
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
            not self.deterministic or self.table.is_queue,
            "deterministic runs need a queue (--table.sampler fifo --table.max-times-sampled 1): which items a replay "
            "holds when a batch is sampled depends on timing. Drop --deterministic, or use --agent impala.",
        )
        require(
            self.inference.max_batch_size == 0 or self.inference.max_batch_size >= self.envs_per_group,
            f"inference.max_batch_size ({self.inference.max_batch_size}) must hold a group of {self.envs_per_group} "
            "environments (envs_per_actor / actor.groups), or be 0: all of them.",
        )
        require(0 <= self.seed < 2**31, f"seed ({self.seed}) must lie in 0 .. 2**31-1.")
        require(
            self.replay in ("embedded", "reverb") or self.replay.startswith(SCHEME),
            f"replay ({self.replay!r}) must be 'embedded', 'reverb' (a server is started) or 'reverb://host:port'.",
        )
        if self.replay.startswith(SCHEME):
            parse_address(self.replay)
        require(
            self.replay != "embedded" or self.table.is_queue or not 0 < self.table.max_size < self.largest_insert,
            f"table.max_size ({self.table.max_size}) must be at least {self.largest_insert}: so many unrolls may be "
            "inserted together (learner.batch_size, or the environments of a group if these are more). Raise "
            "--table.max-size.",
        )
        require(self.steps is None or self.steps > 0, f"steps ({self.steps}) must be positive.")
        require(self.seconds is None or self.seconds > 0, f"seconds ({self.seconds}) must be positive.")

    @property
    def goal(self) -> float | None:
        """The mean return that the run stops at."""
        return self.stop_at_return

    @property
    def envs_per_group(self) -> int:
        """Environments of one group of one actor."""
        return self.envs_per_actor // self.actor.groups

    @property
    def unroll_rows(self) -> int:
        """Rows of an unroll: those that lead, those of the burn-in, T+1."""
        return self.network.lead + self.learner.burn_in + self.learner.unroll_length + 1

    @property
    def overlap(self) -> int:
        """Rows that an unroll has in common with the next one."""
        return self.unroll_rows - self.learner.stride

    @property
    def num_slots(self) -> int:
        """Environments of the whole run, evaluation included (0 actors: the one in the learner's process)."""
        return (max(self.num_actors, 1) + self.eval_actors) * self.envs_per_actor

    @property
    def largest_insert(self) -> int:
        """Unrolls that are inserted together at most: whole groups, within a batch of the learner unless it is one."""
        groups = max(self.num_actors, 1) * self.actor.groups
        return self.envs_per_group * min(groups, max(self.learner.batch_size // self.envs_per_group, 1))
