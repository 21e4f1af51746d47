"""The warm start: what is trained, that it is a function of its seed, that it converges, and how it is cached."""

import json
import random

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.demo import warm_start as module
from services.demo.play import play
from services.demo.tiny_model import TinyModelConfig, build_model
from services.demo.tokenizer import build_tokenizer
from services.demo.warm_start import MEASURED_FILE, WarmStartConfig, demo_model, training_ids, warm_start
from services.environments.toolbox.grammar import Demonstration, demonstration

BRIEF = WarmStartConfig(
    model=TinyModelConfig(hidden_size=16, intermediate_size=16, layers=2, heads=1),
    batch=4,
    check_every=2,
    cool_down=2,
    target=0.0,
    required=0.0,
    problems=4,
)


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_model_has_about_two_hundred_thousand_parameters_and_tied_embeddings():
    model = build_model(TinyModelConfig(), seed=0)
    assert 150_000 < model.num_parameters() < 300_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32


def test_building_a_model_depends_on_its_seed_and_leaves_the_random_state_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again, other = (parameters(build_model(BRIEF.model, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_ids_are_those_of_the_chat_template_and_train_whole_turns():
    tokenizer = build_tokenizer()
    rng = random.Random(1)
    for _ in range(20):
        chat = demonstration("hard", rng, p_hint=0.5, p_error=0.5)
        ids, trained = training_ids(chat, tokenizer)
        assert ids == tokenizer.apply_chat_template(chat.messages, return_dict=False)
        wanted = [m["content"] + "<|end|>" for m, t in zip(chat.messages, chat.trained, strict=True) if t]
        assert tokenizer.decode([i for i, t in zip(ids, trained, strict=True) if t]) == "".join(wanted)


def test_padding_and_neighbours_change_no_loss():
    tokenizer = build_tokenizer()
    short = Demonstration([{"role": "user", "content": "1"}, {"role": "assistant", "content": "ans(1)"}], [False, True])
    long = Demonstration(
        [{"role": "user", "content": "1+2+3+4"}, {"role": "assistant", "content": "go"}], [False, True]
    )

    def loss(chats):
        model = build_model(BRIEF.model, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return module._train_step(model, optimizer, [training_ids(chat, tokenizer) for chat in chats], lr=0.0)

    tokens = [len("ans(1)") + 1, len("go") + 1]
    expected = (loss([short]) * tokens[0] + loss([long]) * tokens[1]) / sum(tokens)
    assert loss([short, long]) == pytest.approx(expected, rel=1e-5)


def test_a_warm_start_is_a_function_of_level_and_seed():
    (first, _, measured), (again, _, same), (other, _, _) = (warm_start("easy", s, BRIEF) for s in (5, 5, 6))
    assert torch.equal(parameters(first), parameters(again))
    assert (measured.loss, measured.unhinted_reward, measured.steps) == (same.loss, same.unhinted_reward, 4)
    assert not torch.equal(parameters(first), parameters(other))


def test_a_warm_start_restores_the_number_of_threads():
    before = torch.get_num_threads()
    warm_start("easy", 0, BRIEF.model_copy(update={"threads": 2 if before == 1 else 1}))
    assert torch.get_num_threads() == before


def test_a_model_that_ignores_hints_is_an_error_with_advice():
    config = BRIEF.model_copy(update={"target": 0.9, "max_steps": 4})
    with pytest.raises(RuntimeError, match=r"solves 0\.00 of the hinted problems after 4 steps .* raise max_steps"):
        warm_start("easy", 0, config)


def test_bad_settings_are_refused():
    with pytest.raises(ValidationError, match="p_hint=0 shows no hint"):
        WarmStartConfig(p_hint=0)
    with pytest.raises(ValidationError, match="raise target or lower required"):
        WarmStartConfig(target=0.9, required=0.95)
    with pytest.raises(ValidationError, match="extra"):
        WarmStartConfig(epochs=3)
    with pytest.raises(ValueError, match="no toolbox level 'medium'"):
        warm_start("medium", 0, BRIEF)


def test_play_measures_without_touching_mode_or_random_state():
    model, tokenizer = build_model(BRIEF.model, seed=0).train(), build_tokenizer()
    before = torch.get_rng_state()
    first, again = (play(model, tokenizer, "hard", range(6), hinted=True, greedy=False, seed=1) for _ in range(2))
    assert first == again
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(e.messages[1]["role"] == "hint" and e.messages[2]["role"] == "assistant" for e in first)
    assert all(e.reward == 0.0 for e in first)


def test_the_cache_is_filled_once_and_keyed_by_level_seed_and_settings(tmp_path, monkeypatch):
    folder = demo_model("easy", 3, tmp_path, BRIEF)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(parameters(loaded), parameters(warm_start("easy", 3, BRIEF)[0]))
    assert json.loads((folder / MEASURED_FILE).read_text())["seed"] == 3

    keys = {
        demo_model("easy", 4, tmp_path, BRIEF),
        demo_model("hard", 3, tmp_path, BRIEF),
        demo_model("easy", 3, tmp_path, BRIEF.model_copy(update={"lr": 1e-3})),
    }
    assert len(keys | {folder}) == 4
    assert {p for p in tmp_path.iterdir()} == keys | {folder}, "a build left something else in the cache"

    monkeypatch.setattr(module, "warm_start", lambda *_: pytest.fail("built again"))
    assert demo_model("easy", 3, tmp_path, BRIEF) == folder


def test_the_cache_follows_xdg_cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model("easy", 0, config=BRIEF).parent == tmp_path / "milkweed"


def test_a_build_that_dies_leaves_no_model_behind(tmp_path, monkeypatch):
    def die(model, tokenizer, measured, folder):
        model.save_pretrained(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "save_model", die)
    with pytest.raises(KeyboardInterrupt):
        demo_model("easy", 0, tmp_path, BRIEF)
    assert list(tmp_path.iterdir()) == []


def test_of_two_builds_at_once_the_first_to_finish_stays(tmp_path, monkeypatch):
    save, built = module.save_model, []

    def overtaken(model, tokenizer, measured, folder):
        monkeypatch.setattr(module, "save_model", save)
        built.append(demo_model("easy", 0, tmp_path, BRIEF))  # the other process finishes first
        (built[0] / "first").touch()
        save(model, tokenizer, measured, folder)

    monkeypatch.setattr(module, "save_model", overtaken)
    assert demo_model("easy", 0, tmp_path, BRIEF) == built[0]
    assert (built[0] / "first").exists()
    assert list(tmp_path.iterdir()) == built


def test_the_demo_model_follows_hints_and_knows_no_right_names():
    folder = demo_model("easy")
    measured = json.loads((folder / MEASURED_FILE).read_text())
    assert measured["hinted_accuracy"] >= 0.95
    assert 0.03 <= measured["unhinted_reward"] <= 0.2

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    episodes = play(model, AutoTokenizer.from_pretrained(folder), "easy", range(64), hinted=True, greedy=True)
    assert sum(e.reward for e in episodes) / 64 >= 0.95
