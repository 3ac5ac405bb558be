"""Plans of parallelism, as data."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ligermodels.arguments import ActivationCheckpointing, nearest
from ligermodels.errors import ConfigError, validation_message

DtypeName = Literal["bfloat16", "float32"]
FsdpUnit = Literal["block", "model"]


class ParallelPlan(BaseModel):
    """How to spread a model over ranks: degrees of parallelism, mixed precision, checkpointing and compilation.

    The product of replicate, shard, context and tensor is the number of ranks.

    Args:
        replicate: groups of ranks that each hold the whole model (HSDP, together with `shard`). Default: 1.
        shard: ranks that a copy of the model is sharded over (FSDP2). Default: -1, all ranks that the other degrees
            leave.
        tensor: ranks that each matrix product is divided over. Default: 1.
        context: ranks that each sequence is divided over. Default: 1.
        expert: ranks that the experts of a mixture are divided over, out of shard x context. Default: 1.
        param_dtype: "bfloat16" or "float32", dtype of gathered parameters and of the computation. Default: the
            parameters' dtype.
        reduce_dtype: "bfloat16" or "float32", dtype of sums of gradients over ranks. Default: the dtype of the
            computation.
        reshard_after_forward: whether blocks are sharded again after their forward pass, and gathered a second time for
            their backward pass. False takes memory for all whole blocks. Default: True.
        fsdp_unit: "block" or "model", what FSDP2 gathers and reduces at once. "model" takes memory for the whole model
            and its gradients, and less work of the CPU: for blocks that are too small to keep a GPU busy. Modules that
            keep their dtypes (`KeepsDtype`) are gathered in their block all the same. Default: "block".
        activation_checkpointing: "none", "selective", "full" or "offload". Default: the model's setting.
        compile: "none" or "blocks", the parts that torch.compile compiles. Of blocks within which FSDP2 gathers modules
            (those that keep their dtypes, and experts), the other layers are compiled. Default: "none".

    Raises:
        ConfigError: a value has the wrong type or is out of range, or fields cannot be combined; the message names the
            field.

    Examples:
        >>> import ligermodels as lm
        >>> plan = lm.ParallelPlan(tensor=2, param_dtype="bfloat16")
        >>> plan.degrees(8)
        {'replicate': 1, 'shard': 4, 'context': 1, 'tensor': 2}
        >>> model = lm.from_pretrained("Qwen/Qwen3-0.6B", plan=plan)  # under torchrun  # doctest: +SKIP
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    AXES: ClassVar[tuple[str, ...]] = ("replicate", "shard", "context", "tensor")
    """Dimensions of the mesh, the outermost first. Neighbours in the last dimension exchange the most data and share a
    host. Experts are spread over neighbours among the ranks of `shard` and `context`."""

    replicate: int = Field(1, ge=1, description="Groups of ranks that each hold the whole model (HSDP, with shard).")
    shard: int = Field(
        -1, ge=-1, description="Ranks that a copy of the model is sharded over (FSDP2); -1: all other ranks."
    )
    tensor: int = Field(1, ge=1, description="Ranks that each matrix product is divided over.")
    context: int = Field(1, ge=1, description="Ranks that each sequence is divided over.")
    expert: int = Field(1, ge=1, description="Ranks that the experts of a mixture are divided over.")
    param_dtype: DtypeName | None = Field(
        None,
        description="Mixed precision: dtype of gathered parameters and computation.  [default: the parameters' dtype]",
    )
    reduce_dtype: DtypeName | None = Field(
        None, description="Dtype of sums of gradients over ranks.  [default: dtype of the computation]"
    )
    reshard_after_forward: bool = Field(
        True, description="Shard blocks again after their forward pass; off: after their backward pass."
    )
    fsdp_unit: FsdpUnit = Field("block", description="What FSDP2 gathers at once: each block, or the whole model.")
    activation_checkpointing: ActivationCheckpointing | None = Field(
        None, description="Activation checkpointing.  [default: the model's setting]"
    )
    compile: Literal["none", "blocks"] = Field("none", description="Parts that torch.compile compiles.")

    def __init__(self, **settings: Any) -> None:  # without it, type checkers derive one that requires all settings
        known = type(self).model_fields
        if unknown := [name for name in settings if name not in known]:
            raise ConfigError(f"{unknown[0]}: there is no such setting{nearest(unknown[0], known)}")
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError("; ".join(map(validation_message, error.errors()))) from None

    @field_validator("shard")
    @classmethod
    def _is_degree(cls, value: int) -> int:
        if value == 0:
            raise ConfigError("shard: must be at least 1, or -1 for all other ranks, got 0")
        return value

    def degrees(self, world_size: int) -> dict[str, int]:
        """Size of each dimension of the mesh.

        Args:
            world_size: number of ranks.

        Returns:
            Name of each of AXES -> its size; the product is `world_size`.

        Raises:
            ConfigError: the degrees do not divide the number of ranks.
        """
        sizes = {"replicate": self.replicate, "shard": self.shard, "context": self.context, "tensor": self.tensor}
        others = self.replicate * self.context * self.tensor
        text = " x ".join(f"{name} {size}" for name, size in sizes.items() if name != "shard" and size > 1) or "1"
        if self.shard == -1:
            if world_size % others:
                raise ConfigError(
                    f"{text}: does not divide the number of ranks, which is {world_size}; start the program by "
                    f"torchrun --nproc-per-node N, or a command with --gpus N, N a multiple of {others}"
                )
            sizes["shard"] = world_size // others
        elif others * self.shard != world_size:
            rest, left = divmod(world_size, others)
            advice = f"give shard {rest}, or -1" if not left else f"{text} does not divide the {world_size} ranks"
            raise ConfigError(
                f"shard: {self.shard}, times {text}, is {others * self.shard} ranks, and there are {world_size}; "
                f"{advice}, or start as many processes"
            )
        ranks = sizes["shard"] * self.context
        if ranks % self.expert:
            raise ConfigError(
                f"expert: {self.expert} does not divide the {ranks} ranks (shard x context) that share a copy of the "
                "model, experts included; give a divisor of that number"
            )
        return sizes
