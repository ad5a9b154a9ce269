"""``PromptAttention``: one layer's prefill with the statistics that compression methods decide by."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from diffkv_repro.attention_stats.blocks import BlockScores, blocked_attention
from diffkv_repro.models.hf import AttentionCall


@dataclass(frozen=True)
class PromptAttention:
    """The attention of a whole prompt in one layer: as many keys as queries, all of full precision.

    ``padding`` [batch] counts the columns of left padding of each sequence, or is None without any. Statistics are
    computed when they are first asked for, and once: methods compared on one prompt share them.
    """

    call: AttentionCall
    padding: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Columns of the prompt, padding included."""
        return self.call.key.shape[2]

    @cached_property
    def valid(self) -> Tensor | None:
        """[batch, tokens], False at padding; None without any."""
        if self.padding is None:
            return None
        return torch.arange(self.tokens, device=self.padding.device) >= self.padding[:, None]

    @cached_property
    def _blocked(self) -> BlockScores:
        return blocked_attention(self.call, block=1024 if self.call.query.is_cuda else 128, valid=self.valid)

    @property
    def received(self) -> Tensor:
        """[batch, heads, tokens]: sum of the scores each token gets from all strictly later queries."""
        return self._blocked.received

    def output(self) -> Tensor:
        """Exact attention output, [batch, heads, tokens, head_dim]."""
        call = self.call
        plain = self.padding is None and call.window is None and call.softcap is None
        if not plain or "_blocked" in self.__dict__:
            return self._blocked.output
        grouped = call.query.shape[1] != call.key.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            call.query, call.key, call.value, is_causal=True, scale=call.scale, enable_gqa=grouped
        )

    def rows(self, queries: int) -> Tensor:
        """Scores of the last ``queries`` queries, [batch, heads, queries, tokens] in float32; padding gets none."""
        call, tokens = self.call, self.tokens
        count = min(queries, tokens)
        batch, heads, _, dim = call.query.shape
        kv_heads = call.key.shape[1]
        asked = call.query[:, :, tokens - count :].float().reshape(batch, kv_heads, -1, dim)
        scores = torch.matmul(asked, call.key.float().transpose(-1, -2)).mul_(call.scale)
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        scores = scores.view(batch, heads, count, tokens)
        column = torch.arange(tokens, device=scores.device)
        query = column[tokens - count :, None]
        hidden = column > query
        if call.window is not None:
            hidden |= column <= query - call.window
        scores.masked_fill_(hidden, -torch.inf)
        if self.valid is not None:
            scores.masked_fill_(~self.valid[:, None, None, :], -torch.inf)
        return torch.softmax(scores, dim=-1).nan_to_num_(0.0) if self.padding is not None else scores.softmax(dim=-1)
