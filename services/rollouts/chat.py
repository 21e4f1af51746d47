"""A chat as the model's own template writes it, kept in step with the ids that were really sampled.

What was sampled is never tokenized again. After a turn the template's text of the longer chat must begin with the text
so far; then only what is new is tokenized and appended. Where the template rewrites history (it drops thinking, trims
white space), it does not, and the caller starts a new sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

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
        self._text = _render(self.tokenizer, self.messages, prompt=True)
        self.ids = self._encode(self._text)
        return self.ids

    def sampled(self, ids: Sequence[int]) -> str:
        """Append sampled ids as the assistant's turn; returns its content: the text without the end-of-turn token."""
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
        self.messages += messages
        text = _render(self.tokenizer, self.messages, prompt=True)
        forked = not text.startswith(self._text)
        new = self._encode(text if forked else text[len(self._text) :])
        self.ids = new if forked else self.ids + new
        self._text = text
        return new, forked

    def hinted(self, hint: str) -> HintedPrompt:
        """The context of the coming turn with `hint` in front of it: before its turn, so after `open` or `extend`."""
        with_hint = _render(self.tokenizer, [*self.messages, {"role": self.hint_role, "content": hint}], prompt=True)
        plain = _render(self.tokenizer, self.messages, prompt=False)
        if with_hint.startswith(plain) and self._text.startswith(plain):
            # The exact ids are kept up to the generation prompt, if it is cleanly the tail of what stands there.
            opener = self._encode(self._text[len(plain) :])
            cut = len(self.ids) - len(opener)
            if self.ids[cut:] == opener:
                return HintedPrompt(cut, self._encode(with_hint[len(plain) :]))
        return HintedPrompt(0, self._encode(with_hint))

    def copy(self) -> ChatText:
        """The chat as it stands now; what happens to one of the two does not change the other."""
        copy = ChatText(self.tokenizer, self.hint_role)
        copy.messages, copy.ids, copy._text = list(self.messages), list(self.ids), self._text
        return copy

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check_template(tokenizer: Any, *, hint_role: str | None = None, system: bool = False) -> None:
    """ValueError, with the remedy, when the chat template cannot write the chats of an episode.

    Tried are the chats before the first and before the second turn, each also with a message of `hint_role` at its end
    (None: there are no hints). A template may refuse a role, or leave its text out without a word.
    """
    opening = ["system", "user"] if system else ["user"]
    before_a_turn = [opening, [*opening, "assistant", "tool"]]
    for roles in before_a_turn:
        fault = _fault(tokenizer, roles)
        if fault and system and not _fault(tokenizer, roles[1:]):
            raise ValueError(f"the chat template knows no system message ({fault}); leave system_prompt empty")
        if fault:
            raise ValueError(
                f"the chat template cannot write an episode: {fault}; use a model whose template does, or save one "
                "with its tokenizer (tokenizer.chat_template)"
            )
    if hint_role is None:
        return
    faults = [_fault(tokenizer, [*roles, hint_role]) for roles in before_a_turn]
    if any(faults):
        others = [r for r in ("user", "system", "tool") if not any(_fault(tokenizer, [*b, r]) for b in before_a_turn)]
        remedy = f'set hint_role to "{others[0]}"' if others else "set hint_layers to [] to do without hints"
        raise ValueError(
            f"the chat template cannot write a hint of role {hint_role!r}: {next(filter(None, faults))}; {remedy}"
        )


def _fault(tokenizer: Any, roles: Sequence[str]) -> str | None:
    """What goes wrong with a chat of these roles, or None."""
    messages = [{"role": role, "content": f"message-{number}"} for number, role in enumerate(roles)]
    order = ", ".join(roles)
    try:
        text = _render(tokenizer, messages, prompt=True)
    except TemplateError as error:
        return f"it refuses {order} ({error})"
    left_out = [message["role"] for message in messages if message["content"] not in text]
    return f"it leaves out the {left_out[0]} message of {order}" if left_out else None


def _render(tokenizer: Any, messages: Sequence[Message], *, prompt: bool) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))
