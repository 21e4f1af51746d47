"""A chat as the model's own template writes it, kept in step with the ids that were really sampled.

What was sampled is never tokenized again. After a turn the template's text of the longer chat must begin with the text
so far; then only what is new is tokenized and appended. Where the template rewrites history (it drops thinking, trims
white space, closes a turn with another token than the model did), it does not, and the caller starts a new sequence.

Templates write their special tokens themselves, a first one such as `<|begin_of_text|>` too, so text is always encoded
without any more of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

Message = dict[str, str]

HINT_ROLES = ("user", "system")  # of a hint where the model was not trained on hints; the first that it can write


@dataclass(frozen=True, slots=True)
class HintedPrompt:
    """A context with a hint before the coming turn: the first `cut` ids of the plain one, then `hint_ids`."""

    cut: int
    hint_ids: list[int]


class ChatText:
    """The text and ids of one growing chat. `tokenizer` is a transformers tokenizer with a chat template.

    A sampled turn is over at any of `stop_ids`; None: those that the tokenizer tells of (`turn_ends`).
    """

    def __init__(self, tokenizer: Any, hint_role: str = "hint", stop_ids: Iterable[int] | None = None) -> None:
        self.tokenizer, self.hint_role = tokenizer, hint_role
        self.stop_ids = frozenset(turn_ends(tokenizer) if stop_ids is None else stop_ids)
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
        ended = bool(ids) and ids[-1] in self.stop_ids
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
        copy = ChatText(self.tokenizer, self.hint_role, self.stop_ids)
        copy.messages, copy.ids, copy._text = list(self.messages), list(self.ids), self._text
        return copy

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def turn_ends(tokenizer: Any, others: Iterable[int] = ()) -> tuple[int, ...]:
    """The ids that end an assistant's turn, each once. The first is the one that the chat template writes there.

    That need not be the tokenizer's end-of-sequence token, which ends a turn as well: a chat model may end turns with
    `<|im_end|>` and documents with `<|endoftext|>`. `others` are what else the model declares (its generation config).
    """
    written = _closing_token(tokenizer)
    found = [written, tokenizer.eos_token_id, *others]
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))


def _closing_token(tokenizer: Any) -> int | None:
    """The special token that the template writes behind what the assistant said, if there is one."""
    said = "message-1;"
    chat = [{"role": "user", "content": "message-0;"}, {"role": "assistant", "content": said}]
    try:
        _, found, behind = _render(tokenizer, chat, prompt=False).rpartition(said)
    except TemplateError:
        return None
    ids = tokenizer.encode(behind, add_special_tokens=False) if found and behind else []
    return ids[0] if ids and ids[0] in _special_tokens(tokenizer) else None


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    return {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}


def find_hint_role(tokenizer: Any, opening: Sequence[str] = ("user",), observation_role: str = "tool") -> str:
    """The role for hints that suits a model: `hint` if it has a special token for that role, so that it was trained on
    hints; else the first of `HINT_ROLES` that its template writes before every turn.

    `opening` and `observation_role` as in `check_template`. ValueError when the template writes none of them.
    """
    if any("hint" in token for token in _special_tokens(tokenizer).values()):
        return "hint"
    written = _roles_written(tokenizer, HINT_ROLES, _before_a_turn(opening, observation_role))
    if not written:
        raise ValueError(
            f"the chat template writes no hint as a message of role {' or '.join(HINT_ROLES)}; set hint_layers to [] "
            "to do without hints"
        )
    return written[0]


def check_template(
    tokenizer: Any,
    *,
    hint_role: str | None = None,
    opening: Sequence[str] = ("user",),
    observation_role: str = "tool",
) -> None:
    """ValueError, with the remedy, when the chat template cannot write the chats of an episode.

    Tried are the chats before the first and before the second turn, each also with a message of `hint_role` at its end
    (None: there are no hints). `opening` are the roles before the first turn, `observation_role` is that of the message
    after a turn. A template may refuse a role, or leave its text out without a word.
    """
    chats = _before_a_turn(opening, observation_role)
    first, second = (_fault(tokenizer, roles) for roles in chats)
    if first and opening[0] == "system" and not _fault(tokenizer, opening[1:]):
        raise ValueError(f"the chat template knows no system message ({first}); leave system_prompt empty")
    if first and len(opening) > 1 and not _fault(tokenizer, ["user"]):
        raise ValueError(f"the chat template cannot write the examples: {first}; give them other roles")
    if second and not first:
        others = [role for role in ("user", "tool") if not _fault(tokenizer, [*opening, "assistant", role])]
        if others:
            raise ValueError(
                f"the chat template cannot write an observation of role {observation_role!r}: {second}; "
                f'set observation_role to "{others[0]}"'
            )
    if first or second:
        raise ValueError(
            f"the chat template cannot write an episode: {first or second}; use a model whose template does, or save "
            "one with its tokenizer (tokenizer.chat_template)"
        )
    if hint_role is None:
        return
    fault = next(filter(None, (_fault(tokenizer, [*roles, hint_role]) for roles in chats)), None)
    if fault:
        others = _roles_written(tokenizer, ("user", "system", "tool"), chats)
        remedy = f'set hint_role to "{others[0]}"' if others else "set hint_layers to [] to do without hints"
        raise ValueError(f"the chat template cannot write a hint of role {hint_role!r}: {fault}; {remedy}")


def _before_a_turn(opening: Sequence[str], observation_role: str) -> list[list[str]]:
    """The roles of the chats before the first and before the second turn."""
    return [[*opening], [*opening, "assistant", observation_role]]


def _roles_written(tokenizer: Any, roles: Sequence[str], chats: Sequence[Sequence[str]]) -> list[str]:
    """Those of `roles` that the template writes at the end of each of the chats."""
    return [role for role in roles if not any(_fault(tokenizer, [*chat, role]) for chat in chats)]


def _fault(tokenizer: Any, roles: Sequence[str]) -> str | None:
    """What goes wrong with a chat of these roles, or None."""
    messages = [{"role": role, "content": f"message-{number};"} for number, role in enumerate(roles)]
    order = ", ".join(roles)
    try:
        text = _render(tokenizer, messages, prompt=True)
    except TemplateError as error:
        return f"it refuses {order} ({error})"
    left_out = [message["role"] for message in messages if message["content"] not in text]
    return f"it leaves out the {left_out[0]} message of {order}" if left_out else None


def _render(tokenizer: Any, messages: Sequence[Message], *, prompt: bool) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))
