"""Text to tokens and back, and the model's chat template."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from meshpipe.errors import ModelError, UsageError
from meshpipe.llama.context import free_model
from meshpipe.llama.gguf import read_header
from meshpipe.llama.options import EngineOptions

_UNUSED = 1 << 1  # LLAMA_TOKEN_ATTR_UNUSED


class Vocabulary:
    """The tokenizer of a model file or of a first stage's slice; loads no weights. Not thread-safe."""

    def __init__(self, path: str | Path) -> None:
        self.digest = read_header(path).vocabulary  # which says in one line what is wrong with a file
        self._model = EngineOptions().load(Path(path), vocab_only=True)
        self._formatter: Jinja2ChatFormatter | None = None  # compiled when it is first needed
        vocab = self.pointer
        self.size: int = llama_cpp.llama_vocab_n_tokens(vocab)
        if llama_cpp.llama_vocab_type(vocab) == 0:
            self.close()
            raise ModelError(f"{path} has no vocabulary: give the model, or a slice that starts at layer 0")
        self.end_tokens = frozenset(
            token for token in range(self.size) if llama_cpp.llama_vocab_is_eog(vocab, token)
        )

    @property
    def _open_model(self) -> Any:
        if not self._model:
            raise UsageError("this vocabulary is closed")
        return self._model

    @property
    def pointer(self) -> Any:
        """llama.cpp's vocabulary."""
        return llama_cpp.llama_model_get_vocab(self._open_model)

    def tokenize(self, text: str, *, special: bool = True, start: bool = True) -> tuple[int, ...]:
        """Token ids of `text`; `special` parses markers like `<|im_end|>`, `start` adds the model's own BOS.

        Raises UsageError for text that is no Unicode.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not valid Unicode: {error}") from None
        room = len(data) + 16
        tokens = (ctypes.c_int32 * room)()
        count = llama_cpp.llama_tokenize(self.pointer, data, len(data), tokens, room, start, special)
        if count < 0:  # a vocabulary may need more tokens than bytes
            room = -count
            tokens = (ctypes.c_int32 * room)()
            count = llama_cpp.llama_tokenize(self.pointer, data, len(data), tokens, room, start, special)
        return tuple(tokens[:count])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, which may be part of a character; b"" for control tokens unless `special`."""
        if not 0 <= token < self.size:
            raise UsageError(f"token {token} is outside the vocabulary of {self.size}")
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = llama_cpp.llama_token_to_piece(self.pointer, token, buffer, room, 0, special)
            if size >= 0:
                return buffer.raw[:size]
            room = -size

    def raw(self, token: int) -> str:
        """The token as the file spells it; for comparing vocabularies."""
        found = llama_cpp.llama_vocab_get_text(self.pointer, token)
        return found.decode("utf-8", "replace") if found else ""

    def unused(self, token: int) -> bool:
        """Whether the file says that the token is padding."""
        return bool(llama_cpp.llama_vocab_get_attr(self.pointer, token) & _UNUSED)

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of whole tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.piece(token, special=special) for token in tokens).decode("utf-8", "replace")

    @property
    def chat_template(self) -> str | None:
        """The model's Jinja chat template."""
        template = llama_cpp.llama_model_chat_template(self._open_model, None)
        return template.decode("utf-8", "replace") if template else None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> str:
        """The prompt of a conversation, by the model's template, up to where the assistant speaks.

        Raises UsageError when the model has no template or the template refuses the messages.
        """
        template = self.chat_template
        if template is None:
            raise UsageError("this model carries no chat template: send a plain prompt")
        try:
            if self._formatter is None:
                eos = self._special(llama_cpp.llama_vocab_eos(self.pointer))
                bos = self._special(llama_cpp.llama_vocab_bos(self.pointer))
                self._formatter = Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)
            return str(self._formatter(messages=list(messages), **extra).prompt)
        except Exception as error:
            raise UsageError(f"the model's chat template refused the messages: {error}") from error

    def _special(self, token: int) -> str:
        return self.text([token], special=True) if token >= 0 else ""

    def close(self) -> None:
        """Frees the model; safe to call twice."""
        if self._model:
            free_model(self._model)
            self._model = None


class TextStream:
    """Turns tokens into text as they come, never emitting half a UTF-8 character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return self._decoder.decode(b"".join(map(self._vocabulary.piece, tokens)))

    def finish(self) -> str:
        """What an unfinished character at the very end leaves: U+FFFD or nothing."""
        return self._decoder.decode(b"", final=True)
