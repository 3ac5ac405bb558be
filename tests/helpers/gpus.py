"""GPUs that this machine lacks: the launches that the calls of `op_calls` make on each, compiled for it by Triton.

`python tests/helpers/gpus.py` writes docs/gpus.md. In a process of its own, because it replaces Triton's driver:
`gpus.py record` prints as JSON what each op does on each GPU. `gpus.py compile op_calls 1` prints for each GPU the
launches of the calls in that module that do not compile for it, or that need more shared memory than it has: of the
ops in one of the parts that PARTS_FROM divides them into.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from compile_stages import Shown, Stages
from launches import Launch, fewest, machine_code_of, name_of, values_of

from ligermodels import ops
from ligermodels.errors import BackendError
from ligermodels.ops.runtime import dispatch
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
PARTS_FROM = "attention, backend triton", "causal_conv", "linear"
"""The first op of each part but the first. Ops of different parts share few kernels."""
TENSOR_MEMORY = 512
"""Columns of the tensor memory of sm_100."""
NVIDIA_STAGES = 3
"""Triton's default of num_stages on NVIDIA GPUs; on AMD GPUs it is 2."""
RUN = "sm_90"
"""The GPU on which the tests have been run, and launch sizes were tuned."""
NOT_RUN: set[str] = set()
"""Ops that have not been run on it yet, or whose kernels have changed since."""

HEAD = f"""# GPUs

Ops choose kernels and launch sizes by the properties of the GPU: compute capability,
shared memory, number of multiprocessors. The tests run on one kind, {GPUS[RUN].name}
({RUN}); launch sizes are tuned there. For the others, `make test-compile` compiles every
kernel, without a GPU, and checks the shared memory that it needs, at the launches of
`tests/helpers/op_calls.py`. Where an older GPU has shown that a launch needs little
memory, a newer one compiles it only if no other launch has its flags, dtypes or tile sizes.

- **run**: the kernels compile, and the tests of the op have been run on this GPU as
  they are now.
- **compiled**: the kernels compile and fit into its shared memory. The tests run
  ptxas at optimisation level 1; kernels run with level 3.
- **torch**: the op runs in plain torch, without kernels (`gated_delta_rule`: in
  fla-core if it is installed). So do the chunks of `gated_delta_rule` and `ssd` on GPUs
  with tensor memory (B200), where Triton 3.6 to 3.8 overlap wrongly products that add to
  one sum (triton-lang/triton#10821), and on AMD GPUs, which lack tf32x3.
- **error**: the op raises `BackendError`, which names the GPU.

`make gpus` writes this table from the recorded launches. Ops without a row, such as
`grouped_mm` and `lora_linear`, are operations of torch on every GPU.
"""


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

    With `assembled`, the launches are compiled until their memory is allocated, and some to machine code: the fewest
    that contain each kernel with each of its dtypes. `Stages` says what older GPUs show of a launch on a newer one.
    Launches that need not be compiled for their memory are, as few as contain each value of each constant, option and
    dtype of a kernel.

    If a launch needs more than the GPU has, the calls are made once more, and OutOfResources is raised where Triton
    would raise it, so that an op may launch smaller tiles. faults: the launches that do not compile, and the calls of
    ops that do not.

    Args:
        gpu: one of GPUS.
        calls_in: the module with the calls.
        part: number of the part of the ops whose calls are made. Default: all.
        assembled: `machine_code_of` the launches that older GPUs of this generation have run through the assembler; it
            grows. Default: nothing is compiled.
    """

    def __init__(
        self, gpu: str, calls_in: str = "op_calls", part: int | None = None, assembled: set[Any] | None = None
    ) -> None:
        import triton

        importlib.import_module("layer_calls")  # adds to those of op_calls
        self._gpu, self.driver = gpu, Driver(gpu)
        self.launches: dict[Any, Launch] = {}
        self.calls: dict[str, list[list[str] | str]] = {}
        self._kernels, self._of_op = set[str](), set[Any]()  # what the current call and the current op launch
        self._failures: dict[str, list[str]] = {}  # op -> its calls that end in OutOfResources
        self._not_compiled: list[str] = []
        self._lacking: dict[Any, OutOfResources] = {}  # launch -> what it needs that the GPU has not
        self._stages = Stages(GPUS[gpu].shared_memory, CACHE)
        self._assembled: set[Any] = set() if assembled is None else assembled
        torch.cuda.current_device = lambda: self.driver.device
        triton.runtime.driver.set_active(self.driver)
        triton.knobs.runtime.jit_cache_hook = self._record
        triton.knobs.runtime.add_stages_inspection_hook = self._stages
        dispatch.pretend(GPUS[gpu])
        calls = importlib.import_module(calls_in).CALLS
        if part is not None:
            bounds = [0, *map(list(calls).index, PARTS_FROM), len(calls)]
            calls = dict(list(calls.items())[bounds[part] : bounds[part + 1]])
        launched = {op: self._call(op, calls[op]) for op in calls}
        compiled = set[Any]()
        while assembled is not None and (new := self.launches.keys() - compiled):
            self._compile_all(new)
            compiled |= new
            launched |= {op: self._call(op, calls[op]) for op in calls if launched[op] & new & self._lacking.keys()}

    @property
    def faults(self) -> list[str]:
        return self._not_compiled + [failure for failures in self._failures.values() for failure in failures]

    def _call(self, op: str, calls: list[Any]) -> set[Any]:
        """Make the calls of an op; returns what it launches."""
        self._of_op, self.calls[op], self._failures[op] = set(), [], []
        for call in calls:
            self._kernels.clear()
            try:
                call()
            except BackendError as error:
                self.calls[op].append(str(error))
            except OutOfResources as error:
                self._failures[op].append(f"{op} {call.args} {call.keywords}: {error}")
            else:
                self.calls[op].append(sorted(self._kernels))
        return self._of_op

    def _record(self, *, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        options = {name: compile[name] for name in ("num_warps", "num_stages")}
        launch = Launch(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options)
        known = launch.name, str(key)
        self._kernels.add(launch.name)
        self._of_op.add(known)
        self.launches.setdefault(known, launch)
        if known in self._lacking:
            raise self._lacking[known]
        return True  # neither compile nor run

    def _compile_all(self, new: set[Any]) -> None:
        """Compile those of the launches that older GPUs do not show to run, and some of the others."""
        ordered = sorted(new, key=lambda known: (self.launches[known].tile_size, known))
        shown = {known: self._shown(self.launches[known]) for known in ordered}
        # To machine code first those that an older GPU has shown, which costs nothing.
        free = [known for known in ordered if shown[known] is Shown.MACHINE_CODE]
        parts = {known: machine_code_of(self.launches[known]) for known in ordered}
        self._assembled |= set().union(*(parts[known] for known in free))
        for known in fewest(parts, self._assembled):
            if self._compile(known, machine_code=True):
                self._assembled |= parts[known]
            shown[known] = Shown.MACHINE_CODE
        for known in ordered:
            if shown[known] is Shown.NOTHING:
                self._compile(known)
        parts = {known: values_of(self.launches[known]) for known in ordered}
        fits = {known: parts[known] for known in ordered if shown[known] is Shown.FITS}
        for known in fewest(fits, set().union(*(parts[known] for known in ordered if known not in fits))):
            self._compile(known)

    def _shown(self, launch: Launch) -> Shown:
        """What older GPUs show of a launch; of one for an AMD GPU also with the default of NVIDIA GPUs, more stages."""
        if not GPUS[self._gpu].hip:
            return self._stages.shown(launch.hash, self.driver.target.arch)
        stages = {launch.options["num_stages"], NVIDIA_STAGES}
        found = [launch._replace(options=launch.options | {"num_stages": n}).hash for n in stages]
        return max(self._stages.shown(each, None) for each in found)

    def _compile(self, known: Any, *, machine_code: bool = False) -> bool:
        """Whether the launch compiles; notes what it lacks."""
        from triton.compiler import ASTSource, compile

        launch = self.launches[known]
        print(launch, file=sys.stderr, flush=True)  # an error in LLVM ends the process: the last line tells where
        source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
        self._stages.begin(launch.hash, machine_code)
        try:
            made = compile(source, target=self.driver.target, options=launch.options).metadata
        except Exception as error:
            self._not_compiled.append(f"{launch}: {type(error).__name__}: {error}")
            return False
        needs = {
            "shared memory": (made.shared, GPUS[self._gpu].shared_memory),
            "tensor memory": (getattr(made, "tmem_size", None) or 0, TENSOR_MEMORY),
            "threads": (launch.options["num_warps"] * self.driver.target.warp_size, MAX_THREADS),
        }
        for resource, (needed, there) in needs.items():
            if needed > there:
                self._lacking[known] = OutOfResources(needed, there, f"{resource} of {launch}")
        return True


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


def faults(calls_in: str, part: int | None) -> dict[str, list[str]]:
    """`Recording.faults` of each GPU, older ones first, which share their results."""
    assembled = defaultdict[Any, set[Any]](set)  # generation -> what its GPUs have run through the assembler
    generations = {name: (gpu.hip, gpu.capability[0]) for name, gpu in GPUS.items()}
    return {name: Recording(name, calls_in, part, assembled[generations[name]]).faults for name in GPUS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/gpus.md, from what the calls of op_calls launch on GPUs.")
    commands = parser.add_subparsers(dest="command", title="instead of it, in a process of its own")
    commands.add_parser("record", help="print as JSON what each op does on each GPU")
    compiling = commands.add_parser("compile", help="print as JSON the launches on each GPU that do not compile or fit")
    compiling.add_argument("calls_in", help="module with the calls")
    compiling.add_argument("part", type=int, nargs="?", help="number of the part of the ops; default: all ops")
    given = parser.parse_args()
    if given.command == "record":
        print(json.dumps(record()))
    elif given.command == "compile":
        print(json.dumps(faults(given.calls_in, given.part)))
    else:
        PAGE.write_text(page(in_own_process("record")), encoding="utf-8")


if __name__ == "__main__":
    main()
