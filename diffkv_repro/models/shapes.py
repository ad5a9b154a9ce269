"""The exact attention and weight shapes of every model in both papers, for byte counts and shape-only runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions, from its published configuration.

    ``head_dim`` is per head; ``kv_bias`` tells whether the query, key and value projections carry a bias;
    ``intermediate`` is the MLP width, of each of ``experts`` where there are several; ``hub_id`` names the
    weights on the Hugging Face hub.
    """

    name: str
    hub_id: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    kv_bias: bool = False
    tied_embeddings: bool = False
    qk_norm: bool = False
    experts: int = 1

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.heads} heads are no multiple of {self.kv_heads} KV heads")

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes of keys and values that one token adds over all layers and KV heads (16 bit by default)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    @property
    def parameters(self) -> int:
        """Number of weights: embeddings, attention, gated MLP and norms."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (q + 2 * kv) + q * self.hidden + (q + 2 * kv if self.kv_bias else 0)
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = attention + self.experts * 3 * self.hidden * self.intermediate + router + norms
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + self.hidden


_QWEN_32B = {
    "layers": 64, "hidden": 5120, "intermediate": 27648, "heads": 40, "kv_heads": 8, "head_dim": 128,
    "vocab": 152064, "kv_bias": True,
}  # fmt: skip
_LLAMA_8B = {
    "layers": 32, "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128,
    "vocab": 128256,
}  # fmt: skip
_LLAMA_70B = {
    "layers": 80, "hidden": 8192, "intermediate": 28672, "heads": 64, "kv_heads": 8, "head_dim": 128,
    "vocab": 128256,
}  # fmt: skip

SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama3-8b", "meta-llama/Meta-Llama-3-8B-Instruct", **_LLAMA_8B),
        ModelShape("llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", **_LLAMA_8B),
        ModelShape("r1-distill-llama-8b", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", **_LLAMA_8B),
        ModelShape("llama3-70b", "meta-llama/Meta-Llama-3-70B-Instruct", **_LLAMA_70B),
        ModelShape("llama3.1-70b", "meta-llama/Llama-3.1-70B-Instruct", **_LLAMA_70B),
        ModelShape(
            "qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct",
            layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064,
            kv_bias=True,
        ),
        ModelShape("qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct", **_QWEN_32B),
        ModelShape("qwq-32b", "Qwen/QwQ-32B", **_QWEN_32B),
        ModelShape(
            "r1-distill-qwen-14b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
            layers=48, hidden=5120, intermediate=13824, heads=40, kv_heads=8, head_dim=128, vocab=152064,
            kv_bias=True,
        ),
        ModelShape(
            "qwen3-235b", "Qwen/Qwen3-235B-A22B",
            layers=94, hidden=4096, intermediate=1536, heads=64, kv_heads=4, head_dim=128, vocab=151936,
            qk_norm=True, experts=128,
        ),
        ModelShape(
            "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct",
            layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152,
            tied_embeddings=True,
        ),
        ModelShape(
            "qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct",
            layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, head_dim=64, vocab=151936,
            kv_bias=True, tied_embeddings=True,
        ),
    )
}  # fmt: skip


def shape_of(name: str) -> ModelShape:
    """The shape called ``name``; raises KeyError naming the known ones."""
    try:
        return SHAPES[name]
    except KeyError:
        raise KeyError(f"no shape called {name!r}; known are {', '.join(SHAPES)}") from None
