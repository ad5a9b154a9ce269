"""What notebook 15 claims of the policy explorer: its bytes are those of a packed cache, and an update is cheap."""

import statistics as stats
import time

import torch

from diffkv_repro.cache import Method, Session
from diffkv_repro.core.threads import one_thread
from diffkv_repro.explore.effect import effect_of
from diffkv_repro.explore.policy import draw_policy
from diffkv_repro.explore.statistics import TextStatistics
from diffkv_repro.models.hf import decoder_of


def bytes_apart(statistics: TextStatistics, method: Method) -> int:
    """By how many bytes the explorer's total misses what a packed cache of the prompt has really allocated.

    Layers with a sliding window are not packed: they keep what a model keeps, and are counted as that.
    """
    cache = Session(statistics.loaded.model, method, "packed").new_cache()
    with one_thread(), torch.no_grad():
        cache.admit(statistics.prompts, statistics.rows)
    allocated = sum(
        sum(tensor.nbytes for tensor in layer.tensors()) or layer.kv_bytes(cache.rows).total for layer in cache.layers
    )
    return abs(effect_of(statistics, method).size.total - allocated)


def update_cost(statistics: TextStatistics, method: Method, *, repeats: int) -> float:
    """Processor time of an update, its figure included, over that of a plain prefill of the prompt: medians."""
    ids = statistics.prefilled.input_ids[:, : statistics.prefilled.tokens]
    updates, prefills = [], []
    with one_thread(), torch.inference_mode():
        for _ in range(repeats + 1):  # the first round, which compiles and imports, is not counted
            started = time.process_time()
            draw_policy(effect_of(statistics, method))
            between = time.process_time()
            decoder_of(statistics.loaded.model)(input_ids=ids, use_cache=False)
            updates.append(between - started)
            prefills.append(time.process_time() - between)
    return stats.median(updates[1:]) / stats.median(prefills[1:])
