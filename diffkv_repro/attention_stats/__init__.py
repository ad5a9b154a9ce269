"""Per-token significance, norms and critical tokens, computed in blocks: memory grows linearly with length."""

from diffkv_repro.attention_stats.collect import AttentionStats, collect
from diffkv_repro.attention_stats.critical import critical_tokens

__all__ = ["AttentionStats", "collect", "critical_tokens"]
