"""Kernels on GPUs that are not there: every launch is compiled for each of them, which takes no GPU.

The tests marked slow take minutes the first time; `make test-compile` runs them. Triton caches what it compiled, so
that later runs compile changed kernels alone.

Every launch is compiled until its shared memory is known, for each GPU for which older ones do not show that it fits
(`compile_stages.Stages` says how they do), and so is each flag, dtype and tile size of each kernel. Some are compiled
to machine code (`gpus.Recording` says which), on NVIDIA GPUs by ptxas at optimisation level 1; kernels run with
level 3.
"""

from typing import Any

import pytest
from gpus import GPUS, PAGE, cell, in_own_process, page


@pytest.fixture(scope="module")
def recorded() -> Any:
    pytest.importorskip("triton")
    return in_own_process("record")


def test_every_kernel_is_launched(recorded: Any) -> None:
    """A new kernel needs calls in tests/helpers/op_calls.py."""
    launched = {kernel for gpu in GPUS for kernel in recorded["gpus"][gpu]["launched"]}
    assert launched == set(recorded["kernels"])


def test_what_ops_do_elsewhere(recorded: Any) -> None:
    """On each GPU an op runs its kernels, or torch, or raises an error that names the GPU."""
    for name, gpu in GPUS.items():
        for op, calls in recorded["gpus"][name]["calls"].items():
            assert cell(recorded, op, name) != "mixed", (op, name, calls)
            assert all(gpu.name in call for call in calls if isinstance(call, str)), (op, name, calls)


def test_page(recorded: Any) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(recorded), "docs/gpus.md is out of date: make gpus"


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 0, 3, 2])  # of two processes one takes the first two, about half
def test_launches_compile(part: int) -> None:
    """For each GPU, with at most its shared memory; a dtype that it lacks is an error of the compiler."""
    pytest.importorskip("triton")
    found = in_own_process("compile", "op_calls", str(part))
    assert not any(found.values()), "\n\n".join(f"{gpu}: {fault}" for gpu in GPUS for fault in found[gpu])


@pytest.mark.slow
def test_faults_are_found() -> None:
    """Of tests/helpers/faulty_kernels.py, on exactly the GPUs that do not run them."""
    pytest.importorskip("triton")
    texts = {
        "product": "product (128,) {}: out of resource: shared memory",
        "float8": "type fp8e4nv not supported in this architecture",
        "griddepcontrol": "nvidia_kernel",
        "flag": "flag_kernel",
    }
    found = {
        gpu: [name for fault in faults for name, text in texts.items() if text in fault]
        for gpu, faults in in_own_process("compile", "faulty_kernels").items()
    }
    assert {gpu: sorted(names) for gpu, names in found.items()} == {
        "sm_80": ["float8", "griddepcontrol"],
        "sm_89": ["griddepcontrol", "product"],
        "sm_90": ["flag"],
        "sm_100": ["flag"],
        "sm_120": ["flag", "product"],
        "gfx942": ["griddepcontrol", "product"],
    }
