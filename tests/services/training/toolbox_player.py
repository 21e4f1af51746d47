"""Toolbox episodes as rollouts with exact ids, logprobs and hinted error sites, played in this process in one batch."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch

from mesh.messages import ErrorSite, Group, Rollout, Task, Turn, VersionSpan
from services.environments.hints import HintLayers, load_hint_modules
from services.environments.toolbox.grammar import Outcome, Toolbox
from services.rollouts.advantages import group_advantages, is_dead
from services.rollouts.chat import ChatText
from services.rollouts.samples import SequenceRecorder
from services.training.hinted import HintedTeacher
from services.training.learner import Hinted

LEVEL = "easy"
MAX_NEW_TOKENS = 14


def play_groups(model: Any, tokenizer: Any, seeds: range, group_size: int, version: int) -> list[Group]:
    """`group_size` rollouts of every seed's problem, sampled at temperature 1 with torch's random state."""
    load_hint_modules(["services.environments.toolbox.hints"])
    tasks = [Task(str(seed), index, seed) for index, seed in enumerate(seeds)]
    episodes = [_Episode(tokenizer, task, member) for task in tasks for member in range(group_size)]
    while running := [episode for episode in episodes if not episode.session.done]:
        sampled = _sample(model, tokenizer, [episode.chat.ids for episode in running])
        for episode, (ids, logprobs) in zip(running, sampled, strict=True):
            episode.act(ids, logprobs, version)
    groups = []
    for start in range(0, len(episodes), group_size):
        rollouts = [episode.rollout() for episode in episodes[start : start + group_size]]
        rewards = [rollout.reward for rollout in rollouts]
        groups.append(Group(rollouts[0].task, rollouts, group_advantages(rewards), is_dead(rewards), staleness=0))
    return groups


def mean_reward(groups: list[Group]) -> float:
    return fmean(rollout.reward or 0.0 for group in groups for rollout in group.rollouts)


def ask(teacher: HintedTeacher, plan: Any) -> Hinted:
    """The teacher's rows for a plan, as the trainer hands them to the learner."""
    rows = teacher.align(plan.contexts)
    return Hinted.from_reader(rows.in_order(), rows.row_offsets, version=rows.version)


class _Episode:
    def __init__(self, tokenizer: Any, task: Task, member: int) -> None:
        self.tokenizer, self.task, self.member = tokenizer, task, member
        self.session, self.chat, self.hints = Toolbox(LEVEL), ChatText(tokenizer), HintLayers(["template"])
        self.recorder = SequenceRecorder(self.chat.open([{"role": "user", "content": self.session.reset(task.seed)}]))
        self.turns: list[Turn] = []
        self.reward = 0.0

    def act(self, ids: list[int], logprobs: list[float], version: int) -> None:
        ended = ids[-1] == self.tokenizer.eos_token_id
        outcome = self.session.step(self.tokenizer.decode(ids[:-1] if ended else ids))
        error = self._site(outcome)  # before the chat goes on: the hint stands in front of this turn
        sequence, start, stop = self.recorder.append_sampled(ids, logprobs, [VersionSpan(version, 0, len(ids))])
        text = self.chat.sampled(ids)
        self.turns.append(Turn(sequence, start, stop, text, outcome.content, outcome.reward, error))
        self.reward = outcome.reward or 0.0
        new, _ = self.chat.extend([{"role": "tool", "content": outcome.content}])
        if not outcome.done:
            self.recorder.append_context(new)

    def _site(self, outcome: Outcome) -> ErrorSite | None:
        if outcome.error_kind is None:
            return None
        site = ErrorSite(outcome.error_kind, outcome.content)
        found = self.hints.hint_for(
            outcome.error_kind, outcome.hint_template_key, outcome.hint_context, outcome.content
        )
        if found:
            site.hint, site.hint_layer = found
            prompt = self.chat.hinted(site.hint)
            site.cut, site.hint_ids = prompt.cut, prompt.hint_ids
        return site

    def rollout(self) -> Rollout:
        name = f"{self.task.id}/{self.member}"
        return Rollout(
            name, self.task, self.member, "", self.recorder.sequences, self.turns, self.chat.messages,
            "finished", reward=self.reward,
        )  # fmt: skip


@torch.no_grad()
def _sample(model: Any, tokenizer: Any, contexts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Ids up to and including the end of the turn, with their logprobs; contexts are padded on the left."""
    longest = max(map(len, contexts))
    ids = torch.full((len(contexts), longest), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, context in enumerate(contexts):
        ids[row, longest - len(context) :] = torch.tensor(context)
        mask[row, longest - len(context) :] = 1
    output = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    new = output.sequences[:, longest:]
    logprobs = torch.stack(output.logits, 1).log_softmax(-1).gather(2, new[..., None]).squeeze(2)
    eos = tokenizer.eos_token_id
    stops = [row.index(eos) + 1 if eos in row else len(row) for row in new.tolist()]
    return [(new[i, :stop].tolist(), logprobs[i, :stop].tolist()) for i, stop in enumerate(stops)]
