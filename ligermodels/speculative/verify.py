"""Verifies the files of draft heads: fields, layer ids, norms, vocabulary tables, shapes, and results by the formulas.

The weights of the model are not needed: a stub target gives random states.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json
from ligermodels.layers import NormConfig
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.extra_heads import EAGLE_TYPE, MEDUSA_COUNTS, draft_type
from ligermodels.pretrained import from_config
from ligermodels.speculative.checks import ROWS, HeadsReport, check_values, compare, random, report_of, require
from ligermodels.speculative.head_files import CONFIG, allocated
from ligermodels.speculative.hub import heads_folder
from ligermodels.speculative.load import DRAFT_HEADS, refuse_others
from ligermodels.speculative.medusa import ResBlock
from ligermodels.speculative.medusa_files import Heads, open_heads
from ligermodels.speculative.mtp_files import load_head, stored_layers
from ligermodels.speculative.mtp_head import MTPHead
from ligermodels.speculative.profiles import FC_BIAS, HeadsShape
from ligermodels.speculative.verify_blocks import BlockFiles
from ligermodels.speculative.verify_eagle3 import Eagle3Files

TOKENS = 8


def verify_heads(heads: str | os.PathLike[str], model: str | os.PathLike[str] | Mapping[str, Any]) -> HeadsReport:
    """Verify the files of Medusa, MTP, EAGLE-3, DFlash or DSpark heads against the config of their model.

    The checks stop at the first mismatch, which `HeadsReport.first_mismatch` names. For an EAGLE-3, DFlash or DSpark
    head they are: the fields of config.json; layer ids, in every convention; norms, the flags and the tensors;
    vocabulary tables; of DSpark the tensors of the Markov head and the confidence head; names and shapes of all
    tensors; finite values; and the results of three steps, or of three blocks, compared with the formulas in float64
    with the states of a stub target. For Medusa heads: numbers of heads, shapes, values and logits. For an MTP head:
    number of layers, shapes, values, and the computation around its block.

    Args:
        heads: folder or hub id of the heads; of an MTP head, also of a model's checkpoint.
        model: folder or hub id of the model, or its config; only config.json is read.

    Returns:
        The report.

    Raises:
        ConfigError: the model's config is not supported, or the heads are of a kind that is not implemented.
        CheckpointError, HubError: there are no such files.

    Examples:
        >>> report = verify_heads("head/", "meta-llama/Llama-3.1-8B")
        >>> report.passed, report.first_mismatch
        (True, None)
    """
    base = from_config(model, device="meta")
    folder = hub.resolve(heads, weights=False)
    stored = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if (kind := draft_type(stored)) is not None:
        files: Any = Eagle3Files if kind == EAGLE_TYPE else BlockFiles
        return files.report(base, hub.resolve(heads), DRAFT_HEADS[kind])
    refuse_others(stored, heads)
    if (folder / CONFIG).is_file() and set(MEDUSA_COUNTS).isdisjoint(stored) and _has_mtp(base, heads):
        return report_of("MTP", _mtp_checks(base, hub.resolve(heads)))
    path = heads_folder(heads)
    with open_heads(path) as opened:
        return report_of("Medusa", _medusa_checks(base, stored, opened))


def _has_mtp(base: CausalLM, heads: str | os.PathLike[str]) -> bool:
    folder = hub.resolve(heads, weights=False)
    return any(folder.glob("*.safetensors*")) and stored_layers(base, hub.resolve(heads)) > 0


# -- Medusa ------------------------------------------------------------------------------------------------------------


def _medusa_checks(base: CausalLM, config: dict[str, Any], heads: Heads) -> Iterator[tuple[str, Callable[[], str]]]:
    shape = HeadsShape(heads.num_heads, heads.num_layers, base.config.hidden_size, base.config.vocab_size)
    headers, profile, sizes = heads.reader.headers, heads.profile, (shape.num_heads, shape.num_layers)
    names = {
        f"heads.{head}.layers.{layer}.linear.{part}": profile.linear.format(head=head, layer=layer, part=part)
        for head in range(shape.num_heads)
        for layer in range(shape.num_layers)
        for part in ("weight", *(("bias",) if heads.biases else ()))
    }
    lm_heads = profile.lm_head_names(shape)

    def counts() -> str:
        for name, found in {**dict(zip(MEDUSA_COUNTS, sizes, strict=True)), **profile.sizes(shape)}.items():
            stored = config.get(name, found)
            require(stored == found, f"{name}: config.json says {stored} instead of {found}")
        if FC_BIAS in profile.config and config:
            stored, has = bool(config.get(FC_BIAS)), "have" if heads.biases else "have no"
            require(stored == heads.biases, f"{FC_BIAS}: is {stored} in config.json, and the ResBlocks {has} biases")
        return f"format {profile.name}: {shape.num_heads} heads of {shape.num_layers} ResBlocks"

    def shapes() -> str:
        size = shape.hidden_size
        wanted = {name: (size,) if name.endswith("bias") else (size, size) for name in names.values()}
        wanted |= dict.fromkeys(lm_heads, (shape.vocab_size, size))
        for name, dimensions in wanted.items():
            require(name in headers, f"{name}: is missing")
            found = tuple(headers[name].shape)
            require(found == dimensions, f"{name}: {list(found)}, and the model needs {list(dimensions)}")
        return f"{len(wanted)} tensors"

    def values() -> str:
        return check_values({name: heads.reader.read(name) for name in (*names.values(), *lm_heads)})

    def logits() -> str:
        hidden = random(0, TOKENS, shape.hidden_size)

        def places() -> Iterator[tuple[str, Tensor, Tensor]]:
            for head in range(shape.num_heads):
                ours, formula = hidden, hidden.double()
                for layer in range(shape.num_layers):
                    block = ResBlock(shape.hidden_size).float()
                    for part, parameter in block.linear.named_parameters():
                        if (name := names.get(f"heads.{head}.layers.{layer}.linear.{part}")) is not None:
                            with torch.no_grad():
                                parameter.copy_(heads.reader.read(name))
                    linear = profile.linear.format(head=head, layer=layer, part="{part}")
                    weight = heads.reader.read(linear.format(part="weight")).double()
                    bias = heads.reader.read(linear.format(part="bias")).double() if heads.biases else None
                    with torch.no_grad():
                        ours, formula = block(ours), formula + F.silu(F.linear(formula, weight, bias))
                name = lm_heads[head] if head < len(lm_heads) else None
                rows = random(1, ROWS, shape.hidden_size) if name is None else heads.reader.read(name)[:ROWS].float()
                yield f"head {head}", F.linear(ours, rows), F.linear(formula, rows.double())

        return compare(places())

    return iter((("heads", counts), ("shapes", shapes), ("values", values), ("logits", logits)))


# -- MTP ---------------------------------------------------------------------------------------------------------------


def _mtp_checks(base: CausalLM, folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    made: list[MTPHead] = []

    def layers() -> str:
        count = stored_layers(base, folder)
        return f"{count} layer{'s' if count > 1 else ''} for this model"

    def shapes() -> str:
        from ligermodels.speculative.mtp import MTPModel

        model = MTPModel.from_pretrained(base, folder)
        network = partial(MTPHead, base.config, model.head.num_layers, separate=model.layout.format.separate)
        head = allocated(network, torch.float32, torch.device("cpu"))
        load_head(base, head, folder)
        made.append(head.eval())
        return f"{len(model.layout.weight_map.sources())} tensors"

    def values() -> str:
        return check_values(dict(made[0].named_parameters()))

    def around_the_block() -> str:
        """fc [embedding_norm(e) | hidden_norm(h)] and the norm after the block, in float64."""
        head, size, norm = made[0], base.config.hidden_size, base.config.norm
        e, h = random(0, 1, TOKENS, size), random(1, 1, TOKENS, size)
        inside: dict[str, Tensor] = {}
        hooks = [
            head.fc.register_forward_hook(lambda module, args, out: inside.update(fc=out)),
            head.block.register_forward_hook(lambda module, args, out: inside.update(block=out.hidden)),
        ]
        with torch.no_grad():
            y = head(e, h)
        for hook in hooks:
            hook.remove()
        joined = torch.cat([_norm(norm, head.embedding_norm, e), _norm(norm, head.hidden_norm, h)], dim=-1)
        x = F.linear(joined, head.fc.weight.double())
        result = _norm(norm, head.norm, inside["block"])
        return compare(iter((("fc of the two norms", inside["fc"], x), ("norm after the block", y, result))))

    return iter((("layers", layers), ("shapes", shapes), ("values", values), ("results", around_the_block)))


def _norm(config: NormConfig, module: nn.Module, x: Tensor) -> Tensor:
    """The formula of a norm in float64, with the weight of a module."""
    x, weights = x.double(), {name: parameter.detach().double() for name, parameter in module.named_parameters()}
    if config.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    scaled = x * (x.square().mean(-1, keepdim=True) + config.eps).rsqrt() * (weights["weight"] + config.offset)
    return scaled + weights.get("bias", 0.0)
