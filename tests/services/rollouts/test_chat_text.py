"""A chat's text and ids: what was sampled stays as it is, whatever the template would make of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from services.demo.tokenizer import CHARACTERS, build_tokenizer
from services.rollouts.chat import ChatText, check_template, find_hint_role

MESSAGE = "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"


def loop(body):
    return "{% for message in messages %}" + body + "{% endfor %}" + PROMPT


TRIMS = loop("{{ '<|' + message.role + '|>' + message.content | trim + '<|end|>' }}")
DROPS_THINKING = loop(
    "{% set content = message.content.split('</think>')[-1] if message.role == 'assistant' else message.content %}"
    "{{ '<|' + message.role + '|>' + content + '<|end|>' }}"
)
IGNORES_UNKNOWN = loop("{% if message.role in ('user', 'assistant', 'tool', 'system') %}" + MESSAGE + "{% endif %}")
REFUSES_UNKNOWN = loop(
    "{% if message.role not in ('user', 'assistant', 'tool') %}{{ raise_exception('unknown role') }}{% endif %}"
    + MESSAGE
)
ALTERNATES = loop(
    "{% if (message.role == 'assistant') != (loop.index0 % 2 == 1) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + MESSAGE
)
NO_TOOLS = loop("{% if message.role != 'tool' %}" + MESSAGE + "{% endif %}")
NO_PROMPT = "{% for message in messages %}" + MESSAGE + "{% endfor %}"


def tokenizer(template=None):
    tok = build_tokenizer()
    tok.chat_template = template or tok.chat_template
    return tok


SHARED = tokenizer()


def merging_tokenizer():
    """Writes a message as `content!` and the generation prompt as `>`; the two together are one token."""
    tokens = ["<|end|>", "<unk>", "!>", *CHARACTERS]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [("!", ">")], unk_token="<unk>")
    backend = Tokenizer(model)
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}"
        "{{ ('>' if m.role == 'assistant' else '') + m.content + '!' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '>' }}{% endif %}",
    )


def opened(tok, content="3+4", hint_role="hint"):
    chat = ChatText(tok, hint_role)
    chat.open([{"role": "user", "content": content}])
    return chat


def turn(tok, text):
    return [*tok.encode(text), tok.eos_token_id]


def from_scratch(tok, messages):
    return tok.encode(tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def observe(chat, content):
    return chat.extend([{"role": "tool", "content": content}])


def test_a_chat_opens_with_the_prompt_and_a_turn_ends_with_its_eos():
    tok = tokenizer()
    chat = opened(tok)
    assert tok.decode(chat.ids) == "<|user|>3+4<|end|><|assistant|>"
    assert chat.sampled(turn(tok, "add(3,4)")) == "add(3,4)"
    assert observe(chat, "7") == (tok.encode("<|tool|>7<|end|><|assistant|>"), False)
    assert chat.ids == from_scratch(tok, chat.messages)
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool"]


def test_sampled_ids_are_kept_where_tokenizing_their_text_would_give_others():
    tok = merging_tokenizer()
    chat = opened(tok)
    prompt, sampled = list(chat.ids), [tok.convert_tokens_to_ids("!"), tok.convert_tokens_to_ids(">")]
    assert tok.encode(tok.decode(sampled)) != sampled
    assert chat.sampled(sampled) == "!>"
    new, forked = observe(chat, "7")
    assert not forked
    assert chat.ids == [*prompt, *sampled, *new]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_ids_of_the_turns_so_far_are_a_prefix_of_those_of_one_turn_more(data):
    tok = SHARED
    anything = st.integers(0, len(tok) - 1).filter(lambda token: token != tok.eos_token_id)
    chat = opened(tok)
    for _ in range(3):
        before = list(chat.ids)
        sampled = data.draw(st.lists(anything, min_size=1, max_size=6)) + data.draw(
            st.sampled_from([[], [tok.eos_token_id]])
        )
        chat.sampled(sampled)
        new, forked = observe(chat, data.draw(st.text(alphabet=CHARACTERS + "é", max_size=5)))
        assert not forked
        assert chat.ids == [*before, *sampled, *new]


def test_a_turn_cut_without_eos_is_closed_by_context_and_not_by_the_policy():
    tok = tokenizer()
    chat = opened(tok)
    assert chat.sampled(tok.encode("add(3,")) == "add(3,"
    new, forked = observe(chat, "bad")
    assert (tok.decode(new), forked) == ("<|end|><|tool|>bad<|end|><|assistant|>", False)


@pytest.mark.parametrize(
    ("template", "text", "left"),
    [(TRIMS, " add(3,4) ", "add(3,4)"), (DROPS_THINKING, "hm</think>add(3,4)", "add(3,4)")],
)
def test_a_template_that_rewrites_history_gives_the_whole_chat_anew(template, text, left):
    tok = tokenizer(template)
    chat = opened(tok)
    assert chat.sampled(turn(tok, text)) == text
    new, forked = observe(chat, "7")
    assert forked
    assert new == chat.ids == from_scratch(tok, chat.messages)
    assert tok.decode(new) == f"<|user|>3+4<|end|><|assistant|>{left}<|end|><|tool|>7<|end|><|assistant|>"
    chat.sampled(turn(tok, "ans(7)"))
    assert not observe(chat, "ok")[1]


def test_a_hinted_context_is_what_the_template_writes_with_the_hint_before_the_turn():
    tok = tokenizer()
    chat = opened(tok)
    for action, answer in [("add(3,4)", "bad"), ("sum(3,4", "bad")]:
        hinted = chat.hinted("plus(a,b)")
        expected = from_scratch(tok, [*chat.messages, {"role": "hint", "content": "plus(a,b)"}])
        assert [*chat.ids[: hinted.cut], *hinted.hint_ids] == expected
        assert tok.decode(hinted.hint_ids) == "<|hint|>plus(a,b)<|end|><|assistant|>"
        chat.sampled(turn(tok, action))
        observe(chat, answer)


def test_a_hint_keeps_the_exact_ids_of_what_was_sampled_before_it():
    tok = merging_tokenizer()
    tok.chat_template = tok.chat_template.replace("'>'", "'?'")  # nothing merges with the prompt any more
    chat = opened(tok)
    sampled = [tok.convert_tokens_to_ids("!"), tok.convert_tokens_to_ids(">")]
    chat.sampled(sampled)
    observe(chat, "7")
    hinted = chat.hinted("h")
    assert chat.ids[: hinted.cut] == chat.ids[:-1]
    assert hinted.hint_ids == tok.encode("h!?")


def test_a_generation_prompt_that_is_no_clean_tail_gives_a_whole_hinted_prompt():
    tok = merging_tokenizer()
    chat = opened(tok)
    assert chat.ids[-1] == tok.convert_tokens_to_ids("!>")
    hinted = chat.hinted("h")
    assert (hinted.cut, hinted.hint_ids) == (0, tok.encode("3+4!h!>"))


def test_a_hint_that_makes_the_template_rewrite_history_gives_a_whole_hinted_prompt():
    # As templates do that keep the thinking only behind the last user message.
    template = loop(
        "{% set old = messages[-1].role == 'user' and not loop.last %}"
        "{% set content = message.content.split('</think>')[-1] if old else message.content %}"
        "{{ '<|' + message.role + '|>' + content + '<|end|>' }}"
    )
    tok = tokenizer(template)
    chat = opened(tok, hint_role="user")
    chat.sampled(turn(tok, "hm</think>add(3,4)"))
    assert observe(chat, "bad")[1] is False
    hinted = chat.hinted("plus(a,b)")
    assert hinted.cut == 0
    assert hinted.hint_ids == from_scratch(tok, [*chat.messages, {"role": "user", "content": "plus(a,b)"}])
    assert "hm" not in tok.decode(hinted.hint_ids)


def test_a_template_without_generation_prompt_has_its_hint_at_the_very_end():
    tok = tokenizer(NO_PROMPT)
    chat = opened(tok)
    hinted = chat.hinted("h")
    assert (hinted.cut, tok.decode(hinted.hint_ids)) == (len(chat.ids), "<|hint|>h<|end|>")


def test_a_copy_goes_its_own_way():
    tok = tokenizer()
    chat = opened(tok)
    copy = chat.copy()
    chat.sampled(turn(tok, "add(3,4)"))
    observe(chat, "7")
    assert (copy.ids, copy.messages) == (opened(tok).ids, opened(tok).messages)
    assert copy.hinted("h") == opened(tok).hinted("h")


def test_the_bundled_template_writes_hints_and_system_prompts():
    check_template(tokenizer(), hint_role="hint", opening=["system", "user"])
    assert find_hint_role(tokenizer()) == "hint"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (IGNORES_UNKNOWN, "leaves out the hint message of user, hint"),
        (REFUSES_UNKNOWN, r"refuses user, hint \(.*unknown role"),
    ],
)
def test_a_hint_role_that_the_template_does_not_write_is_refused_with_one_that_it_does(template, why):
    tok = tokenizer(template)
    with pytest.raises(ValueError, match=rf"hint of role 'hint': it {why}.*set hint_role to \"user\""):
        check_template(tok, hint_role="hint")
    check_template(tok, hint_role="user")
    check_template(tok, hint_role=None)


def test_a_template_without_place_for_hints_is_told_to_do_without():
    tok = tokenizer(ALTERNATES)
    with pytest.raises(ValueError, match=r"roles must alternate.*set hint_layers to \[\]"):
        check_template(tok, hint_role="user")
    check_template(tok)


def test_a_template_that_writes_no_tool_messages_is_refused_with_a_role_that_it_does():
    refused = r"leaves out the tool message of user, assistant, tool; set observation_role to \"user\""
    with pytest.raises(ValueError, match=refused):
        check_template(tokenizer(NO_TOOLS))
    check_template(tokenizer(NO_TOOLS), observation_role="user")


def test_a_template_that_writes_no_chat_at_all_is_refused():
    with pytest.raises(ValueError, match="leaves out the user message of user; use a model"):
        check_template(tokenizer("nothing"))


def test_a_template_that_knows_no_system_message_is_refused_only_with_a_system_prompt():
    tok = tokenizer(REFUSES_UNKNOWN)
    with pytest.raises(ValueError, match=r"no system message .* leave system_prompt empty"):
        check_template(tok, opening=["system", "user"])
    check_template(tok)
