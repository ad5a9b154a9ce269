"""lm-eval's own command line, knowing our models."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lm_eval.api.model
from lm_eval.__main__ import cli_evaluate

from diffkv_repro.evaluation.lm_eval_model import CompressedLM, register_models


def run_lm_eval(arguments: Sequence[str]) -> None:
    """``lm-eval run`` with ``arguments``, just as they are: every option, and every model, of lm-eval works.

    ``--use_cache PATH`` with one of our models keeps finished requests in our own file, ``PATH_rank0.db``.
    """
    register_models()
    before = sys.argv
    sys.argv = ["lm-eval", "run", *arguments]
    try:
        with _own_cache(), _own_log():
            cli_evaluate()
    finally:
        sys.argv = before


@contextmanager
def _own_cache() -> Iterator[None]:
    """lm-eval puts a cache of its own around a model: not around ours, which do that better (see set_cache_hook)."""
    original = lm_eval.api.model.CachingLM

    def around(model: Any, path: str) -> Any:
        if not isinstance(model, CompressedLM):
            return original(model, path)
        model.answers.keep(path)
        return model

    lm_eval.api.model.CachingLM = around
    try:
        yield
    finally:
        lm_eval.api.model.CachingLM = original


@contextmanager
def _own_log() -> Iterator[None]:
    """What our model has to say, beside what lm-eval says."""
    ours, handler = logging.getLogger("diffkv_repro"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
