"""Episodes on a scripted engine and an environment in this process: what becomes of turns, limits and failures."""

import asyncio
import contextlib
import math

import pytest
from pydantic import ValidationError

from mesh.messages import Group, Lease, Task, VersionSpan
from services.demo.tokenizer import CHAT_TEMPLATE, build_tokenizer
from services.engines.engine import EngineError, Generation
from services.environments.client import EnvironmentFailure, Observation
from services.rollouts.episode import EpisodeConfig, EpisodeRunner, evaluation_lease, turn_seed
from services.rollouts.samples import flatten, hinted_contexts
from services.rollouts.validation import malformed

TOK = build_tokenizer()


class ScriptedEngine:
    """Generates, for each lease, its texts one after the other, each with eos unless it ends with `…` (cut short).

    Logprobs count up over everything sampled, so that each token's is its own. An exception in a script is raised, a
    `Generation` returned, and an `Event` waited for before the next.
    """

    def __init__(self, **scripts):
        self.scripts = {name: list(script) for name, script in scripts.items()}
        self.requests, self.version, self.sampled, self.cancelled = [], 0, 0, []
        self.waits = asyncio.Event()

    async def generate(self, request):
        self.requests.append(request)
        script = self.scripts[request.id.partition("#")[0]]
        for _ in range(len(request.id) % 3):  # some answer sooner than others
            await asyncio.sleep(0)
        if isinstance(script[0], asyncio.Event):
            self.waits.set()
            try:
                await script[0].wait()
            except asyncio.CancelledError:
                self.cancelled.append(request.id)
                raise
            script.pop(0)
        text = script.pop(0)
        if isinstance(text, Exception):
            raise text
        if isinstance(text, Generation):
            return text
        ids = TOK.encode(text.removesuffix("…")) + ([] if text.endswith("…") else [TOK.eos_token_id])
        ids = ids[: request.max_tokens]
        logprobs = [-0.001 * (self.sampled + n + 1) for n in range(len(ids))]
        self.sampled += len(ids)
        half = len(ids) // 2 if self.version else 0  # new weights came in the middle of the turn
        versions = [VersionSpan(self.version - 1, 0, half), VersionSpan(self.version, half, len(ids))]
        finish = "stop" if ids[-1] == TOK.eos_token_id else "length"
        return Generation(request.id, ids, logprobs, versions if half else versions[1:], finish)


class LocalEnvironment:
    """Sessions in this process: `fail:KIND` is refused, `ans` ends the episode with reward 1, anything else is echoed.

    `break` fails the environment, `hang` waits for ever; what is answered names the seed.
    """

    def __init__(self, query="q", partial_reward=None):
        self.query, self.partial_reward = query, partial_reward
        self.open = self.opened = 0

    @contextlib.asynccontextmanager
    async def session(self):
        self.open += 1
        self.opened += 1
        try:
            yield LocalSession(self)
        finally:
            self.open -= 1


class LocalSession:
    def __init__(self, environment):
        self.environment, self.seed, self.turn = environment, None, 0

    async def reset(self, seed):
        await asyncio.sleep(0)
        if self.environment.query == "break":
            raise EnvironmentFailure("http://env", seed, 0, "it is on fire")
        self.seed = seed
        return Observation(f"{self.environment.query}{seed}", 0)

    async def step(self, text):
        await asyncio.sleep(0)
        self.turn += 1
        if text.startswith("fail:"):
            kind = text.removeprefix("fail:")
            context = {"tool": "t", "tools": "plus"}
            return Observation(f"bad {kind}", self.turn, error_kind=kind, hint_template_key=kind, hint_context=context)
        if text == "break":
            raise EnvironmentFailure("http://env", self.seed, self.turn, "it is on fire")
        if text == "hang":
            await asyncio.Event().wait()
        if text == "ans":
            return Observation("ok", self.turn, reward=1.0, done=True)
        return Observation(f"{self.seed} {text.strip()}", self.turn, reward=self.environment.partial_reward)


def tokenizer(template):
    tok = build_tokenizer()
    tok.chat_template = template
    return tok


def lease(name="a", seed=3):
    return Lease(name, Task(f"task-{name}", 0, seed), 1, 60.0)


def played(*script, tok=TOK, environment=None, greedy=False, **settings):
    """The rollout of one scripted episode, and the engine that made it."""
    engine = ScriptedEngine(a=script)
    return asyncio.run(runner(engine, environment, tok, **settings).run(lease(), greedy=greedy)), engine


def runner(engine, environment=None, tok=TOK, **settings):
    return EpisodeRunner(tok, engine.generate, environment or LocalEnvironment(), EpisodeConfig(**settings), "g-0", 5)


def texts(rollout):
    """The decoded sampled spans of each sequence."""
    return [[TOK.decode(q.token_ids[start:stop]) for start, stop in q.sampled] for q in rollout.sequences]


def rendered(messages, prompt=True):
    return TOK.encode(TOK.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


def assert_each_sampled_token_is_trained_once(rollout, engine):
    samples = flatten([Group(rollout.task, [rollout], [1.0], False, 0)])
    trained = sorted(float(logprob) for s in samples for logprob in s.logprobs[s.loss_mask])
    expected = sorted(-0.001 * (n + 1) for n in range(engine.sampled))
    assert trained == pytest.approx(expected)


# ---- an episode that ends by itself --------------------------------------------------------------------------------


def test_a_finished_episode_carries_ids_turns_messages_and_the_last_reward():
    rollout, engine = played("add", "ans")
    assert malformed(rollout) is None
    assert (rollout.status, rollout.env_reward, rollout.reward, rollout.reason) == ("finished", 1.0, None, "")
    assert (rollout.id, rollout.lease_id, rollout.generator) == ("task-a/1", "a", "g-0")
    assert [(t.text, t.observation, t.reward, t.error) for t in rollout.turns] == [
        ("add", "3 add", None, None), ("ans", "ok", 1.0, None)
    ]  # fmt: skip
    assert [m["content"] for m in rollout.messages] == ["q3", "add", "3 add", "ans", "ok"]
    (sequence,) = rollout.sequences
    assert sequence.token_ids == rendered(rollout.messages[:-1], prompt=False)  # nothing behind the last turn
    assert texts(rollout) == [["add<|end|>", "ans<|end|>"]]
    assert [TOK.decode(sequence.token_ids[t.start : t.stop]) for t in rollout.turns] == ["add<|end|>", "ans<|end|>"]
    assert_each_sampled_token_is_trained_once(rollout, engine)


def test_each_prompt_begins_with_the_one_before_and_the_exact_sampled_ids():
    # <pad> and <|tool|> are one token each here, though their text is many characters.
    odd = [TOK.convert_tokens_to_ids(t) for t in ("<pad>", "<|tool|>", "x", "<|end|>")]
    sampled = Generation("a#0", odd, [-0.1] * 4, [VersionSpan(5, 0, 4)], "stop")
    rollout, engine = played(sampled, "add", "ans")
    prompts = [request.prompt_ids for request in engine.requests]
    turns = [rollout.sequences[0].token_ids[t.start : t.stop] for t in rollout.turns]
    assert turns[0] == odd
    for prompt, turn, following in zip(prompts, turns, prompts[1:], strict=False):
        assert following[: len(prompt) + len(turn)] == prompt + turn
    assert malformed(rollout) is None


def test_logprobs_and_versions_stay_with_their_tokens():
    engine = ScriptedEngine(a=["add", "ans"])
    engine.version = 4
    rollout = asyncio.run(runner(engine).run(lease()))
    (sequence,) = rollout.sequences
    at = [(v.version, TOK.decode(sequence.token_ids[v.start : v.stop])) for v in sequence.versions]
    assert at == [(3, "ad"), (4, "d<|end|>"), (3, "an"), (4, "s<|end|>")]
    assert rollout.oldest_version == 3
    sampled = [logprob for start, stop in sequence.sampled for logprob in sequence.logprobs[start:stop]]
    assert sampled == pytest.approx([-0.001 * n for n in range(1, 9)])
    assert math.fsum(sequence.logprobs) == pytest.approx(math.fsum(sampled))


def test_the_system_prompt_stands_before_the_query():
    rollout, engine = played("ans", system_prompt="be brief")
    assert [m["role"] for m in rollout.messages] == ["system", "user", "assistant", "tool"]
    assert engine.requests[0].prompt_ids == rendered(rollout.messages[:2])


def test_what_is_sampled_depends_on_run_member_attempt_and_turn_alone():
    async def seeds(run_seed, name, generator):
        engine = ScriptedEngine(**{name: ["add", "ans"]})
        player = EpisodeRunner(TOK, engine.generate, LocalEnvironment(), EpisodeConfig(), generator, run_seed)
        await player.run(lease(name))
        return [request.seed for request in engine.requests]

    first = asyncio.run(seeds(5, "a", "g-0"))
    assert first == [turn_seed(5, lease("a").sampled_as, turn) for turn in (0, 1)]
    assert first == asyncio.run(seeds(5, "a", "g-1"))
    others = asyncio.run(seeds(6, "a", "g-0")) + asyncio.run(seeds(5, "b", "g-0"))
    assert len({*first, *others}) == 6
    assert asyncio.run(seeds(None, "a", "g-0")) == [None, None]


def test_requests_carry_the_sampling_settings_and_ids_of_their_own():
    _, engine = played("add", "ans", greedy=True, temperature=0.7, max_new_tokens=9)
    assert [r.id for r in engine.requests] == ["a#0", "a#1"]
    assert {(r.temperature, r.greedy, r.stop_ids, r.max_tokens) for r in engine.requests} == {
        (0.7, True, (TOK.eos_token_id,), 9)
    }


def test_many_rollouts_at_once_do_not_mix():
    names = "abcdefgh"
    engine = ScriptedEngine(**{n: [f"{n}{i}" * (1 + i % 3) for i in range(4)] + ["ans"] for n in names})
    environment = LocalEnvironment()
    play = runner(engine, environment)

    async def all_at_once():
        return await asyncio.gather(*[play.run(lease(n, seed)) for seed, n in enumerate(names)])

    rollouts = asyncio.run(all_at_once())
    assert (environment.opened, environment.open) == (len(names), 0)
    for seed, (name, rollout) in enumerate(zip(names, rollouts, strict=True)):
        assert malformed(rollout) is None
        assert [t.text for t in rollout.turns] == [f"{name}{i}" * (1 + i % 3) for i in range(4)] + ["ans"]
        assert all(t.observation.startswith(f"{seed} ") for t in rollout.turns[:-1])
        assert rollout.sequences[0].token_ids == rendered(rollout.messages[:-1], prompt=False)


def test_an_evaluation_lease_names_its_task_and_never_expires():
    made = evaluation_lease(Task("held-out", -1, 5), 2)
    assert (made.rollout_id, made.expires_in_s) == ("held-out/2", math.inf)


# ---- templates that rewrite history --------------------------------------------------------------------------------

TRIMS = CHAT_TEMPLATE.replace("message.content", "message.content | trim")
DROPS_THINKING = CHAT_TEMPLATE.replace("message.content", "message.content.split('</think>')[-1]")


@pytest.mark.parametrize(("template", "first"), [(TRIMS, " add"), (DROPS_THINKING, "hm</think>add")])
def test_rewritten_history_forks_the_sample_and_each_sampled_token_is_trained_once(template, first):
    tok = tokenizer(template)
    rollout, engine = played(first, "mul", "ans", tok=tok)
    assert malformed(rollout) is None
    assert texts(rollout) == [[f"{first}<|end|>"], ["mul<|end|>", "ans<|end|>"]]
    assert [t.sequence for t in rollout.turns] == [0, 1, 1]
    assert TOK.decode(rollout.sequences[1].token_ids).startswith("<|user|>q3<|end|><|assistant|>add<|end|><|tool|>")
    assert engine.requests[1].prompt_ids == rollout.sequences[1].token_ids[: rollout.turns[1].start]
    assert_each_sampled_token_is_trained_once(rollout, engine)


def test_history_that_is_rewritten_at_every_turn_gives_a_sequence_per_turn():
    rollout, engine = played(" add", " mul", "fail:other ", "ans", tok=tokenizer(TRIMS))
    assert malformed(rollout) is None
    assert len(rollout.sequences) == 4
    assert_each_sampled_token_is_trained_once(rollout, engine)


def test_rewriting_after_the_last_turn_adds_no_sequence():
    rollout, _ = played("add", " x", tok=tokenizer(TRIMS), max_turns=2)
    assert (rollout.status, len(rollout.sequences)) == ("truncated", 1)


# ---- limits of the agent -------------------------------------------------------------------------------------------


def test_a_turn_cut_at_max_new_tokens_has_no_eos_and_the_episode_goes_on():
    rollout, engine = played("add them all", "ans", max_new_tokens=5)
    assert malformed(rollout) is None
    assert texts(rollout) == [["add t", "ans<|end|>"]]
    assert rollout.turns[0].text == "add t"
    (sequence,) = rollout.sequences
    assert TOK.decode(sequence.token_ids[rollout.turns[0].stop :]).startswith("<|end|><|tool|>3 add t<|end|>")
    assert_each_sampled_token_is_trained_once(rollout, engine)


def test_too_many_turns_truncate_the_rollout_as_it_stands():
    rollout, engine = played(*["add"] * 5, max_turns=3)
    assert malformed(rollout) is None
    assert (rollout.status, rollout.reason, len(rollout.turns)) == ("truncated", "reached max_turns 3", 3)
    assert rollout.sequences[0].token_ids[rollout.turns[-1].stop :] == []
    assert len(engine.requests) == 3


def test_no_turn_is_longer_than_the_room_that_is_left():
    start = len(rendered([{"role": "user", "content": "q3"}]))
    rollout, engine = played(*["add"] * 9, max_tokens=start + 20)
    assert malformed(rollout) is None
    assert (rollout.status, rollout.reason) == ("truncated", f"reached max_tokens {start + 20}")
    assert all(len(r.prompt_ids) + r.max_tokens <= start + 20 for r in engine.requests)
    assert engine.requests[-1].max_tokens < 14
    assert len(rollout.sequences[0].token_ids) <= start + 20
    assert rollout.turns[-1].stop == len(rollout.sequences[0].token_ids)


def test_an_answer_that_fills_the_context_is_read_by_nobody_and_not_recorded():
    environment = LocalEnvironment(query="q" * 30)
    rollout, engine = played("x" * 12, "add", environment=environment, max_tokens=60)
    assert (rollout.status, len(engine.requests), len(rollout.turns)) == ("truncated", 1, 1)
    assert len(rollout.sequences[0].token_ids) == rollout.turns[0].stop
    assert rollout.messages[-1] == {"role": "tool", "content": "3 " + "x" * 12}


def test_a_query_that_fills_the_context_is_truncated_before_the_first_turn():
    rollout, engine = played(environment=LocalEnvironment(query="q" * 80), max_tokens=60)
    assert malformed(rollout) is None
    assert (rollout.status, rollout.turns, rollout.sampled_tokens, engine.requests) == ("truncated", [], 0, [])


@pytest.mark.parametrize(("named", "fallback", "reward"), [(0.25, 0.0, 0.25), (None, 0.0, 0.0), (None, None, None)])
def test_a_truncated_rollout_has_the_reward_the_environment_named_last_or_the_configured_one(named, fallback, reward):
    environment = LocalEnvironment(partial_reward=named)
    rollout, _ = played("add", "add", environment=environment, max_turns=2, truncated_reward=fallback)
    assert (rollout.status, rollout.env_reward, rollout.reward) == ("truncated", reward, None)


def test_a_finished_rollout_without_a_reward_gets_none_from_the_configuration():
    class Silent(LocalSession):
        async def step(self, text):
            return Observation("bye", 1, reward=None, done=True)

    environment = LocalEnvironment()
    environment.session = lambda: contextlib.nullcontext(Silent(environment))
    rollout, _ = played("add", environment=environment)
    assert (rollout.status, rollout.env_reward) == ("finished", None)


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_failing_environment_fails_the_rollout_with_its_reason():
    for environment, script, turns in [(LocalEnvironment("break"), [], 0), (LocalEnvironment(), ["add", "break"], 1)]:
        rollout, _ = played(*script, environment=environment)
        assert malformed(rollout) is None
        assert (rollout.status, rollout.env_reward, rollout.reward) == ("failed", None, None)
        assert "http://env failed" in rollout.reason
        assert "it is on fire" in rollout.reason
        assert (len(rollout.turns), environment.open) == (turns, 0)


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_a_turn_that_the_engine_gave_up_fails_the_rollout(finish):
    given_up = Generation("a#1", [7, 8], [-1.0, -1.0], [VersionSpan(0, 0, 2)], finish, error="out of slots")
    rollout, _ = played("add", given_up, environment=LocalEnvironment(partial_reward=0.5))
    assert malformed(rollout) is None
    assert (rollout.status, rollout.env_reward, len(rollout.turns)) == ("failed", None, 1)
    assert rollout.reason == "the engine ended the turn: out of slots"


def test_an_engine_that_samples_nothing_fails_the_rollout():
    rollout, _ = played(Generation("a#0", [], [], [], "stop"))
    assert (rollout.status, rollout.reason) == ("failed", "the engine sampled no token for request a#0")


@pytest.mark.parametrize("error", [ValueError("the prompt is too long"), TimeoutError("request a#0 took too long")])
def test_what_the_engine_refuses_of_one_request_fails_that_rollout_only(error):
    rollout, _ = played(error)
    assert (rollout.status, rollout.reason) == ("failed", f"the engine: {error}")


def test_a_dead_engine_is_no_rollout():
    environment = LocalEnvironment()
    with pytest.raises(EngineError, match="the engine died"):
        played("add", EngineError("the engine died"), environment=environment)
    assert environment.open == 0


@pytest.mark.parametrize(
    ("script", "culprit"), [(["add", asyncio.Event()], "the engine at turn 1"), (["hang"], "the environment at turn 0")]
)
def test_an_episode_that_takes_too_long_fails_and_names_what_it_waited_for(script, culprit):
    environment = LocalEnvironment()
    rollout, engine = played(*script, environment=environment, time_limit_s=1.0)
    assert malformed(rollout) is None
    assert (rollout.status, rollout.env_reward) == ("failed", None)
    assert rollout.reason == f"not done after 1 s, when it waited for {culprit}"
    assert environment.open == 0
    assert engine.cancelled == (["a#1"] if "engine" in culprit else [])


def test_a_cancelled_episode_ends_and_leaves_its_session():
    async def scenario():
        engine, environment = ScriptedEngine(a=[asyncio.Event()]), LocalEnvironment()
        episode = asyncio.create_task(runner(engine, environment).run(lease()))
        await asyncio.wait_for(engine.waits.wait(), 30)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert (engine.cancelled, environment.open) == (["a#0"], 0)

    asyncio.run(scenario())


# ---- hints ---------------------------------------------------------------------------------------------------------


def test_a_failing_turn_carries_its_hint_where_the_template_would_have_put_it():
    rollout, _ = played("add", "fail:tool_not_found", "ans", max_new_tokens=40)
    assert malformed(rollout) is None
    assert [t.error is not None for t in rollout.turns] == [False, True, False]
    site = rollout.turns[1].error
    assert (site.kind, site.error_text, site.hint_layer) == ("tool_not_found", "bad tool_not_found", "template")
    assert site.hint.startswith("There is no tool named `t`")
    (hinted,) = hinted_contexts(rollout)
    before_the_turn = [*rollout.messages[:3], {"role": "hint", "content": site.hint}]
    assert hinted.context.prompt_ids == rendered(before_the_turn)
    assert TOK.decode(hinted.context.turn_ids) == "fail:tool_not_found<|end|>"
    assert hinted.context.actions == ["add"]
    turn = rollout.turns[1]
    assert hinted.student_positions == list(range(turn.start - 1, turn.stop - 1))


def test_hints_stand_before_the_right_turn_after_history_was_rewritten():
    rollout, _ = played(" add", "fail:tool_not_found", "ans", tok=tokenizer(TRIMS), max_new_tokens=40)
    assert malformed(rollout) is None
    (hinted,) = hinted_contexts(rollout)
    messages = [dict(m, content=m["content"].strip()) for m in rollout.messages[:3]]
    assert hinted.sequence == 1
    assert hinted.context.prompt_ids == rendered([*messages, {"role": "hint", "content": rollout.turns[1].error.hint}])


def test_a_hint_in_another_role_is_written_in_that_role():
    rollout, _ = played("fail:tool_not_found", "ans", max_new_tokens=40, hint_role="user")
    (hinted,) = hinted_contexts(rollout)
    assert hinted.context.prompt_ids == rendered(
        [rollout.messages[0], {"role": "user", "content": rollout.turns[0].error.hint}]
    )


def test_a_turn_that_fails_like_the_one_before_gets_the_hint_for_repeated_failures():
    again, other = "fail:tool_not_found", "fail:other"
    rollout, _ = played(again, again, again, "add", again, other, again, max_turns=7, max_new_tokens=40)
    hints = [t.error.hint if t.error else None for t in rollout.turns]
    assert hints[1].startswith("This is failure 2 in a row of the same kind: bad tool_not_found")
    assert hints[2].startswith("This is failure 3 in a row")
    first = "There is no tool named"
    assert [h.startswith(first) if h else None for h in hints] == [True, False, False, None, True, False, True]
    assert (rollout.turns[5].error.hint, rollout.turns[5].error.hint_layer) == ("bad other", "raw_error")


def test_without_hint_layers_a_failing_turn_has_a_site_and_no_hint():
    rollout, _ = played("fail:tool_not_found", "ans", max_new_tokens=40, hint_layers=[])
    site = rollout.turns[0].error
    assert malformed(rollout) is None
    assert (site.kind, site.hint, site.hint_layer, site.hint_ids) == ("tool_not_found", None, None, [])


def test_long_hints_are_cut():
    rollout, _ = played("fail:other", "ans", max_hint_chars=5)
    site = rollout.turns[0].error
    assert site.hint == "bad o"
    assert "bad o<|end|>" in TOK.decode(site.hint_ids)


def test_hint_layers_that_do_not_exist_are_refused():
    with pytest.raises(ValidationError, match=r"hint layers .* must be some of"):
        EpisodeConfig(hint_layers=["raw_error", "template"])
