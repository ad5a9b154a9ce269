"""Per-token significance, norms and critical tokens, computed in blocks: memory grows linearly with length."""

from diffkv_repro.attention_stats.collect import AttentionStats, collect
from diffkv_repro.attention_stats.critical import critical_tokens
from diffkv_repro.attention_stats.prompt import PromptAttention
from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.attention_stats.store import survey
from diffkv_repro.attention_stats.summaries import critical_table, decades, spread, top_share, uniform_received

__all__ = [
    "AttentionStats", "PromptAttention", "Significance", "collect", "critical_table", "critical_tokens", "decades",
    "spread", "survey", "top_share", "uniform_received",
]  # fmt: skip
