"""A small serving engine on the paged cache, made to measure what memory savings buy, DiffKV's against FP16's.

Both caches share every line but the compression. Follow a request: ``llm.LLM.add`` -> ``scheduler.Scheduler`` (who
runs when) -> ``runner.Runner`` (numbers to the device, CUDA graphs, sampling) -> ``model.Decoder`` (a Llama-type
decoder) -> ``kv_cache.EngineCache`` (pages, decisions, attention).

Limits, on purpose: Llama-, Mistral-, Qwen2- and Qwen3-type decoders with full attention; prompts are computed whole,
not in chunks, and not together with generation; no prefix sharing between requests, no beam search, no speculative
decoding, no quantised weights, no pipeline parallelism. A preempted request is computed anew, as one prompt: rounding,
and a policy that now decides at once what it had decided step by step, can change its answer. For serving use a serving
system.
"""

from diffkv_repro.engine.async_llm import AsyncLLM
from diffkv_repro.engine.llm import LLM
from diffkv_repro.engine.replay import TierReplay
from diffkv_repro.engine.request import RequestOutput, SamplingParams
from diffkv_repro.engine.shards import Shards
from diffkv_repro.engine.weights import Weights

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "Shards", "TierReplay", "Weights"]
