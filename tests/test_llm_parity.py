"""`transformers` itself, in this interpreter: its logits are ours, and it reads what we save.

Needs torch and transformers; SEEDX_REQUIRE naming `parity` makes their absence fail.
"""

import importlib.util
import os

import hf_directories
import numpy as np
import parity_cases
import pytest

from seedx.envs.text.reward_model import RewardModel
from seedx.networks.hf_config import from_hf
from seedx.networks.hf_files import load_hf, save_hf

pytestmark = [pytest.mark.external, pytest.mark.filterwarnings("ignore:::torch"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def recorder():
    """record_logits.py, which imports torch and transformers."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing and "parity" in os.environ.get("SEEDX_REQUIRE", "").split():
        pytest.fail(f"SEEDX_REQUIRE names parity, and {', '.join(missing)} cannot be imported")
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    import record_logits

    return record_logits


@pytest.mark.parametrize("case", parity_cases.CASES)
def test_logits_are_those_of_transformers(tmp_path, recorder, case):
    hf_directories.write_case(tmp_path, case)
    config, params = load_hf(tmp_path)
    theirs = recorder.logits(case)
    assert np.abs(hf_directories.logits(config, params, case) - theirs).max() <= 1e-4
    np.testing.assert_allclose(np.load(recorder.GOLDEN)[case], theirs, atol=1e-5)


@pytest.mark.parametrize("case", parity_cases.CASES)
def test_transformers_reads_what_we_save(tmp_path, recorder, case):
    hf_directories.write_case(tmp_path / "a", case)
    save_hf(tmp_path / "b", *load_hf(tmp_path / "a"), max_shard_bytes=10_000)
    model, report = recorder.transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", attn_implementation="eager", dtype="float32", output_loading_info=True
    )
    assert not any(report.values()), report
    np.testing.assert_allclose(recorder.forward(model.eval(), case), recorder.logits(case), atol=1e-5)


@pytest.mark.parametrize("case", parity_cases.CASES)
def test_we_read_what_transformers_saves(tmp_path, recorder, case):
    model = recorder.model(case)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    config, params = load_hf(tmp_path)
    assert config == from_hf(parity_cases.CASES[case])
    assert np.abs(hf_directories.logits(config, params, case) - recorder.forward(model, case)).max() <= 1e-4


@pytest.mark.parametrize("case", ["llama", "llama_tied_theta", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_pattern"])
def test_scores_are_those_of_transformers(tmp_path, recorder, case):
    kind = recorder.transformers.AutoModelForSequenceClassification
    model = recorder.model(case, kind, num_labels=1, architectures=None)
    model.save_pretrained(tmp_path)
    hf_directories.write_byte_tokenizer(tmp_path)
    rows = np.where(parity_cases.tokens(case) == 0, 1, parity_cases.tokens(case))  # 0 is its padding
    texts = [rows[i % 2, :length].tolist() for i, length in enumerate((1, 5, 9, 14, 20))]
    texts += [[*texts[1], 0, 0], [0, *texts[2]]]
    padded = np.zeros((len(texts), 20), np.int64)
    seen = np.zeros((len(texts), 20), np.int64)
    for i, text in enumerate(texts):
        padded[i, : len(text)], seen[i, : len(text)] = text, 1
    torch = recorder.torch
    with torch.no_grad():
        theirs = model(torch.from_numpy(padded), attention_mask=torch.from_numpy(seen)).logits[:, 0].numpy()
    np.testing.assert_allclose(RewardModel(str(tmp_path)).score(texts), theirs, atol=1e-4)
