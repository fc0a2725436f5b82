import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from seedx import bpe
from seedx.checks import ConfigError
from seedx.tokenizer import TextStream

BYTES = bpe.byte_tokenizer()
BOS, START, END = 257, 258, 259
SPECIAL = ["<s>", "</s>", "<|eot|>"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0"))


def gguf_metadata(**changes):
    """A byte-level BPE with merges for "abc", " a" and "12"; ids 0 to 2 are special, 3 is a token of the user's."""
    tokens = [*SPECIAL, "<tool>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "Ġa", "12"]
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": np.array([3, 3, 3, 4] + [1] * (len(tokens) - 4)),
        "merges": ["a b", "ab c", "Ġ a", "1 2"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eot_token_id": 2,
        "add_bos_token": True,
    } | changes
    return {f"tokenizer.ggml.{key}": item for key, item in metadata.items() if item is not None}


@pytest.fixture(scope="module")
def small():
    return bpe.from_gguf(gguf_metadata())


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE of the library's, trained on this file."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train([__file__], trainer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return library


def save(directory, library, config=None, **files):
    library.save(str(directory / "tokenizer.json"))
    for name, content in {"config": {"eos_token_id": 1} if config is None else config, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def pieces(tokenizer, tokens):
    return [tokenizer.token_bytes(token).decode() for token in tokens]


@given(TEXTS)
def test_the_byte_tokenizer_spells_utf8(text):
    assert BYTES.encode(text, add_bos=False) == list(text.encode())
    assert BYTES.encode(text)[0] == BOS
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.lists(st.one_of(st.integers(0, 263), st.sampled_from(list("é😀日".encode())))))
def test_a_stream_joined_is_the_whole_decoded(tokens):
    stream = TextStream(BYTES)
    assert "".join(map(stream.push, tokens)) + stream.flush() == BYTES.decode(tokens)


@given(TEXTS)
def test_a_stream_gives_whole_characters_and_takes_nothing_back(text):
    stream, given_out = TextStream(BYTES), ""
    for i, token in enumerate(text.encode()):
        given_out += stream.push(token)
        whole = text.encode()[: i + 1].decode(errors="ignore")
        assert given_out == whole
    assert given_out == text
    assert stream.flush() == ""


def test_what_is_held_back_comes_at_the_end():
    stream = TextStream(BYTES)
    assert [stream.push(byte) for byte in b"a\xf0\x9f"] == ["a", "", ""]
    assert stream.flush() == "\ufffd"


@pytest.fixture(scope="module")
def ours(trained):
    """The trained one as we read it, from tokenizer.json's content and from the parts that GGUF keeps."""
    spec = json.loads(trained.to_str())
    vocabulary = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    types = np.array([3] * 3 + [1] * (len(vocabulary) - 3))
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    parts = gguf_metadata(tokens=vocabulary, token_type=types, merges=merges, pre="gpt-2")
    return [bpe.BpeTokenizer(spec, None, (1,), 1), bpe.from_gguf(parts)]


@given(TEXTS)
def test_a_trained_bpe_is_the_library_s(trained, ours, text):
    for tokenizer in ours:
        tokens = tokenizer.encode(text, add_bos=False, parse_special=True)
        assert tokens == trained.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokens) == trained.decode(tokens) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "1", "2"]),
        ("gpt-2", ["12", "12"]),
        ("llama-bpe", ["12", "1", "2"]),
        ("qwen2", ["1", "2", "1", "2"]),
    ],
)
def test_texts_are_split_as_the_file_says(pre, expected):
    tokenizer = bpe.from_gguf(gguf_metadata(pre=pre))
    assert pieces(tokenizer, tokenizer.encode("abc a 1212", add_bos=False)) == ["abc", " a", " ", *expected]


def test_special_tokens_are_parsed_only_where_asked(small):
    text = "a</s><|eot|>b"
    assert small.decode(small.encode(text)) == text
    assert set(small.encode(text, add_bos=False)).isdisjoint({0, 1, 2})
    assert [token for token in small.encode(text, parse_special=True) if token < 3] == [0, 1, 2]
    assert small.encode("x" + small.literal(text), parse_special=True) == small.encode("x" + text)
    assert 3 in small.encode("a<tool>b")  # user-defined: always parsed, as llama.cpp does
    assert small.decode([3]) == "<tool>"


def test_special_tokens_that_overlap_stay_text():
    tokens = ["aba", "bab", *gguf_metadata()["tokenizer.ggml.tokens"][2:]]
    tokenizer = bpe.from_gguf(gguf_metadata(tokens=tokens, add_bos_token=False))
    assert tokenizer.encode("ababab", parse_special=True)[0] == 0
    assert pieces(tokenizer, tokenizer.encode("ababab")) == ["ab"] * 3


@pytest.mark.parametrize("text", ["x", "<s>x", "<s><s>x"])
@pytest.mark.parametrize("parse_special", [False, True])
def test_there_is_one_bos(small, text, parse_special):
    assert small.bos_id == 0
    assert small.encode(text, parse_special=parse_special) == [0, *small.encode("x", add_bos=False)]
    without = bpe.from_gguf(gguf_metadata(add_bos_token=False))
    assert without.bos_id is None
    assert without.encode("x") == small.encode("x", add_bos=False)


def test_ids_of_a_gguf_file(small):
    assert (small.eos_ids, small.pad_id, small.vocab_size) == ((1, 2), 1, 264)
    assert bpe.from_gguf(gguf_metadata(padding_token_id=2)).pad_id == 2
    assert bpe.from_gguf(gguf_metadata(pre="llama-bpe", add_bos_token=None)).bos_id == 0
    assert small.token_bytes(100_000) == b""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"tokenizer.ggml.model \(llama\) is not supported, only gpt2"),
        ({"pre": "deepseek"}, r"tokenizer.ggml.pre \(deepseek\) is not supported, only gpt-2, smollm"),
        ({"merges": None}, r"the file has no tokenizer.ggml.merges"),
        ({"token_type": np.array([1])}, r"token_type has 1 entries for 264 tokens"),
        ({"merges": ["a missing"]}, r"the tokenizer cannot be built"),
    ],
)
def test_other_gguf_tokenizers_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        bpe.from_gguf(gguf_metadata(**changes))


def test_half_a_surrogate_pair_is_refused(small):
    with pytest.raises(ValueError, match="surrogate"):
        small.encode("a\ud800")


def test_a_directory(tmp_path, trained):
    settings = {"eos_token": {"content": "</s>"}, "pad_token": "</s>"}
    save(tmp_path, trained, tokenizer_config=settings, generation_config={"eos_token_id": [2, 1]})
    tokenizer = bpe.from_json(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (1, 2), 1)
    assert tokenizer.encode("def test") == trained.encode("def test").ids


def test_a_sentencepiece_vocabulary(tmp_path):
    """As Gemma's: spaces are written U+2581, what is not in the vocabulary as bytes."""
    vocabulary = ["<bos>", "<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    merges = [("▁", "a"), ("a", "b")]
    library = Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocabulary)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    library.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in vocabulary[:3]])
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = bpe.from_json(save(tmp_path, library))
    for text in ("a b", "  ab é😀", "ab\n日本 a"):
        tokens = tokenizer.encode(text)
        assert tokens == library.encode(text).ids
        assert tokenizer.decode(tokens) == library.decode(tokens) == text
    assert tokenizer.decode(tokenizer.encode("<eos>")) == "<eos>"
    assert tokenizer.encode("<eos>", parse_special=True) == [1]


def test_other_directories_are_refused(tmp_path, trained):
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        bpe.from_json(tmp_path)
    with pytest.raises(ConfigError, match=r"config.json needs eos_token_id"):
        bpe.from_json(save(tmp_path, trained, config={}))
    for content, message in [("{", "is not JSON"), ("[]", "must hold a JSON object"), ("{}", "cannot be read")]:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match=rf"tokenizer.json {message}"):
            bpe.from_json(tmp_path)
    trained = Tokenizer.from_str(trained.to_str())
    trained.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"decoder \(WordPiece\) is not supported, only ByteLevel and ByteFallback"):
        bpe.from_json(save(tmp_path, trained))
