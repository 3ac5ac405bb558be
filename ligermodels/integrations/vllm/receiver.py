"""How the workers of an engine take new weights: methods that `update_weights` calls in each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ligermodels.errors import CheckpointError, InputError
from ligermodels.integrations.vllm.model import LigerModelsForCausalLM
from ligermodels.integrations.vllm.shared_buckets import Handle, Table, read_bucket, reader_of


class WeightReceiver:
    """Extension of vLLM's worker class (`worker_extension_cls`). The plugin sets it for engines of this package's
    classes; an extension of your own inherits from it."""

    if TYPE_CHECKING:  # vLLM's worker has them
        device: torch.device
        rank: int

        def get_model(self) -> torch.nn.Module:
            """The model of this worker."""

    def begin_weight_update(self) -> dict[str, Any] | None:
        """Begin an update. Returns the worker's `reader_of`; None if it serves another class."""
        model = self.get_model()
        if not isinstance(model, LigerModelsForCausalLM):
            return None
        model.begin_update()
        return reader_of(self.device)

    def load_shared_weights(self, handles: list[Handle], table: Table) -> list[str] | None:
        """Copy this worker's part of a bucket into the model.

        Args:
            handles: the bucket's handles, for each worker by its rank.
            table: table of the bucket.

        Returns:
            None; or name of the class and message of an error in `ligermodels.errors`.
        """
        model = self.get_model()
        assert isinstance(model, LigerModelsForCausalLM)
        try:
            model.update(read_bucket(handles[self.rank], table, self.device))
        except (CheckpointError, InputError) as error:
            return [type(error).__name__, str(error)]
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        return None

    def missing_weights(self) -> list[str]:
        """Names of the model's tensors that the update has not sent."""
        model = self.get_model()
        assert isinstance(model, LigerModelsForCausalLM)
        return model.not_updated()
