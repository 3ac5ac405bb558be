"""Compares the native model of a checkpoint with transformers, module by module."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.arguments import check_count, check_number
from ligermodels.convert.placement import DeviceLike, DtypeLike
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import BackendError, CheckpointError, warn_caller
from ligermodels.generation.prompts import TokenIds, prepare_prompts
from ligermodels.layers.attention_config import AttentionConfig
from ligermodels.layers.latent_attention import LatentAttentionConfig
from ligermodels.layers.norm import RMSNormAdd
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.state_dict import layout_in_memory
from ligermodels.pretrained import from_pretrained

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative error that rounding explains. Both models compute their rotary tables in fp32 in any dtype."""

LOGITS = "logits"

SCORES_BYTES = 2**31
"""Size of the scores of one attention layer in transformers above which `verify` warns."""

_NOT_COMPARED = (nn.Linear, RMSNormAdd)
"""Projections, because modules around them return their outputs; and norms that add the residual to their output."""


@dataclass(frozen=True)
class Place:
    """Names of a module here and in transformers, and the relative error of its output (nan: not comparable)."""

    name: str
    theirs: str
    error: float


@dataclass(frozen=True)
class Report:
    """The result of `verify`: `places` are the modules in the order of computation."""

    places: Sequence[Place]
    tolerance: float
    tokens: int

    @property
    def first_mismatch(self) -> Place | None:
        """The first module with an error above the tolerance; None if there is none."""
        return next((place for place in self.places if not place.error <= self.tolerance), None)

    @property
    def passed(self) -> bool:
        """Whether all modules match."""
        return self.first_mismatch is None


def verify(
    folder: str | os.PathLike[str],
    *,
    reference: str | os.PathLike[str] | None = None,
    input_ids: TokenIds | None = None,
    tokens: int = 64,
    dtype: DtypeLike = torch.float32,
    device: DeviceLike = "cpu",
    attention: str = "auto",
    tolerance: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Run the same tokens through a checkpoint's model here and in transformers, and compare every module's output.

    One model is in memory at a time.

    Args:
        folder: the checkpoint.
        reference: the checkpoint that transformers opens; None for `folder`.
        input_ids: the tokens to run: a list of ids, or long (T,) or (B, T); None for random tokens, always the same.
        tokens: number of random tokens.
        dtype: dtype of both models, or its name ("bfloat16"); "auto" for the checkpoint's.
        device: device of both models.
        attention: attention backend of the native model; transformers uses "eager".
        tolerance: largest relative error allowed, max |ours - theirs| / max |theirs|; None for TOLERANCES[dtype].
        progress: called with the bytes loaded and the bytes in all.

    Returns:
        The error of each module.

    Raises:
        BackendError: transformers is not installed.
        CheckpointError: the native model or transformers cannot load the checkpoint.
        InputError: no tokens, ids outside the vocabulary, or an unknown dtype or device.

    Examples:
        >>> report = verify("path/to/checkpoint")
        >>> report.passed, report.first_mismatch
        (True, None)
    """
    try:
        import transformers
    except ImportError:
        raise BackendError(
            "verify compares with transformers, which is not installed: pip install 'ligermodels[verify]'"
        ) from None
    tokens = check_count("tokens", tokens)
    if tolerance is not None:
        check_number("tolerance", tolerance)
    model = from_pretrained(folder, dtype=dtype, device=device, attention=attention, progress=progress)
    dtype, device = model.dtype, model.device
    ids = _ids(input_ids, tokens, model.config.vocab_size).to(device)
    _warn_of_scores(model, *ids.shape)
    spec = model.export_spec
    layouts = [] if spec is None else [spec.weight_map, layout_in_memory(spec, model.config)]
    pairs = [modules_in_common(layout) for layout in layouts]
    ours = _outputs(model, {name: None for names in pairs for name in names}, ids)
    del model

    path = folder if reference is None else reference
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText
        other = auto.from_pretrained(path, dtype=dtype, attn_implementation="eager", local_files_only=True)
    except Exception as error:  # transformers raises many types
        raise CheckpointError(f"transformers cannot open {path}: {error}") from error
    if hasattr(other.config, "_experts_implementation"):
        other.set_experts_implementation("eager")  # its default needs aligned sizes
    other.to(device).eval()
    modules = dict(other.named_modules())  # published checkpoints may have names that differ from the modules'
    names = max(pairs, key=lambda names: sum(name in modules for name in names.values()), default={})
    theirs = _outputs(other, names.values(), ids)
    names[LOGITS] = LOGITS
    places = [
        Place(name, names[name], relative_error(output, theirs[names[name]]))
        for name, output in ours.items()
        if names.get(name) in theirs
    ]
    return Report(places, TOLERANCES[dtype] if tolerance is None else tolerance, ids.numel())


def _ids(input_ids: TokenIds | None, tokens: int, vocab_size: int) -> Tensor:
    """The tokens to run, long (B, n): given, or so many random ones in one row."""
    if input_ids is None:
        return torch.randint(vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    return prepare_prompts(input_ids, None, None, (), vocab_size).ids


def _warn_of_scores(model: CausalLM, rows: int, tokens: int) -> None:
    """A UserWarning if transformers' attention, which keeps the scores of all pairs of tokens, needs much memory for
    `rows` of `tokens`."""
    mixers = (part for block in model.config.blocks if block.mixer is not None for part in block.mixer.parts)
    attention = (mixer for mixer in mixers if isinstance(mixer, AttentionConfig | LatentAttentionConfig))
    heads = max((mixer.num_heads for mixer in attention), default=0)
    if (size := heads * rows * tokens**2 * model.dtype.itemsize) > SCORES_BYTES:
        warn_caller(
            f"verify: the attention scores of {tokens:,} tokens take {size / 2**30:.1f} GiB in each layer of "
            f"transformers, and computing them grows with the square of the tokens; fewer compare the same modules",
            UserWarning,
        )


def modules_in_common(weights: WeightMap) -> dict[str, str]:
    """Native module -> module in transformers that holds the same weights, from a weight map.

    A module with a fused weight (q, k and v) matches the module that contains all its parts; modules around them match
    if they contain the same tensors. A weight under another name (such as a norm of queries inside the module that also
    rotates them) has no match.
    """
    matches: dict[str, str] = {}
    for mapping in weights.mappings:
        here = mapping.target.split(".")[:-1]
        there = os.path.commonpath([view.source.replace(".", "/") for view in mapping.views]).split("/")
        if len(mapping.views) == 1:
            *there, name = there  # from the weight to its module
            if name != mapping.target.rpartition(".")[2]:
                continue
        else:
            here = here[:-1]
        while here and there:
            matches.setdefault(".".join(here), ".".join(there))
            here, there = here[:-1], there[:-1]
    matches.pop("head", None)  # compared by the logits: tied models have them too
    of_ours, of_theirs = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for mapping in weights.mappings:
        for source in (view.source for view in mapping.views):
            for module in _modules_of(mapping.target):
                of_ours[module].add(source)
            for module in _modules_of(source):
                of_theirs[module].add(source)
    return {ours: theirs for ours, theirs in matches.items() if of_ours[ours] == of_theirs[theirs]}


def _modules_of(name: str) -> Iterator[str]:
    """Names of the module that holds the tensor `name`, and of all modules around it."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """max |ours - theirs| / max |theirs|; nan for different shapes."""
    if ours.shape != theirs.shape:
        return math.nan
    difference, scale = (ours.double() - theirs.double()).abs().max().item(), theirs.double().abs().max().item()
    return difference / scale if scale else (math.inf if difference else 0.0)


@torch.no_grad()
def _outputs(model: nn.Module, names: Iterable[str], ids: Tensor) -> dict[str, Tensor]:
    """Module in `names`, except _NOT_COMPARED -> its output, in the order of computation; and the logits."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            output = output if isinstance(output, Tensor) else output[0]
            # Some modules get tokens without the batch dimension, and Llama 4 adds to an output in place.
            outputs[name] = output.flatten(0, -2).to("cpu", copy=True)

        return hook

    modules = dict(model.named_modules())
    for name in names:
        if name in modules and not isinstance(modules[name], _NOT_COMPARED):
            modules[name].register_forward_hook(keep(name))
    outputs[LOGITS] = model(ids).logits.cpu()
    return outputs
