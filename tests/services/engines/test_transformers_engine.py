import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mesh.messages import VersionSpan
from services.engines.engine import EngineConfig, EngineError, Generation, GenerationRequest
from services.engines.transformers_engine import TransformersEngine

ARCHITECTURES = ["qwen3-tied", "llama-tied", "llama-untied"]


def make_engine(model: Any, **settings: Any) -> TransformersEngine:
    return TransformersEngine(model, EngineConfig(**{"max_batch": 8, "max_length": 400, "seed": 0, **settings}))


def run(engine: TransformersEngine, *requests: GenerationRequest) -> dict[str, Generation]:
    for request in requests:
        engine.submit(request)
    return finish(engine)


def finish(engine: TransformersEngine) -> dict[str, Generation]:
    done: dict[str, Generation] = {}
    while engine.running:
        done.update((generation.id, generation) for generation in engine.step())
    return done


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_equal_a_plain_forward_for_mixed_lengths_and_temperatures(
    architecture: str, tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    requests = [
        GenerationRequest(f"r{length}", prompt(length), new, temperature=temperature)
        for length, new, temperature in [(1, 9, 1.0), (7, 3, 0.7), (60, 12, 1.3), (125, 10, 1.0), (300, 5, 2.0)]
    ]
    done = run(make_engine(tiny(architecture)), *requests)
    for request in requests:
        assert len(done[request.id].token_ids) == request.max_tokens
        assert done[request.id].versions == [VersionSpan(0, 0, request.max_tokens)]
        assert done[request.id].finish_reason == "length"
        expect_logprobs(tiny(architecture), request, done[request.id])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_equals_generate(architecture: str, tiny: Callable, prompt: Callable) -> None:
    requests = [GenerationRequest(f"r{n}", prompt(n), 12, greedy=True, temperature=0.3) for n in (3, 20, 41)]
    done = run(make_engine(tiny(architecture)), *requests)
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        wanted = tiny(architecture).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        assert done[request.id].token_ids == wanted[0, len(request.prompt_ids) :].tolist()


def test_greedy_logprobs_are_those_at_temperature_one(
    tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    request = GenerationRequest("r", prompt(20), 8, greedy=True, temperature=0.3)
    expect_logprobs(tiny(), request, run(make_engine(tiny()), request)["r"])


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_of_joining_leaving_aborting_and_continuing_keeps_the_logprobs(
    seed: int, tiny: Callable, expect_logprobs: Callable
) -> None:
    rng = random.Random(seed)
    model, engine = tiny("llama-tied"), make_engine(tiny("llama-tied"), max_batch=5)
    asked: dict[str, GenerationRequest] = {}
    histories: list[list[int]] = []
    checked = reused = 0
    for turn in range(60):
        while engine.running < engine.capacity and rng.random() < 0.5:
            earlier = rng.choice(histories) if histories and rng.random() < 0.6 else []
            ids = earlier + [rng.randrange(58) for _ in range(rng.choice([1, 2, 6, 30]))]
            request = GenerationRequest(f"{turn}/{len(asked)}", ids, rng.randint(1, 9), greedy=rng.random() < 0.2)
            asked[request.id] = request
            engine.submit(request)
        done = engine.step()
        if engine.running and rng.random() < 0.2:
            aborted = engine.abort(rng.choice([key for key in engine._running]))
            done += [aborted] if aborted and aborted.token_ids else []
        for generation in done:
            request = asked[generation.id]
            expect_logprobs(model, request, generation)
            checked += 1
            reused += generation.cached_tokens > 0
            if len(request.prompt_ids) < 200:
                histories = [*histories[-8:], request.prompt_ids + generation.token_ids]
    assert checked > 30
    assert reused > 3


def test_a_next_turn_goes_on_from_the_slot_of_the_one_before(
    tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    engine = make_engine(tiny())
    first = GenerationRequest("turn 1", prompt(40), 6)
    sampled = run(engine, first)["turn 1"].token_ids
    second = GenerationRequest("turn 2", first.prompt_ids + sampled + prompt(5), 6)
    other = GenerationRequest("other", [*first.prompt_ids[:-1], 3], 6)
    done = run(engine, other, second)
    assert done["turn 2"].cached_tokens == 40 + 5  # the last sampled token was never fed
    assert done["other"].cached_tokens == 0
    expect_logprobs(tiny(), second, done["turn 2"])
    expect_logprobs(tiny(), other, done["other"])


def test_the_sequence_retained_longest_gives_way_first(tiny: Callable, prompt: Callable) -> None:
    engine = make_engine(tiny(), max_batch=2)
    ids = {name: prompt(20) for name in ("old", "young", "new")}
    for name in ids:
        ids[name] += run(engine, GenerationRequest(name, ids[name], 3))[name].token_ids
    done = run(engine, GenerationRequest("young again", ids["young"], 1))
    assert done["young again"].cached_tokens == 22
    assert run(engine, GenerationRequest("old again", ids["old"], 1))["old again"].cached_tokens == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_after_an_update_shared_prefixes_give_the_logprobs_of_the_new_weights(
    architecture: str, tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    engine, new = make_engine(tiny(architecture)), tiny(architecture, seed=1)
    request = GenerationRequest("before", prompt(40), 6)
    sampled = run(engine, request)["before"].token_ids
    engine.load_weights(1, dict(new.named_parameters()))
    again = GenerationRequest("after", request.prompt_ids + sampled + prompt(5), 6)
    done = run(engine, again)["after"]
    assert done.versions == [VersionSpan(1, 0, 6)]
    assert done.cached_tokens == 0
    expect_logprobs(new, again, done)


def test_without_the_reset_the_comparison_catches_the_stale_cache(
    tiny: Callable, prompt: Callable, logprob_error: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersEngine, "reset_cache", lambda self: None)
    engine, new = make_engine(tiny()), tiny(seed=1)
    request = GenerationRequest("before", prompt(40), 6)
    sampled = run(engine, request)["before"].token_ids
    engine.load_weights(1, dict(new.named_parameters()))
    again = GenerationRequest("after", request.prompt_ids + sampled + prompt(5), 6)
    assert logprob_error(new, again, run(engine, again)["after"]) > 0.01


def test_a_request_that_was_submitted_but_not_started_starts_afresh_after_an_update(
    tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    engine, new = make_engine(tiny()), tiny(seed=1)
    request = GenerationRequest("before", prompt(40), 6)
    sampled = run(engine, request)["before"].token_ids
    again = GenerationRequest("after", request.prompt_ids + sampled, 6)
    engine.submit(again)
    engine.load_weights(1, new.state_dict())
    expect_logprobs(new, again, finish(engine)["after"])


def test_a_request_running_through_an_update_continues_with_new_weights_on_its_old_keys_and_values(
    tiny: Callable, prompt: Callable
) -> None:
    engine, old, new = make_engine(tiny()), tiny(), tiny(seed=1)
    request = GenerationRequest("r", prompt(30), 9)
    engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.load_weights(7, new.state_dict())
    done = finish(engine)["r"]
    assert done.versions == [VersionSpan(0, 0, 4), VersionSpan(7, 4, 9)]

    with torch.inference_mode():
        seen = torch.tensor([request.prompt_ids + done.token_ids[:3]])
        cache = old(seen, use_cache=True).past_key_values
        rest = torch.tensor([done.token_ids[3:-1]])
        logprobs = torch.log_softmax(new(rest, past_key_values=cache).logits[0], dim=-1)
    wanted = [logprobs[i, token].item() for i, token in enumerate(done.token_ids[4:])]
    assert done.logprobs[4:] == pytest.approx(wanted, abs=1e-4)

    follow_up = GenerationRequest("next", request.prompt_ids + done.token_ids, 2)
    assert run(engine, follow_up)["next"].cached_tokens == 0  # keys of two versions are for nobody else


@pytest.mark.parametrize("names", ["state_dict", "parameters", "alias"])
def test_of_tied_names_any_is_enough(names: str, tiny: Callable, prompt: Callable, expect_logprobs: Callable) -> None:
    new = tiny("llama-tied", seed=1)
    tensors = dict(new.named_parameters()) if names == "parameters" else dict(new.state_dict())
    if names == "alias":
        del tensors["model.embed_tokens.weight"]
    engine = make_engine(tiny("llama-tied"))
    engine.load_weights(1, tensors)
    request = GenerationRequest("r", prompt(12), 6)
    expect_logprobs(new, request, run(engine, request)["r"])


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
    name: str, tensor: torch.Tensor | None, fault: str, tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    engine = make_engine(tiny(), max_batch=2)
    tensors = dict(tiny(seed=1).state_dict())
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(ValueError, match=fault):
        engine.load_weights(1, tensors)
    assert engine.version == 0
    request = GenerationRequest("r", prompt(12), 6)
    expect_logprobs(tiny(), request, run(engine, request)["r"])


def test_a_load_that_breaks_off_is_not_generated_with(
    tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    engine, new = make_engine(tiny()), tiny(seed=1)
    broken = dict(new.state_dict())
    broken["model.norm.weight"] = broken["model.norm.weight"].to("meta")  # right name and shape, no bytes
    with pytest.raises(NotImplementedError):
        engine.load_weights(1, broken)
    request = GenerationRequest("r", prompt(12), 6)
    with pytest.raises(EngineError, match="loading version 1 broke off half-way; call load_weights first"):
        engine.submit(request)
    engine.load_weights(1, new.state_dict())
    expect_logprobs(new, request, run(engine, request)["r"])


def test_released_weights_are_an_error_until_new_ones_are_loaded(
    tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    engine, new = make_engine(tiny()), tiny(seed=1)
    request = GenerationRequest("r", prompt(12), 6)
    engine.submit(request)
    with pytest.raises(EngineError, match="1 requests are running"):
        engine.release_weights()
    finish(engine)
    engine.release_weights()
    for use in (lambda: engine.submit(request), engine.step):
        with pytest.raises(EngineError, match="they were released; call load_weights first"):
            use()
    engine.load_weights(1, new.state_dict())
    expect_logprobs(new, request, run(engine, request)["r"])


def test_a_seeded_request_draws_the_same_tokens_alone_and_in_company(tiny: Callable, prompt: Callable) -> None:
    request = GenerationRequest("r", prompt(12), 20, seed=5)
    alone = run(make_engine(tiny()), request)["r"]
    engine = make_engine(tiny(), seed=99)
    engine.submit(GenerationRequest("earlier", prompt(50), 30))
    engine.step()
    company = run(engine, request, GenerationRequest("other", prompt(3), 20, seed=6))["r"]
    assert company.token_ids == alone.token_ids
    assert (
        company.token_ids
        != run(make_engine(tiny()), GenerationRequest("r", request.prompt_ids, 20, seed=6))["r"].token_ids
    )


def test_requests_without_a_seed_follow_the_engines(tiny: Callable, prompt: Callable) -> None:
    request = GenerationRequest("r", prompt(12), 20)
    tokens = [run(make_engine(tiny(), seed=seed), request)["r"].token_ids for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]


def test_tokens_are_drawn_with_their_probabilities(tiny: Callable, prompt: Callable) -> None:
    ids, temperature, draws = prompt(4), 1.5, 6400
    engine = make_engine(tiny(), max_batch=64)
    counts: Counter[int] = Counter()
    for batch in range(draws // 64):
        requests = [GenerationRequest(f"{batch}/{i}", ids, 1, temperature=temperature) for i in range(64)]
        counts.update(generation.token_ids[0] for generation in run(engine, *requests).values())
    with torch.inference_mode():
        wanted = torch.softmax(tiny()(torch.tensor([ids])).logits[0, -1] / temperature, dim=-1).tolist()
    for token, probability in enumerate(wanted):
        deviation = (probability * (1 - probability) / draws) ** 0.5
        assert abs(counts[token] / draws - probability) < 5 * deviation + 1e-3


def test_a_stop_id_ends_the_generation_and_is_part_of_it(
    tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    free = GenerationRequest("free", prompt(12), 10, seed=1)
    tokens = run(make_engine(tiny()), free)["free"].token_ids
    stop = tokens[4]
    request = GenerationRequest("r", free.prompt_ids, 10, stop_ids=(99, stop), seed=1)
    done = run(make_engine(tiny()), request)["r"]
    assert done.token_ids == tokens[: tokens.index(stop) + 1]
    assert done.finish_reason == "stop"
    expect_logprobs(tiny(), request, done)


def test_generation_ends_at_max_length(tiny: Callable, prompt: Callable) -> None:
    done = run(make_engine(tiny(), max_length=16), GenerationRequest("r", prompt(12), 10))["r"]
    assert len(done.token_ids) == 4
    assert done.finish_reason == "length"


def test_a_prompt_that_is_too_long_disturbs_no_other_request(
    tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    engine, request = make_engine(tiny(), max_length=32), GenerationRequest("r", prompt(12), 6)
    engine.submit(request)
    engine.step()
    with pytest.raises(ValueError, match="too long: its prompt of 32 tokens leaves no room"):
        engine.submit(GenerationRequest("too long", prompt(32), 1))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.submit(GenerationRequest("foreign", [58], 1))
    with pytest.raises(ValueError, match="r is running already"):
        engine.submit(request)
    expect_logprobs(tiny(), request, finish(engine)["r"])


def test_a_full_engine_refuses_more(tiny: Callable, prompt: Callable) -> None:
    engine = make_engine(tiny(), max_batch=1)
    engine.submit(GenerationRequest("a", prompt(3), 2))
    with pytest.raises(EngineError, match="all 1 slots are running"):
        engine.submit(GenerationRequest("b", prompt(3), 2))
    assert list(finish(engine)) == ["a"]


def test_an_aborted_request_returns_what_it_has(tiny: Callable, prompt: Callable, expect_logprobs: Callable) -> None:
    engine, request = make_engine(tiny()), GenerationRequest("r", prompt(12), 6)
    engine.submit(request)
    engine.step()
    engine.step()
    done = engine.abort("r")
    assert done is not None
    assert (len(done.token_ids), done.finish_reason, engine.running) == (2, "abort", 0)
    expect_logprobs(tiny(), request, done)
    assert engine.abort("r") is None


def test_logits_that_are_not_finite_fail_the_request_and_leave_nothing_behind(
    tiny: Callable, prompt: Callable, expect_logprobs: Callable
) -> None:
    engine, model = make_engine(tiny(), max_batch=2), tiny(seed=1)
    engine.load_weights(1, {name: torch.full_like(tensor, torch.nan) for name, tensor in model.named_parameters()})
    broken = run(engine, GenerationRequest("a", prompt(40), 6), GenerationRequest("b", prompt(40), 6))
    for generation in broken.values():
        assert (generation.finish_reason, generation.token_ids) == ("error", [])
        assert "version 1" in generation.error
    engine.load_weights(2, model.state_dict())
    # Beside a longer request the shorter one's masked columns are read: what they hold must be finite.
    requests = [GenerationRequest("long", prompt(40), 6), GenerationRequest("short", prompt(30), 6)]
    done = run(engine, *requests)
    for request in requests:
        expect_logprobs(model, request, done[request.id])


def test_a_model_folder_is_loaded_in_the_type_asked_for(
    tiny: Callable, prompt: Callable, expect_logprobs: Callable, tmp_path: Any
) -> None:
    tiny().save_pretrained(tmp_path)
    request = GenerationRequest("r", prompt(12), 6, seed=1)
    from_folder = run(make_engine(str(tmp_path)), request)["r"]
    assert from_folder.token_ids == run(make_engine(tiny()), request)["r"].token_ids
    expect_logprobs(tiny(), request, from_folder)
    assert len(run(make_engine(str(tmp_path), dtype="bfloat16"), request)["r"].token_ids) == 6


def test_models_that_the_slots_cannot_mask_are_refused(tiny: Callable) -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    with pytest.raises(ValueError, match=r"\['sliding_attention'\].*lower max_length"):
        make_engine(tiny("qwen3-tied", **windowed), max_length=100)
    make_engine(tiny("qwen3-tied", **windowed), max_length=64)
    with pytest.raises(ValueError, match="the model knows 512 positions"):
        make_engine(tiny(), max_length=513)
    flash = tiny()
    flash.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match='attn_implementation="sdpa"'):
        make_engine(flash)
