"""Settings of vLLM that engines of this package's classes have by default."""

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from ligermodels.integrations.vllm import RECEIVER


class EngineDefaults(VerifyAndUpdateConfig):
    """vLLM's hook for an architecture's settings: workers take weights."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Set `worker_extension_cls` if the user has not."""
        parallel = vllm_config.parallel_config
        parallel.worker_extension_cls = parallel.worker_extension_cls or RECEIVER
