"""The list of knobs of an LLM run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from seedx.checks import finite, not_negative, require
from seedx.config import CheckpointConfig, MetricsConfig
from seedx.device_config import MeshConfig
from seedx.grpo_config import (
    CurriculumConfig,
    DecodeConfig,
    GrpoConfig,
    HeldOutConfig,
    RolloutConfig,
    TextLearnerConfig,
    WarmStartConfig,
)
from seedx.lora_config import LoraConfig
from seedx.reverb_address import SCHEME, parse_address
from seedx.reward_config import RewardConfig
from seedx.table_config import TableConfig

AGENTS = ("grpo",)

# Settings of a part that LLM runs share with others, and that mean nothing in a queue whose groups are generated anew.
UNUSED = {
    "table": (
        *("sampler", "remover", "priority_exponent", "importance_exponent"),
        *("max_times_sampled", "min_size", "samples_per_insert", "error_buffer"),
    ),
    "checkpoint": ("replay_interval_s", "replay_max_bytes"),
}


@dataclass(frozen=True)
class LlmConfig:
    """A whole run of a language model.

    Attributes:
        agent: "grpo".
        task: "reverse", "sort", "sums", "calculator", "reasoning_gym:NAME", "jsonl:PATH" or "module:function"; after
            it maybe "?reward=judge:ADDRESS" or another reward.
        model: smollm2, a .gguf file, a Hugging Face directory, hf://org/name, or tiny (random weights).
        steps: Completions to learn from; None: no limit.
        seconds: Wall time, from the start of the learner's process on, with the warm start and all evaluations but
            the last one; a resumed run has as long again. None: no limit.
        stop_at_reward: Stops when the mean reward of the last `metrics.return_window` completions reaches it.
        seed: Seed of everything.
        run_dir: Where the run is kept; None: runs/<agent>-<task>-<date>.
        resume: Continues from the last checkpoint in run_dir.
        replay: Where groups wait: "embedded" in the learner's process, "reverb" in a Reverb server that is started for
            the run, "reverb://host:port" in one that is running.
        max_staleness: Versions that the weights of a token may be behind those of the update that learns from it; 0:
            generating and learning take turns, and two runs give the same parameters bit for bit.
        serve_port: The engine, with decode hosts the first one's, also answers decode requests at this port of
            localhost; None: it does not.
        decode_hosts: Processes beside the learner's that generate, each with an engine; 0: the learner's has one.
        mesh: The devices of learner and engine.
    """

    agent: str = "grpo"
    task: str = "reverse"
    model: str = "tiny"
    steps: int | None = None
    seconds: float | None = None
    stop_at_reward: float | None = None
    seed: int = 1
    run_dir: str | None = None
    resume: bool = False
    replay: str = "embedded"
    max_staleness: int = 1
    serve_port: int | None = None
    decode_hosts: int = 0
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(data=0))
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    learner: TextLearnerConfig = field(default_factory=TextLearnerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    table: TableConfig = field(default_factory=TableConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=lambda: MetricsConfig(return_window=512))

    def __post_init__(self) -> None:
        finite(self)
        require(self.agent in AGENTS, f"agent ({self.agent!r}) of an LLM run must be one of {', '.join(AGENTS)}.")
        require(self.model != "", "model ('') is empty; give tiny, smollm2, a file, a directory or hf://org/name.")
        require(self.run_dir != "", "run_dir ('') must name a directory; leave --run-dir out for the default one.")
        not_negative(self, "max_staleness", "decode_hosts")
        require(
            self.rollout.redundant == 0 or self.max_staleness > 0,
            f"rollout.redundant ({self.rollout.redundant}) must be 0 with max_staleness 0, where two runs give "
            "the same parameters: what is lost or late is a matter of timing. Raise --max-staleness.",
        )
        require(self.steps is None or self.steps > 0, f"steps ({self.steps}) must be positive.")
        require(self.seconds is None or self.seconds > 0, f"seconds ({self.seconds}) must be positive.")
        require(0 <= self.seed < 2**31, f"seed ({self.seed}) must lie in 0 .. 2**31-1.")
        require(
            self.serve_port is None or 0 <= self.serve_port < 2**16,
            f"serve_port ({self.serve_port}) must be a port, 0 (a free one) to 65535.",
        )
        require(
            self.replay in ("embedded", "reverb") or self.replay.startswith(SCHEME),
            f"replay ({self.replay!r}) must be 'embedded', 'reverb' (a server is started) or 'reverb://host:port'.",
        )
        if self.replay.startswith(SCHEME):
            parse_address(self.replay)
        for part, names in UNUSED.items():
            _require_defaults(part, getattr(self, part), names)
        require(
            self.learner.zero == 3 or self.mesh.fsdp > 1,
            f"learner.zero ({self.learner.zero}) does nothing with mesh.fsdp 1: there is nobody to share with. Give "
            "--mesh.fsdp, or leave --learner.zero out.",
        )
        groups = max(self.mesh.data, 1) * self.mesh.fsdp
        require(
            self.decode.max_concurrent % groups == 0,
            f"decode.max_concurrent ({self.decode.max_concurrent}) must be a multiple of {groups}: completions are "
            "spread over --mesh.data x --mesh.fsdp devices.",
        )

    @property
    def goal(self) -> float | None:
        """The mean reward that the run stops at."""
        return self.stop_at_reward

    @property
    def env(self) -> str:
        """The task: what is acted in."""
        return self.task

    @property
    def overlap(self) -> int:
        """Rows that an item has in common with the next one."""
        return 0

    @property
    def num_slots(self) -> int:
        """Sources of items."""
        return 1


def _require_defaults(part: str, config: Any, names: tuple[str, ...]) -> None:
    defaults = type(config)()
    for name in names:
        given, default = getattr(config, name), getattr(defaults, name)
        require(
            given == default,
            f"{part}.{name} ({given}) does nothing in an LLM run, whose table is a queue: groups are learned from "
            "once, in the order of their prompts, and a resume generates anew what was not. Leave "
            f"--{part}.{name.replace('_', '-')} out.",
        )
