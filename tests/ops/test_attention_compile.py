"""The Triton kernels of attention compile for GPUs of every kind, within their shared memory. It takes no GPU."""

import os
import subprocess
import sys

import pytest

SHARED = {"80": 163, "89": 99, "90": 227, "100": 227, "120": 99, "gfx942": 64}
"""KiB that a program may use."""

COMPILED = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from ligermodels.ops.attention import triton_attention_kernels as kernels
from ligermodels.ops.attention.triton_attention import launch_options
from ligermodels.ops.attention.triton_attention_tiles import tile_options

arch, limit, dtype, dim, value_dim = sys.argv[1], 1024 * int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch), 32)
types = dict.fromkeys(("q", "k", "v", "dout", "out", "dq", "dk", "dv", "sinks"), "*" + dtype)
types |= {"lse": "*fp32", "delta": "*fp32", "cu_seqlens": "*i32"}
types |= dict.fromkeys(("scale", "softcap", "softmax_scale"), "fp32")
for name in ("forward", "query_gradient", "key_gradient"):
    jitted = getattr(kernels, f"attention_{name}_kernel")._jitted
    for tiles in tile_options(name, dim, value_dim, 4 if dtype == "fp32" else 2, limit - 2**13):
        options = launch_options(tiles)
        constants = {"GROUP": 4, "DIM": dim, "VALUE_DIM": value_dim, "BLOCK_DIM": dim, "BLOCK_VALUE": value_dim}
        constants |= {key: options.pop(key) for key in ("BLOCK_T", "BLOCK_S")}
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in jitted.arg_names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(jitted.arg_names)
            if signature[n].startswith("*") or n.endswith(("_batch", "_token", "_head"))
        }
        made = compile(ASTSource(jitted, signature, constants, aligned), target=target, options=options)
        if made.metadata.shared <= limit:
            break
    else:
        raise SystemExit(f"{name}: no tiles fit into {limit} bytes")
    print(name, tiles, made.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim"),
    [
        ("bf16", 64, 64),
        ("bf16", 128, 128),
        ("bf16", 256, 256),
        ("fp16", 256, 128),
        ("bf16", 512, 512),
        ("fp32", 64, 64),
    ],
)
def test_every_kind_of_gpu(arch: str, dtype: str, dim: int, value_dim: int) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED, arch, str(SHARED[arch]), dtype, str(dim), str(value_dim)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
