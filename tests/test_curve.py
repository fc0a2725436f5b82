"""The learning-curve picture: drawn from any number of rows, atomically, from what was measured."""

import json
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from seedx import curve
from seedx.curve import draw_curve


def write_rows(run_dir, rows, torn="") -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


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
    write_rows(tmp_path, rows_of(count), torn='{"env_st')
    path = draw_curve(tmp_path, title="impala on CartPole-v1, seed 1", goal=475)
    image = matplotlib.image.imread(path)
    assert image.shape == (720, 960, 4)
    assert blue(image) > 50 if count else blue(image) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curve.png", "metrics.jsonl"]


def test_draws_what_was_measured(tmp_path, monkeypatch):
    drawn = {}

    def record(axes, rows, score, goal):
        drawn["steps"], drawn["mean"] = curve._series(rows, f"{score}_mean")

    monkeypatch.setattr(curve, "_draw_score", record)
    rows = rows_of(5)
    rows[2]["return_mean"] = None
    del rows[3]["return_mean"]
    write_rows(tmp_path, rows)
    draw_curve(tmp_path, title="t")
    assert drawn == {"steps": [1000, 2000, 5000], "mean": [0.0, 1.0, 4.0]}


def test_rows_behind_a_resume_are_left_out():
    rows = [{"env_steps": s, "x": x} for s, x in ((100, 0), (200, 1), (300, 2), (150, 3), (250, 4))]
    assert [row["x"] for row in curve._last_attempt(rows)] == [0, 3, 4]


def test_a_failed_draw_leaves_the_last_picture(tmp_path):
    write_rows(tmp_path, rows_of(3))
    before = draw_curve(tmp_path, title="t").read_bytes()
    (tmp_path / "metrics.jsonl").write_text("broken\n{}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1 is not JSON"):
        draw_curve(tmp_path, title="t")
    assert (tmp_path / "curve.png").read_bytes() == before


def test_pyplot_is_not_imported(tmp_path):
    write_rows(tmp_path, rows_of(2))
    code = """if True:
        import sys
        from seedx.curve import draw_curve
        draw_curve(sys.argv[1], title="t", score="reward")
        assert "matplotlib.pyplot" not in sys.modules and "jax" not in sys.modules
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True)


def test_short_numbers():
    assert [curve._short(v) for v in (0, 300, 20_000, 1.5e6, 2e9)] == ["0", "300", "20k", "1.5M", "2G"]
