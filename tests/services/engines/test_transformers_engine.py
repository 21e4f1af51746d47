from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_builders import expect_logprobs, finish, generate, make_model

from mesh.messages import VersionSpan
from services.engines.engine import EngineConfig, GenerationRequest
from services.engines.transformers_engine import TransformersEngine


def make_engine(model: Any, **settings: Any) -> TransformersEngine:
    return TransformersEngine(model, EngineConfig(**{"max_batch": 8, "max_length": 400, "seed": 0, **settings}))


def test_a_next_turn_goes_on_from_the_slot_of_the_one_before(prompt: Callable) -> None:
    engine = make_engine(make_model())
    first = GenerationRequest("turn 1", prompt(40), 6)
    sampled = generate(engine, first)["turn 1"].token_ids
    second = GenerationRequest("turn 2", first.prompt_ids + sampled + prompt(5), 6)
    other = GenerationRequest("other", [*first.prompt_ids[:-1], 3], 6)
    done = generate(engine, other, second)
    assert done["turn 2"].cached_tokens == 40 + 5  # the last sampled token was never fed
    assert done["other"].cached_tokens == 0
    expect_logprobs(make_model(), second, done["turn 2"])
    expect_logprobs(make_model(), other, done["other"])


def test_the_sequence_retained_longest_gives_way_first(prompt: Callable) -> None:
    engine = make_engine(make_model(), max_batch=2)
    ids = {name: prompt(20) for name in ("old", "young", "new")}
    for name in ids:
        ids[name] += generate(engine, GenerationRequest(name, ids[name], 3))[name].token_ids
    done = generate(engine, GenerationRequest("young again", ids["young"], 1))
    assert done["young again"].cached_tokens == 22
    assert generate(engine, GenerationRequest("old again", ids["old"], 1))["old again"].cached_tokens == 0


def test_a_request_running_through_an_update_continues_with_new_weights_on_its_old_keys_and_values(
    prompt: Callable,
) -> None:
    engine, old, new = make_engine(make_model()), make_model(), make_model(seed=1)
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
    assert generate(engine, follow_up)["next"].cached_tokens == 0  # keys of two versions are for nobody else


def test_a_model_folder_is_loaded_in_the_type_asked_for(prompt: Callable, tmp_path: Any) -> None:
    make_model().save_pretrained(tmp_path)
    request = GenerationRequest("r", prompt(12), 6, seed=1)
    from_folder = generate(make_engine(str(tmp_path)), request)["r"]
    assert from_folder.token_ids == generate(make_engine(make_model()), request)["r"].token_ids
    expect_logprobs(make_model(), request, from_folder)
    assert len(generate(make_engine(str(tmp_path), dtype="bfloat16"), request)["r"].token_ids) == 6


def test_models_that_the_slots_cannot_mask_are_refused() -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    with pytest.raises(ValueError, match=r"\['sliding_attention'\].*lower max_length"):
        make_engine(make_model("qwen3-tied", **windowed), max_length=100)
    make_engine(make_model("qwen3-tied", **windowed), max_length=64)
    with pytest.raises(ValueError, match="the model knows 512 positions"):
        make_engine(make_model(), max_length=513)
    flash = make_model()
    flash.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match='attn_implementation="sdpa"'):
        make_engine(flash)
