"""``observe``: run a text once, and keep all that any policy's effect on it can be worked out from."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.cache.attention import attend
from diffkv_repro.cache.layer import Rows
from diffkv_repro.core.threads import one_thread
from diffkv_repro.evaluation.teacher_forced import Prefilled, prefill
from diffkv_repro.models import LoadedModel
from diffkv_repro.models.hf import AttentionCall, intercept_attention

OBSERVED = 16
_MOST_TOKENS = 2048
_KEPT = 4  # texts: each holds the keys, values and queries of all layers


@dataclass(frozen=True, eq=False)
class TextStatistics:
    """One text under one model: a prompt, which a policy would compress, and ``observed`` tokens that come after it.

    ``tokens`` are the prompt's, as text. ``prompts`` one a layer, with their statistics. ``calls`` the attention of the
    observed tokens, one a layer, keys and values being their own, and ``outputs`` [1, heads, observed, head_dim] what
    it gives with nothing compressed. ``margins`` [observed]: logit of the most likely next token over the next likely
    one. ``slopes``, one a layer, [observed, 1, heads, observed, head_dim]: derivative of each margin by the layer's
    outputs.
    """

    loaded: LoadedModel
    text: str
    tokens: tuple[str, ...]
    prefilled: Prefilled
    calls: tuple[AttentionCall, ...]
    outputs: tuple[Tensor, ...]
    margins: Tensor
    slopes: tuple[Tensor, ...]

    @property
    def prompts(self) -> Sequence[PromptAttention]:
        return self.prefilled.prompts

    @property
    def rows(self) -> Rows:
        return self.prefilled.rows

    @property
    def observed(self) -> int:
        """Tokens after the prompt."""
        return len(self.margins)

    @property
    def positions(self) -> Tensor:
        """[1, observed] of the observed tokens."""
        first = self.prefilled.tokens
        return torch.arange(first, first + self.observed, device=self.loaded.device)[None]

    def agreement(self, changes: Tensor) -> float:
        """Share of the observed tokens whose most likely successor stays so when the margins change so much."""
        return float((self.margins + changes > 0).float().mean())


_kept: OrderedDict[tuple, TextStatistics] = OrderedDict()
_lock = Lock()


def observe(loaded: LoadedModel, text: str, *, observed: int = OBSERVED, limit: int = 256) -> TextStatistics:
    """Statistics of the first ``limit`` tokens of ``text``, of which the last ``observed`` are not the prompt.

    One prefill of the prompt, one forward and one backward pass of the observed tokens. Those of the last few texts
    are kept, so that asking again costs nothing. Raises ValueError for a text or a limit that leaves no prompt of at
    least as many tokens as are observed.
    """
    if not 1 <= observed <= 64:
        raise ValueError(f"observed is {observed}; allowed are 1 to 64 tokens")
    longest = min(_MOST_TOKENS, loaded.layout.max_positions or _MOST_TOKENS)
    if not 2 * observed <= limit <= longest:
        raise ValueError(f"limit is {limit} tokens; with {observed} observed, allowed are {2 * observed} to {longest}")
    ids = loaded.tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :limit]
    if ids.shape[1] < 2 * observed:
        raise ValueError(f"the text has {ids.shape[1]} tokens; at least {2 * observed} are needed")
    key = (loaded.fingerprint, str(loaded.model.dtype), loaded.device.type, observed, tuple(ids[0].tolist()))
    with _lock:
        if key not in _kept:
            _kept[key] = _observe(loaded, text, ids, observed)
            while len(_kept) > _KEPT:
                _kept.popitem(last=False)
        _kept.move_to_end(key)
        return _kept[key]


def _observe(loaded: LoadedModel, text: str, ids: Tensor, observed: int) -> TextStatistics:
    model, length = loaded.model, ids.shape[1] - observed
    prefilled = prefill(model, ids, length)
    calls: dict[int, AttentionCall] = {}
    outputs: dict[int, Tensor] = {}
    probes: dict[int, Tensor] = {}

    def watch(call: AttentionCall) -> Tensor:
        prompt = prefilled.prompts[call.layer].call
        key, value = (torch.cat([old.clone(), new], dim=2) for old, new in
                      ((prompt.key, call.key), (prompt.value, call.value)))  # fmt: skip
        output, _ = attend(call, key, value, None)
        own = {name: getattr(call, name).detach() for name in ("query", "key", "value")}
        calls[call.layer], outputs[call.layer] = replace(call, **own), output.detach()
        # Nothing is added to the output but a place to take derivatives at.
        probes[call.layer] = torch.zeros_like(output, requires_grad=True)
        return output + probes[call.layer]

    rest = ids[:, length:].to(model.device)
    positions = torch.arange(length, ids.shape[1], device=model.device)[None]
    with one_thread(), torch.enable_grad(), intercept_attention(model, watch):
        logits = model(input_ids=rest, position_ids=positions, use_cache=False).logits[0].float()
        first, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
        places = [probes[layer] for layer in sorted(probes)]
        slopes = [torch.autograd.grad(margin, places, retain_graph=True) for margin in first - second]
    return TextStatistics(
        loaded=loaded,
        text=text,
        tokens=tuple(loaded.tokenizer.convert_tokens_to_string([token]) if token else "" for token in
                     loaded.tokenizer.convert_ids_to_tokens(ids[0, :length].tolist())),
        prefilled=prefilled,
        calls=tuple(calls[layer] for layer in sorted(calls)),
        outputs=tuple(outputs[layer] for layer in sorted(outputs)),
        margins=(first - second).detach(),
        slopes=tuple(torch.stack(own) for own in zip(*slopes, strict=True)),
    )  # fmt: skip
