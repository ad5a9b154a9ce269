"""What the tests of methods that drop or skip tokens share: exact prompts, and a layer that is filled and asked."""

from dataclasses import replace

import torch
from cache_helpers import cut, place_of, prompt_of, random_call, rows_of


def call_of(tokens, batch=1, **options):
    """A random prompt whose keys and values FP16 holds exactly, so that storing them changes nothing."""
    call = random_call(batch=batch, tokens=tokens, **options)
    return replace(call, key=call.key.half().float(), value=call.value.half().float())


def of_rows(call, rows):
    """Other sequences, or other orders of them."""
    return replace(call, query=call.query[rows], key=call.key[rows], value=call.value[rows])


def prefilled(method, call, prompt, padding=None, storage="simulated", layer=0, layers=1):
    """A layer of ``method`` that holds the first ``prompt`` tokens of ``call``."""
    cache = method.layer(place_of(layer, layers=layers), storage)
    cache.prefill(prompt_of(cut(call, 0, prompt), padding), rows_of(len(call.key), prompt, padding))
    return cache


def decoded(layer, call, prompt, padding=None, sizes=None):
    """Outputs of the tokens after the prompt, ``sizes`` of them at a time (one by one if not given)."""
    outputs, at = [], prompt
    for size in sizes or [1] * (call.key.shape[2] - prompt):
        outputs.append(layer.decode(cut(call, at, at + size), rows_of(len(call.key), at + size, padding)))
        at += size
    return torch.cat(outputs, dim=2)


def kept_columns(layer, row=0):
    """Columns that each KV head keeps of one sequence."""
    return [tier.ge(0).nonzero().flatten().tolist() for tier in layer.store.tier[row]]
