"""The demo's tokenizer: one token per character, so that a tiny model can copy any name it is shown.

The chat template writes each message as `<|role|>content<|end|>` and the generation prompt as `<|assistant|>`. Nothing
is trimmed or reordered: the ids of a chat are a prefix of the ids of the same chat with one more message.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROLES = ("user", "assistant", "tool", "hint")
PAD, END, UNKNOWN = "<pad>", "<|end|>", "<unk>"
ROLE_TOKENS = [f"<|{role}|>" for role in ROLES]
CHARACTERS = "".join(map(chr, range(ord(" "), ord("~") + 1))) + "\n"  # what error texts and teachers may write

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of printable ASCII and the demo's roles; `<|end|>` is its eos. Other characters become `<unk>`."""
    tokens = [PAD, END, UNKNOWN, *ROLE_TOKENS, *CHARACTERS]
    model = models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=ROLE_TOKENS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=512,
    )
