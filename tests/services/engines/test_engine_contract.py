"""What every engine does, whichever it is: each test runs on both."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from engine_builders import ARCHITECTURES, expect_logprobs, finish, generate, make_model, worst_difference

from mesh.messages import VersionSpan
from services.engines.engine import EngineError, GenerationRequest, WeightsError


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_equal_a_plain_forward_for_mixed_lengths_and_temperatures(
    make_engine: Callable, architecture: str, prompt: Callable
) -> None:
    requests = [
        GenerationRequest(f"r{length}", prompt(length), new, temperature=temperature)
        for length, new, temperature in [(1, 9, 1.0), (7, 3, 0.7), (60, 12, 1.3), (125, 10, 1.0), (300, 5, 2.0)]
    ]
    done = generate(make_engine(architecture), *requests)
    for request in requests:
        assert len(done[request.id].token_ids) == request.max_tokens
        assert done[request.id].versions == [VersionSpan(0, 0, request.max_tokens)]
        assert done[request.id].finish_reason == "length"
        expect_logprobs(make_model(architecture), request, done[request.id])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_equals_generate(make_engine: Callable, architecture: str, prompt: Callable) -> None:
    requests = [GenerationRequest(f"r{n}", prompt(n), 12, greedy=True, temperature=0.3) for n in (3, 20, 41)]
    done = generate(make_engine(architecture), *requests)
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        wanted = make_model(architecture).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        assert done[request.id].token_ids == wanted[0, len(request.prompt_ids) :].tolist()


def test_greedy_logprobs_are_those_at_temperature_one(make_engine: Callable, prompt: Callable) -> None:
    request = GenerationRequest("r", prompt(20), 8, greedy=True, temperature=0.3)
    expect_logprobs(make_model(), request, generate(make_engine(), request)["r"])


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_of_joining_leaving_aborting_and_continuing_keeps_the_logprobs(
    make_engine: Callable, seed: int
) -> None:
    rng = random.Random(seed)
    model, engine = make_model("llama-tied"), make_engine("llama-tied", max_batch=5)
    asked: dict[str, GenerationRequest] = {}
    running: set[str] = set()
    histories: list[list[int]] = []
    checked = reused = 0
    for turn in range(80):
        while engine.running < engine.capacity and rng.random() < 0.5:
            earlier = rng.choice(histories) if histories and rng.random() < 0.6 else []
            ids = earlier + [rng.randrange(58) for _ in range(rng.choice([1, 6, 40, 60]))]
            request = GenerationRequest(f"{turn}/{len(asked)}", ids, rng.randint(1, 9), greedy=rng.random() < 0.2)
            asked[request.id] = request
            running.add(request.id)
            engine.submit(request)
        done = engine.step()
        running -= {generation.id for generation in done}
        assert engine.running == len(running)
        if running and rng.random() < 0.2:
            aborted = engine.abort(rng.choice(sorted(running)))
            running.discard(aborted.id)
            done += [aborted] if aborted.token_ids else []
        for generation in done:
            request = asked[generation.id]
            expect_logprobs(model, request, generation)
            checked += 1
            reused += generation.cached_tokens > 0
            if len(request.prompt_ids) < 200:
                histories = [*histories[-8:], request.prompt_ids + generation.token_ids]
    assert checked > 30
    assert reused > 3


def test_a_next_turn_computes_only_what_the_one_before_did_not(make_engine: Callable, prompt: Callable) -> None:
    engine = make_engine()
    first = GenerationRequest("turn 1", prompt(40), 6)
    sampled = generate(engine, first)["turn 1"].token_ids
    second = GenerationRequest("turn 2", first.prompt_ids + sampled + prompt(5), 6)
    other = GenerationRequest("other", prompt(45), 6)
    done = generate(engine, other, second)
    assert 0 < done["turn 2"].cached_tokens <= 40 + 5  # the last sampled token was never fed
    assert done["other"].cached_tokens == 0
    expect_logprobs(make_model(), second, done["turn 2"])
    expect_logprobs(make_model(), other, done["other"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_after_an_update_shared_prefixes_give_the_logprobs_of_the_new_weights(
    make_engine: Callable, architecture: str, prompt: Callable
) -> None:
    engine, new = make_engine(architecture), make_model(architecture, seed=1)
    request = GenerationRequest("before", prompt(40), 6)
    sampled = generate(engine, request)["before"].token_ids
    engine.load_weights(1, dict(new.named_parameters()))
    again = GenerationRequest("after", request.prompt_ids + sampled + prompt(5), 6)
    done = generate(engine, again)["after"]
    assert done.versions == [VersionSpan(1, 0, 6)]
    assert done.cached_tokens == 0
    expect_logprobs(new, again, done)


def test_without_the_reset_the_comparison_catches_the_stale_cache(
    make_engine: Callable, prompt: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, new = make_engine(), make_model(seed=1)
    monkeypatch.setattr(type(engine), "reset_cache", lambda self: None)
    request = GenerationRequest("before", prompt(40), 6)
    sampled = generate(engine, request)["before"].token_ids
    engine.load_weights(1, dict(new.named_parameters()))
    again = GenerationRequest("after", request.prompt_ids + sampled + prompt(5), 6)
    assert worst_difference(new, again, generate(engine, again)["after"]) > 0.01


def test_a_request_that_was_submitted_but_not_started_starts_afresh_after_an_update(
    make_engine: Callable, prompt: Callable
) -> None:
    engine, new = make_engine(), make_model(seed=1)
    request = GenerationRequest("before", prompt(40), 6)
    sampled = generate(engine, request)["before"].token_ids
    again = GenerationRequest("after", request.prompt_ids + sampled, 6)
    engine.submit(again)
    engine.load_weights(1, new.state_dict())
    expect_logprobs(new, again, finish(engine)["after"])


@pytest.mark.parametrize("names", ["state_dict", "parameters", "alias"])
def test_of_tied_names_any_is_enough(make_engine: Callable, names: str, prompt: Callable) -> None:
    new = make_model("llama-tied", seed=1)
    tensors = dict(new.named_parameters()) if names == "parameters" else dict(new.state_dict())
    if names == "alias":
        del tensors["model.embed_tokens.weight"]
    engine = make_engine("llama-tied")
    engine.load_weights(1, tensors)
    request = GenerationRequest("r", prompt(12), 6)
    expect_logprobs(new, request, generate(engine, request)["r"])


@pytest.mark.parametrize(
    ("name", "tensor", "fault"),
    [
        ("model.norm.weight", None, "1 missing: model.norm.weight"),
        ("model.norm.bias", torch.zeros(32), "1 unexpected: model.norm.bias"),
        (
            "model.norm.weight",
            torch.zeros(31),
            r"1 of another shape: model.norm.weight is \(31,\), the model's",
        ),
        ("lm_head.weight", torch.zeros(58, 32), "tied to a tensor that was sent with other values"),
    ],
)
def test_tensors_that_do_not_fit_leave_the_old_weights_in_use(
    make_engine: Callable, name: str, tensor: torch.Tensor | None, fault: str, prompt: Callable
) -> None:
    engine = make_engine(max_batch=2)
    tensors = dict(make_model(seed=1).state_dict())
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(ValueError, match=fault):
        engine.load_weights(1, tensors)
    assert engine.version == 0
    request = GenerationRequest("r", prompt(12), 6)
    expect_logprobs(make_model(), request, generate(engine, request)["r"])


def test_a_load_that_breaks_off_half_way_leaves_the_old_weights_in_use(make_engine: Callable, prompt: Callable) -> None:
    engine, new = make_engine(), make_model(seed=1)
    first, second = GenerationRequest("first", prompt(40), 9), GenerationRequest("second", prompt(12), 6)
    engine.submit(first)
    engine.step()
    broken = dict(new.state_dict())
    late = "model.layers.1.mlp.up_proj.weight"
    broken[late] = broken[late].to("meta")  # right name and shape, no bytes
    with pytest.raises(NotImplementedError):
        engine.load_weights(1, broken)
    done = generate(engine, second)
    assert done["first"].versions == [VersionSpan(0, 0, 9)]
    assert done["second"].versions == [VersionSpan(0, 0, 6)]
    for request in (first, second):
        expect_logprobs(make_model(), request, done[request.id])
    engine.load_weights(2, new.state_dict())
    expect_logprobs(new, second, generate(engine, second)["second"])


@pytest.mark.parametrize("architecture", ["qwen3-tied", "llama-untied"])
@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.1.self_attn.q_proj.weight"],  # one part of what vLLM fuses
        ["model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"],
        ["model.embed_tokens.weight"],
        ["model.norm.weight"],
        ["lm_head.weight"],
        [],
    ],
)
def test_with_a_partial_update_what_was_not_sent_stays_as_it_is(
    make_engine: Callable, architecture: str, names: list[str], prompt: Callable
) -> None:
    engine, model, other = make_engine(architecture), make_model(architecture, seed=1), make_model(architecture, seed=2)
    engine.load_weights(1, model.state_dict())
    part = {name: other.state_dict()[name] for name in names}
    engine.load_weights(2, part, partial=True)
    model.load_state_dict(part, strict=False)
    request = GenerationRequest("r", prompt(40), 8)
    done = generate(engine, request)["r"]
    assert done.versions == [VersionSpan(2, 0, 8)]
    expect_logprobs(model, request, done)


def test_a_partial_update_needs_weights_and_names_that_the_model_has(make_engine: Callable, prompt: Callable) -> None:
    engine, new = make_engine(), make_model(seed=1)
    with pytest.raises(WeightsError, match=r"1 unexpected: model\.norm\.bias"):
        engine.load_weights(1, {"model.norm.bias": torch.zeros(32)}, partial=True)
    engine.release_weights()
    with pytest.raises(EngineError, match="call load_weights with all of them first"):
        engine.load_weights(1, {"model.norm.weight": torch.ones(32)}, partial=True)
    engine.load_weights(2, new.state_dict())
    request = GenerationRequest("r", prompt(12), 6)
    expect_logprobs(new, request, generate(engine, request)["r"])


def test_released_weights_are_an_error_until_new_ones_are_loaded(make_engine: Callable, prompt: Callable) -> None:
    engine, new = make_engine(), make_model(seed=1)
    request = GenerationRequest("r", prompt(12), 6)
    engine.submit(request)
    with pytest.raises(EngineError, match="1 requests are running"):
        engine.release_weights()
    finish(engine)
    engine.release_weights()
    for use in (lambda: engine.submit(request), engine.step):
        with pytest.raises(EngineError, match="they were released; call load_weights with all of them first"):
            use()
    engine.load_weights(1, new.state_dict())
    expect_logprobs(new, request, generate(engine, request)["r"])


def test_a_seeded_request_draws_the_same_tokens_alone_and_in_company(make_engine: Callable, prompt: Callable) -> None:
    request = GenerationRequest("r", prompt(12), 20, seed=5)
    alone = generate(make_engine(), request)["r"]
    engine = make_engine(seed=99)
    engine.submit(GenerationRequest("earlier", prompt(50), 30))
    engine.step()
    company = generate(engine, request, GenerationRequest("other", prompt(3), 20, seed=6))["r"]
    assert company.token_ids == alone.token_ids
    assert (
        company.token_ids
        != generate(make_engine(), GenerationRequest("r", request.prompt_ids, 20, seed=6))["r"].token_ids
    )


def test_requests_without_a_seed_follow_the_engines(make_engine: Callable, prompt: Callable) -> None:
    request = GenerationRequest("r", prompt(12), 20)
    tokens = [generate(make_engine(seed=seed), request)["r"].token_ids for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]


def test_tokens_are_drawn_with_their_probabilities(make_engine: Callable, prompt: Callable) -> None:
    ids, temperature, draws = prompt(4), 1.5, 6400
    engine = make_engine(max_batch=64)
    counts: Counter[int] = Counter()
    for batch in range(draws // 64):
        requests = [GenerationRequest(f"{batch}/{i}", ids, 1, temperature=temperature) for i in range(64)]
        counts.update(generation.token_ids[0] for generation in generate(engine, *requests).values())
    with torch.inference_mode():
        wanted = torch.softmax(make_model()(torch.tensor([ids])).logits[0, -1] / temperature, dim=-1).tolist()
    for token, probability in enumerate(wanted):
        deviation = (probability * (1 - probability) / draws) ** 0.5
        assert abs(counts[token] / draws - probability) < 5 * deviation + 1e-3


def test_a_stop_id_ends_the_generation_and_is_part_of_it(make_engine: Callable, prompt: Callable) -> None:
    free = GenerationRequest("free", prompt(12), 10, seed=1)
    tokens = generate(make_engine(), free)["free"].token_ids
    stop = tokens[4]
    request = GenerationRequest("r", free.prompt_ids, 10, stop_ids=(99, stop), seed=1)
    done = generate(make_engine(), request)["r"]
    assert done.token_ids == tokens[: tokens.index(stop) + 1]
    assert done.finish_reason == "stop"
    expect_logprobs(make_model(), request, done)


def test_generation_ends_at_max_length(make_engine: Callable, prompt: Callable) -> None:
    done = generate(make_engine(max_length=16), GenerationRequest("r", prompt(12), 10))["r"]
    assert len(done.token_ids) == 4
    assert done.finish_reason == "length"


def test_a_prompt_that_is_too_long_disturbs_no_other_request(make_engine: Callable, prompt: Callable) -> None:
    engine, request = make_engine(max_length=32), GenerationRequest("r", prompt(12), 6)
    engine.submit(request)
    engine.step()
    with pytest.raises(ValueError, match="too long: its prompt of 32 tokens leaves no room"):
        engine.submit(GenerationRequest("too long", prompt(32), 1))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.submit(GenerationRequest("foreign", [58], 1))
    with pytest.raises(ValueError, match="r is running already"):
        engine.submit(request)
    expect_logprobs(make_model(), request, finish(engine)["r"])


def test_a_full_engine_refuses_more(make_engine: Callable, prompt: Callable) -> None:
    engine = make_engine(max_batch=1)
    engine.submit(GenerationRequest("a", prompt(3), 2))
    with pytest.raises(EngineError, match="all 1 places are taken"):
        engine.submit(GenerationRequest("b", prompt(3), 2))
    assert list(finish(engine)) == ["a"]


def test_an_aborted_request_returns_what_it_has(make_engine: Callable, prompt: Callable) -> None:
    engine, request = make_engine(), GenerationRequest("r", prompt(12), 6)
    engine.submit(request)
    engine.step()
    engine.step()
    done = engine.abort("r")
    assert done is not None
    assert (len(done.token_ids), done.finish_reason, engine.running) == (2, "abort", 0)
    expect_logprobs(make_model(), request, done)
    assert engine.abort("r") is None


def test_logits_that_are_not_finite_fail_the_request_and_leave_nothing_behind(
    make_engine: Callable, prompt: Callable
) -> None:
    engine, model = make_engine(max_batch=2), make_model(seed=1)
    engine.load_weights(1, {name: torch.full_like(tensor, torch.nan) for name, tensor in model.named_parameters()})
    broken = generate(engine, GenerationRequest("a", prompt(40), 6), GenerationRequest("b", prompt(40), 6))
    for generation in broken.values():
        assert (generation.finish_reason, generation.token_ids) == ("error", [])
        assert "version 1" in generation.error
    engine.load_weights(2, model.state_dict())
    # Beside a longer request the shorter one's masked columns are read: what they hold must be finite.
    requests = [GenerationRequest("long", prompt(40), 6), GenerationRequest("short", prompt(30), 6)]
    done = generate(engine, *requests)
    for request in requests:
        expect_logprobs(model, request, done[request.id])
