"""Tokenizers of the `tokenizers` library: from tokenizer.json, from a GGUF file's metadata, and one of plain bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from seedx.checks import ConfigError

# A noncharacter, which no text may hold (Unicode 23.7). Between the characters of a special token it keeps the library
# from seeing one; it is dropped before anything else is done to the text.
_MARK = "\ufdd0"
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types of GGUF

# What llama.cpp's names of pre-tokenizers do: each text is split, and tokens never reach over a split.
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES = _GPT2 | {"use_regex": False}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_PRE_TOKENIZERS = {
    "gpt-2": [_GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
    "llama-bpe": [_split(_WORDS.replace("DIGITS", "{1,3}")), _BYTES],
    "qwen2": [_split(_WORDS.replace("DIGITS", "")), _BYTES],
}
_ADDS_BOS = ("llama-bpe",)  # unless the file says otherwise


class BpeTokenizer:
    """A `seedx.tokenizer.Tokenizer` over the library's. Any thread may use it.

    Args:
        spec: Content of a tokenizer.json.
        bos_id: None: prompts begin with none.
        eos_ids: Tokens that end a completion.
        pad_id: Token of padding.

    Raises:
        ConfigError: the library cannot read it, or its tokens are not strings of bytes.
    """

    def __init__(self, spec: dict[str, Any], bos_id: int | None, eos_ids: tuple[int, ...], pad_id: int) -> None:
        added = spec.get("added_tokens") or []
        special = [token["content"] for token in added if token["special"]]
        # Special tokens are found before the marks are dropped.
        added = [token | {"normalized": token["normalized"] and not token["special"]} for token in added]
        drop_marks = {"type": "Replace", "pattern": {"String": _MARK}, "content": ""}
        steps = [drop_marks, *([spec["normalizer"]] if spec.get("normalizer") else [])]
        normalizer = {"type": "Sequence", "normalizers": steps}
        try:
            whole = json.dumps(spec | {"added_tokens": added, "normalizer": normalizer})
            self._library = tokenizers.Tokenizer.from_str(whole)
        except Exception as error:  # the library raises no narrower one
            raise ConfigError(f"the tokenizer cannot be built: {error}.") from error
        starts = "|".join(re.escape(token) for token in special)
        self._special = re.compile(f"(?=(?:{starts}))(.)", re.DOTALL) if special else None
        self._bytes = _bytes_of_tokens(self._library, spec.get("decoder") or {}, set(special))
        self.vocab_size, self.bos_id, self.eos_ids, self.pad_id = len(self._bytes), bos_id, eos_ids, pad_id

    def encode(self, text: str, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """See `Tokenizer`.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        begin = [self.bos_id] if add_bos and self.bos_id is not None else []
        if begin and (bos := self._library.id_to_token(begin[0])):
            while text.startswith(bos):
                text = text.removeprefix(bos)
        try:
            encoding = self._library.encode(text if parse_special else self.literal(text), add_special_tokens=False)
        except TypeError:  # what the library says of text that is no Unicode
            raise ValueError("the text holds half of a surrogate pair; send whole characters.") from None
        return begin + encoding.ids

    def literal(self, text: str) -> str:
        """See `Tokenizer`."""
        return self._special.sub(rf"\1{_MARK}", text) if self._special else text

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer`."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer`."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")


def _bytes_of_tokens(library: tokenizers.Tokenizer, decoder: dict[str, Any], special: set[str]) -> list[bytes]:
    """For each id its bytes."""
    kinds = {step["type"] for step in [decoder, *decoder.get("decoders", [])] if step}
    if "ByteLevel" in kinds:
        to_byte = {char: byte for byte, char in enumerate(_byte_alphabet())}

        def to_bytes(token: str) -> bytes:
            return bytes(to_byte[char] for char in token)
    elif "ByteFallback" in kinds:  # SentencePiece

        def to_bytes(token: str) -> bytes:
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
    else:
        raise ConfigError(
            f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported, only ByteLevel and "
            "ByteFallback: its tokens are no strings of bytes."
        )
    added = {index: token.content for index, token in library.get_added_tokens_decoder().items()}
    vocabulary = library.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        if token not in special:
            table[index] = added[index].encode() if index in added else to_bytes(token)
    return table


def _byte_alphabet() -> list[str]:
    """For each byte the character that byte-level BPE writes it as (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _byte_level(vocabulary: dict[str, int], merges: list[str], steps: list[dict[str, Any]], **model: Any) -> dict:
    """The tokenizer.json of a byte-level BPE, still without added tokens."""
    merged = [merge.split(" ", 1) for merge in merges]
    return {
        "version": "1.0",
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _GPT2,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merged, **model},
    }


def _added(index: int, token: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, "special": special, **flags}


def byte_tokenizer() -> BpeTokenizer:
    """Ids 0 to 255 are bytes; then <|pad|>, <|bos|>, <|im_start|> and <|im_end|>, which ends a completion."""
    spec = _byte_level({char: byte for byte, char in enumerate(_byte_alphabet())}, [], [_BYTES])
    names = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
    spec["added_tokens"] = [_added(256 + i, name, True) for i, name in enumerate(names)]
    return BpeTokenizer(spec, bos_id=257, eos_ids=(259,), pad_id=256)


def from_gguf(metadata: Mapping[str, Any]) -> BpeTokenizer:
    """The tokenizer that a GGUF file holds.

    Raises:
        ConfigError: it is not a byte-level BPE with a known pre-tokenizer, or a part is missing.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ConfigError(f"tokenizer.ggml.model ({kind}) is not supported, only gpt2 (byte-level BPE).")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(f"tokenizer.ggml.pre ({pre}) is not supported, only {', '.join(_PRE_TOKENIZERS)}.")
    for key in ("tokens", "merges", "token_type", "eos_token_id"):
        if f"tokenizer.ggml.{key}" not in metadata:
            raise ConfigError(f"the file has no tokenizer.ggml.{key}.")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if len(tokens) != len(types):
        raise ConfigError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens.")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = metadata["tokenizer.ggml.merges"]
    spec = _byte_level(vocabulary, merges, _PRE_TOKENIZERS[pre], ignore_merges=pre == "llama-bpe")
    spec["added_tokens"] = [
        _added(i, tokens[i], kind != _USER_DEFINED)
        for i, kind in enumerate(types.tolist())
        if kind in (_CONTROL, _USER_DEFINED, _UNUSED)
    ]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in _ADDS_BOS)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id") if adds_bos else None
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    eos_ids = tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))
    return BpeTokenizer(spec, bos_id, eos_ids, metadata.get("tokenizer.ggml.padding_token_id", eos_ids[0]))


def from_json(directory: Path) -> BpeTokenizer:
    """The tokenizer of a Hugging Face directory: tokenizer.json, and what ends a completion from the configs.

    Raises:
        ConfigError: there is no tokenizer.json, it is not supported, or nothing ends a completion.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{directory} has no tokenizer.json; save a fast tokenizer there (transformers makes them).")
    spec = read_json(path)
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    first = next(iter(library.encode("a").ids), -1)  # with what its post-processor puts before
    begins = library.get_added_tokens_decoder().get(first)
    settings = read_json(directory / "tokenizer_config.json")
    eos_ids = [library.token_to_id(token_text(settings.get("eos_token")))]
    for name in ("generation_config.json", "config.json"):
        ends = read_json(directory / name).get("eos_token_id")
        eos_ids += ends if isinstance(ends, list) else [ends]
    ends = tuple(dict.fromkeys(index for index in eos_ids if index is not None))
    if not ends:
        raise ConfigError(f"{directory} does not say what ends a completion: config.json needs eos_token_id.")
    pad_id = library.token_to_id(token_text(settings.get("pad_token")))
    bos_id = first if begins is not None and begins.special else None
    return BpeTokenizer(spec, bos_id, ends, ends[0] if pad_id is None else pad_id)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file.

    Raises:
        ConfigError: the file holds something else.
    """
    try:
        found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return found


def token_text(entry: str | dict[str, Any] | None) -> str:
    """A token as tokenizer_config.json writes it: its text, or a table with it, or nothing."""
    return entry["content"] if isinstance(entry, dict) else entry or ""
