"""Widgets over the library: each a plain function from choices to a figure, and a thin layer that asks for them.

The plain functions are for scripts too; "Copy as code" in an explorer prints the lines that call them.
"""

from diffkv_repro.explore.bandwidth import (
    bandwidth_explorer,
    decide,
    decision_table,
    draw_choice,
    draw_envelope,
    read_profiles,
    write_profiles,
)
from diffkv_repro.explore.compare import (
    choice_named,
    compare_explorer,
    comparison_table,
    draw_comparison,
    generate,
    outcome_of,
    parting,
    texts_side_by_side,
    to_send,
    write_choice,
)
from diffkv_repro.explore.effect import Effect, effect_of
from diffkv_repro.explore.pages import draw_moment, draw_request, page_inspector
from diffkv_repro.explore.policy import coloured_text, draw_policy, measured_agreement, policy_explorer
from diffkv_repro.explore.statistics import TextStatistics, observe
from diffkv_repro.explore.story import Story

__all__ = [
    "Effect",
    "Story",
    "TextStatistics",
    "bandwidth_explorer",
    "choice_named",
    "coloured_text",
    "compare_explorer",
    "comparison_table",
    "decide",
    "decision_table",
    "draw_choice",
    "draw_comparison",
    "draw_envelope",
    "draw_moment",
    "draw_policy",
    "draw_request",
    "effect_of",
    "generate",
    "measured_agreement",
    "observe",
    "outcome_of",
    "page_inspector",
    "parting",
    "policy_explorer",
    "read_profiles",
    "texts_side_by_side",
    "to_send",
    "write_choice",
    "write_profiles",
]
