"""How a model is spread over ranks, as data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ligermodels.errors import ConfigError, validation_message


class ParallelPlan(BaseModel):
    """Degrees of parallelism, whose product is the number of ranks, and what goes with them.

    Raises ConfigError, which names the field, for a value of another type or out of range.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    AXES: ClassVar[tuple[str, ...]] = ("replicate", "shard", "context", "tensor")
    """Dimensions of the mesh, the outermost first: neighbours in the last exchange the most, and share a host. Experts
    are spread over neighbours among the ranks of `shard` and `context`."""

    replicate: int = Field(1, ge=1, description="Groups of ranks that each hold the whole model (HSDP, with shard).")
    shard: int = Field(-1, ge=-1, description="Ranks that a copy of the model is sharded over (FSDP2); -1: the rest.")
    tensor: int = Field(1, ge=1, description="Ranks that each matrix product is divided over.")
    context: int = Field(1, ge=1, description="Ranks that each sequence is divided over.")
    expert: int = Field(1, ge=1, description="Ranks that the experts of a mixture are divided over.")
    param_dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="Mixed precision: dtype to gather parameters and to compute in.  [default: the parameters']"
    )
    reduce_dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="Dtype to sum gradients over ranks in.  [default: that of the computation]"
    )
    activation_checkpointing: Literal["none", "selective", "full"] | None = Field(
        None, description="As of the model.  [default: what the model has]"
    )
    compile: Literal["none", "blocks"] = Field("none", description="What torch.compile compiles.")

    if TYPE_CHECKING:  # the constructor that type checkers derive would ask for every setting

        def __init__(self, **settings: Any) -> None: ...

    else:

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigError("; ".join(map(validation_message, error.errors()))) from None

    @field_validator("shard")
    @classmethod
    def _is_degree(cls, value: int) -> int:
        if value == 0:
            raise ConfigError("shard: must be at least 1, or -1 for the rest of the ranks, got 0")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> ParallelPlan:
        if self.expert > 1 and self.tensor > 1:
            raise ConfigError("expert: is not supported beside tensor; experts are spread over shard and context")
        if self.expert > 1 and self.compile != "none":
            raise ConfigError("compile: experts that are spread over ranks are not compiled; leave it 'none'")
        return self

    def degrees(self, world_size: int) -> dict[str, int]:
        """The size of each of AXES on so many ranks; ConfigError unless their product is that number."""
        found = {name: getattr(self, name) for name in self.AXES}
        others = math.prod(found[name] for name in self.AXES if name != "shard")
        told = " x ".join(f"{name} {size}" for name, size in found.items() if name != "shard" and size > 1) or "1"
        if self.shard == -1:
            if world_size % others:
                raise ConfigError(
                    f"{told}: does not divide the number of ranks, which is {world_size}; start the program by "
                    f"torchrun --nproc-per-node N, N a multiple of {others}"
                )
            found["shard"] = world_size // others
        elif others * self.shard != world_size:
            rest, left = divmod(world_size, others)
            advice = f"give shard {rest}, or -1" if not left else f"{told} does not divide the {world_size} ranks"
            raise ConfigError(
                f"shard: {self.shard}, times {told}, is {others * self.shard} ranks, and there are {world_size}; "
                f"{advice}, or start as many processes"
            )
        if found["shard"] * found["context"] % self.expert:
            ranks = found["shard"] * found["context"]
            raise ConfigError(
                f"expert: {self.expert} does not divide the {ranks} ranks (shard x context) that a copy of the model, "
                "experts included, is spread over"
            )
        return found
