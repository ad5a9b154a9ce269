"""Compile Triton kernels ahead of time for GPUs that are not there, in a process of its own.

Triton decides when it is imported whether kernels are interpreted; the process that runs the tests has decided so.
"""

import ast
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

CAPABILITIES = (80, 89, 90)
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # that one block may have
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """A kernel by module and name; types of its arguments as triton writes them; values of those fixed at compile
    time; ``options`` it is launched with (num_warps, num_stages)."""

    module: str
    name: str
    signature: dict[str, str]
    constexprs: dict[str, object]
    options: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel_fn, signature, constexprs, **options) -> "Job":
        """Of a ``@triton.jit`` function, interpreted or not."""
        return cls(kernel_fn.fn.__module__, kernel_fn.fn.__name__, dict(signature), dict(constexprs), options)


def compile_for(kernel_fn, signature, constexprs, capability=90) -> list[int]:
    """Bytes of the cubin of ``kernel_fn`` for compute capability ``capability`` (90 is sm_90), as a list of one."""
    return compile_jobs([Job.of(kernel_fn, signature, constexprs)], [capability])


def compile_jobs(jobs, capabilities=CAPABILITIES) -> list[int]:
    """Bytes of the cubins of all ``jobs`` for all ``capabilities``. Raises AssertionError with its complaint,
    and for a kernel that wants more shared memory than such a GPU has."""
    plain = [(job.module, job.name, job.signature, job.constexprs, job.options) for job in jobs]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], input=repr((plain, list(capabilities))), capture_output=True, text=True,
        env=environment, cwd=_ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return ast.literal_eval(done.stdout)


def _main() -> None:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    jobs, capabilities = ast.literal_eval(sys.stdin.read())
    sizes = []
    for module, name, signature, constexprs, options in jobs:
        kernel = getattr(importlib.import_module(module), name)
        types = signature | dict.fromkeys(constexprs, "constexpr")
        ordered = {argument: types[argument] for argument in kernel.arg_names}
        # As launched on tensors of even shapes: wide loads, and room in shared memory for those on their way.
        kinds = enumerate(ordered.values())
        even = {(i,): [["tt.divisibility", 16]] for i, kind in kinds if kind.startswith("*") or kind == "i64"}
        for capability in capabilities:
            source = ASTSource(fn=kernel, signature=ordered, constexprs=constexprs, attrs=even)
            built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            if built.metadata.shared > SHARED_BYTES[capability]:
                raise SystemExit(f"{name} takes {built.metadata.shared} bytes of shared memory on sm_{capability}")
            sizes.append(len(built.asm["cubin"]))
    sys.stdout.write(repr(sizes))


if __name__ == "__main__":
    # The folder of this file holds modules named like others'.
    sys.path[0] = str(_ROOT)
    _main()
