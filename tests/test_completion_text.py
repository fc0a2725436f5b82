"""Texts and stop texts do not depend on where tokens end."""

from hypothesis import given
from hypothesis import strategies as st

from seedx.inference.completion_text import CompletionText


class Pieces:
    """A tokenizer whose tokens are given pieces of bytes."""

    vocab_size, bos_id, eos_ids, pad_id = 1000, None, (), 0

    def __init__(self, pieces):
        self.pieces = pieces

    def encode(self, text, add_bos=True, parse_special=False):
        raise AssertionError("not used")

    def literal(self, text):
        return text

    def decode(self, tokens):
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def token_bytes(self, token):
        return self.pieces[token]


def read(pieces, stops):
    """The text, what was shown after each token, and how many tokens were read."""
    text = CompletionText(Pieces(pieces), stops)
    shown = []
    for token in range(len(pieces)):
        shown.append(text.push(token))
        if text.stopped:
            break
    shown.append(text.flush())
    assert "".join(shown) == text.text
    return text, shown


TEXTS = st.text(alphabet="ab€", max_size=12)
CUTS = st.sets(st.integers(0, 40))
STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3).map(tuple)


@given(text=TEXTS, cuts=CUTS, stops=STOPS)
def test_any_cut_into_tokens_gives_the_text_before_the_first_stop(text, cuts, stops):
    data = text.encode()
    ends = sorted(cut for cut in cuts if cut < len(data))
    pieces = [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]
    result, shown = read(pieces, stops)
    # The first stop text to be complete ends the text; of those complete with one token, the one that begins first.
    whole = ""
    for count in range(len(pieces) + 1):
        whole = b"".join(pieces[:count]).decode("utf-8", "ignore")
        found = [whole.index(stop) for stop in stops if stop in whole]
        if found:
            assert result.stopped
            assert result.text == whole[: min(found)]
            assert len(shown) == count + 1
            return
    assert not result.stopped
    assert result.text == text


def test_only_what_may_become_a_stop_text_is_held_back():
    _, shown = read([b"xy", b"a", b"b", b"a", b"c", b"z"], ("abc",))
    assert shown == ["xy", "", "", "ab", "ac", "z", ""]


def test_half_a_character_is_never_shown():
    _, shown = read([b"\xe2", b"\x82", b"\xac!", b"\xe2"], ())
    assert shown == ["", "", "€!", "", "\ufffd"]
