"""vLLM's engines and workers as forks of one process that has imported all that they need.

On the CPU vLLM spawns them, and each takes longer to import its modules than to run a model. The servers of
test_native_server.py start them by vLLM's own way.
"""

import multiprocessing

import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor

# To import them starts no thread with OMP_NUM_THREADS=1, as tests have it.
PRELOADED = [
    "vllm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "ligermodels.integrations.vllm.model",
    "ligermodels.integrations.vllm.receiver",
]


def fork_workers() -> None:
    """Let the engines of this process, and of processes that it makes, fork their workers."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: forks
