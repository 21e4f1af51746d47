"""The demo's tokenizer: exact round trips, and a chat template whose ids only ever grow at the end."""

import random

import pytest
from transformers import AutoTokenizer

from services.demo.tokenizer import CHARACTERS, ROLE_TOKENS, build_tokenizer
from services.environments.toolbox.grammar import demonstration

CHAT = [
    {"role": "user", "content": "3+4*2"},
    {"role": "hint", "content": "sum(a,b)"},
    {"role": "assistant", "content": "sum(3,4)"},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": " odd  text,\n with 'spaces' . "},
]


def ids_of(tokenizer, chat, prompt=False):
    return tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)


def test_every_character_is_one_token_and_comes_back():
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(CHARACTERS)
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == CHARACTERS


def test_unknown_characters_become_unk():
    tokenizer = build_tokenizer()
    assert tokenizer.encode("aéb")[1] == tokenizer.unk_token_id


def test_a_chat_is_rendered_as_role_content_end():
    tokenizer = build_tokenizer()
    text = tokenizer.apply_chat_template(CHAT[:4], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|user|>3+4*2<|end|><|hint|>sum(a,b)<|end|><|assistant|>sum(3,4)<|end|><|tool|>7<|end|><|assistant|>"
    )
    assert tokenizer.decode(ids_of(tokenizer, CHAT[:4], prompt=True)) == text


def test_ids_of_a_chat_are_a_prefix_of_the_longer_chat():
    tokenizer = build_tokenizer()
    for cut in range(1, len(CHAT)):
        shorter, longer = ids_of(tokenizer, CHAT[:cut]), ids_of(tokenizer, CHAT[: cut + 1])
        assert longer[: len(shorter)] == shorter


def test_prompt_and_sampled_text_are_the_ids_of_the_rendered_turn():
    tokenizer = build_tokenizer()
    for cut in (2, 4):
        sampled = [*tokenizer.encode(CHAT[cut]["content"]), tokenizer.eos_token_id]
        assert ids_of(tokenizer, CHAT[:cut], prompt=True) + sampled == ids_of(tokenizer, CHAT[: cut + 1])


def test_skipping_special_tokens_leaves_the_action():
    tokenizer = build_tokenizer()
    assert (
        tokenizer.decode([*tokenizer.encode("sum(3,4)"), tokenizer.eos_token_id], skip_special_tokens=True)
        == "sum(3,4)"
    )


def test_a_saved_tokenizer_is_the_same(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert ids_of(loaded, CHAT, prompt=True) == ids_of(tokenizer, CHAT, prompt=True)
    assert (loaded.eos_token, loaded.pad_token, loaded.padding_side) == ("<|end|>", "<pad>", "left")
    assert set(ROLE_TOKENS) <= set(loaded.all_special_tokens)


@pytest.mark.parametrize("level", ["easy", "hard"])
def test_demonstrations_fit_the_vocabulary_and_200_tokens(level):
    tokenizer = build_tokenizer()
    rng = random.Random(0)
    for _ in range(200):
        ids = ids_of(tokenizer, demonstration(level, rng, p_hint=1.0, p_error=1.0).messages)
        assert len(ids) < 200
        assert tokenizer.unk_token_id not in ids
