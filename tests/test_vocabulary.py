"""Text to tokens and back, half characters, and the chat template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpipe.errors import ModelError, UsageError
from meshpipe.llama.slicing import slice_model
from meshpipe.llama.vocabulary import TextStream, Vocabulary

# The model's vocabulary lacks tokens for some bytes: control characters and unassigned planes do not survive it.
LETTERS = st.text(st.characters(max_codepoint=0x4FF, categories=["L", "N", "P", "Zs"]), max_size=60)


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Iterator[Vocabulary]:
    """Of the first stage's slice: no weights of other stages are needed."""
    vocabulary = Vocabulary(slice_model(smollm2, 0, 1))
    yield vocabulary
    vocabulary.close()


def test_the_slice_has_the_whole_vocabulary(smollm2: Path, vocabulary: Vocabulary) -> None:
    whole = Vocabulary(smollm2)
    text = "The quick brown fox, 12.5%, naïve 日本語 🙂\n\tdef f(x): return x<|im_end|>"
    assert whole.size == vocabulary.size == 49152
    assert whole.tokenize(text) == vocabulary.tokenize(text)
    assert whole.end_tokens == vocabulary.end_tokens
    assert 2 in whole.end_tokens  # <|im_end|>
    whole.close()


@given(text=LETTERS)
def test_text_survives(vocabulary: Vocabulary, text: str) -> None:
    tokens = vocabulary.tokenize(text, special=False)
    assert vocabulary.text(tokens, special=True) == text


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(1, 4), max_size=30))
def test_a_stream_never_gives_half_a_character(vocabulary: Vocabulary, text: str, cuts: list[int]) -> None:
    tokens = list(vocabulary.tokenize(text, special=False))
    whole = vocabulary.text(tokens)
    stream, pieces = TextStream(vocabulary), []
    while tokens:
        count = cuts.pop() if cuts else 1
        pieces.append(stream.feed(tokens[:count]))
        del tokens[:count]
    pieces.append(stream.finish())
    assert "".join(pieces) == whole


def test_bytes_that_are_no_text_become_replacement_characters(vocabulary: Vocabulary) -> None:
    smile = vocabulary.tokenize("🙂", special=False)
    assert len(smile) > 1
    stream = TextStream(vocabulary)
    assert stream.feed(smile[:1]) == ""
    assert stream.finish() == "\ufffd"


def test_markers_are_tokens_only_when_asked_for(vocabulary: Vocabulary) -> None:
    assert vocabulary.tokenize("<|im_start|>") == (1,)
    assert len(vocabulary.tokenize("<|im_start|>", special=False)) > 1
    assert vocabulary.piece(1) == b""
    assert vocabulary.piece(1, special=True) == b"<|im_start|>"


def test_chat_template(vocabulary: Vocabulary) -> None:
    prompt = vocabulary.render_chat([{"role": "user", "content": "Hi!"}])
    assert prompt.endswith("<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n")
    assert vocabulary.tokenize(prompt)[0] == 1
    with pytest.raises(UsageError, match="chat template refused"):
        vocabulary.render_chat([{"role": "user"}, 3])  # type: ignore[list-item]


def test_what_has_no_vocabulary(smollm2: Path, vocabulary: Vocabulary) -> None:
    with pytest.raises(ModelError, match="has no vocabulary"):
        Vocabulary(slice_model(smollm2, 14, 15))
    with pytest.raises(UsageError, match="token 49152 is outside"):
        vocabulary.piece(49152)
