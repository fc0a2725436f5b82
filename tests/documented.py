"""The metrics that docs/operations.md and docs/grpo.md explain."""

import re

from processes import ROOT


def metrics() -> set[str]:
    """Names in the first columns of the tables of runs in environments."""
    return _names("operations.md")


def llm_metrics() -> set[str]:
    """Of language models' runs."""
    return _names("operations.md") | _names("grpo.md")


def _names(document: str) -> set[str]:
    """Names in the first column of a document's table; there `_max` after `a_mean` stands for `a_max`."""
    text = (ROOT / "docs" / document).read_text().partition("## Metrics")[2].partition("\n## ")[0]
    names: set[str] = set()
    for row in text.partition("| name | meaning | unit |")[2].splitlines():
        name = ""
        for word in re.findall(r"`([^`]+)`", row.split("|")[1] if row.startswith("|") else ""):
            name = name.rpartition("_")[0] + word if word.startswith("_") else word
            names.add(name)
    return names
