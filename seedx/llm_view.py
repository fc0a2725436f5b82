"""What an LLM run shows on a terminal, and what it warns of."""

from __future__ import annotations

from collections.abc import Mapping

from seedx.console import Cells, Figures, View

LLM_ROWS: Mapping[str, Cells] = {
    "acting": (
        ("completions", "{env_steps:,.0f}"),
        ("tokens/s", "{completion_tokens_per_s:,.0f}"),
        ("reward", "{reward_mean:,.3f}"),
        ("length", "{rollout/completion_tokens_mean:.1f}"),
        ("truncated", "{rollout/truncated:.0%}"),
    ),
    "learning": (
        ("updates", "{updates:,.0f}"),
        ("updates/s", "{updates_per_s:,.2f}"),
        ("lag", "{learner/lag_updates_mean:.2f}"),
        ("no spread", "{rollout/zero_spread:.0%}"),
    ),
    "update": (
        ("takes", "{learner/update_ms:.0f} ms"),
        ("gradient", "{learner/grad_norm:.3g}"),
        ("entropy", "{learner/entropy:.3f}"),
        ("clipped", "{learner/clip_fraction:.1%}"),
        ("KL", "{learner/kl_reference:.3g}"),
    ),
    "waits": (
        ("learner", "{learner/wait_batch_ms:.0f} ms"),
        ("scoring", "{reward/latency_ms:.0f} ms"),
        ("publish", "{weights/publish_ms:.1f} ms"),
    ),
    "held": (
        ("slots", "{decode/occupancy:.0%}"),
        ("waiting", "{decode/waiting:,.0f}"),
        ("groups", "{replay/items:,.0f}"),
        ("unscored", "{reward/unscored:,.0f}"),
    ),
}
LLM_LINE = ("completions", "tokens/s", "reward", "updates", "lag", "no spread", "clipped")


def waiting_stage(before: Figures, now: Figures) -> str | None:
    """What an LLM run waits for, None if completions or updates moved between the two snapshots."""
    for name in ("env_steps", "updates", "decode/tokens"):
        if now.get(name, 0) != before.get(name, 0):
            return None
    if gone_s := now.get("replay/gone_s"):
        return f"a Reverb server has been gone for {gone_s:.0f} s; {now['replay/give_up_in_s']:.0f} s left to come back"
    if now.get("decode/hosts") == 0:
        return "no decode host takes requests; see logs/decode-0.log in the run directory"
    if now.get("decode/waiting") or now.get("decode/occupancy"):
        return "the decode engine has prompts and makes no tokens"
    if busy_s := now.get("learner/busy_s"):
        return f"an update or a checkpoint has been under way for {busy_s:.0f} s"
    return "rewards are being computed; see --reward.timeout-s"


LLM_VIEW = View(LLM_ROWS, LLM_LINE, "reward", waiting_stage)
