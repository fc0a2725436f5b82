"""Completions for people to read: samples.jsonl, and the newest ones as a page, samples.html."""

from __future__ import annotations

import html
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from seedx.envs.text.group import Group

_INTERVAL_S = 5.0
_AT_MOST = 500  # then rarer and rarer: a day's file must not fill the disk
_SHOWN_GROUPS = 50
_STYLE = (
    "body{font:15px system-ui;margin:2em;max-width:70em}pre{white-space:pre-wrap;margin:.2em 0}"
    "table{border-collapse:collapse;width:100%}td{vertical-align:top;padding:.2em .6em;border-top:1px solid #ddd}"
    "h3{margin-bottom:.2em}.good{color:#070}.bad{color:#a00}"
)


class SampleLog:
    """Keeps a group now and then, and all of its completions.

    Args:
        run_dir: Where the files are.
        text_of: The text of a prompt's tokens.
        title: Of the page.
    """

    def __init__(self, run_dir: Path, text_of: Callable[[Group], str], title: str) -> None:
        self._path, self._page = run_dir / "samples.jsonl", run_dir / "samples.html"
        self._text_of, self._title = text_of, title
        self._groups: deque[dict] = deque(maxlen=_SHOWN_GROUPS)
        self._due, self._started = 0.0, time.monotonic()
        self._lock = threading.Lock()

    def add(self, group: Group, updates: int) -> None:
        """Writes a group if it is time for one."""
        with self._lock:
            if time.monotonic() < self._due:
                return
            now = time.monotonic()
            self._due = now + max(_INTERVAL_S, (now - self._started) / _AT_MOST)
            entry = {
                "updates": updates,
                "prompt": self._text_of(group),
                "completions": [
                    {
                        "text": sample.text,
                        "reward": None if math.isnan(sample.reward) else sample.reward,
                        "scores": sample.scores,
                        "tokens": len(sample.tokens),
                        "finish_reason": sample.finish_reason,
                    }
                    for sample in group.samples
                ],
            }
            self._groups.appendleft(entry)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            self._page.write_text(self._html(), encoding="utf-8")

    def _html(self) -> str:
        groups = "".join(_group_html(entry) for entry in self._groups)
        title = html.escape(self._title)
        return (
            f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>{groups}"
        )


def _group_html(entry: dict) -> str:
    rows = "".join(_sample_html(sample) for sample in entry["completions"])
    return f"<h3>update {entry['updates']:,}</h3><pre>{html.escape(entry['prompt'])}</pre><table>{rows}</table>"


def _sample_html(sample: dict) -> str:
    good, text = (sample["reward"] or 0) > 0, html.escape(sample["text"])
    cells = [f"<td class={'good' if good else 'bad'}>{_shown(sample['reward'])}</td>", f"<td><pre>{text}</pre></td>"]
    return f"<tr>{''.join(cells)}<td>{sample['tokens']} tokens, {sample['finish_reason']}</td></tr>"


def _shown(reward: float | None) -> str:
    return "not scored" if reward is None else f"{reward:.3g}"
