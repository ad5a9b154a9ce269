"""One vLLM instance, run in a process of its own by test_vllm.py with the Python that has vLLM: a job in, results out.

python vllm_instance.py job.json results.json
"""

import json
import os
import sys
from pathlib import Path


def main(job_path: str, results_path: str) -> None:
    """Generate greedily for every prompt (token ids) of the job, one after the other."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    job = json.loads(Path(job_path).read_text())
    transfer = job.get("transfer")
    llm = LLM(
        job["model"],
        dtype="float32",
        seed=0,
        enforce_eager=True,
        distributed_executor_backend="uni",
        max_model_len=1024,
        max_num_batched_tokens=job.get("max_num_batched_tokens", 1024),
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
    )
    results = []
    for prompt in job["prompts"]:
        asked = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], logprobs=1, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        (made,) = output.outputs
        logprobs = [step[token].logprob for step, token in zip(made.logprobs, made.token_ids, strict=True)]
        results.append(
            {
                "tokens": list(made.token_ids),
                "logprobs": logprobs,
                "cached": output.num_cached_tokens,
                "finish": made.finish_reason,
            }
        )
    Path(results_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
