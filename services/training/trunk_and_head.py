"""A causal language model in two parts: a trunk that gives hidden states, a head that makes logits of them.

Logits are the largest tensor by far, and of most positions nobody wants any. With the two parts apart one keeps the
hidden states of the positions that matter and makes their logits a few rows at a time.

What a model does behind its trunk (bias, scale, soft cap, slices) differs between architectures and shows in no
interface. So the head is the model's own `forward`, run in a copy of the module whose trunk hands on what it is given.
The copy shares every parameter with the model, which is not touched and goes on working.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from services.models import ModelError

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # of the logits' size; half precision: 5e-2


class TrunkAndHead:
    """`model`'s two parts. ModelError when together they do not give its own logits, which is tried on a few tokens."""

    def __init__(self, model: Any) -> None:
        self._trunk: Any = model.get_decoder()
        path = next((name for name, module in model.named_modules() if module is self._trunk), "")
        if not path:
            raise _refusal(model, "it does not say which part of it is the decoder")
        self._head = _with_replaced(model, path.split("."), _HandsOn(self._trunk))
        self.device: torch.device = model.device
        self.vocab = self._check(model)

    def hidden(self, ids: Tensor, attended: Tensor) -> Tensor:
        """The last hidden states (B, T, H) of ids (B, T), where `attended` (B, T) is 1 and not 0."""
        states: Tensor = self._trunk(input_ids=ids, attention_mask=attended, use_cache=False)[0]
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's logits (n, V), in its own dtype, of hidden states (n, H)."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    @torch.no_grad()
    def _check(self, model: Any) -> int:
        """The vocabulary's size, when the parts agree with the whole."""
        ids = (torch.arange(5, device=model.device) * 7 % model.config.get_text_config().vocab_size)[None]
        attended = torch.ones_like(ids)
        whole: Tensor = model(input_ids=ids, attention_mask=attended, use_cache=False).logits[0]
        try:
            parts = self.logits(self.hidden(ids, attended)[0])
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            raise _refusal(model, f"{type(error).__name__}: {error}") from None
        size = whole.float().abs().max().item()
        off = (parts - whole).float().abs().max().item() if parts.shape == whole.shape else float("inf")
        if not off <= _TOLERANCE.get(whole.dtype, 5e-2) * size:
            raise _refusal(model, f"in two parts it gives other logits, off by {off:.3g} of {size:.3g}")
        return whole.shape[-1]


class _HandsOn(nn.Module):
    """Stands where the trunk was: its last hidden states are what it is given as embeddings."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.__dict__["trunk"] = trunk  # no submodule of this one

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Handed:
        return _Handed((inputs_embeds,))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["trunk"], name)  # some heads read a factor off their trunk


class _Handed(tuple[Tensor]):
    """A trunk's output that has hidden states and nothing else: caches, attentions, router logits are None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def _with_replaced(module: nn.Module, path: list[str], new: nn.Module) -> nn.Module:
    """A copy of `module` that shares everything with it but the submodule at `path`, which is `new`."""
    if not path:
        return new
    changed = copy.copy(module)
    changed._modules = {**module._modules}
    changed._modules[path[0]] = _with_replaced(module.get_submodule(path[0]), path[1:], new)
    return changed


def _refusal(model: Any, why: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be the hinted teacher, whose logits are made a few rows at a time ({why}): set "
        "sdpo.alpha = 0, or use a model whose logits follow from its decoder's last hidden states"
    )
