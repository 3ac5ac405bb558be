"""Options of decoding, with heads or without, for the commands that generate text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligermodels.cli import options
from ligermodels.console import say

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM
    from ligermodels.speculative.multi_head import MultiHeadModel
    from ligermodels.speculative.tree import DynamicTree

DraftTree = Annotated[
    str | None,
    typer.Option(
        metavar="DEPTH,WIDTH,NODES",
        help="With EAGLE-3 or MTP heads: draft a tree that grows from their probabilities, with this many levels, "
        "candidates per token, and nodes; as exact as a chain, greedy and with --sample.  [default: a chain; a fixed "
        "tree of Medusa heads]",
    ),
]

ConfidenceThreshold = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="With DSpark heads: accept drafts only while the product of their confidences is at least this; the "
        "tokens stay the same.  [default: 0, all drafts]",
    ),
]


def tree_of(text: str | None) -> DynamicTree | None:
    """The `DynamicTree` of a value of --draft-tree. Raises typer.BadParameter for anything but three whole numbers."""
    from ligermodels.speculative.tree import DynamicTree

    if text is None:
        return None
    numbers = text.split(",")
    if len(numbers) != 3 or not all(number.strip().isdecimal() for number in numbers):
        raise typer.BadParameter(f"give three whole numbers, as 6,8,48; got {text!r}", param_hint="--draft-tree")
    return DynamicTree(*map(int, numbers))


NEEDS_SAMPLE = "--temperature, --top-k, --top-p and --seed need --sample"


@dataclass(frozen=True)
class Decoding:
    """How a command decodes: a group of options (`flags.with_groups`); None where an option is not given.

    Raises typer.BadParameter for options that contradict one another.
    """

    heads: Annotated[
        str | None,
        typer.Option(
            "--heads",
            "--medusa",
            help="Draft heads (Medusa, MTP, EAGLE-3, DFlash or DSpark), a folder or a hub id (PATH, if it holds them): "
            "the same tokens, or with --sample samples of the same distribution, in fewer steps.",
        ),
    ] = None
    draft_tree: DraftTree = None
    confidence_threshold: ConfidenceThreshold = None
    sample: Annotated[
        bool | None,
        typer.Option("--sample/--greedy", help="Sample, or greedy decoding.  [default: as in the checkpoint]"),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sampling temperature. With heads and --greedy: temperature of typical acceptance, which accepts "
            "tokens other than the greedy tokens."
        ),
    ] = None
    top_k: Annotated[int | None, typer.Option(help="With --sample: only the K most probable tokens.")] = None
    top_p: Annotated[
        float | None, typer.Option(help="With --sample: the smallest set of tokens of total probability P.")
    ] = None
    seed: Annotated[int | None, typer.Option(min=-(2**63), max=2**63 - 1, help="With --sample: seed of sampling.")] = (
        None
    )

    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Bits that do not depend on the other prompts; slower. Not with heads."),
    ] = False

    def __post_init__(self) -> None:
        if self.batch_invariant and self.heads is not None:
            raise typer.BadParameter("is not for --heads", param_hint="--batch-invariant")
        flags = {"--draft-tree": self.draft_tree, "--confidence-threshold": self.confidence_threshold}
        for flag, value in flags.items():
            if value is not None and self.heads is None:
                raise typer.BadParameter("needs --heads", param_hint=flag)
        self._check_sampling(self.sample, self.temperature)

    @property
    def _shaping(self) -> dict[str, Any]:
        shaping = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {name: value for name, value in shaping.items() if value is not None}

    def _check_sampling(self, sample: bool | None, temperature: float | None) -> None:
        shaping = self._shaping.keys() - ({"temperature"} if self.heads else set())
        if sample is False and (shaping or self.seed is not None):
            raise typer.BadParameter(NEEDS_SAMPLE)
        if sample and temperature == 0 and not self.heads:  # with heads, samples at 0 are the greedy tokens
            raise typer.BadParameter("must be above 0 to sample; --greedy decodes greedily", param_hint="--temperature")

    def load_heads(self, model: CausalLM) -> MultiHeadModel | None:
        """The draft heads of --heads, if they are given."""
        if self.heads is None:
            return None
        return options.load_heads(model, self.heads, tree_of(self.draft_tree), self.confidence_threshold)

    def defaults(self, model: CausalLM) -> dict[str, Any]:
        """The defaults of the checkpoint, without those that the flags replace: see `generation_defaults`."""
        return model.generation_defaults(self.sample, given=self._shaping)

    def arguments(self, model: CausalLM, max_new_tokens: int) -> dict[str, Any]:
        """Keyword arguments of `generate`, of the model or its heads.

        Raises typer.BadParameter for options of sampling if neither --sample nor the checkpoint asks for sampling.
        """
        import torch

        from ligermodels.generation.generate import as_eos_ids

        defaults = self.defaults(model)
        sample = bool(defaults.get("do_sample", False) if self.sample is None else self.sample)
        self._check_sampling(sample, defaults.get("temperature") if self.temperature is None else self.temperature)
        arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample}
        if self.batch_invariant:
            arguments["batch_invariant"] = True
        if not as_eos_ids(defaults.get("eos_token_id")) and defaults.get("pad_token_id") is None:
            arguments["pad_token_id"] = 0  # masked; without an EOS no sequence ends early
        if self.heads:
            if (penalty := defaults.get("repetition_penalty", 1.0)) != 1.0:
                say(f"with heads, the checkpoint's repetition_penalty {penalty} is not applied")
            arguments["repetition_penalty"] = 1.0
            arguments |= {"tree": tree_of(self.draft_tree)}
        if sample:
            generator = torch.Generator(model.device)
            generator.manual_seed(generator.seed() if self.seed is None else self.seed)
            arguments["generator"] = generator
        return {**arguments, **self._shaping} if sample or self.heads else arguments
