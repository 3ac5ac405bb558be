"""Engines of vLLM that start in less than a second, in one process that has imported all that they need.

On the CPU vLLM spawns engines and workers, and each takes longer to import its modules than to run a model. Each engine
also collects garbage several times, through a million objects of imported modules. The servers of test_native_server.py
start in vLLM's own way.
"""

import gc
import multiprocessing

import vllm.model_executor.models.registry
import vllm.v1.engine.core
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker
from vllm.platforms.cpu import CpuPlatform

import ligermodels.integrations.vllm.model
import ligermodels.integrations.vllm.receiver  # noqa: F401

# To import them starts no thread with OMP_NUM_THREADS=1, as tests have it.
PRELOADED = [
    "vllm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "ligermodels.integrations.vllm.model",
    "ligermodels.integrations.vllm.receiver",
]


def quicken_starts() -> None:
    """Leave out the work of an engine's start that is the same for all engines of this process and of its children."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: forks
    CpuPlatform.register_triton_kernel_overrides()  # searches all modules for kernels
    CpuPlatform.register_triton_kernel_overrides = staticmethod(lambda: None)
    # Properties of a model class are found in a process that imports vLLM again.
    vllm.model_executor.models.registry._run_in_subprocess = lambda function: function()
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # vLLM thaws the modules when an engine ends
