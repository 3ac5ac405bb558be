"""`python -m benchmarks needed_tokens [MODEL ...]`: savings of Gemma 4's layers with shared keys and values.

These layers have no keys and values of their own, so they run only on the needed tokens: tokens with a label in
training, the last token in a prefill. First the FLOPs of the decoder's linear layers in a forward pass are counted, on
any machine; a backward pass has twice as many. On a GPU, the forward and backward pass of a training step, and a
prefill, are timed too, beside passes that compute all tokens and select the needed tokens at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import ligermodels as lm
from benchmarks.cases.models import CONFIGS
from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels.generation.step import prefill
from ligermodels.layers.targets import shift_labels
from ligermodels.layers.tokens import take_tokens
from ligermodels.models.causal_lm import CausalLM

MODELS = ("gemma-4-e2b", "gemma-4-e4b")


def linear_flops(config: Mapping[str, Any], length: int, needed: int) -> tuple[int, int]:
    """FLOPs of the decoder's linear layers in a forward pass: with `needed` needed tokens, and with all tokens.

    Nothing is computed: the model is on the meta device.

    Args:
        config: Config of the model.
        length: Tokens of the sequence.
        needed: Number of needed tokens.
    """
    model = lm.from_config(config, device="meta", dtype=torch.bfloat16)
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")

    def count(token_indices: Tensor | None) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.decoder(ids, token_indices=token_indices)
        return int(counter.get_flop_counts()["Global"][torch.ops.aten.mm])

    return count(ids.new_zeros(needed)), count(None)


def prefill_ways(model: CausalLM, ids: Tensor) -> list[Callable[[], Tensor]]:
    """Prefills of ids (1, T) with only the needed tokens, and with all; both return the logits of the last token."""
    state, lengths = model.new_state(1, ids.shape[1] + 1), torch.full_like(ids[:, 0], ids.shape[1])

    def way(every_state: bool) -> Tensor:
        with torch.no_grad():
            return prefill(model, ids, lengths, state, every_state=every_state).logits

    return [lambda: way(every_state=False), lambda: way(every_state=True)]


def training_ways(model: CausalLM, ids: Tensor, labels: Tensor) -> list[Callable[[], Tensor]]:
    """Forward and backward passes with the needed tokens only, and with all tokens; both return the loss.

    Args:
        model: The model.
        ids: Token ids (1, T).
        labels: Labels (1, T).
    """
    targets = shift_labels(labels, 1)
    token_indices = (targets != -100).flatten().nonzero().flatten()

    def with_needed() -> Tensor:
        return backward(model(ids, labels=labels).loss)

    def without() -> Tensor:
        states = model(ids, return_last_hidden_state=True).last_hidden_state
        taken = targets.flatten()[token_indices][None]
        return backward(model.head_loss(take_tokens(cast(Tensor, states), token_indices), taken).loss)

    def backward(loss: Tensor | None) -> Tensor:
        loss = cast(Tensor, loss)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return [with_needed, without]


def timed(ways: list[Callable[[], Tensor]]) -> dict[str, float]:
    """Milliseconds of both ways, and the relative difference of their results."""
    results = [way().float() for way in ways]
    with_ms, without_ms = (measure.milliseconds(way) for way in ways)
    return {"with_ms": with_ms, "without_ms": without_ms, "error": measure.relative_error(*results)}


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{' or '.join(MODELS)} (both)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the sequence")
    parser.add_argument("--ignored", type=float, default=0.75, help="fraction of tokens without a label in training")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; give any of {', '.join(MODELS)}")
    length, masked = arguments.length, int(arguments.ignored * arguments.length)
    records = []
    for name in arguments.models or MODELS:
        for case, needed in (("training", length - masked), ("prefill", 1)):
            fewer, all_of_them = linear_flops(CONFIGS[name], length, needed)
            record = {"case": f"{name} 1x{length} {case}", "needed": needed, "flops": fewer, "all_flops": all_of_them}
            print(f"{record['case']}, {needed} needed: {1 - fewer / all_of_them:.1%} of linear FLOPs saved", flush=True)
            if torch.cuda.is_available():
                torch.manual_seed(0)
                model = lm.from_config(CONFIGS[name], device=measure.DEVICE, dtype=torch.bfloat16)
                model.train(case == "training")
                ids = torch.randint(3, 1000, (1, length), device=measure.DEVICE)
                labels = ids.masked_fill(torch.arange(length, device=measure.DEVICE) < masked, -100)
                record |= timed(training_ways(model, ids, labels) if case == "training" else prefill_ways(model, ids))
                print({key: value for key, value in record.items() if key.endswith(("_ms", "error"))}, flush=True)
                del model
                measure.free()
            records.append({**record, **recording.facts()})
    recording.write(arguments.out, records)
