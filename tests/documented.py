"""The metrics that docs/operations.md explains."""

import re

from processes import ROOT


def metrics() -> set[str]:
    """Names in the first column of its table; there `_max` after `a_mean` stands for `a_max`."""
    text = (ROOT / "docs" / "operations.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    names: set[str] = set()
    for row in text.partition("| name | meaning | unit |")[2].splitlines():
        name = ""
        for word in re.findall(r"`([^`]+)`", row.split("|")[1] if row.startswith("|") else ""):
            name = name.rpartition("_")[0] + word if word.startswith("_") else word
            names.add(name)
    return names
