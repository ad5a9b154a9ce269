"""Which KV heads look things up far back: an induction test that needs no training.

A block of random tokens is shown twice. Chance aside, a token of the second showing has one reason to attend to the
first one: it has met itself there (matching), and what came next is what comes next now (induction). Heads that do so
are akin to the induction heads of Olsson et al. (2022, arXiv:2209.11895) and the retrieval heads of Wu et al. (2024,
arXiv:2404.15574); DuoAttention keeps the whole cache for such heads alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.models.hf import AttentionCall, attention_layout, decoder_of, intercept_attention
from diffkv_repro.models.zoo import LoadedModel

# Tokens before the first block. The first ones of a text collect attention whatever they are (attention sinks), which
# would pass for retrieval of the first tokens of the block.
LEAD = 4


def retrieval_scores(
    model: PreTrainedModel | LoadedModel, *, length: int = 256, sequences: int = 2, seed: int = 0
) -> np.ndarray:
    """Mean attention from a repeated token to its first showing and the one after it: [layers, kv_heads], 0 to 1.

    ``length`` distinct random tokens are shown twice, less where the model's context or vocabulary is too small, in
    ``sequences`` different sequences. A KV head scores as the highest of its query heads: what it drops is lost to all.
    Raises ValueError for fewer than 2 tokens or no sequence, UnsupportedAttention for a model that cannot be watched.
    """
    network = model.model if isinstance(model, LoadedModel) else model
    layout = attention_layout(network)
    if sequences < 1:
        raise ValueError(f"sequences is {sequences}; it must be at least 1")
    input_ids = repeated_tokens(network, length=length, sequences=sequences, seed=seed)
    shown = (input_ids.shape[1] - LEAD) // 2
    scores = np.zeros((len(layout.layers), layout.kv_heads))

    def watch(call: AttentionCall) -> Tensor:
        prompt = PromptAttention(call)
        # Row j is the j-th token of the second showing; the last one's successor is no longer in the first.
        rows = prompt.rows(shown)[:, :, :-1]
        mass = sum(torch.diagonal(rows, offset=LEAD + after, dim1=-2, dim2=-1) for after in (0, 1))
        per_head = mass.double().mean(dim=(0, 2)).view(layout.kv_heads, layout.group)
        scores[call.layer] = per_head.amax(dim=1).cpu().numpy()
        return prompt.output()

    with torch.inference_mode(), intercept_attention(network, watch):
        decoder_of(network)(input_ids=input_ids.to(network.device), use_cache=False)
    return scores


def repeated_tokens(model: PreTrainedModel, *, length: int, sequences: int, seed: int) -> Tensor:
    """Token ids [sequences, LEAD + 2 n]: a few tokens to begin with, then n distinct ones twice, n at most ``length``.

    The very first is the model's BOS where it has one; special tokens are not drawn otherwise.
    """
    config = model.config.get_text_config()
    named = [getattr(config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")]
    special = {index for item in named for index in (item if isinstance(item, list) else [item])}
    ordinary = torch.tensor([index for index in range(config.vocab_size) if index not in special])
    room = [length, len(ordinary) - LEAD]
    if getattr(config, "max_position_embeddings", None) is not None:
        room.append((config.max_position_embeddings - LEAD) // 2)
    shown = min(room)
    if shown < 2:
        raise ValueError(f"length is {length}, and the model has room for {shown} tokens; at least 2 are needed")
    generator = torch.Generator().manual_seed(seed)
    drawn = [ordinary[torch.randperm(len(ordinary), generator=generator)[: LEAD + shown]] for _ in range(sequences)]
    ids = torch.stack(drawn)
    if isinstance(named[0], int):
        ids[:, 0] = named[0]
    return torch.cat([ids, ids[:, LEAD:]], dim=1)


def top_heads(scores: np.ndarray, share: float, layers: Sequence[int]) -> tuple[tuple[bool, ...], ...]:
    """The highest ``share`` (0 to 1, rounded to whole heads) of the heads of ``layers``, as [layers][kv_heads].

    Other layers get an empty row. Of equal scores those of the lower layer and head go first.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}; allowed are 0 to 1")
    ranked = scores[list(layers)]
    chosen = np.zeros(ranked.size, dtype=bool)
    chosen[np.argsort(-ranked, axis=None, kind="stable")[: round(share * ranked.size)]] = True
    rows = dict(zip(layers, chosen.reshape(ranked.shape).tolist(), strict=True))
    return tuple(tuple(rows.get(layer, ())) for layer in range(len(scores)))
