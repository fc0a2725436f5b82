"""What a user names as "module:function"."""

import pytest
from fakes import VECTOR

from seedx.agents.build import build_agent
from seedx.checks import ConfigError
from seedx.config import Config
from seedx.imports import load


def test_functions_and_classes_are_found():
    assert load("seedx.imports:load", "agent") is load
    assert load("seedx.config:Config", "agent") is Config


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (":x", "not of the form 'module:function'"),
        ("x:", "not of the form"),
        ("x", "not of the form"),
        ("", "not of the form"),
        ("..x:y", "not of the form"),
        ("no_such_module:f", "no module 'no_such_module' .* on the Python path"),
        ("seedx.no_such_module:f", "no module 'seedx.no_such_module'"),
        ("seedx.imports:laod", r"seedx.imports has no function 'laod'. Did you mean 'seedx.imports:load'\?"),
        ("seedx.supervisor:USER_ERROR", "has no function 'USER_ERROR'"),
    ],
)
def test_what_is_not_there_is_refused(path, message):
    with pytest.raises(ConfigError, match=f"agent '{path}' is unknown: .*{message}"):
        load(path, "agent")


def test_a_mistake_in_the_module_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "lacks_a_dependency.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load("lacks_a_dependency:make", "agent")


@pytest.mark.parametrize("agent", [":x", "x:", "fakes:no", "ppo"])
def test_an_unknown_agent_is_a_config_error(agent):
    with pytest.raises(ConfigError, match=f"agent .*'{agent}'"):
        build_agent(Config(agent=agent), VECTOR)
