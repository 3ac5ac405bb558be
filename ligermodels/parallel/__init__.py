"""Models on several GPUs: plans as data, meshes from them, and torch's own FSDP2 and DTensor."""

from typing import TYPE_CHECKING

from ligermodels.lazy import lazy_names

if TYPE_CHECKING:
    from ligermodels.parallel.apply import parallelize
    from ligermodels.parallel.plan import ParallelPlan
    from ligermodels.parallel.ranks import DataRanks

# Recipes contain plans, and are read without importing torch.
__getattr__, __dir__ = lazy_names(
    __name__, {"apply": ("parallelize",), "plan": ("ParallelPlan",), "ranks": ("DataRanks",)}
)

__all__ = ["DataRanks", "ParallelPlan", "parallelize"]
