"""Speculative sampling: the samples against the exact distribution of the model's continuations, for every head."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import ligermodels as lm
from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.generation.sampling import warp
from ligermodels.speculative.block_drafter import BlockDrafter
from ligermodels.speculative.decoding import speculative_generate
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.drafting import Drafter
from ligermodels.speculative.sampling import Sampling, draw
from ligermodels.speculative.tree import DynamicTree, Tree, chain

VOCAB = 5
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 2], [0]]
SAMPLES, NEW = 1000, 4
BUSHY = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
SHAPINGS: list[dict[str, Any]] = [{}, {"temperature": 0.6, "top_k": 4}, {"temperature": 1.4, "top_p": 0.8}]
FEW = DraftVocabulary(torch.tensor([0, 2, 3]), VOCAB)


@torch.no_grad()
def random(module: Any, spread: float) -> None:
    draw = torch.Generator().manual_seed(1)
    for parameter in module:
        parameter.copy_(torch.randn(parameter.shape, generator=draw) * spread)


@pytest.fixture(scope="module")
def base() -> lm.CausalLM:
    model = lm.from_config(CONFIG, dtype="float32").eval()
    random(model.parameters(), 0.35)
    return model


def heads_on(base: lm.CausalLM, name: str) -> Any:
    """Random heads: their distributions have little to do with the model's."""
    if name == "Medusa":
        model: Any = lm.MedusaModel.from_base(base, 3)
    elif name.startswith("MTP"):
        model = lm.MTPModel.from_base(base, 3, num_layers=int(name[-1]))
    elif name == "DFlash":
        model = lm.DFlashModel.from_base(base, 4, num_layers=1)
    elif name.startswith("DSpark"):
        kind: Any = name.split()[1].rstrip(",")
        vocabulary = FEW if name.endswith("reduced") else None
        model = lm.DSparkModel.from_base(
            base, 3, num_layers=1, markov_rank=4, markov_head_type=kind, vocabulary=vocabulary
        )
    else:
        model = lm.Eagle3Model.from_base(base, 3, vocabulary=FEW if name == "EAGLE-3, reduced" else None)
    random(model.head_parameters(), 0.4)
    return model


def exact(base: lm.CausalLM, prompt: list[int], shaping: dict[str, Any]) -> Tensor:
    """(V, ..., V), the probability of every continuation of NEW tokens."""
    ids = torch.tensor([[*prompt, *tail] for tail in itertools.product(range(VOCAB), repeat=NEW)])
    with torch.no_grad():
        p = warp(base(ids).logits.double(), **shaping).softmax(-1)
    picked = p[:, len(prompt) - 1 : -1].gather(2, ids[:, len(prompt) :, None])[..., 0]
    return picked.prod(1).double()


def chi_square(found: Tensor, p: Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; cells of fewer than 5 expected samples are one cell."""
    counts = torch.bincount(found, minlength=len(p)).double()
    assert not counts[p == 0].any()
    expected = p * len(found)
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    return ((counts - expected).square() / expected).sum().item(), len(expected) - 1


@pytest.mark.parametrize(("name", "tree", "shaping"), [
    ("Medusa", BUSHY, SHAPINGS[1]), ("MTP 1", chain(3), SHAPINGS[2]), ("MTP 2", chain(2), SHAPINGS[0]),
    ("EAGLE-3", BUSHY, SHAPINGS[2]), ("EAGLE-3", DynamicTree(3, 2, 6), SHAPINGS[0]),
    ("EAGLE-3, reduced", chain(2), SHAPINGS[2]), ("DFlash", chain(3), SHAPINGS[1]),
    ("DSpark gated, reduced", chain(2), SHAPINGS[2]),
], ids=lambda value: f"{len(value.paths)} nodes" if isinstance(value, Tree) else str(value))  # fmt: skip
def test_samples_have_the_distribution_of_the_model(
    base: lm.CausalLM, name: str, tree: Tree, shaping: dict[str, Any]
) -> None:
    """In one batch of prompts of two lengths, of which each sequence accepts its own number of tokens. Other heads of
    DSpark are in the next test."""
    model = heads_on(base, name)
    generator = torch.Generator().manual_seed(5)
    options = {"do_sample": True, "num_return_sequences": SAMPLES, "generator": generator, "pad_token_id": 0, **shaping}
    out = model.generate(PROMPTS, NEW, tree=tree, return_stats=True, **options)
    assert 1.05 < out.tokens_per_step < 3 and out.steps < out.passes * 2 * SAMPLES
    check_distribution(base, out.sequences, shaping)


def check_distribution(base: lm.CausalLM, sequences: Tensor, shaping: dict[str, Any]) -> None:
    """The chi-square test of SAMPLES continuations of each prompt, in adjacent rows (SAMPLES * P, T + NEW)."""
    place = VOCAB ** torch.arange(NEW - 1, -1, -1)
    for prompt, rows in zip(PROMPTS, sequences.cpu().split(SAMPLES), strict=True):
        statistic, freedom = chi_square((rows[:, -NEW:] * place).sum(1), exact(base, prompt, shaping))
        assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5, (statistic, freedom)


@pytest.mark.parametrize(("name", "tree", "shaping", "threshold"), [
    ("DSpark vanilla", chain(3), SHAPINGS[0], 0.97), ("DSpark gated", chain(3), SHAPINGS[1], 0.05),
    ("DSpark rnn, reduced", chain(3), SHAPINGS[2], 0.7), ("DSpark rnn", BUSHY, SHAPINGS[0], 0.5),
], ids=["vanilla", "gated", "rnn, reduced", "tree"])  # fmt: skip
def test_drafts_cut_by_confidence_leave_the_distribution(
    base: lm.CausalLM, name: str, tree: Tree, shaping: dict[str, Any], threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, depths, confident = heads_on(base, name), set[int](), BlockDrafter._confident
    with torch.no_grad():
        model.head.confidence.proj.weight.mul_(4)  # confidences that differ from text to text
    model.confidence_threshold = threshold

    def recorded(*args: Any) -> Tensor:
        found = confident(*args)
        depths.update(found.tolist())
        return found

    monkeypatch.setattr(BlockDrafter, "_confident", recorded)
    generator = torch.Generator().manual_seed(5)
    options = {"do_sample": True, "num_return_sequences": SAMPLES, "generator": generator, "pad_token_id": 0, **shaping}
    sequences = model.generate(PROMPTS, NEW, tree=tree, **options)
    assert len(depths) > 2
    check_distribution(base, sequences, shaping)


def test_logits_of_heads_that_overflow_leave_the_tokens(base: lm.CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN after some of the tokens, as in float16: samples of a chain, and greedy tokens of a tree that grows."""
    model, generator = heads_on(base, "EAGLE-3"), torch.Generator().manual_seed(5)
    project_with = lm.Eagle3Model.project_with

    def overflowing(self: Any, dtype: torch.dtype) -> Any:
        project = project_with(self, dtype)
        return lambda hidden: project(hidden).masked_fill((1e3 * hidden[..., :1]).sin() > 0.3, torch.nan)

    monkeypatch.setattr(lm.Eagle3Model, "project_with", overflowing)
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": SAMPLES, "pad_token_id": 0, **SHAPINGS[1]}
    sampled = model.generate(PROMPTS, NEW, tree=chain(3), generator=generator, return_stats=True, **options)
    assert 1.05 < sampled.tokens_per_step < 3
    check_distribution(base, sampled.sequences, SHAPINGS[1])
    grown = model.generate(PROMPTS, 14, tree=DynamicTree(3, 3, 4), pad_token_id=0)
    assert torch.equal(grown, base.generate(PROMPTS, 14, pad_token_id=0))


class Perfect(Drafter):
    """Drafts by the model itself, without a cache."""

    def __init__(self, model: lm.CausalLM) -> None:
        self.model = model

    def begin(self, batch_size: int, max_length: int, tree: Any, choose: Any) -> None:
        self.depth, self.choose = tree.max_depth, choose

    def draft(self, sequences: ops.Sequences) -> Tensor:
        rows = torch.arange(len(sequences.text))
        text, end = sequences.text.clone(), sequences.cache_seqlens
        for depth in range(self.depth):
            logits = self.model(text).logits[rows, end + depth]
            text[rows, end + depth + 1] = self.choose(logits[:, None], depth)[:, 0, 0]
        return text.gather(1, end[:, None] + torch.arange(1, self.depth + 1))[..., None]


def test_drafts_of_the_models_own_distribution_are_all_accepted(base: lm.CausalLM) -> None:
    """min(1, p / q) is 1, at any temperature: not so if the draft's own distribution were not used."""
    ids = torch.tensor([[3, 1, 4, 1, 2]]).repeat(50, 1)
    for shaping in SHAPINGS:
        options: dict[str, Any] = {"tree": chain(3), "max_new_tokens": 13, "do_sample": True, **shaping}
        out = speculative_generate(base, Perfect(base), ids, generator=torch.Generator().manual_seed(1), **options)
        assert out.tokens_per_step > 3.98 and len(out.sequences.unique(dim=0)) > 40


def test_acceptance_is_that_of_the_metrics(base: lm.CausalLM) -> None:
    """Tokens per step, against tau on the same kind of text: 1 + the products of mean sums of min(p, q)."""
    model, ids = heads_on(base, "EAGLE-3"), torch.tensor([[3, 1, 4, 1, 2]]).repeat(300, 1)
    options: dict[str, Any] = {"do_sample": True, "generator": torch.Generator().manual_seed(1)}
    text = base.generate(ids, 56, **options)
    labels = text.clone()
    labels[:, :6] = -100
    with torch.no_grad():
        acceptance = model(text, labels=labels).acceptance
    tau = 1 + acceptance.cumprod(0).sum()
    found = model.generate(ids, 56, return_stats=True, **options).tokens_per_step
    assert 2.5 < tau < 3.5 and abs(found - tau) < 0.04 * tau, (acceptance, tau, found)  # the last step is cut short


@pytest.mark.parametrize("tree", [chain(3), BUSHY], ids=["chain", "tree"])
def test_seeds_temperature_zero_and_draft_heads_of_generate(base: lm.CausalLM, tree: Tree) -> None:
    model = heads_on(base, "EAGLE-3")
    greedy = base.generate(PROMPTS, 12, pad_token_id=0)
    for temperature in (0, 0.0, 1e-6):
        options: dict[str, Any] = {"do_sample": True, "temperature": temperature, "pad_token_id": 0}
        assert torch.equal(model.generate(PROMPTS, 12, tree=tree, **options), greedy)
    assert torch.equal(base.generate(PROMPTS, 12, draft=model, tree=tree, pad_token_id=0), greedy)

    def sampled(seed: int | None, **changes: Any) -> list[list[int]]:
        options = {"do_sample": True, "tree": tree, "draft": model, "pad_token_id": 0, **changes}
        if seed is not None:
            options["generator"] = torch.Generator().manual_seed(seed)
        return base.generate(PROMPTS, 12, **options).tolist()

    torch.manual_seed(3)
    assert sampled(1) == sampled(1) == sampled(1, cuda_graph=False) != sampled(2)
    first = sampled(None)
    torch.manual_seed(3)
    assert sampled(None) == first
    assert sampled(1, top_k=1) == greedy.tolist()


def test_options_that_have_no_effect_are_errors(base: lm.CausalLM) -> None:
    model = heads_on(base, "Medusa")
    for option in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"generator": torch.Generator()}):
        with pytest.raises(InputError, match=f"{next(iter(option))}: is for sampling; give do_sample=True"):
            model.generate(PROMPTS[:1], 3, **option)
    with pytest.raises(InputError, match="num_return_sequences above 1 needs do_sample"):
        model.generate(PROMPTS[:1], 3, num_return_sequences=2)
    with pytest.raises(InputError, match="draft: must be draft heads on this model"):
        base.generate(PROMPTS[:1], 3, draft=heads_on(lm.from_config(CONFIG), "Medusa"))
    with pytest.raises(InputError, match="tree: is for speculative decoding"):
        base.generate(PROMPTS[:1], 3, tree=chain(2))


def test_draw_is_the_inverse_of_the_cumulative_sum() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 5.0, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.374, 0.375, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights.expand(6, 6), uniforms).tolist() == [1, 1, 3, 3, 4, 4]


def test_a_draft_rejected_by_a_rounding_alone() -> None:
    """q is p but for roundings upwards, so that p exceeds it nowhere: the token is then a sample of p."""
    p = torch.tensor([[0.3, 0.4, 0.1, 0.2, 0.0]])  # the last token is one that top-k leaves out
    sampling = Sampling({}, 1, chain(1), p.device, lambda uniforms: uniforms.copy_(tops[:, None, None].expand(3, 1, 2)))
    tops = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64)  # drafts, acceptance, choice
    sampling.renew()
    assert sampling.drafts is not None
    sampling.drafts(p.log()[:, None])
    shaped, ids = sampling.drafts._sampled[0]
    sampling.drafts._sampled[0] = torch.where(shaped > 0, shaped.nextafter(torch.ones(())), 0), ids
    tokens, parent = torch.tensor([[3, 0]]), torch.tensor([0, 0])
    assert sampling(p.log()[:, None].expand(1, 2, 5), tokens, parent).choices[0, 0] == 1


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize(("name", "tree", "threshold"), [
    ("EAGLE-3", chain(3), 0), ("EAGLE-3", BUSHY, 0), ("EAGLE-3", DynamicTree(3, 2, 6), 0),
    ("DSpark vanilla", chain(3), 0.6), ("DSpark rnn", chain(3), 0.3), ("DSpark gated", BUSHY, 0.3),
], ids=str)  # fmt: skip
def test_by_graphs_as_without(base: lm.CausalLM, name: str, tree: Any, threshold: float) -> None:
    """Each replay draws new numbers and cuts anew by confidence: the same samples and steps as without a graph, with
    the distribution of the model; and the greedy tokens of the model alone."""
    device = torch.device("cuda")
    model = lm.from_config(CONFIG, dtype="float32", device=device).eval()
    model.load_state_dict(base.state_dict())
    heads = heads_on(model, name)
    if threshold:
        heads.confidence_threshold = threshold
    shared: dict[str, Any] = {"pad_token_id": 0, "tree": tree, "return_stats": True}
    options = {"do_sample": True, "num_return_sequences": SAMPLES, "top_p": 0.9, **shared}
    found = [
        heads.generate(PROMPTS, NEW, generator=torch.Generator(device).manual_seed(5), cuda_graph=graph, **options)
        for graph in (False, True)
    ]
    assert torch.equal(found[0].sequences, found[1].sequences) and found[0].steps == found[1].steps
    check_distribution(base, found[1].sequences, {"top_p": 0.9})
    greedy = [heads.generate(PROMPTS, 16, cuda_graph=graph, **shared) for graph in (False, True)]
    assert torch.equal(greedy[0].sequences, greedy[1].sequences) and greedy[0].steps == greedy[1].steps
    assert torch.equal(greedy[1].sequences, model.generate(PROMPTS, 16, pad_token_id=0))
