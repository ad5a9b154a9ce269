"""What a profile does to a model: the decode side goes on from the cache that arrived (KVServe section 7, Metrics)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.layout import KV, KVLayout, LayerKV
from diffkv_repro.kvserve.prefill import prefill
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.models.hf import AttentionCall, intercept_attention
from diffkv_repro.models.zoo import LoadedModel


class Continuation:
    """A model that goes on from a cache, token by token. Tokens that a profile dropped are not attended to.

    Raises ValueError for a ``kv`` that does not start at position 0.
    """

    def __init__(self, loaded: LoadedModel, kv: KV) -> None:
        if kv.start:
            raise ValueError(f"kv starts at position {kv.start}; a model can only go on from a whole prompt")
        self._loaded, self._kept = loaded, [layer.kept for layer in kv.layers]
        self._cache = DynamicCache(config=loaded.model.config)
        for index, (key, value) in enumerate(kv.pairs):
            own = (part[None].to(loaded.device, loaded.model.dtype) for part in (key, value))
            self._cache.update(*own, index)

    def step(self, ids: Tensor) -> Tensor:
        """Log-probabilities float32 [n, vocab] after each of ``ids`` [1, n], which follow what there is."""
        loaded = self._loaded
        with torch.inference_mode(), intercept_attention(loaded.model, self._attend):
            logits = loaded.model(ids.to(loaded.device), past_key_values=self._cache).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def kv(self, dtype: torch.dtype) -> KV:
        """The cache as it is now, in ``dtype``; what was dropped of it still is."""
        layers = []
        for layer, kept in zip(self._cache.layers, self._kept, strict=True):
            key, value = (side[0].to("cpu", dtype) for side in (layer.keys, layer.values))
            there = (
                None if kept is None else torch.nn.functional.pad(kept, (0, key.shape[1] - kept.shape[1]), value=True)
            )
            layers.append(LayerKV(key, value, there))
        return KV(tuple(layers))

    def _attend(self, call: AttentionCall) -> Tensor:
        queries, keys = call.query.shape[2], call.key.shape[2]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=call.query.device).tril(keys - queries)
        kept, group = self._kept[call.layer], call.query.shape[1] // call.key.shape[1]
        if kept is not None:
            there = torch.nn.functional.pad(kept.to(seen.device), (0, keys - kept.shape[1]), value=True)
            seen = seen & there.repeat_interleave(group, dim=0)[:, None]
        key, value = (side.repeat_interleave(group, dim=1) for side in (call.key, call.value))
        return torch.nn.functional.scaled_dot_product_attention(
            call.query, key, value, attn_mask=seen.expand(1, call.query.shape[1], -1, -1), scale=call.scale
        )


def continue_from(loaded: LoadedModel, kv: KV, ids: Tensor) -> Tensor:
    """Log-probabilities float32 [n, vocab] after each of ``ids`` [1, n], which follow the tokens of ``kv``.

    Tokens that a profile dropped are not attended to. ``kv`` starts at position 0, else ValueError.
    """
    return Continuation(loaded, kv).step(ids)


@dataclass(frozen=True)
class Quality:
    """A profile on prompts with known continuations: ``added_nll`` nats a token against the uncompressed cache, the
    share of tokens at which both would choose alike, mean true ``ratio``; of ``prompts``."""

    profile: Profile
    added_nll: float
    agreement: float
    ratio: float
    prompts: int

    @property
    def relative(self) -> float:
        """Perplexity of the uncompressed cache over that of this one: 1 where nothing is lost."""
        return math.exp(-self.added_nll)


class Judge:
    """Prompts are ``ids`` [1, tokens] without the last ``continuation`` tokens, which the model is asked to say.

    ``window`` and ``significance`` (see :func:`prefill`) are for profiles that rank the tokens of a prompt: each prompt
    then has its own ranking, in place of any that :meth:`judge` is given.
    """

    def __init__(
        self, loaded: LoadedModel, ids: Sequence[Tensor], *, continuation: int, window: int | None = None,
        significance: Significance | None = None,
    ) -> None:  # fmt: skip
        if not ids or not 1 <= continuation < min(own.shape[1] for own in ids):
            raise ValueError(f"{len(ids)} prompts, continuation {continuation}; it must leave each prompt a token")
        self.loaded, self.layout = loaded, KVLayout.of(loaded, torch.float16)
        self._ids = ids
        self._prompts = [own[:, :-continuation] for own in ids]
        # The last token of the prompt is asked again: what follows it is the first that is judged.
        self._asked = [own[:, -continuation - 1 : -1] for own in ids]
        self._said = [own[0, -continuation:] for own in ids]
        options = {"dtype": torch.float16, "window": window, "significance": significance}
        prefilled = [prefill(loaded, own[:, :-1], **options) for own in self._prompts]
        self._kv = [own.kv for own in prefilled]
        named = ({"token_scores": own.token_scores, "received": own.received} for own in prefilled)
        self._ranked = [{name: given for name, given in own.items() if given is not None} for own in named]
        self._plain = [continue_from(loaded, kv, asked) for kv, asked in zip(self._kv, self._asked, strict=True)]

    def judge(self, profile: Profile, assets: Assets | None = None) -> Quality:
        """What ``profile`` costs on all prompts."""
        losses, same, ratios = [], [], []
        prompts = zip(self._kv, self._ranked, self._asked, self._said, self._plain, strict=True)
        for kv, ranked, asked, said, plain in prompts:
            frame = profile.encode(kv, self.layout, assets=replace(assets or Assets(), **ranked))
            found = continue_from(self.loaded, frame.decode(), asked)
            index = said.to(found.device)[:, None]
            losses.append(float((plain.gather(1, index) - found.gather(1, index)).mean()))
            same.append(float((plain.argmax(-1) == found.argmax(-1)).float().mean()))
            ratios.append(frame.ratio)
        count = len(losses)
        return Quality(profile, sum(losses) / count, sum(same) / count, sum(ratios) / count, count)
