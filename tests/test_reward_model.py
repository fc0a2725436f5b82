"""Models with a scalar head: scores against recorded logits and a plain forward; texts, versions, memory, processes."""

import functools
import json
import resource
import zlib
from pathlib import Path

import hf_directories
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases
import pytest

from seedx.checks import ConfigError
from seedx.envs.text.load import load_task
from seedx.envs.text.reward_model import RewardModel
from seedx.envs.text.rewards import RewardPool
from seedx.envs.text.task import Prompt
from seedx.metrics import Metrics
from seedx.networks import safetensors_files
from seedx.networks.hf_score import open_score_model
from seedx.networks.transformer import features
from seedx.reward_config import RewardConfig
from seedx.threads import Crew

RECORDED = np.load(Path(__file__).parent / "golden" / "logits.npz")
LONG = {"vocab_size": 256, "max_position_embeddings": 200, "num_hidden_layers": 1, "pad_token_id": None}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Of a model that reads bytes, up to 200; not to be changed."""
    path = tmp_path_factory.mktemp("model")
    hf_directories.write_score_model(path, "llama", **LONG)
    return path


@pytest.fixture(scope="module")
def model(directory):
    return RewardModel(str(directory))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama_tied_theta", "qwen2_sliding", "qwen3", "gemma3_nested"])
def test_a_head_that_is_a_row_of_the_output_gives_the_recorded_logits(tmp_path, case):
    """A logit is a row of the output times the state that a score is made of."""
    raw, vocab = parity_cases.CASES[case], 7
    shape = (raw["vocab_size"], raw["hidden_size"])
    name = "model.embed_tokens.weight" if raw["tie_word_embeddings"] else "lm_head.weight"
    head = parity_cases.weight(name, shape)[vocab : vocab + 1]
    hf_directories.write_score_model(tmp_path, case, head, pad_token_id=None)
    tokens = parity_cases.tokens(case)
    places = [(row, length) for row in range(2) for length in (1, 11, 20)]
    scores = RewardModel(str(tmp_path)).score([tokens[row, :length].tolist() for row, length in places])
    np.testing.assert_allclose(scores, [RECORDED[case][row, length - 1, vocab] for row, length in places], atol=1e-4)


def texts_of(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, length).tolist() for length in lengths]


LENGTHS = (1, 200, 64, 65, 3, 2, 40, 41, 42, 43, 44)  # nine of the shortest rows


def test_neither_padding_nor_neighbours_change_a_score(directory, model):
    texts = texts_of(LENGTHS)
    together = model.score(texts)
    found = open_score_model(directory)
    params, head = found.load()
    forward = jax.jit(functools.partial(features, found.config))
    for text, score in list(zip(texts, together, strict=True))[:4]:
        state, _ = forward(params, jnp.asarray([text], jnp.int32), jnp.arange(len(text), dtype=jnp.int32)[None])
        plain = np.asarray(state, np.float64)[0, -1] @ np.asarray(head, np.float64)
        assert score == pytest.approx(plain, abs=1e-5)
    np.testing.assert_allclose(model.score(texts[::-1])[::-1], together, atol=1e-5)
    np.testing.assert_allclose([model.score([text])[0] for text in texts], together, atol=1e-5)
    others = texts_of(LENGTHS[1:], seed=1)
    assert model.score([texts[0], *others])[0] == together[0]
    assert np.ptp(together) > 0.5
    assert model.score([]).shape == (0,)


def test_padding_in_a_text_is_passed_over_at_its_end_alone(tmp_path):
    hf_directories.write_score_model(tmp_path, "llama", pad_token_id=3)
    model = RewardModel(str(tmp_path))
    text, longer = [5, 3, 7], [5, 3, 7, 3, 3]
    found = model.score([text, longer, [5, 3], [5], [3], [3, 3]])
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[4] == found[5]
    assert len({*found.tolist()}) == 3


# ---- texts


def test_without_a_template_the_completion_follows_the_prompt(model):
    prompt = Prompt("ab=")
    assert model.encode(prompt, "ba") == model._tokenizer.encode("ab=ba")
    assert model(prompt, "ba") == model.score([model._tokenizer.encode("ab=ba")])[0]
    with pytest.raises(ValueError, match=r"has messages, and the reward model .* no chat template"):
        model(Prompt(messages=({"role": "user", "content": "Hi"},)), "ba")


def test_with_a_template_the_completion_is_the_assistant_s(tmp_path):
    hf_directories.write_score_model(tmp_path, "llama", **LONG)
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ '!' if add_generation_prompt }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    model = RewardModel(str(tmp_path))

    def text(prompt, completion):
        return model._tokenizer.decode(model.encode(prompt, completion))

    assert text(Prompt("ab="), "ba") == "[user:ab=][assistant:ba]"
    messages = ({"role": "system", "content": "S"}, {"role": "user", "content": "U"})
    assert text(Prompt(messages=messages), "A") == "[system:S][user:U][assistant:A]"


def test_texts_that_do_not_fit_are_refused(model):
    with pytest.raises(ValueError, match=r"a text has 201 tokens, and the reward model .* takes 1 to 200"):
        model.score([[1], [1] * 201])
    with pytest.raises(ValueError, match="a text has 0 tokens"):
        model(Prompt(""), "")


# ---- what is in the directory


def test_the_version_follows_from_the_weights_alone(tmp_path):
    heads = [np.full((1, 32), value, np.float32) for value in (0.5, 0.5, 0.25)]
    versions = []
    for i, head in enumerate(heads):
        hf_directories.write_score_model(tmp_path / str(i), "llama", head, initializer_range=0.01 * i)
        model = RewardModel(str(tmp_path / str(i)))
        model.prepare()
        versions.append(model.version)
    assert versions[0] == versions[1] != versions[2]
    assert versions[0] == zlib.crc32((tmp_path / "0" / "model.safetensors").read_bytes())


def change_config(path, **fields):
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))


def test_shards_are_one_model(tmp_path):
    hf_directories.write_score_model(tmp_path, "llama", **LONG)
    whole = RewardModel(str(tmp_path))
    text = [*range(30)]
    expected = whole.score([text])
    stored = safetensors_files.read_header(tmp_path / "model.safetensors")
    tensors = {name: at.read() for name, at in stored.items()}
    files = {name: f"model-{1 + (name == 'score.weight')}.safetensors" for name in tensors}
    for file in {*files.values()}:
        part = {name: tensors[name] for name in tensors if files[name] == file}
        specs = {name: (tensor.dtype, tensor.shape) for name, tensor in part.items()}
        safetensors_files.write(tmp_path / file, specs, iter(part.values()))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    sharded = RewardModel(str(tmp_path))
    np.testing.assert_array_equal(sharded.score([text]), expected)
    assert sharded.version == zlib.crc32(b"".join((tmp_path / f"model-{i}.safetensors").read_bytes() for i in (1, 2)))


@pytest.mark.parametrize(
    ("fields", "head", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, (1, 32), r"\(\['LlamaForCausalLM'\]\) must name one ForSequenceCl"),
        ({"architectures": None}, (1, 32), r"architectures \(None\) must name one"),
        ({"architectures": ["BertForSequenceClassification"]}, (1, 32), "must name one of LlamaForCausalLM"),
        ({}, (2, 32), r"score.weight has shape \[2, 32\], not \[1, 32\]"),
        ({"num_hidden_layers": 1}, (1, 32), "unexpected model.layers.1"),
        ({"attention_bias": True}, (1, 32), r"attention_bias \(True\) is not supported"),
        ({"pad_token_id": "x"}, (1, 32), r"pad_token_id \('x'\) must be an integer, or null"),
    ],
)
def test_what_is_no_reward_model_is_refused_before_it_is_loaded(tmp_path, fields, head, message):
    hf_directories.write_score_model(tmp_path, "llama", np.zeros(head, np.float32))
    change_config(tmp_path, **fields)
    with pytest.raises(ConfigError, match=message):
        RewardModel(str(tmp_path))


def test_fields_of_training_are_no_matter(tmp_path):
    hf_directories.write_score_model(tmp_path, "llama")
    change_config(tmp_path, problem_type="regression", id2label={"0": "LABEL_0"})
    RewardModel(str(tmp_path))
    with pytest.raises(ConfigError, match=r"max_tokens \(0\) must be positive"):
        RewardModel(str(tmp_path), max_tokens=0)


# ---- as a task's reward


def test_a_task_asks_for_it_by_name_and_loads_no_weights(directory, model):
    task = load_task(f"reverse?reward=model:{directory}&weight=0.5&max_tokens=64&reward=task")
    made = task._rewards["model"]
    assert made._weights == ()
    assert made._lengths() == [64]
    assert model._lengths() == [64, 128, 200]
    assert not task.reward_waits
    task.prepare()
    prompt = Prompt("ab=", answer="ba")
    model.prepare()
    expected = {"model": model(prompt, "ba"), "model_version": model.version, "reward": 1.0}
    assert task.reward(prompt, "ba") == pytest.approx(expected, abs=1e-5)
    assert dict(task.reward_weights) == {"model": 0.5, "model_version": 0.0}


def test_too_little_memory_is_said_before_anything_is_loaded(directory, monkeypatch):
    model = RewardModel(str(directory))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**31, 2**31))
    with pytest.raises(ConfigError, match=r"its process may have 2,147,483,648; give --reward.memory-bytes \d+ or"):
        model.prepare()
    assert model._weights == ()


S = 100.0  # bounds hanging alone


@pytest.mark.slow
def test_reward_processes_load_it_and_score_as_here(directory, model, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    monkeypatch.setenv("XLA_FLAGS", "")
    task, prompt = f"reverse?reward=model:{directory}", Prompt("ab=")
    pool = RewardPool(task, RewardConfig(timeout_s=S), Metrics(), crew := Crew())
    try:
        futures = [pool.submit(prompt, "b" * n) for n in range(100)]
        found = [future.result(2 * S) for future in futures]
        assert crew.failure is None
    finally:
        pool.close()
    expected = [model(prompt, "b" * n) for n in range(100)]
    np.testing.assert_allclose([scores["model"] for scores in found], expected, atol=1e-5)
    assert {scores["model_version"] for scores in found} == {model.version}


def test_a_model_that_a_reward_process_has_not_the_memory_for_is_refused_before_a_run(directory):
    task = load_task(f"reverse?reward=model:{directory}")
    with pytest.raises(
        ConfigError, match=r"its process may have 1,073,741,824; give --reward.memory-bytes \d+ or more"
    ):
        task.check_config(RewardConfig(memory_bytes=2**30))
    task.check_config(RewardConfig())


@pytest.mark.slow
def test_a_reward_process_without_the_memory_stops_the_run(directory, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    pool = RewardPool(f"reverse?reward=model:{directory}", RewardConfig(memory_bytes=2**30), Metrics(), crew := Crew())
    try:
        assert crew.stop.wait(S)
        assert isinstance(crew.failure, ConfigError)
        assert "give --reward.memory-bytes" in str(crew.failure)
    finally:
        pool.close()
