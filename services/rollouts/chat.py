"""A chat as the model's own template writes it, kept in step with the ids that were really sampled.

What was sampled is never tokenized again. After a turn the template's text of the longer chat must begin with the text
so far; then only what is new is tokenized and appended. Where the template rewrites history (it drops thinking, trims
white space), it does not, and the caller starts a new sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class HintedPrompt:
    """A context with a hint before the coming turn: the first `cut` ids of the plain one, then `hint_ids`."""

    cut: int
    hint_ids: list[int]


class ChatText:
    """The text and ids of one growing chat. `tokenizer` is a transformers tokenizer with a chat template."""

    def __init__(self, tokenizer: Any, hint_role: str = "hint") -> None:
        self.tokenizer, self.hint_role = tokenizer, hint_role
        self.messages: list[Message] = []
        self.ids: list[int] = []
        self._text = ""

    def open(self, messages: Sequence[Message]) -> list[int]:
        """Start with these messages; returns the prompt's ids, the generation prompt included."""
        self.messages = list(messages)
        self._text = self._render(self.messages, prompt=True)
        self.ids = self._encode(self._text)
        return self.ids

    def sampled(self, ids: Sequence[int]) -> str:
        """Append sampled ids as the assistant's turn; returns its content: the text without end-of-turn tokens."""
        ids = list(ids)
        ended = bool(ids) and ids[-1] == self.tokenizer.eos_token_id
        content = self._decode(ids[:-1] if ended else ids)
        self._text += self._decode(ids)
        self.ids = self.ids + ids
        self.messages.append({"role": "assistant", "content": content})
        return content

    def extend(self, messages: Sequence[Message]) -> tuple[list[int], bool]:
        """Append messages and the next generation prompt.

        Returns `(new ids, False)`, or `(ids of the whole chat, True)` when the template rewrote history.
        """
        self.messages += list(messages)
        text = self._render(self.messages, prompt=True)
        forked = not text.startswith(self._text)
        new = self._encode(text if forked else text[len(self._text) :])
        self.ids = new if forked else self.ids + new
        self._text = text
        return new, forked

    def hinted(self, hint: str) -> HintedPrompt:
        """The context of the coming turn with `hint` in front of it."""
        with_hint = self._render([*self.messages, {"role": self.hint_role, "content": hint}], prompt=True)
        plain = self._render(self.messages, prompt=False)
        opener = self._encode(self._text[len(plain) :])
        # Exact ids are kept up to the generation prompt when it is cleanly the tail of what stands there.
        if with_hint.startswith(plain) and self._text.startswith(plain) and self.ids[-len(opener) :] == opener:
            return HintedPrompt(len(self.ids) - len(opener), self._encode(with_hint[len(plain) :]))
        return HintedPrompt(0, self._encode(with_hint))

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
