"""Environment steps a second of whole runs, as ratios of what bounds them, in interleaved pairs.

    python benchmarks/throughput.py cartpole     # over EnvPool's own rate, same processes, groups and threads
    python benchmarks/throughput.py pixels       # overhead over the same work in one process without gRPC

Steps are executed ones (the ignored action after an episode's end does not count). A run's rate is that at which its
learner consumed them, after start-up; further flags are those of launch/local.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from seedx import cli
from seedx.config import Config
from seedx.config_file import env_config
from seedx.runlog import read_rows

ROOT = Path(__file__).parent.parent
WARM_UP_UPDATES = 5


def run_rate(flags: list[str], seconds: float) -> tuple[float, dict]:
    """Steps a second that a run's learner consumed, and its last row of metrics."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, str(ROOT / "launch" / "local.py"), *flags, "--run-dir", str(run_dir)]
        done = subprocess.run(
            [*command, "--seconds", str(seconds), "--stop-at-return", "None", "--metrics.interval-s", "0.5"],
            capture_output=True,
            text=True,
            timeout=seconds + 120,
        )
        if done.returncode:
            raise RuntimeError(f"the run failed with {done.returncode}:\n{done.stdout}{done.stderr}")
        rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row.get("updates", 0) >= WARM_UP_UPDATES]
    rows = [row for row in rows[:-1] if row.get("updates_per_s")]  # the last interval holds the end of the run
    first, last = rows[0], rows[-1]
    return (last["env_steps"] - first["env_steps"]) / (last["seconds"] - first["seconds"]), last


def envpool_rate(config: Config, seconds: float) -> float:
    """Executed steps a second of EnvPool alone: as many processes and groups as the run, actions made beforehand."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(config.num_actors) as pool:
        rates = pool.starmap(_step_envpool, [(config, seconds, i) for i in range(config.num_actors)])
    return sum(rates)


def _step_envpool(config: Config, seconds: float, actor: int) -> float:
    import numpy as np

    from seedx.envs.envpool_adapter import load_envpool

    rng = np.random.default_rng(actor)
    make = load_envpool().make
    num = config.envs_per_group
    envs = [
        make(config.env, env_type="gymnasium", num_envs=num, num_threads=config.actor.env_threads, seed=100 * actor + i)
        for i in range(config.actor.groups)
    ]
    actions = rng.integers(0, envs[0].action_space.n, (64, num)).astype(np.int32)
    for env in envs:
        env.reset()
    ended = [np.zeros(num, bool) for _ in envs]
    executed, calls, started = 0, 0, time.monotonic()
    while time.monotonic() - started < seconds:
        for i, env in enumerate(envs):
            _, _, terminated, truncated, _ = env.step(actions[calls % 64])
            executed += num - int(np.count_nonzero(ended[i]))
            ended[i] = terminated | truncated
            calls += 1
    return executed / (time.monotonic() - started)


def alone_rate(flags: list[str], seconds: float) -> float:
    """Steps a second of `benchmarks/alone.py` in a process of its own."""
    command = [sys.executable, str(ROOT / "benchmarks" / "alone.py"), *flags, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300)
    if done.returncode:
        raise RuntimeError(f"alone.py failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return float(next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).split()[2])


def cartpole(flags: list[str], pairs: int, seconds: float) -> None:
    flags = ["--config", str(ROOT / "configs" / "impala_cartpole_fast.py"), *flags]
    config = env_config(cli.parse(flags))
    ratios, rates = [], []
    for pair in range(pairs):
        rate, last = run_rate(flags, seconds)
        bound = envpool_rate(config, min(seconds, 8.0))
        ratios.append(rate / bound)
        rates.append(rate)
        print(
            f"pair {pair}: {rate:,.0f} steps/s, EnvPool alone {bound:,.0f}, ratio {rate / bound:.3f} "
            f"(update {last['learner/update_ms']:.1f} ms, fill {last['batcher/fill']:.0%})",
            flush=True,
        )
    print(f"RESULT cartpole_env_steps_per_s {statistics.median(rates):.0f} steps/s")
    print(f"RESULT cartpole_over_envpool {statistics.median(ratios):.3f} ratio")


def pixels(flags: list[str], pairs: int, seconds: float) -> None:
    flags = ["--env", "Pong-v5", "--num-actors", "1", *flags]
    overheads = []
    for pair in range(pairs):
        rate, _ = run_rate(flags, seconds)
        alone = alone_rate(flags, seconds)
        overheads.append(1 - rate / alone)
        print(f"pair {pair}: {rate:,.0f} steps/s, alone {alone:,.0f}, overhead {1 - rate / alone:.1%}", flush=True)
    print(f"RESULT pixels_overhead {statistics.median(overheads):.3f} ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cartpole", "pixels"))
    parser.add_argument("--pairs", type=int, help="interleaved pairs (default: 5 for cartpole, 3 for pixels)")
    parser.add_argument("--seconds-each", type=float, default=20.0, help="length of one measurement (default: 20)")
    own, flags = parser.parse_known_args()
    if own.what == "cartpole":
        cartpole(flags, own.pairs or 5, own.seconds_each)
    else:
        pixels(flags, own.pairs or 3, own.seconds_each)


if __name__ == "__main__":
    main()
