"""`python -m benchmarks medusa [--out FILE]`: a step of Medusa stage 1, the backbone frozen, beside the same in torch.

The peers have transformers' backbone and the same heads in plain torch. Their loss is torch's cross entropy over fp32
logits or, for "liger", Liger's fused linear cross entropy, once per head; "liger" has Liger's kernels in the backbone
too. "liger + torchao float8" has the backbone in torchao's float8, its blocks compiled, and Liger's losses.

Ours: "shared" uses the lm_head of the model for all heads. "stage 2" trains the model too and recomputes norms and
activations. "float8" computes the linear layers of the blocks in float8. "whole" computes the logits of all tokens at
once, by a large `memory_budget`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ligermodels as lm
from benchmarks.cases.models import CONFIGS
from benchmarks.cases.peers import PROVIDERS, TORCHAO
from benchmarks.cases.projections import IN_BF16, IN_FLOAT8, Products
from benchmarks.cases.roofline import medusa_roofline
from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels.layers import shift_labels
from ligermodels.speculative.joint import JointMedusa
from ligermodels.training.fused_adamw import FusedAdamW

DECAY, STEPS = 0.8, 6
WHOLE = 2**40  # bytes, more than any logits take
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class TorchHeads(nn.Module):
    """A backbone of transformers and K heads: x + silu(linear(x)), then an lm_head."""

    def __init__(self, model: Any, num_heads: int, loss: Loss) -> None:
        super().__init__()
        self.backbone, self.loss = model.model.requires_grad_(False), loss
        size, weight = model.config.hidden_size, model.lm_head.weight
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(num_heads)).to(weight)
        self.lm_heads = nn.ParameterList(weight.detach().clone() for _ in range(num_heads))
        for block in self.blocks:
            for parameter in block.parameters():
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Sum of the heads' losses, decayed."""
        with torch.no_grad():
            hidden = self.backbone(input_ids=input_ids).last_hidden_state
        total = hidden.new_zeros((), dtype=torch.float32)
        for index, (block, weight) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            x = (hidden + F.silu(block(hidden))).flatten(0, 1)
            total = total + DECAY**index * self.loss(x, weight, shift_labels(labels, 2 + index).flatten())
        return total


def _eager_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.t()).float(), target)


def _liger_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    loss: Tensor = LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]
    return loss


PEERS: dict[str, tuple[str, Loss]] = {
    "torch": ("transformers", _eager_loss),
    "liger": ("transformers + liger", _liger_loss),
    "liger + torchao float8": (TORCHAO, _liger_loss),
}
"""Provider -> the provider of its backbone, and the loss of a head."""

BACKBONES = {
    **dict.fromkeys(("ligermodels", "torch", "liger"), IN_BF16),
    **dict.fromkeys(("ligermodels float8", "ligermodels float8 whole", "liger + torchao float8"), IN_FLOAT8),
}
"""Provider of stage 1 with one lm_head per head -> the precision of its backbone."""


def make(provider: str, config: dict[str, Any], num_heads: int) -> tuple[Callable[..., Tensor], torch.optim.Optimizer]:
    """A function from ids and labels to the loss, and the optimizer of the heads."""
    if provider.startswith("ligermodels"):
        base = lm.from_config(config, dtype=torch.bfloat16, device=measure.DEVICE)
        if "float8" in provider:
            lm.float8(base)
        medusa = lm.MedusaModel.from_base(base, num_heads, lm_head="shared" if "shared" in provider else "own")
        joint = "stage 2" in provider
        if joint:
            base.activation_checkpointing = "selective"
        optimizer = FusedAdamW(medusa.parameters() if joint else medusa.head_parameters(), lr=1e-5)
        model = JointMedusa(medusa) if joint else medusa
        options = {"memory_budget": WHOLE} if "whole" in provider else {}
        return lambda ids, labels: model(ids, labels=labels, **options).loss, optimizer
    backbone, loss = PEERS[provider]
    heads = TorchHeads(PROVIDERS[backbone](config, None), num_heads, loss)
    trained = [p for p in heads.parameters() if p.requires_grad]
    return heads, torch.optim.AdamW(trained, lr=1e-5, fused=True)


def timed(
    loss_of: Callable[..., Tensor], optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor
) -> dict[str, float]:
    """Median time of a step, memory held between steps, peak memory, and the first loss."""

    def step() -> Tensor:
        loss = loss_of(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return timed_step(step, optimizer, ids)


def timed_step(step: Callable[[], Tensor], optimizer: torch.optim.Optimizer, ids: Tensor) -> dict[str, float]:
    """The numbers of `timed`, of a function that takes a step on token ids and returns the loss."""
    loss = float(step())
    step()
    measure.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step_ms = measure.one_after_another(step, STEPS)
    return {
        "step_ms": step_ms,
        "tokens_per_s": ids.numel() / step_ms * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "held_gib": held / 2**30,
        "gradients_gib": sum(p.nbytes for group in optimizer.param_groups for p in group["params"]) / 2**30,
        "loss": loss,
    }


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--model", default="llama-3-8b", choices=CONFIGS)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--ignored", type=float, nargs="*", default=[0.0, 0.5])
    parser.add_argument("--providers", nargs="*", default=["ligermodels", "ligermodels shared", "torch", "liger"])
    parser.add_argument(
        "--roofline",
        "--floor",
        action="store_true",
        help="first measure the lower bound of stage 1, in the precision of each provider",
    )
    arguments = parser.parse_args()
    config = CONFIGS[arguments.model]
    name = f"{arguments.model} {arguments.heads} heads {arguments.batch}x{arguments.length}"
    common, records = recording.facts(), []
    rooflines = dict[tuple[float, Products | None], dict[str, float]]()
    for products in dict.fromkeys(BACKBONES[p] for p in arguments.providers if p in BACKBONES and arguments.roofline):
        for ignored in arguments.ignored:
            least = medusa_roofline(config, arguments.heads, arguments.batch, arguments.length, ignored, products)
            rooflines[ignored, products] = {"floor_ms": least}
            print(f"{ignored:.0%} ignored, backbone by {products.calls.__name__}: {least:.1f} ms at least", flush=True)
            measure.free()
    for provider in arguments.providers:
        torch.manual_seed(0)
        loss_of = optimizer = None
        ids = torch.randint(config["vocab_size"], (arguments.batch, arguments.length), device=measure.DEVICE)
        for ignored in arguments.ignored:
            labels = torch.where(torch.rand(ids.shape, device=measure.DEVICE) < ignored, -100, ids)
            record: dict[str, Any] = {"case": f"{name} {ignored:.0%} ignored", "provider": provider}
            record |= rooflines.get((ignored, BACKBONES.get(provider)), {})
            try:
                if loss_of is None or optimizer is None:
                    loss_of, optimizer = make(provider, config, arguments.heads)
                record |= timed(loss_of, optimizer, ids, labels)
                if "floor_ms" in record:
                    record["of_floor"] = record["floor_ms"] / record["step_ms"]
            except Exception as failure:  # A failing peer is a result.
                record["failed"] = f"{type(failure).__name__}: {failure}"[:200]
            records.append(record)
            print(record, flush=True)
            recording.write(arguments.out, [{**record, **common}])
        del loss_of, optimizer
        measure.free()
    recording.end(records)
