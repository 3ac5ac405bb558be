"""`python -m benchmarks draft [--out FILE]`: a training step of EAGLE-3 and of DSpark, beside plain torch.

- "eagle3 llama-3-8b": 7 steps of training-time test on 4 sequences of 4,096 tokens, 32,000 draft tokens.
- "dspark qwen3-8b": 512 blocks of 7 slots on a sequence of 4,096 tokens, 5 layers, all tokens.

Weights are random. The peer "torch" has the same target and draft head; its draft part materialises the logits and
uses flex attention, as one compiled function (`draft_peers`). "graph" takes whole steps by a CUDA graph, as training
jobs do with `cuda_graph: on`. "target bf16" has the target in bf16, else it is in float8. Before the timing, the losses
of both are compared. `--roofline` first measures the lower bound of each step: the GEMMs and the attention of the
target's forward pass, and the GEMMs and the attention of the draft part forward and backward, with the optimizer's
bytes; one product per token for the target's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ligermodels as lm
from benchmarks.cases import attention
from benchmarks.cases.draft_peers import PlainDSpark, PlainEagle3
from benchmarks.cases.medusa import timed, timed_step
from benchmarks.cases.models import CONFIGS
from benchmarks.cases.projections import IN_BF16, IN_FLOAT8, Call, Products, gemms
from benchmarks.cases.roofline import ADAMW_BYTES, copies, fastest_attention, forward_calls, step_ms
from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.training.cuda_graph import graph_step
from ligermodels.training.fused_adamw import FusedAdamW

LOSS_LIMIT = 0.02
"""Largest relative difference of the losses of ours and the peer, in bf16."""
PROVIDERS = ("ligermodels", "ligermodels graph", "torch", "ligermodels target bf16", "torch target bf16")


@dataclass(frozen=True)
class Case:
    """A head on a model, and its batch. `options`: arguments of the head's `from_base`."""

    kind: str
    model: str
    batch: int
    length: int
    draft_tokens: int | None
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Head, model and batch."""
        return f"{self.kind} {self.model} {self.batch}x{self.length}"


CASES = {
    "eagle3": Case("eagle3", "llama-3-8b", 4, 4096, 32000, {"num_steps": 7}),
    "dspark": Case("dspark", "qwen3-8b", 1, 4096, None, {"block_size": 7, "num_layers": 5, "num_anchors": 512}),
}


def head_of(case: Case, base: lm.CausalLM) -> Any:
    """A new head on a model, the same for each provider."""
    torch.manual_seed(1)
    if case.kind == "dspark":
        return lm.DSparkModel.from_base(base, **case.options)
    vocab_size = base.config.vocab_size
    vocabulary = DraftVocabulary(torch.arange(0, case.draft_tokens or vocab_size), vocab_size)
    return lm.Eagle3Model.from_base(base, vocabulary=vocabulary, **case.options)


def measured(case: Case, provider: str, ids: Tensor) -> tuple[dict[str, float], float]:
    """The numbers of steps on token ids (see `timed`), and the loss of ours on them.

    Args:
        case: the head and its batch.
        provider: a name of PROVIDERS.
        ids: long (B, T).
    """
    torch.manual_seed(0)
    base = lm.from_config(CONFIGS[case.model], dtype=torch.bfloat16, device=measure.DEVICE)
    if "bf16" not in provider:
        lm.float8(base)
    model = head_of(case, base)
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    if provider.startswith("ligermodels"):
        optimizer = FusedAdamW(model.head_parameters(), lr=1e-5)
        if "graph" not in provider:
            return timed(lambda ids, labels: model(ids, labels=labels).loss, optimizer, ids, ids), loss
        take, batch = graph_step(model, optimizer, max_grad_norm=None), {"input_ids": ids, "labels": ids}
        return timed_step(lambda: take([batch]).losses[0], optimizer, ids), loss
    plain: Any = PlainEagle3(model, *ids.shape) if case.kind == "eagle3" else PlainDSpark(model, ids)
    trained = [x for x in plain.weights.values() if x.requires_grad]
    model.head.to("meta")  # the copies are trained
    return timed(lambda ids, labels: plain(ids), torch.optim.AdamW(trained, lr=1e-5, fused=True), ids, ids), loss


def layer_calls(decoder: Any, rows: int, context: int, width: int) -> list[Call]:
    """GEMMs of the draft's layers, forward and backward.

    Args:
        decoder: the composed config of the layers.
        rows: tokens, or slots.
        context: further tokens whose keys and values are computed.
        width: channels that queries, keys and values read.
    """
    calls, hidden = list[Call](), decoder.hidden_size
    for block in decoder.blocks:
        a, size = block.mixer, block.mlp.size
        calls += gemms((rows, a.num_heads * a.head_dim, width))
        calls += gemms((rows + context, 2 * a.num_kv_heads * a.head_dim, width))
        calls += gemms((rows, hidden, a.num_heads * a.head_dim))
        calls += [*gemms((rows, 2 * size, hidden)), *gemms((rows, hidden, size))]
    return calls


def roofline(case: Case, products: Products) -> float:
    """Lower bound of a step in milliseconds, with the projections of the target in the precision of `products`."""
    base = lm.from_config(CONFIGS[case.model], dtype=torch.bfloat16, device="meta")
    model, tokens = head_of(case, base), case.batch * case.length
    decoder, hidden, draft = model.config.decoder, base.config.hidden_size, len(model.vocabulary)
    calls = forward_calls(base, case.batch, case.length, products)
    calls += gemms((tokens, hidden, len(model.config.boundaries) * hidden), ("weight",))
    a = decoder.blocks[0].mixer
    if case.kind == "eagle3":
        of_step = layer_calls(decoder, tokens, 0, 2 * hidden)
        of_step += gemms((tokens, draft, hidden))
        of_step.append(
            fastest_attention(attention.Case(case.batch, case.length, a.num_heads, a.num_kv_heads, a.head_dim))
        )
        calls += [*gemms((tokens, draft, hidden), ()), *(model.num_heads * of_step)]
    else:
        slots, rank = case.options["num_anchors"] * model.num_heads, model.config.markov_rank
        calls += layer_calls(decoder, slots, tokens, hidden)
        seen = 7 * (case.length // 2) * len(decoder.blocks)  # 2 products forward and 5 backward, of half the text
        calls += gemms((slots, seen, a.num_heads * a.head_dim), ())
        calls += [*gemms((slots, draft, hidden), ("input",)), *gemms((slots, draft, hidden), ())]
        calls += gemms((slots, draft, rank))
    return step_ms([*calls, *copies(ADAMW_BYTES * sum(p.numel() for p in model.head_parameters()))])


def record_of(case: Case, provider: str, least: dict[str, float]) -> dict[str, Any]:
    """The record of a provider.

    Args:
        case: the head and its batch.
        provider: a name of PROVIDERS.
        least: {"floor_ms": the lower bound}, or empty.
    """
    record: dict[str, Any] = {"case": case.name, "provider": provider, **least}
    try:
        torch.manual_seed(2)
        vocab_size = CONFIGS[case.model]["vocab_size"]
        ids = torch.randint(vocab_size, (case.batch, case.length), device=measure.DEVICE)
        numbers, loss = measured(case, provider, ids)
        record |= numbers
        if (error := abs(record["loss"] / loss - 1)) > LOSS_LIMIT:
            raise RuntimeError(f"its loss is {record['loss']:.4f}, and ours {loss:.4f}: wrong by {error:.1%}")
        if least:
            record["of_floor"] = least["floor_ms"] / record["step_ms"]
    except Exception as failure:  # A failing peer is a result.
        record["failed"] = f"{type(failure).__name__}: {failure}"[:200]
    return record


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--providers", nargs="*", default=list(PROVIDERS[:4]), choices=PROVIDERS)
    parser.add_argument("--roofline", action="store_true", help="first measure the lower bound of each step")
    arguments = parser.parse_args()
    common, records = recording.facts(), []
    for name in arguments.cases or CASES:
        case, bounds = CASES[name], dict[Products, dict[str, float]]()
        for provider in arguments.providers:
            products = IN_BF16 if "bf16" in provider else IN_FLOAT8
            if arguments.roofline and products not in bounds:
                bounds[products] = {"floor_ms": roofline(case, products)}
                measure.free()
            records.append(record_of(case, provider, bounds.get(products, {})))
            print(records[-1], flush=True)
            recording.write(arguments.out, [{**records[-1], **common}])
            torch._dynamo.reset()
            measure.free()
    recording.end(records)
