"""Whole episodes under chat templates as language models have them, on bytes and their special tokens.

What must hold under each: the ids of the sequences are exactly those sampled, and each is trained once; a sequence
begins with what the template writes, and where history was rewritten a new one does.
"""

import asyncio

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mesh.messages import Group, Lease, Task, VersionSpan
from services.engines.engine import Generation
from services.environments.client import Observation
from services.rollouts.chat import ChatText, check_template, find_hint_role, turn_ends
from services.rollouts.episode import EpisodeConfig, EpisodeRunner
from services.rollouts.samples import flatten, hinted_contexts
from services.rollouts.validation import malformed

# As SmolLM2's: any role is written; a default system message where none is given.
CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: thinking is kept only behind the last message of the user; tool messages are the user's, in tags.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}"
    "{% set said = m.content %}"
    "{% if loop.index0 < ns.last and '</think>' in said %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}"
    "{{ '<|im_start|>assistant\n' + said + '<|im_end|>\n' }}"
    "{% elif m.role in ('user', 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% else %}{{ raise_exception('unexpected role ' + m.role) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 3's: a first token of its own, white space trimmed, a turn closed by another token than a document.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As Gemma's: user and assistant take turns, and nobody else speaks.
TAKES_TURNS = (
    "{% for m in messages %}"
    "{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\n' }}{% endif %}"
)
SPECIAL = {
    CHATML: (None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"]),
    THINKING: (None, "<|im_end|>", ["<|im_start|>", "<|endoftext|>"]),
    HEADERS: ("<|begin_of_text|>", "<|end_of_text|>", ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]),
    TAKES_TURNS: (None, "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
}


def tokenizer(template):
    """Bytes and the template's special tokens. One with a first token adds it by itself wherever it is asked to."""
    bos, eos, others = SPECIAL[template]
    special = [*filter(None, [bos, eos]), *others]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, special.index(bos))])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=others,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    if bos:
        assert made.encode("x")[0] == made.bos_token_id
    return made


TOKENIZERS = {template: tokenizer(template) for template in SPECIAL}


class Engine:
    """Samples the texts of its script; a text may end with the name of a special token, which ends the turn."""

    def __init__(self, tok, *script):
        self.tok, self.script, self.sampled, self.requests = tok, list(script), [], []

    async def generate(self, request):
        self.requests.append(request)
        ids = self.tok.encode(self.script.pop(0), add_special_tokens=False)
        stop = next((i + 1 for i, token in enumerate(ids) if token in request.stop_ids), len(ids))
        ids = ids[: min(stop, request.max_tokens)]
        logprobs = [-0.001 * (len(self.sampled) + n + 1) for n in range(len(ids))]
        self.sampled += ids
        finish = "stop" if ids[-1] in request.stop_ids else "length"
        return Generation(request.id, ids, logprobs, [VersionSpan(0, 0, len(ids))], finish)


class Environment:
    """Echoes what it is told; `wrong` is refused, `ans` ends the episode."""

    def __init__(self):
        self.heard = []

    def session(self):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    async def reset(self, seed):
        return Observation("3+4", 0)

    async def step(self, text):
        self.heard.append(text)
        if text.strip().endswith("ans"):
            return Observation("ok", len(self.heard), reward=1.0, done=True)
        kind = "tool_not_found" if "wrong" in text else None
        return Observation(f"got {text.strip()[-3:]}", len(self.heard), error_kind=kind)


def play(template, *script, **settings):
    """The rollout of one scripted episode, its engine and its environment; checks what holds under any template."""
    tok = TOKENIZERS[template]
    engine, environment = Engine(tok, *script), Environment()
    config = EpisodeConfig(**{"max_new_tokens": 64, "max_tokens": 1000, **settings})
    runner = EpisodeRunner(tok, engine.generate, environment, config)
    rollout = asyncio.run(runner.run(Lease("a", Task("t", 0, 3), 0, 60.0)))
    assert malformed(rollout) is None

    samples = flatten([Group(rollout.task, [rollout], [1.0], False, 0)])
    assert [token for s in samples for token in s.token_ids[s.loss_mask]] == engine.sampled
    logprobs = [float(logprob) for s in samples for logprob in s.logprobs[s.loss_mask]]
    assert logprobs == pytest.approx([-0.001 * (n + 1) for n in range(len(engine.sampled))])
    for turn, request in zip(rollout.turns, engine.requests, strict=True):
        assert rollout.sequences[turn.sequence].token_ids[: turn.start] == request.prompt_ids
    for number, sequence in enumerate(rollout.sequences):
        first = next(t for t in rollout.turns if t.sequence == number)
        before = rollout.messages[: len(rollout.messages) - 2 * (len(rollout.turns) - rollout.turns.index(first))]
        assert sequence.token_ids[: first.start] == written(tok, before), "a sequence begins as the template writes"
    return rollout, engine, environment


def written(tok, messages):
    chat = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tok.encode(chat, add_special_tokens=False)


def text(template, sequence):
    return TOKENIZERS[template].decode(sequence.token_ids)


def test_chatml_grows_in_one_sequence_and_keeps_white_space():
    rollout, _, environment = play(CHATML, " add <|im_end|>", "ans\n<|im_end|>", system_prompt="Add.")
    (sequence,) = rollout.sequences
    assert environment.heard == [" add ", "ans\n"]
    assert text(CHATML, sequence) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n add <|im_end|>\n"
        "<|im_start|>tool\ngot add<|im_end|>\n<|im_start|>assistant\nans\n<|im_end|>"
    )


def test_a_turn_that_ends_like_a_document_is_over_and_history_is_written_anew():
    tok = TOKENIZERS[CHATML]
    document = tok.convert_tokens_to_ids("<|endoftext|>")
    chat = ChatText(tok, stop_ids=turn_ends(tok, [document]))
    chat.open([{"role": "user", "content": "3+4"}])
    sampled = tok.encode("add<|endoftext|>")
    assert chat.sampled(sampled) == "add"
    _, forked = chat.extend([{"role": "tool", "content": "7"}])
    assert forked
    assert "add<|im_end|>" in tok.decode(chat.ids)
    assert ChatText(tok).stop_ids == {tok.convert_tokens_to_ids("<|im_end|>")}


def test_a_turn_cut_short_is_closed_by_the_template_in_the_same_sequence():
    rollout, _, _ = play(CHATML, "add them", "ans<|im_end|>", max_new_tokens=5)
    (sequence,) = rollout.sequences
    assert "add t<|im_end|>\n<|im_start|>tool\n" in text(CHATML, sequence)


def test_thinking_is_kept_while_only_tools_answer():
    turns = ["<think>\nhm\n</think>\n\nadd<|im_end|>", "<think>\nso\n</think>\n\nans<|im_end|>"]
    rollout, _, environment = play(THINKING, *turns)
    (sequence,) = rollout.sequences
    assert environment.heard[0] == "<think>\nhm\n</think>\n\nadd"
    assert "<tool_response>\ngot add\n</tool_response>" in text(THINKING, sequence)


def test_thinking_that_is_dropped_when_the_user_answers_forks_the_sample():
    turns = ["<think>\nhm\n</think>\n\nadd<|im_end|>", "<think>\nso\n</think>\n\nmul<|im_end|>", "ans<|im_end|>"]
    rollout, _, _ = play(THINKING, *turns, observation_role="user")
    assert [t.sequence for t in rollout.turns] == [0, 1, 2]
    assert "hm" not in text(THINKING, rollout.sequences[1])
    assert "<think>\nso\n</think>\n\nmul" in text(THINKING, rollout.sequences[1])


def test_trimmed_white_space_forks_and_a_first_token_stands_once_at_the_beginning_of_each_sequence():
    rollout, engine, _ = play(HEADERS, "add<|eot_id|>", " mul <|eot_id|>", "ans<|eot_id|>")
    tok = TOKENIZERS[HEADERS]
    assert [t.sequence for t in rollout.turns] == [0, 0, 1]
    for sequence in rollout.sequences:
        assert [i for i, token in enumerate(sequence.token_ids) if token == tok.bos_token_id] == [0]
    assert "ipython<|end_header_id|>\n\ngot add<|eot_id|>" in text(HEADERS, rollout.sequences[1])
    assert set(engine.requests[0].stop_ids) == {tok.eos_token_id, tok.convert_tokens_to_ids("<|eot_id|>")}


@pytest.mark.parametrize(
    ("template", "token"),
    [(CHATML, "<|im_end|>"), (THINKING, "<|im_end|>"), (HEADERS, "<|eot_id|>"), (TAKES_TURNS, "<end_of_turn>")],
)
def test_a_turn_ends_with_the_token_that_the_template_writes_there_first_of_all(template, token):
    tok = TOKENIZERS[template]
    ends = turn_ends(tok, [tok.eos_token_id])
    assert ends[0] == tok.convert_tokens_to_ids(token)
    assert set(ends) == {ends[0], tok.eos_token_id}


@pytest.mark.parametrize("template", [CHATML, THINKING, HEADERS])
def test_a_hint_stands_before_the_failing_turn_in_a_role_that_the_template_writes(template):
    end = TOKENIZERS[template].convert_ids_to_tokens(turn_ends(TOKENIZERS[template])[0])
    rollout, _, _ = play(template, f"add{end}", f"wrong{end}", f"ans{end}", hint_layers=["raw_error"])
    tok = TOKENIZERS[template]
    assert find_hint_role(tok) == "user"
    (site,) = hinted_contexts(rollout)
    hinted = [*rollout.messages[:3], {"role": "user", "content": rollout.turns[1].error.hint}]
    assert site.context.prompt_ids == written(tok, hinted)
    assert tok.decode(site.context.turn_ids) == f"wrong{end}"


def test_where_user_and_assistant_take_turns_the_user_observes_and_nobody_hints():
    with pytest.raises(ValueError, match=r"of role 'tool': .*must alternate.*set observation_role to \"user\""):
        play(TAKES_TURNS, "ans<end_of_turn>", hint_layers=[])
    with pytest.raises(ValueError, match="no hint as a message of role user or system; set hint_layers to"):
        play(TAKES_TURNS, "ans<end_of_turn>", observation_role="user")
    with pytest.raises(ValueError, match=r"no system message .*leave system_prompt empty"):
        play(TAKES_TURNS, "ans<end_of_turn>", observation_role="user", hint_layers=[], system_prompt="Add.")
    rollout, _, environment = play(
        TAKES_TURNS, "add<end_of_turn>", "ans<end_of_turn>", observation_role="user", hint_layers=[]
    )
    assert environment.heard == ["add", "ans"]
    assert len(rollout.sequences) == 1


EXAMPLES = [
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "add"},
    {"role": "tool", "content": "3"},
]


def test_examples_stand_between_the_system_prompt_and_the_query_and_are_not_trained():
    rollout, engine, _ = play(CHATML, "ans<|im_end|>", system_prompt="Add.", examples=EXAMPLES)
    assert [m["role"] for m in rollout.messages] == ["system", "user", "assistant", "tool", "user", "assistant", "tool"]
    assert engine.requests[0].prompt_ids == written(TOKENIZERS[CHATML], rollout.messages[:5])


def test_examples_that_the_template_cannot_write_are_refused():
    with pytest.raises(ValueError, match=r"write the examples: .*unexpected role critic.*; give them other roles"):
        play(THINKING, examples=[*EXAMPLES, {"role": "critic", "content": "good"}])
    check_template(TOKENIZERS[THINKING], opening=["user", "assistant", "tool", "user"])
