"""The learning-curve picture: drawn from any number of rows, atomically, from what was measured."""

import json
import subprocess
import sys
import threading

import matplotlib.image
import numpy as np
import pytest

from seedx import curve, report
from seedx.config import Config, MetricsConfig
from seedx.curve import draw_curve, drawn_figures
from seedx.metrics import Metrics


def rows_of(count: int) -> list[dict]:
    return [
        {
            "env_steps": 1000 * (i + 1),
            "return_mean": float(i),
            "return_interval_mean": i + (-1) ** i,
            "env_steps_per_s": 35_000.0 + i,
            "learner/lag_updates_mean": 1.5,
        }
        for i in range(count)
    ]


def blue(image: np.ndarray) -> int:
    return int(np.sum((image[..., 2] > 0.6) & (image[..., 0] < 0.3)))


@pytest.mark.parametrize("count", [0, 1, 50])
def test_draws_any_number_of_rows(tmp_path, count):
    path = draw_curve(tmp_path, rows_of(count), title="impala on CartPole-v1, seed 1", goal=475)
    image = matplotlib.image.imread(path)
    assert image.shape == (720, 960, 4)
    assert blue(image) > 50 if count else blue(image) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curve.png"]


def test_draws_what_was_measured(tmp_path, monkeypatch):
    drawn = {}

    def record(axes, rows, score, goal):
        drawn["steps"], drawn["mean"] = curve._series(rows, f"{score}_mean")

    monkeypatch.setattr(curve, "_draw_score", record)
    rows = rows_of(5)
    rows[2]["return_mean"] = None
    del rows[3]["return_mean"]
    draw_curve(tmp_path, [drawn_figures(row) for row in rows], title="t")
    assert drawn == {"steps": [1000, 2000, 5000], "mean": [0.0, 1.0, 4.0]}


def test_rows_behind_a_resume_are_left_out():
    rows = [{"env_steps": s, "x": x} for s, x in ((100, 0), (200, 1), (300, 2), (150, 3), (250, 4))]
    assert [row["x"] for row in curve._last_attempt(rows)] == [0, 3, 4]


def test_a_failed_draw_leaves_the_last_picture(tmp_path):
    before = draw_curve(tmp_path, rows_of(3), title="t").read_bytes()
    with pytest.raises(TypeError):
        draw_curve(tmp_path, [*rows_of(3), {"env_steps": 4000, "return_mean": "broken"}], title="t")
    assert (tmp_path / "curve.png").read_bytes() == before


def test_the_reporter_reads_the_file_once_and_draws_few_rows(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row | {"other": 1}) + "\n" for row in rows_of(5000)))
    drawn = []
    monkeypatch.setattr(report, "draw_curve", lambda run_dir, rows, **_: drawn.extend(rows))
    figures = dict.fromkeys(("frames", "updates", "seconds", "lag_updates_mean"), 1.0) | {"env_steps": 6_000_000}
    stop = threading.Event()
    stop.set()
    config = Config(metrics=MetricsConfig(tensorboard=False))
    reporter = report.Reporter(config, tmp_path, Metrics(), lambda: figures, stop)
    monkeypatch.setattr(report, "read_rows", None)
    reporter.loop()
    reporter.finish("steps")
    assert len(drawn) <= 2000
    assert drawn[0] == {name: value for name, value in rows_of(4)[3].items() if name != "other"}
    assert drawn[-1] == {"env_steps": 6_000_000}
    assert len(path.read_text().splitlines()) == 5001


def test_pyplot_is_not_imported(tmp_path):
    code = """if True:
        import sys
        from seedx.curve import draw_curve
        assert "matplotlib" not in sys.modules
        draw_curve(sys.argv[1], [{"env_steps": 1, "reward_mean": 0.5}], title="t", score="reward")
        assert "matplotlib.pyplot" not in sys.modules and "jax" not in sys.modules
    """
    assert subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)]).returncode == 0
    assert (tmp_path / "curve.png").exists()


def test_short_numbers():
    assert [curve._short(v) for v in (0, 300, 20_000, 1.5e6, 2e9)] == ["0", "300", "20k", "1.5M", "2G"]
