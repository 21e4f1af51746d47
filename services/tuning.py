"""Which of the policy's parameters are trained, and what the rest of the run gets to see of them.

                 trained                                 published              readers load
    full         everything                              everything             everything
    top_layers   the last layers, the norm behind them   those                  those
    lora         A (r, in) and B (out, r) beside every   A and B                W + alpha / r · B A for every W that
                 targeted weight W (out, in)                                    has an adapter (`Merger`)

Readers start from the same initial model, so what is not trained they have. Engines that take no adapters, and the
hinted teacher, need none: merging is the reader's, before it loads. A reference policy is the initial model in every
kind. Checkpoints hold the policy whole in Hugging Face form whatever the kind, and the adapter beside it.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from services.models import load_model

_PREFIX = "base_model.model."  # of every name in a model that peft wrapped
_ADAPTER = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.(?:default\.)?weight")
_FIELDS_OF = {"top_layers": ("top_layers",), "lora": ("rank", "alpha", "targets")}


class TuneError(ValueError):
    """This model cannot be tuned as it was asked for. The message names the setting to change."""


class TuneConfig(BaseModel):
    """What is trained of the policy."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["full", "top_layers", "lora"] = Field(
        "full",
        description="What is trained: everything, the last top_layers layers, or a low-rank adapter (extra lora).",
    )
    top_layers: int = Field(8, ge=1, description="top_layers: how many; less memory, and backward ends there.")
    rank: int = Field(16, ge=1, description="lora: rank of the adapter's matrices.")
    alpha: float = Field(32.0, gt=0, description="lora: the adapter's part is scaled by alpha / rank.")
    targets: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description='lora: the layers that get an adapter, by the end of their name, e.g. ["q_proj", "v_proj"]; '
        "all-linear: every linear one but the output head.",
    )

    @model_validator(mode="after")
    def _only_what_is_used(self) -> TuneConfig:
        for kind, names in _FIELDS_OF.items():
            # A default may be written down without being meant.
            changed = [n for n in names if getattr(self, n) != type(self).model_fields[n].default]
            if kind != self.kind and changed:
                raise ValueError(
                    f'tune.{changed[0]} is for kind "{kind}" and this is "{self.kind}": remove it, or set tune.kind = '
                    f'"{kind}"'
                )
        if self.targets == []:
            raise ValueError('tune.targets is empty, so nothing would be trained: name layers, or use "all-linear"')
        return self


def check_installed(config: TuneConfig) -> None:
    """TuneError, with the extra to install, when a package that this kind needs is not there."""
    if config.kind == "lora" and importlib.util.find_spec("peft") is None:
        raise TuneError("tune.kind = \"lora\" needs the package peft: pip install 'milkweed[lora]'")


def prepare(model: Any, config: TuneConfig) -> Any:
    """The Hugging Face causal LM ready to be trained: frozen where it is not trained, wrapped by peft for an adapter.

    The same random state gives the same adapter, which changes no output at first (B is 0). TuneError for a model that
    does not have what the config names, or without the package.
    """
    if config.kind == "lora":
        return _with_adapter(model, config)
    if config.kind == "top_layers":
        holder, layers = _layers(model)
        if config.top_layers > len(layers):
            raise TuneError(
                f"tune.top_layers is {config.top_layers} and the model has {len(layers)} layers: set {len(layers)} or "
                'less, or tune.kind = "full"'
            )
        model.requires_grad_(False)
        children = list(holder.children())
        behind = children[next(i for i, child in enumerate(children) if child is layers) + 1 :]
        for module in (*layers[-config.top_layers :], *behind):
            module.requires_grad_(True)
    return model


def published(model: Any) -> dict[str, nn.Parameter]:
    """What readers get: the parameters that are trained, by the initial model's names; of an adapter its own tensors,
    by the names of peft's adapter files."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {
        name.replace(".default.weight", ".weight") if _is_wrapped(model) else name: p for name, p in trained.items()
    }


def merged(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The policy's whole state by the initial model's names, from `state`, the tensors of the prepared model's state
    dict. Without an adapter it is `state` itself."""
    if not _is_wrapped(model):
        return dict(state)
    plain = {
        name.removeprefix(_PREFIX).replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if not _ADAPTER.fullmatch(name)
    }
    adapter = {name: tensor for name, tensor in state.items() if _ADAPTER.fullmatch(name)}
    config = model.peft_config["default"]
    return plain | Merger(plain, config.lora_alpha / config.r)(adapter)


def save_policy(model: Any, state: Mapping[str, Tensor], policy: Path, adapter: Path) -> None:
    """Write the folder `policy`, which `from_pretrained` loads, and with an adapter also `adapter`, in peft's form.

    `state` as for `merged`.
    """
    if not _is_wrapped(model):
        model.save_pretrained(policy, state_dict=dict(state))
        return
    model.get_base_model().save_pretrained(policy, state_dict=merged(model, state))
    model.save_pretrained(adapter, state_dict=dict(state), save_embedding_layers=False)


class Merger:
    """Turns published adapters into the weights of the model that has none.

    `base`: the initial model's tensors by name, of which those with an adapter are used. `scale`: alpha / rank.
    """

    def __init__(self, base: Mapping[str, Tensor], scale: float) -> None:
        self.base, self.scale = base, scale

    @classmethod
    def of_model(cls, path: str, config: TuneConfig) -> Merger | None:
        """For the initial model at `path`, of which the targeted weights stay in memory in float32.

        None when the config has no adapter: what is published is then loaded as it is. Errors as `load_model` and
        `prepare`.
        """
        if config.kind != "lora":
            return None
        with torch.random.fork_rng(devices=[]):  # the adapter is made for its names only
            model = prepare(load_model(path), config)
        weights = dict(model.get_base_model().named_parameters())
        base = {f"{module}.weight": weights[f"{module}.base_layer.weight"].detach() for module in _adapted(model)}
        return cls(base, config.alpha / config.rank)

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New tensors W + scale · B A (out, in) float32, by the base weight's name; others go through as they are.

        ValueError when a matrix has no counterpart, or fits no weight of the base.
        """
        halves: dict[str, dict[str, Tensor]] = {}
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            match = _ADAPTER.fullmatch(name)
            if match:
                halves.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor
            else:
                found[name] = tensor
        for name, pair in halves.items():
            if pair.keys() != {"A", "B"} or name not in self.base:
                raise ValueError(
                    f"the adapter of {name} does not fit the initial model: it has {' and '.join(sorted(pair))}, and "
                    f"the model has {'no' if name not in self.base else 'a'} such weight; trainer and readers must be "
                    "told the same model and [tune] settings"
                )
            weight = self.base[name].float()
            b, a = (pair[half].to(weight) for half in "BA")
            found[name] = torch.addmm(weight, b, a, alpha=self.scale)
        return found


def _with_adapter(model: Any, config: TuneConfig) -> Any:
    check_installed(config)
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear, LoraLayer

    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=0.0,  # the ratio to the behaviour policy is the weights' doing alone
        bias="none",
        target_modules=config.targets,
    )
    try:
        wrapped = get_peft_model(model, settings)
    except ValueError as error:
        raise TuneError(f"tune.targets: {error}") from None
    for name, module in wrapped.named_modules():
        if isinstance(module, LoraLayer) and (type(module) is not Linear or module.fan_in_fan_out):
            raise TuneError(
                f"tune.targets: {name.removeprefix(_PREFIX)} is no plain linear layer, and its adapter could not be "
                'merged: name others, or set tune.kind = "top_layers"'
            )
    return wrapped


def _is_wrapped(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _adapted(model: Any) -> Iterator[str]:
    """The names, in the initial model, of the layers that have an adapter."""
    for name in published(model):
        match = _ADAPTER.fullmatch(name)
        if match and match[2] == "A":
            yield match[1]


def _layers(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder layers and the module that holds them. TuneError when the model has none that could be told."""
    count = model.config.get_text_config().num_hidden_layers
    for holder in model.base_model.modules():
        for child in holder.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return holder, child
    raise TuneError(f'{type(model).__name__} has no list of {count} layers: set tune.kind = "full" or "lora"')
