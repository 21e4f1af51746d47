"""The hinted teacher: whose weights it has, which rows it gives, what it does, and how that is measured."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode
from training_builders import EOS, VOCAB, tiny_model

from mesh.messages import HintedContext, Task
from services.environments.client import EnvironmentFailure
from services.training.hinted import HintedRows, HintedTeacher, HintedTeacherConfig, hinted_accuracy

TOKENIZER: Any = SimpleNamespace(  # a token is its number
    eos_token_id=EOS, decode=lambda ids, skip_special_tokens: " ".join(str(token) for token in ids)
)


def contexts(*shapes: tuple[int, int], seed: int = 0) -> list[HintedContext]:
    """One context for each `(prompt length, turn length)`."""
    rng = random.Random(seed)
    return [
        HintedContext(
            [rng.randrange(3, VOCAB) for _ in range(prompt)],
            [rng.randrange(3, VOCAB) for _ in range(turn)],
            Task(f"t{number}", number, number),
            [],
        )
        for number, (prompt, turn) in enumerate(shapes)
    ]


def teacher(initial: Any, live: Any = None, **settings: Any) -> HintedTeacher:
    return HintedTeacher(initial, live, HintedTeacherConfig(**{"align": "turn", **settings}))


def chunks(rows: HintedRows, size: int) -> list[torch.Tensor]:
    return [rows.read(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]


def aligned(asked_of: HintedTeacher, asked: list[HintedContext]) -> tuple[torch.Tensor, list[int]]:
    """The rows (N, V), read a few at a time, and their offsets."""
    rows = asked_of.align(asked)
    return torch.cat([rows.read(0, 0), *chunks(rows, 3)]), rows.row_offsets


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def rows_by_hand(model: Any, context: HintedContext) -> torch.Tensor:
    """The logits that predict each turn token, from a forward pass over this context alone."""
    model.eval()
    logits = model(torch.tensor([context.prompt_ids + context.turn_ids])).logits[0]
    return torch.stack([logits[len(context.prompt_ids) + j - 1] for j in range(len(context.turn_ids))])


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("batch_tokens", [10_000, 40, 1])
def test_rows_are_those_of_every_context_alone(architecture, batch_tokens):
    model = tiny_model(architecture=architecture)
    asked = contexts((9, 4), (3, 7), (14, 1), (5, 5), (9, 4))
    rows, offsets = aligned(teacher(model, batch_tokens=batch_tokens), asked)
    assert offsets == [0, 4, 11, 12, 17, 21]
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, torch.cat([rows_by_hand(model, c) for c in asked]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row_chunk", [1, 4, 1000])
def test_prefix_ends_at_and_includes_the_first_rejected_token(row_chunk):
    model = tiny_model()
    asked = contexts((6, 6), (8, 6), (5, 6), (7, 1))
    picked = [
        rows_by_hand(model, c).softmax(-1)[torch.arange(len(c.turn_ids)), torch.tensor(c.turn_ids)].tolist()
        for c in asked
    ]
    threshold = sorted(p for row in picked for p in row)[6]
    expected = [next((j + 1 for j, p in enumerate(row) if p < threshold), len(row)) for row in picked]
    assert any(1 < count < 6 for count in expected)  # in the middle of a turn
    rows, offsets = aligned(teacher(model, align="prefix", reject_below=threshold, row_chunk=row_chunk), asked)
    assert [stop - start for start, stop in pairwise(offsets)] == expected
    by_hand = [rows_by_hand(model, c)[:count] for c, count in zip(asked, expected, strict=True)]
    torch.testing.assert_close(rows, torch.cat(by_hand), rtol=1e-4, atol=1e-5)

    lowest = min(p for row in picked for p in row) * 0.99
    _, none_rejected = aligned(teacher(model, align="prefix", reject_below=lowest, row_chunk=row_chunk), asked)
    assert none_rejected == [0, 6, 12, 18, 19]


def test_turn_alignment_covers_the_whole_turn_whatever_is_rejected():
    _, offsets = aligned(teacher(tiny_model(), align="turn", reject_below=0.999), contexts((6, 5), (4, 2)))
    assert offsets == [0, 5, 7]


def test_contexts_over_the_limit_have_no_row_and_the_others_keep_theirs():
    model = tiny_model()
    asked = contexts((20, 4), (5, 3), (20, 1))
    with pytest.warns(UserWarning, match=r"2 of 3 hinted contexts are longer than max_context 12, the longest 24"):
        rows, offsets = aligned(teacher(model, max_context=12), asked)
    assert offsets == [0, 0, 3, 3]
    torch.testing.assert_close(rows, rows_by_hand(model, asked[1]), rtol=1e-4, atol=1e-5)


def test_no_row_at_all_is_an_empty_answer():
    with pytest.warns(UserWarning, match="1 of 1"):
        rows, offsets = aligned(teacher(tiny_model(), max_context=8), contexts((20, 4)))
    assert (rows.shape, offsets) == ((0, VOCAB), [0, 0])
    rows, offsets = aligned(teacher(tiny_model()), [])
    assert (rows.shape, offsets) == ((0, VOCAB), [0])


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation inside the block made, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, list | tuple) else [made]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return made


@pytest.mark.parametrize("weights", ["initial", "trust_region"])
@pytest.mark.parametrize("align", ["prefix", "turn"])
def test_logits_of_more_than_a_chunk_never_exist(align, weights):
    vocab, row_chunk = 5000, 4
    model = tiny_model(vocab_size=vocab)
    bounded = teacher(model, model, align=align, weights=weights, reject_below=1e-9, row_chunk=row_chunk)
    with LargestTensor() as largest:
        rows = bounded.align(contexts((9, 30), (12, 30)))
        for chunk in chunks(rows, row_chunk):
            assert len(chunk) == row_chunk
    assert len(rows) == 60
    weight = model.get_output_embeddings().weight.numel()
    assert largest.elements == max(row_chunk * vocab, weight) < len(rows) * vocab


def test_rows_are_made_anew_at_each_read_and_need_no_gradient():
    model, asked = tiny_model(), contexts((6, 4), (5, 3))
    rows = teacher(model).align(asked)
    expected = torch.cat([rows_by_hand(model, c) for c in asked])
    for start, stop in [(0, 7), (2, 5), (6, 7), (3, 3), (0, 2)]:
        read = rows.read(start, stop)
        torch.testing.assert_close(read, expected[start:stop], rtol=1e-4, atol=1e-5)
        assert not read.requires_grad
    following = rows.in_order()
    torch.testing.assert_close(torch.cat([following(3), following(4)]), expected, rtol=1e-4, atol=1e-5)


def test_rows_cannot_be_read_once_the_weights_have_changed():
    follows, asked = teacher(tiny_model(), tiny_model(), weights="live"), contexts((5, 3))
    rows = follows.align(asked)
    follows.follow(4, parameters(tiny_model(seed=1)))
    with pytest.raises(RuntimeError, match=r"took in version 4 since .* at version 0: read what it said before"):
        rows.read(0, 1)
    assert follows.align(asked).read(0, 3).shape == (3, VOCAB)


def test_initial_never_changes():
    initial, asked = tiny_model(), contexts((5, 3))
    fixed = teacher(initial, tiny_model(seed=1), weights="initial")
    before, _ = aligned(fixed, asked)
    fixed.follow(1, parameters(tiny_model(seed=2)))
    after, _ = aligned(fixed, asked)
    assert torch.equal(before, after)
    assert fixed.version == 0


def test_live_equals_the_policy_it_was_given():
    policy, asked = tiny_model(seed=1), contexts((5, 3))
    follows = teacher(tiny_model(), tiny_model(), weights="live")
    follows.follow(7, parameters(policy))
    rows, _ = aligned(follows, asked)
    torch.testing.assert_close(rows, rows_by_hand(policy, asked[0]), rtol=1e-4, atol=1e-5)
    assert follows.version == 7


def test_a_teacher_keeps_its_own_weights_while_the_policy_trains_in_place():
    policy, asked = tiny_model(), contexts((5, 3))
    for weights in ("live", "ema", "trust_region"):
        inline = teacher(tiny_model(), policy, weights=weights)
        before, _ = aligned(inline, asked)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1)
        assert torch.equal(aligned(inline, asked)[0], before)
        inline.follow(1, dict(policy.named_parameters()))
        assert not torch.equal(aligned(inline, asked)[0], before)


def test_ema_keeps_its_factor_of_itself_at_each_version():
    initial, first, second = tiny_model(), tiny_model(seed=1), tiny_model(seed=2)
    average = teacher(initial, initial, weights="ema", ema=0.75)
    average.follow(1, parameters(first))
    average.follow(2, parameters(second))
    expected = copy.deepcopy(initial)
    with torch.no_grad():
        for parameter, a, b in zip(expected.parameters(), first.parameters(), second.parameters(), strict=True):
            parameter.copy_(0.75 * (0.75 * parameter + 0.25 * a) + 0.25 * b)
    asked = contexts((5, 3))
    rows, _ = aligned(average, asked)
    torch.testing.assert_close(rows, rows_by_hand(expected, asked[0]), rtol=1e-4, atol=1e-5)


def test_ema_counts_the_versions_that_it_missed():
    initial, policy, asked = tiny_model(), tiny_model(seed=1), contexts((5, 3))
    every, slow = (teacher(initial, initial, weights="ema", ema=0.9) for _ in range(2))
    every.follow(1, parameters(policy))
    slow.follow(1, parameters(policy))
    for version in range(2, 6):
        every.follow(version, parameters(policy))
    slow.follow(5, parameters(policy))
    torch.testing.assert_close(aligned(slow, asked)[0], aligned(every, asked)[0], rtol=1e-3, atol=1e-5)


def averaged(shares: Mapping[Any, float]) -> Any:
    """A model whose parameters are the weighted sum of these models'."""
    made = copy.deepcopy(next(iter(shares)))
    with torch.no_grad():
        for parameter, *parts in zip(made.parameters(), *(model.parameters() for model in shares), strict=True):
            parameter.copy_(sum(share * part for share, part in zip(shares.values(), parts, strict=True)))
    return made


def test_an_average_that_starts_late_keeps_its_share_of_the_initial_weights():
    initial, policy, asked = tiny_model(), tiny_model(seed=1), contexts((5, 3))
    late = teacher(initial, initial, weights="ema", ema=0.99)
    late.follow(40, parameters(policy))
    kept = 0.99**40
    assert kept == pytest.approx(0.669, abs=1e-3)
    expected = averaged({initial: kept, policy: 1 - kept})
    rows, _ = aligned(late, asked)
    torch.testing.assert_close(rows, rows_by_hand(expected, asked[0]), rtol=1e-4, atol=1e-5)
    late.follow(41, parameters(policy))
    expected = averaged({initial: 0.99**41, policy: 1 - 0.99**41})
    rows, _ = aligned(late, asked)
    torch.testing.assert_close(rows, rows_by_hand(expected, asked[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("version", [0, 3, 5])
def test_an_average_whose_trainer_went_back_is_that_of_a_teacher_started_there(version):
    initial, abandoned, policy, asked = tiny_model(), tiny_model(seed=1), tiny_model(seed=2), contexts((5, 3))
    went_back, started = (teacher(initial, initial, weights="ema", ema=0.8) for _ in range(2))
    went_back.follow(1, parameters(abandoned))
    went_back.follow(5, parameters(abandoned))
    for each in (went_back, started):
        each.follow(version, parameters(policy))
        assert each.version == version
    assert torch.equal(aligned(went_back, asked)[0], aligned(started, asked)[0])
    assert not torch.allclose(aligned(started, asked)[0], rows_by_hand(policy, asked[0]), atol=1e-3)


@pytest.mark.parametrize("weights", ["live", "ema"])
def test_only_the_parameters_that_are_sent_change(weights):
    initial, policy, asked = tiny_model(), tiny_model(seed=1), contexts((5, 3))
    trained = {name: p for name, p in parameters(policy).items() if ".layers.1." in name}
    assert 0 < len(trained) < len(parameters(policy))
    follows = teacher(initial, initial, weights=weights, ema=0.75)
    follows.follow(1, trained)
    follows.follow(2, trained)
    expected = copy.deepcopy(initial)
    with torch.no_grad():
        for name, p in expected.named_parameters():
            kept = 0.75**2 if weights == "ema" else 0.0
            if name in trained:
                p.copy_(kept * p + (1 - kept) * trained[name])
    torch.testing.assert_close(aligned(follows, asked)[0], rows_by_hand(expected, asked[0]), rtol=1e-4, atol=1e-5)


def test_a_tied_parameter_may_be_sent_by_either_name():
    initial, asked = tiny_model(), contexts((5, 3))
    changed = parameters(tiny_model(seed=1))["model.embed_tokens.weight"]
    rows = []
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        follows = teacher(initial, initial, weights="live")
        follows.follow(1, {name: changed})
        rows.append(aligned(follows, asked)[0])
    assert torch.equal(*rows)
    assert not torch.equal(rows[0], aligned(teacher(initial), asked)[0])


def test_tensors_that_do_not_fit_are_an_error_and_change_nothing():
    initial, asked = tiny_model(), contexts((5, 3))
    follows = teacher(initial, initial, weights="live")
    before, _ = aligned(follows, asked)
    sent = parameters(tiny_model(seed=1))
    name = "model.norm.weight"
    for wrong, message in [
        ({"model.layers.0.lora_A.weight": sent[name]}, r"1 of \d+ tensors are no parameters .*lora_A.*adapters merged"),
        ({name: sent[name][:1]}, r"model.norm.weight is \(1,\), and \(32,\) in the hinted teacher's model"),
    ]:
        with pytest.raises(ValueError, match=message):
            follows.follow(1, {**sent, **wrong})
        assert follows.version == 0
        assert torch.equal(aligned(follows, asked)[0], before)


@pytest.mark.parametrize("trust", [0.0, 0.3, 1.0])
def test_trust_region_is_log_linear_between_the_initial_and_the_live_policy(trust):
    initial, policy, asked = tiny_model(), tiny_model(seed=1), contexts((5, 3))
    between = teacher(initial, initial, weights="trust_region", trust=trust)
    between.follow(1, parameters(policy))
    p, q = (rows_by_hand(model, asked[0]).softmax(-1) for model in (initial, policy))
    geometric = p ** (1 - trust) * q**trust
    rows, _ = aligned(between, asked)
    torch.testing.assert_close(rows.softmax(-1), geometric / geometric.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)


def test_kinds_that_follow_need_a_model_to_start_from():
    with pytest.raises(ValueError, match="'ema' needs the live model"):
        teacher(tiny_model(), None, weights="ema")


def test_an_average_in_bfloat16_is_refused_with_the_fix():
    with pytest.raises(ValidationError, match="set dtype = 'float32'"):
        HintedTeacherConfig(weights="ema", dtype="bfloat16")
    HintedTeacherConfig(weights="live", dtype="bfloat16")


@torch.no_grad()
def greedy_by_hand(model: Any, ids: list[int], tokens: int) -> list[int]:
    model.eval()
    for _ in range(tokens):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-tokens:]


@pytest.mark.parametrize("batch_tokens", [10_000, 1])
def test_it_acts_greedily_and_stops_at_the_end_of_the_turn(batch_tokens):
    model = tiny_model(seed=3)
    asked = contexts((4, 1), (9, 1), (6, 1), seed=1)
    wanted = [greedy_by_hand(model, c.prompt_ids, 6) for c in asked]
    # Make the third token of the first answer the one that ends a turn.
    eos = wanted[0][2]
    tokenizer: Any = SimpleNamespace(eos_token_id=eos, decode=TOKENIZER.decode)
    cut = [ids[: ids.index(eos)] if eos in ids else ids for ids in wanted]
    assert len(cut[0]) == 2
    assert len({len(ids) for ids in cut}) > 1  # they end at different times
    actions = teacher(model, batch_tokens=batch_tokens, probe_tokens=6).act(tokenizer, asked)
    assert actions == [" ".join(map(str, ids)) for ids in cut]


def test_it_does_not_act_where_there_is_no_room():
    with pytest.warns(UserWarning, match="1 of 2"):
        actions = teacher(tiny_model(), max_context=12, probe_tokens=4).act(TOKENIZER, contexts((9, 1), (8, 1)))
    assert actions[0] is None
    assert isinstance(actions[1], str)


class FakeEnvironment:
    """Accepts exactly one action at each state, known by the seed and the actions before it."""

    def __init__(self, right: Mapping[tuple[int, tuple[str, ...]], str], broken: frozenset[int] = frozenset()) -> None:
        self.right, self.broken, self.open = right, broken, 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[FakeSession]:
        self.open += 1
        try:
            yield FakeSession(self)
        finally:
            self.open -= 1


class FakeSession:
    def __init__(self, environment: FakeEnvironment) -> None:
        self.environment, self.seed, self.actions = environment, -1, ()

    async def reset(self, seed: int) -> None:
        if seed in self.environment.broken:
            raise EnvironmentFailure("ws://fake", seed, 0, "gone")
        self.seed = seed

    async def step(self, text: str) -> SimpleNamespace:
        accepted = self.environment.right.get((self.seed, self.actions)) == text
        self.actions = (*self.actions, text)
        return SimpleNamespace(error_kind=None if accepted else "tool_not_found")


def measure(environment: Any, asked: list[HintedContext], actions: list[str | None]) -> float | None:
    return asyncio.run(hinted_accuracy(environment, asked, actions))


def failing_turns() -> list[HintedContext]:
    """Failures at the first turn of seeds 0 and 1, and after two actions in seed 2."""
    asked = contexts((3, 1), (3, 1), (3, 1))
    asked[2].actions = ["add(1,2)", "plus(1,2)"]
    return asked


RIGHT = {(0, ()): "sum(1,2)", (1, ()): "sum(3,4)", (2, ("add(1,2)", "plus(1,2)")): "sum(1,2)"}


def test_hinted_accuracy_is_the_share_that_the_environment_accepts_in_the_same_state():
    environment = FakeEnvironment(RIGHT)
    assert measure(environment, failing_turns(), ["sum(1,2)", "sum(3,4)", "sum(1,2)"]) == 1.0
    assert measure(environment, failing_turns(), ["sum(1,2)", "sum(9,9)", "sum(1,2)"]) == pytest.approx(2 / 3)
    elsewhere = failing_turns()
    elsewhere[2].actions = ["add(1,2)"]  # not the state in which that action is right
    assert measure(environment, elsewhere, ["sum(1,2)", "sum(3,4)", "sum(1,2)"]) == pytest.approx(2 / 3)
    assert environment.open == 0


def test_what_could_not_be_tried_stays_out_of_hinted_accuracy():
    environment = FakeEnvironment(RIGHT, broken=frozenset({1}))
    assert measure(environment, failing_turns(), ["sum(1,2)", "sum(3,4)", "wrong"]) == 0.5
    assert measure(environment, failing_turns(), ["sum(1,2)", None, None]) == 1.0
    assert measure(environment, failing_turns(), [None, None, None]) is None
    assert measure(environment, [], []) is None
    with pytest.raises(EnvironmentFailure, match=r"ws://fake failed .* of seed 1: gone"):
        measure(environment, failing_turns(), [None, "sum(3,4)", None])
    assert environment.open == 0
