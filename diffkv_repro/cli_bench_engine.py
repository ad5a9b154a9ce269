"""``diffkv-repro bench engine``: the serving engine at a model's shape, DiffKV and FP16 in one run."""

import dataclasses
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from diffkv_repro.cli_errors import fail, guarded, waiting


class Part(StrEnum):
    """What to measure."""

    breakdown = "breakdown"
    latency = "latency"
    throughput = "throughput"
    arrivals = "arrivals"


def engine(
    part: Annotated[list[Part] | None, typer.Option(help="What to measure; may be repeated. Default: all.")] = None,
    shape: Annotated[str, typer.Option(help="Random weights of this model's shape.")] = "llama3-8b",
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Requests; may be repeated.")] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens; may be repeated.")] = None,
    shares: Annotated[
        str,
        typer.Option(help="DiffKV's tokens in the high and low tier: shares, or a table that `tiers` recorded."),
    ] = "0.3,0.6",
    pool_gb: Annotated[float, typer.Option(help="Memory for pages, for throughput and arrivals.")] = 8.0,
    prompt: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt, for throughput; at the most, for arrivals.")
    ] = 256,
    generated: Annotated[int, typer.Option(min=1, help="Tokens of an answer; at the most, for arrivals.")] = 4096,
    rate: Annotated[list[float] | None, typer.Option(help="Requests a second, for arrivals; may be repeated.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at each rate, for arrivals.")] = 64,
    seconds: Annotated[float, typer.Option(help="Limit of the arrivals at a rate, in virtual time.")] = 3600.0,
    device: Annotated[str, typer.Option(help="cuda or cpu; cuda where there is one.")] = "",
    output: Annotated[Path | None, typer.Option(help="JSON file to write every number to.")] = None,
) -> None:
    """Time of a step and its parts, throughput under a memory limit, latency under Poisson arrivals.

    Example: diffkv-repro bench engine --part breakdown --shape llama3-8b --batch 8 --length 1024
    """
    import torch

    from diffkv_repro.core.files import write_text
    from diffkv_repro.core.provenance import device_name
    from diffkv_repro.engine.measure import experiments
    from diffkv_repro.engine.measure.load import uniform_lengths
    from diffkv_repro.models.shapes import shape_of

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        setup = experiments.Setup(shape_of(shape), device, _tiers(shares))
    except (ValueError, KeyError) as error:
        fail(f"--shares {shares!r}, --shape {shape!r}: {error.args[0]}")
    batches, lengths, parts = batch or [8, 64], length or [1024, 4096], part or list(Part)
    pool = int(pool_gb * 1e9)
    found: dict[str, Any] = {
        "device": device_name(), "shape": shape, "shares": setup.shares, "source": setup.source,
    }  # fmt: skip
    kept = " and ".join(f"{share:.3g}" for share in setup.shares)
    typer.echo(f"{shape} with random weights on {found['device']}; DiffKV keeps {kept} of the tokens high and low")
    typer.echo(f"shares of the tiers: {setup.source}")

    if Part.breakdown in parts:
        with waiting("timing steps and their parts"):
            rows = guarded(experiments.breakdown, setup, batches, min(lengths))
        found["breakdown"] = [row.as_dict() for row in rows]
        for row in rows:
            text = ", ".join(f"{name} {share:.2f} %" for name, share in row.shares().items())
            typer.echo(f"{row.phase}, {row.batch} x {row.length:,} tokens: {1e3 * row.total:.2f} ms, {text}")
    if Part.latency in parts:
        with waiting("timing generation steps"):
            rows = list(experiments.end_to_end(setup, [(b, n) for b in batches for n in lengths]))
        found["latency"] = rows
        for row in rows:
            typer.echo(f"{row['cache']}, {row['batch']} x {row['length']:,} tokens: {1e3 * row['seconds']:.2f} ms")
    if Part.throughput in parts:
        with waiting("running steady states, in virtual time"):
            states = guarded(
                lambda: experiments.throughput(
                    setup, pool_bytes=pool, prompt=prompt, generated=generated, max_requests=128
                )
            )
        found["throughput"] = {name: state.as_dict() for name, state in states.items()}
        for name, state in states.items():
            own = state.found
            typer.echo(f"{name}: {own.per_second:,.0f} tokens/s, mean batch {own.mean_batch:.1f}")
    if Part.arrivals in parts:
        asked = uniform_lengths((max(prompt // 4, 1), prompt), (max(generated // 4, 1), generated))
        few = uniform_lengths((max(prompt // 4, 1), prompt), (1, max(generated // 16, 1)))
        rates = sorted(rate or [1.0, 2.0, 4.0])
        options = {"pool_bytes": pool, "max_tokens": prompt + generated, "max_requests": 128, "limit": seconds}
        with waiting("serving Poisson arrivals, in virtual time"):
            served = guarded(
                lambda: experiments.arrivals(
                    setup, rates, requests=requests, lengths=asked, check=(rates[0], 8, few), **options
                )
            )
        found["arrivals"] = {name: dataclasses.asdict(own) for name, own in served.items()}
        for name, own in served.items():
            typer.echo(f"{name}: virtual time took {own.virtual_over_real:.2f} x real time on a few requests")
            for row in own.served:
                answered = f"{row.answered} of {row.offered} answered"
                typer.echo(f"{name}, {row.rate:g} a second: {1e3 * row.mean:.1f} ms a token, {answered}")
    if output is not None:
        write_text(output, json.dumps(found, indent=1) + "\n")


def tiers(
    output: Annotated[Path, typer.Option("--output", "-o", help="The table to write, JSON.")],
    model: Annotated[str, typer.Option(help="Bundled name, folder, .gguf file or hub id.")] = "smollm2-135m",
    texts: Annotated[
        list[str] | None, typer.Option(help="prose, code, a folder, hub:...; may be repeated. Default: prose, code.")
    ] = None,
    count: Annotated[int, typer.Option("--texts-count", min=1, help="Texts of each source.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a text.")] = 2048,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of its prompt; the rest enters one by one. Default: half.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Policy file, as calibrate writes. Default: the released code's rules.")
    ] = None,
    name: Annotated[str, typer.Option(help="Short name for legends. Default: the model's.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the choice of texts.")] = 0,
) -> None:
    """Record how many tokens a policy keeps in each tier of a real model, per layer and KV head.

    Where the model's keys have a bias, it is left out of what is quantised, unless a policy file says otherwise.

    Example: diffkv-repro bench tiers --model smollm2-135m --texts-count 2 -o figures/recorded/tiers/smollm2-135m.json
    """
    from dataclasses import replace

    from diffkv_repro.diffkv import CompressionPolicy
    from diffkv_repro.engine.measure.experiments import POLICY
    from diffkv_repro.engine.measure.tiers import record_tiers
    from diffkv_repro.models import has_key_bias, load_model
    from diffkv_repro.workloads import load_windows

    own = guarded(CompressionPolicy.load, policy) if policy else None
    loaded = guarded(load_model, model)
    own = own or replace(POLICY, bias_free=has_key_bias(loaded.model))
    sources = texts or ["prose", "code"]
    windows = guarded(load_windows, sources, loaded.tokenizer, count=count, tokens=tokens, seed=seed)
    with waiting("running the texts through the policy"):
        table = guarded(record_tiers, loaded, own, windows, prompt_tokens=prompt, name=name, seed=seed)
    guarded(table.save, output)
    means = table.replay().shares.mean(dim=(0, 1)).tolist()
    said = ", ".join(f"{tier} {share:.1%}" for tier, share in zip(table.tiers, means, strict=True))
    typer.echo(f"{table.source}: {said} of the tokens outside the window; written: {output}")


def _tiers(shares: str) -> Any:
    """What ``--shares`` says: numbers, or the replay of a table. ValueError for neither."""
    from diffkv_repro.engine.measure.experiments import POLICY
    from diffkv_repro.engine.measure.tiers import tier_table

    try:
        return tuple(float(share) for share in shares.split(","))
    except ValueError:
        return tier_table(shares).require_tiers(POLICY).replay()
