"""Every Triton kernel becomes machine code for the three generations of GPUs, in shapes that take each branch."""

import aot
import pytest
import torch
from diffkv_repro.kernels import (
    append,
    decide,
    decode_merge,
    decode_triton,
    pack,
    pages,
    partition,
    quantize,
    significance,
)
from paged_helpers import empty_view

STRIDES = {
    name: "i64"
    for name in [
        "table_stride",
        "table_request",
        "table_layer",
        "table_head",
        "length_request",
        "length_layer",
        "length_head",
        "key_request",
        "key_head",
        "key_token",
        "value_request",
        "value_head",
        "value_token",
        "query_request",
        "query_head",
        "query_token",
    ]
}
NUMBERS = {
    name: "i32"
    for name in [
        "entries",
        "rows",
        "heads",
        "kv_heads",
        "tokens",
        "tiles",
        "first_layer",
        "window",
        "observed",
        "key_channel",
        "value_channel",
        "query_channel",
        "channels",
        "size",
        "groups",
        "levels",
    ]
} | {"scale": "fp32"}
CACHE = {
    "units": "*i16", "words": "*i32", "tables": "*i32", "lengths": "*i32", "requests": "*i32", "columns": "*i32",
    "prompts": "*i32", "alphas": "*fp32", "plans": "*i32", "tiers": "*i8", "slots": "*i32", "counts": "*i32",
    "sums": "*fp32", "scores": "*fp32", "positions": "*i32", "bias": "*fp32", "angles": "*fp32", "partial": "*fp32",
    "tops": "*fp32", "weights": "*fp32", "logits": "*fp32", "log_sums": "*fp32", "newest": "*i32",
    "codes": "*u8", "scales": "*fp16", "zeros": "*fp16",
}  # fmt: skip


def job(kernel, half, constexprs, **options):
    given = dict.fromkeys(("keys", "values", "query", "key", "out", "x"), half)
    types = STRIDES | NUMBERS | CACHE | given
    return aot.Job.of(
        kernel, {name: types[name] for name in kernel.arg_names if name not in constexprs}, constexprs, **options
    )


def geometry_of(tiers, head_dim):
    view = empty_view(tiers, head_dim=head_dim, device=torch.device("cpu"))
    return {
        "GEOMETRY": pages.geometry(view.layouts), "TIERS": len(view.layouts), "PAGE_BYTES": view.pool.shape[1],
        "HEAD_DIM": head_dim, "WIDTH": pages.padded(head_dim),
    }  # fmt: skip


def jobs_of(tiers, head_dim, half, *, bias, group):
    shape = geometry_of(tiers, head_dim)
    cache = {name: shape[name] for name in ("GEOMETRY", "TIERS", "PAGE_BYTES")}
    attention = shape | {
        "GROUP": group,
        "HEADS": 16,
        "SPLITS": 5,
        "BLOCK": decode_triton.block_for(shape["WIDTH"], bias=bias),
    }
    asking = {"HALF": max(16, shape["WIDTH"] // 2), "TWO_TERMS": half == "*fp32", "BIAS": bias, "KEEP": True}
    blocks = {
        "GROUP": group, "HEAD_DIM": head_dim, "WIDTH": shape["WIDTH"], "NATIVE": half != "*fp32", "QUERIES": 32,
        "KEYS": 32, "PARTS": 1 + 2 * bias,
    }  # fmt: skip
    counting = {
        "TIERS": shape["TIERS"], "PADDED_TIERS": 4, "CLASSIFY": bias, "PARTITION": True, "OWN_SCORE": bias,
        "BY_POSITION": bias, "BLOCK": 1024,
    }  # fmt: skip
    deciding = cache | {"OWN_SCORE": bias, "BY_POSITION": bias, "ALGORITHM_1": shape["TIERS"] != 2, "BLOCK": 512}
    return [
        job(partition.partition_kernel, half, counting),
        job(pack.pack_kernel, half, shape | {"POSITIONS_GIVEN": bias, "BIAS": bias, "BLOCK": 16}),
        job(decide.decide_kernel, half, deciding),
        job(append.append_kernel, half, shape | {"BIAS": bias}, num_warps=1),
        job(
            decode_triton.attention_kernel, half, attention | asking, num_stages=2,
        ),
        job(
            decode_merge.merge_kernel, half,
            attention | {"PADDED_SPLITS": 8, "UPDATE": True, "SKIP_NEWEST": bias, "CHUNKS": 5},
        ),
        job(significance.log_sum_kernel, half, blocks),
        job(significance.received_kernel, half, blocks | {"OWN_SCORE": bias}),
        job(quantize.quantize_kernel, half, {"BLOCK": 4096 // shape["WIDTH"], "WIDTH": shape["WIDTH"]}),
        job(quantize.dequantize_kernel, half, {"BLOCK": 4096 // shape["WIDTH"], "WIDTH": shape["WIDTH"]}),
    ]  # fmt: skip


@pytest.mark.parametrize("capability", aot.CAPABILITIES)
def test_every_kernel_compiles(capability):
    jobs = jobs_of("K8V4 K4V2", 128, "*fp16", bias=False, group=4)
    jobs += [own for own in jobs_of("K8V4 K4V2", 128, "*bf16", bias=True, group=8) if own.name == "attention_kernel"]
    sizes = aot.compile_jobs(jobs, [capability])
    assert len(sizes) == len(jobs)
    assert min(sizes) > 0


def test_numbers_that_are_one_may_be_compiled_in():
    """Triton does so by itself: with one KV head, one token, one entry in a table."""
    jobs = []
    for own in jobs_of("K8V4 K4V2", 64, "*fp16", bias=True, group=1):
        ones = {name: 1 for name, kind in own.signature.items() if kind in ("i32", "i64")}
        rest = {name: kind for name, kind in own.signature.items() if name not in ones}
        jobs.append(aot.Job(own.module, own.name, rest, own.constexprs | ones, own.options))
    assert min(aot.compile_jobs(jobs, [90])) > 0


@pytest.mark.parametrize(
    ("tiers", "head_dim", "half", "group"), [("K4V2:2/4 K16V1 K1V16", 80, "*bf16", 7), ("K8V8", 256, "*fp32", 1)]
)
def test_rare_shapes_compile(tiers, head_dim, half, group):
    assert min(aot.compile_jobs(jobs_of(tiers, head_dim, half, bias=True, group=group), [89])) > 0
