"""GPUs that this machine lacks: the launches that the calls of `op_calls` make on each, compiled for it by Triton.

`python tests/helpers/gpus.py` writes docs/gpus.md. In a process of its own, because it replaces Triton's driver:
`gpus.py record` prints as JSON what each op does on each GPU. `gpus.py compile op_calls 1 4` prints for each GPU the
launches of the calls in that module that do not compile for it, or that need more shared memory than it has: of every
fourth op, the second of them first.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import pkgutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compile_stages import Stages

from ligermodels import ops
from ligermodels.errors import BackendError
from ligermodels.ops.runtime import devices, dispatch
from ligermodels.ops.runtime.devices import GPU
from ligermodels.ops.runtime.dispatch import OutOfResources
from ligermodels.ops.runtime.launcher import MAX_THREADS, Kernel

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "gpus.md"
CACHE = REPOSITORY / "build" / "triton"
"""Triton's cache, by hashes of a kernel's source, its launch and the compiler: only changes are compiled again."""

KIB = 1024
GPUS = {
    "sm_80": GPU("NVIDIA A100", (8, 0), 163 * KIB, 108),
    "sm_89": GPU("NVIDIA L40S", (8, 9), 99 * KIB, 142),
    "sm_90": GPU("NVIDIA H100", (9, 0), 227 * KIB, 132),
    "sm_100": GPU("NVIDIA B200", (10, 0), 227 * KIB, 148),
    "sm_120": GPU("NVIDIA RTX 5090", (12, 0), 99 * KIB, 170),
    "gfx942": GPU("AMD Instinct MI300X", (9, 4), 64 * KIB, 304, hip=True),
}
TENSOR_MEMORY = 512
"""Columns of the tensor memory of sm_100."""
RUN = "sm_90"
"""The GPU on which the tests have been run, and launch sizes were tuned."""
NOT_RUN: set[str] = set()
"""Ops that have not been run on it yet, or whose kernels have changed since."""

HEAD = f"""# GPUs

Ops choose kernels and launch sizes by the properties of the GPU: compute capability,
shared memory, number of multiprocessors. The tests run on one kind, {GPUS[RUN].name}
({RUN}); launch sizes are tuned there. For the others, `make test-compile` compiles
every kernel, at the launches of `tests/helpers/op_calls.py`, and checks the shared
memory that each needs. It takes no GPU.

- **run**: the kernels compile, and the tests of the op have been run on this GPU as
  they are now.
- **compiled**: the kernels compile and fit into its shared memory. The tests run
  ptxas at optimisation level 1; kernels run with level 3.
- **torch**: the op runs in plain torch, without kernels (`gated_delta_rule`: in
  fla-core if it is installed).
- **error**: the op raises `BackendError`, which names the GPU.

`make gpus` writes this table from the recorded launches. Ops without a row, such as
`grouped_mm` and `lora_linear`, are operations of torch on every GPU.
"""


class Launch(NamedTuple):
    """A kernel as a launch compiles it: arguments of triton.compiler.ASTSource, and options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return name_of(self.kernel)

    @property
    def hash(self) -> str:
        """Of all that Triton compiles but the target."""
        from triton import __version__
        from triton.compiler import ASTSource

        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return hashlib.sha256(f"{__version__} {source.hash()} {sorted(self.options.items())}".encode()).hexdigest()

    @property
    def tile_size(self) -> int:
        """The product of the sizes among its constants."""
        return math.prod(filter(is_size, self.constants.values()))

    def __str__(self) -> str:
        names = self.kernel.arg_names
        constants = {names[place]: value for (place, *_), value in self.constants.items()}
        return f"{self.name} {self.options} {constants} {sorted(set(self.signature.values()))}"


class Driver:
    """A driver for Triton that only names its target."""

    def __init__(self, gpu: str) -> None:
        from triton.backends.compiler import GPUTarget

        (major, minor), self.device = GPUS[gpu].capability, list(GPUS).index(gpu)
        self.target = GPUTarget("hip", gpu, 64) if GPUS[gpu].hip else GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


class Recording:
    """The launches of the calls of each op on a GPU; no kernel runs.

    launches: each kind of launch once. calls: for each op, the kernels that each of its calls launches, or its error.

    With `compiles`, each launch is compiled until its memory is allocated, and some to machine code: the fewest that
    contain each kernel with each of its dtypes. faults: the launches that do not compile, or need more than the GPU
    has. For the latter, OutOfResources is raised where Triton would raise it, so that an op may launch smaller tiles;
    only an op that does not is a fault.

    Args:
        gpu: one of GPUS.
        calls_in: the module with the calls.
        part: the ops whose calls are made, by their places. Default: all.
        compiles: whether launches are compiled. Default: False.
    """

    def __init__(
        self, gpu: str, calls_in: str = "op_calls", part: slice = slice(None), *, compiles: bool = False
    ) -> None:
        import triton

        importlib.import_module("layer_calls")  # adds to those of op_calls
        planned = Recording(gpu, calls_in, part).launches if compiles else {}
        self._gpu, self.driver = gpu, Driver(gpu)
        self.launches: dict[Any, Launch] = {}
        self.calls: dict[str, list[list[str] | str]] = defaultdict(list)
        self.faults: list[str] = []
        self._compiles, self._kernels = compiles, set[str]()
        self._lacking: dict[Any, OutOfResources] = {}  # launch -> what it needs that the GPU has not
        self._stages, self._seen = Stages(GPUS[gpu].shared_memory, CACHE), set[Any]()
        self._to_machine_code = self._covering(planned)
        torch.cuda.current_device = lambda: self.driver.device
        triton.runtime.driver.set_active(self.driver)
        triton.knobs.runtime.jit_cache_hook = self._record
        triton.knobs.runtime.add_stages_inspection_hook = self._stages
        dispatch.pretend(GPUS[gpu])
        for op, calls in list(importlib.import_module(calls_in).CALLS.items())[part]:
            for call in calls:
                self._kernels.clear()
                try:
                    call()
                except BackendError as error:
                    self.calls[op].append(str(error))
                except OutOfResources as error:
                    self.faults.append(f"{op} {call.args} {call.keywords}: {error}")
                else:
                    self.calls[op].append(sorted(self._kernels))
        if compiles:  # after an error an op may launch other tiles than were planned
            run = {known: launch for known, launch in self.launches.items() if known not in self._lacking}
            self._to_machine_code = self._covering(run)
            for known in self._to_machine_code:
                self._compile(known, run[known])

    def _covering(self, launches: dict[Any, Launch]) -> dict[Any, None]:
        """The fewest launches that have all parts of `launches` that machine code has not been made of.

        First those that an older GPU has shown. Then the launch with the most parts that are missing is next, the one
        with the smallest tiles of equal ones.
        """
        ordered = sorted(launches, key=lambda known: launches[known].tile_size)
        parts = {known: machine_code_of(launches[known]) - self._seen for known in ordered}
        chosen = dict.fromkeys(known for known in ordered if self._on_older(launches[known], True))
        missing = set().union(*parts.values()).difference(*(parts[known] for known in chosen))
        while missing:
            best = max(ordered, key=lambda known: len(parts[known] & missing))
            chosen[best] = None
            missing -= parts[best]
        return chosen

    def _record(self, *, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        options = {name: compile[name] for name in ("num_warps", "num_stages")}
        launch = Launch(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options)
        self._kernels.add(launch.name)
        known = launch.name, str(key)
        if known not in self.launches:
            self.launches[known] = launch
            if self._compiles:
                self._compile(known, launch)
        if known in self._lacking:
            raise self._lacking[known]
        return True  # neither compile nor run

    def _compile(self, known: Any, launch: Launch) -> None:
        from triton.compiler import ASTSource, compile

        machine_code = known in self._to_machine_code
        if machine_code:
            self._seen |= machine_code_of(launch)
        if self._on_older(launch, machine_code):
            return
        print(launch, file=sys.stderr, flush=True)  # an error in LLVM ends the process: the last line tells where
        source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
        self._stages.begin(launch.hash, machine_code)
        try:
            made = compile(source, target=self.driver.target, options=launch.options).metadata
        except Exception as error:
            self.faults.append(f"{launch}: {type(error).__name__}: {error}")
            return
        needs = {
            "shared memory": (made.shared, devices.gpu_of(torch.device("cpu")).shared_memory),
            "tensor memory": (getattr(made, "tmem_size", None) or 0, TENSOR_MEMORY),
            "threads": (launch.options["num_warps"] * self.driver.target.warp_size, MAX_THREADS),
        }
        for resource, (needed, there) in needs.items():
            if needed > there:
                self._lacking[known] = OutOfResources(needed, there, f"{resource} of {launch}")

    def _on_older(self, launch: Launch, machine_code: bool) -> bool:
        """Whether an older GPU has shown that the launch runs on this one."""
        if GPUS[self._gpu].hip:
            return False
        major, minor = GPUS[self._gpu].capability
        shared = self._stages.memory_on_older(launch.hash, 10 * major + minor, machine_code)
        return shared is not None and shared <= GPUS[self._gpu].shared_memory


def machine_code_of(launch: Launch) -> set[tuple[str, ...]]:
    """The parts of a launch that LLVM and the assembler see: its kernel with each dtype, float16 counted as bfloat16.
    Tiles have been divided among threads by then, and each flag's branch has passed Triton's own passes."""
    dtypes = {dtype.replace("*fp16", "*bf16") for dtype in launch.signature.values()}
    return {(launch.name, dtype) for dtype in dtypes if dtype.startswith("*") and "i" not in dtype} | {(launch.name,)}


def is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix('ligermodels.ops.')}.{kernel.fn.__name__}"


def all_kernels() -> list[str]:
    """Every kernel of the package that the host launches."""
    names = [module.name for module in pkgutil.walk_packages(ops.__path__, "ligermodels.ops.")]
    found = (value for name in names for value in vars(importlib.import_module(name)).values())
    return sorted({name_of(value._jitted) for value in found if isinstance(value, Kernel)})


def record() -> dict[str, Any]:
    """All kernels; and for each GPU the kernels that are launched there, and `Recording.calls`."""
    gpus = {}
    for gpu in GPUS:
        recording = Recording(gpu)
        gpus[gpu] = {
            "launched": sorted({launch.name for launch in recording.launches.values()}),
            "calls": recording.calls,
        }
    return {"kernels": all_kernels(), "gpus": gpus}


def cell(recorded: dict[str, Any], op: str, gpu: str) -> str:
    """The word of the table for an op on a GPU; "mixed" if calls with kernels on the GPU of the tests differ."""
    results = set()
    for on_run, here in zip(*(recorded["gpus"][name]["calls"][op] for name in (RUN, gpu)), strict=True):
        if isinstance(here, str):
            results.add("error")
        elif on_run:
            is_run = gpu == RUN and op not in NOT_RUN
            results.add("torch" if set(here).isdisjoint(on_run) else "run" if is_run else "compiled")
    return results.pop() if len(results) == 1 else "mixed"


def page(recorded: dict[str, Any]) -> str:
    """docs/gpus.md"""
    titles = [f"{gpu.name.partition(' ')[2]} `{name}`" for name, gpu in GPUS.items()]
    rows = [["op", *titles], ["---"] * (1 + len(GPUS))]
    for op in recorded["gpus"][RUN]["calls"]:
        rows.append([op, *(cell(recorded, op, gpu) for gpu in GPUS)])
    errors = {
        call for gpu in GPUS for calls in recorded["gpus"][gpu]["calls"].values() for call in calls
        if isinstance(call, str)
    }  # fmt: skip
    reasons = sorted({error.partition(": ")[2] for error in errors})
    table = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([HEAD, *table, "", "The errors:", "", *(f"- {reason}" for reason in reasons), ""])


def in_own_process(*arguments: str) -> Any:
    """What `gpus.py` prints with these arguments, where Triton compiles rather than interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(CACHE), "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    environment |= {"TRITON_STORE_BINARY_ONLY": "1", "TRITON_DISABLE_LINE_INFO": "1"}
    environment["PTXAS_OPTIONS"] = "--opt-level=1"  # large kernels take about half the time of level 3
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "\n".join(done.stderr.splitlines()[-20:])
    return json.loads(done.stdout.splitlines()[-1])  # ptxas' errors stand before


def main(command: str = "write", *arguments: str) -> None:
    if command == "record":
        print(json.dumps(record()))
    elif command == "compile":
        calls_in, first, step = arguments
        part = slice(int(first), None, int(step))  # older GPUs first, which share their results
        print(json.dumps({gpu: Recording(gpu, calls_in, part, compiles=True).faults for gpu in GPUS}))
    else:
        PAGE.write_text(page(in_own_process("record")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
