"""The order of prompts, and prompts as tokens."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedx.bpe import byte_tokenizer
from seedx.chat import CHATML, ChatTemplate
from seedx.checks import ConfigError
from seedx.envs.text.encode import encode_prompt
from seedx.envs.text.prompts import PromptSource, Taken
from seedx.envs.text.task import Prompt

BYTES = byte_tokenizer()
TEMPLATES = json.loads((Path(__file__).parent / "golden" / "texts.json").read_text())["templates"]
CHAT = Prompt(messages=({"role": "user", "content": "Hi"},))


def prompts(count):
    return [Prompt(str(i)) for i in range(count)]


@given(count=st.integers(1, 40), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 10**6))
def test_an_epoch_takes_each_prompt_once(count, seed, epoch):
    source = PromptSource(prompts(count), seed)
    taken = [source.at(epoch * count + i) for i in range(count)]
    assert sorted(t.uid for t in taken) == list(range(count))
    assert {t.epoch for t in taken} == {epoch}
    assert all(t.prompt.text == str(t.uid) for t in taken)


@given(positions=st.lists(st.integers(0, 10**9), min_size=1, max_size=20), seed=st.integers(0, 2**31 - 1))
def test_a_position_s_prompt_depends_on_nothing_that_was_asked_before(positions, seed):
    source = PromptSource(prompts(7), seed)
    assert [source.at(i) for i in positions] == [PromptSource(prompts(7), seed).at(i) for i in positions]


def test_the_end_of_an_epoch_is_the_begin_of_the_next():
    source = PromptSource(prompts(5), seed=3)
    assert [source.at(i).epoch for i in (4, 5, 9, 10)] == [0, 1, 1, 2]


def test_one_prompt_is_taken_again_and_again():
    only = Prompt("x")
    assert [PromptSource([only], 0).at(i) for i in range(3)] == [Taken(epoch, 0, only) for epoch in range(3)]


def test_equal_prompts_stay_two():
    source = PromptSource([Prompt("x"), Prompt("x")], 0)
    assert {source.at(0).uid, source.at(1).uid} == {0, 1}


def test_orders_differ_between_epochs_and_seeds_and_are_uniform():
    def order(seed, epoch, count):
        source = PromptSource(prompts(count), seed)
        return tuple(source.at(epoch * count + i).uid for i in range(count))

    assert len({order(seed, epoch, 20) for seed in range(5) for epoch in range(5)}) == 25
    seen = Counter(order(0, epoch, 3) for epoch in range(1200))
    assert len(seen) == 6
    assert np.square(np.array([*seen.values()]) - 200).sum() / 200 < 20.5  # chi-square of 5 degrees: p > 0.001


def test_the_order_is_the_same_in_every_version():
    source = PromptSource(prompts(6), seed=7)
    assert [source.at(i).uid for i in range(12)] == [3, 4, 2, 1, 5, 0, 4, 0, 3, 2, 5, 1]


def test_what_cannot_be_taken_is_refused():
    with pytest.raises(ConfigError, match=r"no prompts \(0\) in this split; it must have at least one"):
        PromptSource([], 0)
    with pytest.raises(ConfigError, match=r"order \(-1\) must not be negative"):
        PromptSource(prompts(1), -1)
    with pytest.raises(ValueError, match=r"position \(-1\) must not be negative"):
        PromptSource(prompts(1), 0).at(-1)


def test_a_text_stays_as_it_is_after_one_bos():
    template = ChatTemplate(CHATML, {})
    assert encode_prompt(Prompt("a<|im_end|>"), BYTES, template) == (BYTES.bos_id, *b"a<|im_end|>")
    assert encode_prompt(Prompt(""), BYTES, None) == (BYTES.bos_id,)


@pytest.mark.parametrize("template", TEMPLATES)
def test_messages_go_through_the_template_with_one_bos(template):
    tokens = encode_prompt(CHAT, BYTES, ChatTemplate(TEMPLATES[template], {"bos_token": "<|bos|>", "eos_token": ""}))
    assert tokens[0] == BYTES.bos_id
    assert tokens.count(BYTES.bos_id) == 1
    assert b"Hi" in bytes(token for token in tokens if token < 256)


class WithoutBos:
    """A tokenizer of a model that has no BOS."""

    vocab_size, bos_id, eos_ids, pad_id = 256, None, (0,), 0

    def encode(self, text, add_bos=True, parse_special=False):
        return [*text.encode()]

    def literal(self, text):
        return text

    def token_bytes(self, token):
        return bytes([token])

    def decode(self, tokens):
        return bytes(tokens).decode()


def test_a_model_without_bos_gets_none():
    assert encode_prompt(Prompt("ab"), WithoutBos(), None) == tuple(b"ab")
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert encode_prompt(CHAT, WithoutBos(), template) == tuple(b"Hi")
    with pytest.raises(ConfigError, match=r"a prompt is empty, and the model has no BOS .* give the prompt a text"):
        encode_prompt(Prompt(""), WithoutBos(), None)


def test_messages_that_the_model_cannot_take_are_refused():
    with pytest.raises(ConfigError, match=r"has messages, and the model has no chat template .* use a chat model, or"):
        encode_prompt(CHAT, BYTES, None)
    with pytest.raises(
        ConfigError, match=r"cannot be given to this model: messages\[0\]\.role \(judge\) must be one of"
    ):
        encode_prompt(Prompt(messages=({"role": "judge", "content": ""},)), BYTES, ChatTemplate(CHATML, {}))
