"""The knobs and the recipes. `python tests/test_config.py` rewrites tests/golden/ after a wanted change."""

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.checks import ConfigError
from seedx.config import Config, InferenceConfig, LearnerConfig, NetworkConfig
from seedx.config_file import from_json, load_recipe, read_config, to_json
from seedx.llm_config import LlmConfig
from seedx.table_config import TableConfig

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
RECIPES = sorted((ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_are_as_reviewed(path):
    golden = GOLDEN / f"{path.stem}.json"
    remedy = f"if that is wanted, run `python tests/test_config.py` and review the difference in {golden}"
    assert golden.exists(), f"{path.name} has no golden file; {remedy}"
    assert to_json(load_recipe(path)) == golden.read_text(), f"{path.name} or a default has changed; {remedy}"


def test_every_golden_file_has_its_recipe():
    agents = ("impala", "apex", "r2d2", "grpo")
    golden = {path.stem for path in GOLDEN.glob("*.json") if path.stem.startswith(agents)}
    assert golden == {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_open_with_what_to_expect(path):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    for word in ("Expected:", "Hardware:", "Wall time:", "Command:"):
        assert word in docstring, f"the docstring of {path.name} lacks {word!r}"


_TEXT = st.text("aZ0/: \"'\\\n\té😀")


@given(
    num_actors=st.integers(0, 1000),
    envs=st.integers(1, 1000).map(lambda n: 2 * n),
    seconds=st.none() | st.floats(0.001, 1e9),
    env=_TEXT,
    hidden=st.lists(st.integers(1, 4096), max_size=4).map(tuple),
    learning_rate=st.floats(1e-12, 1e3),
    token_file=st.none() | _TEXT,
)
def test_json_round_trip(num_actors, envs, seconds, env, hidden, learning_rate, token_file):
    made = Config(
        env=env,
        num_actors=num_actors,
        envs_per_actor=envs,
        seconds=seconds,
        network=NetworkConfig(hidden=hidden),
        learner=LearnerConfig(learning_rate=learning_rate),
        inference=InferenceConfig(token_file=token_file),
    )
    assert from_json(to_json(made)) == made


def test_json_with_an_unknown_field_is_refused_with_its_place():
    values = json.loads(to_json(Config()))
    values["learner"]["batchsize"] = 1
    with pytest.raises(ConfigError, match=r"config.learner has unknown fields \['batchsize'\].*'batch_size'"):
        from_json(json.dumps(values))


def test_json_values_are_validated():
    values = json.loads(to_json(Config()))
    values["learner"]["batch_size"] = 0
    with pytest.raises(ConfigError, match=r"batch_size \(0\) must be positive"):
        from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (None, {"num_actors": -1}, r"num_actors \(-1\) must be >= 0"),
        (None, {"envs_per_actor": 31}, r"envs_per_actor \(31\) must be divisible by actor.groups \(2\)"),
        (None, {"steps": 0}, r"steps \(0\) must be positive"),
        (None, {"replay": "rverb"}, r"replay \('rverb'\) must be 'embedded'"),
        ("learner", {"batch_size": 30, "microbatches": 4}, r"batch_size \(30\) must be divisible by .*\(4\)"),
        ("network", {"hidden": (64, 0)}, r"hidden \(64, 0\) must be positive"),
        ("inference", {"tls_cert": "c.pem"}, "go together"),
        ("impala", {"clip_rho": 0.9}, r"clip_rho \(0.9\) must be >= 1"),
        ("actor", {"max_episode_steps": 0}, r"max_episode_steps \(0\) must be positive, or None"),
        ("actor", {"max_episode_steps": -5}, r"max_episode_steps \(-5\) must be positive"),
        ("impala", {"discount": 1.5}, r"discount \(1.5\) must lie in \[0, 1\]"),
        ("checkpoint", {"keep": 0}, r"keep \(0\) must be positive"),
    ],
)
def test_errors_name_the_value_and_what_is_allowed(section, values, message):
    owner = Config() if section is None else getattr(Config(), section)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(owner, **values)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("table", "sampler", "uniform"),
        ("table", "remover", "lifo"),
        ("table", "priority_exponent", 0.5),
        ("table", "importance_exponent", 0.5),
        ("table", "max_times_sampled", 0),
        ("table", "min_size", 2),
        ("table", "samples_per_insert", 1.0),
        ("table", "error_buffer", 8.0),
        ("checkpoint", "replay_interval_s", 1.0),
        ("checkpoint", "replay_max_bytes", 0),
    ],
)
def test_settings_that_do_nothing_in_an_llm_run_are_refused(section, name, value):
    config = LlmConfig(table=TableConfig(max_size=64, max_bytes=2**20, give_up_s=1.0))  # these do
    part = dataclasses.replace(getattr(config, section), **{name: value})
    flag = f"--{section}.{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=rf"{section}.{name} \({value}\) does nothing in an LLM run.* {flag} out"):
        dataclasses.replace(config, **{section: part})


def test_what_a_saved_run_says_of_settings_that_do_nothing_is_passed_over():
    """It was accepted once; flags and recipes are refused."""
    values = json.loads(to_json(LlmConfig()))
    values["table"]["min_size"], values["checkpoint"]["replay_interval_s"] = 7, 300.0
    assert from_json(json.dumps(values)) == LlmConfig()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "does not exist"),
        ("x = 1", r"must define config\(\)"),
        ("def config(): return 3", "returned int; it must be a Config"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, source, message):
    path = tmp_path / "recipe.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_has_no_word_for_are_refused(value):
    for make in (
        lambda: Config(stop_at_return=value),
        lambda: Config(seconds=value),
        lambda: Config(learner=LearnerConfig(learning_rate_end=value)),
    ):
        with pytest.raises(ConfigError, match=rf"\({value}\) must"):
            make()


def test_files_that_are_no_configs_are_refused(tmp_path):
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(ConfigError, match="must be a Python file"):
        load_recipe(tmp_path / "recipe.json")
    for text, message in (("[]", "must be an object"), ('{"learner": 3}', "config.learner is 3"), ("{", "Expecting")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(tmp_path)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for recipe in RECIPES:
        (GOLDEN / f"{recipe.stem}.json").write_text(to_json(load_recipe(recipe)))
