"""Ranks of DFlash and DSpark heads: of tokens, as those of other heads, and what decoding gains, computed from them."""

from typing import Any

import pytest
import torch
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.speculative.benchmark import benchmark_decoding, evaluate_continuations
from ligermodels.speculative.tree import chain, grow

PROMPTS = [[5, 9, 11], [77], [3, 4]]


@pytest.fixture(scope="module")
def base() -> lm.CausalLM:
    return lm.from_config({**CONFIGS["llama-3"], "initializer_range": 0.3}, dtype=torch.float64)


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def heads(request: pytest.FixtureRequest, base: lm.CausalLM) -> Any:
    """Heads that know some of the model's text, with fewer anchors than new tokens."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"block_size": 4, "num_layers": 1, "num_anchors": 7}
    if request.param == "dflash":
        model: Any = lm.DFlashModel.from_base(base, **options)
    else:
        model = lm.DSparkModel.from_base(base, **options, markov_rank=4)
    text = base.generate(PROMPTS[:2], 40, eos_token_id=None, pad_token_id=0)
    optimizer = torch.optim.Adam(model.head_parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()
    return model


def test_a_replay_takes_the_steps_of_decoding(heads: Any) -> None:
    own = evaluate_continuations(heads, PROMPTS, max_new_tokens=40)
    trees = [chain(3), chain(1)] if heads.kind == "DSpark" else [chain(3), grow(own.scores.hits, 12)]
    for tree in trees:
        measured = benchmark_decoding(heads, PROMPTS, tree=tree, max_new_tokens=40).tokens_per_step
        assert own.tokens_per_step(tree) == pytest.approx(measured) and measured > 1.1


@torch.no_grad()
def test_ranks_are_at_the_anchors_of_each_sequence(heads: Any) -> None:
    rows = [torch.randint(0, 131, (1, length), generator=torch.Generator().manual_seed(length)) for length in (6, 11)]
    ids, mask = torch.zeros(2, 11, dtype=torch.long), torch.ones(2, 11, dtype=torch.long)
    ids[0, 5:], ids[1], mask[0, :5] = rows[0], rows[1], 0
    labels = ids.masked_fill(mask == 0, -100)
    ranks = heads(ids, labels=labels, attention_mask=mask, num_anchors=11).ranks
    alone = [heads(row, labels=row, **heads.every_token).ranks for row in rows]
    few = heads(ids, labels=labels, attention_mask=mask, num_anchors=2)
    assert few.counts[0] == 4 and torch.equal(few.counts, heads.num_targets(labels, attention_mask=mask, num_anchors=2))
    for bad in (0, True, 2.5):
        with pytest.raises(InputError, match="num_anchors: must be a whole number"):
            heads(ids, labels=labels, num_anchors=bad)
        with pytest.raises(InputError, match="num_anchors: must be a whole number"):
            heads.num_targets(labels, num_anchors=bad)
    with pytest.raises(InputError, match="num_anchors: is an option of a loss"):
        heads(ids, num_anchors=2)
    assert torch.equal(ranks[:, :1, 5:], alone[0]) and torch.equal(ranks[:, 1:], alone[1])
    assert (ranks[:, 0, :5] == -1).all()
    for slot, of_slot in enumerate(alone[1][:, 0]):  # the last `slot + 1` tokens have no target
        assert (of_slot >= 0).tolist() == [True] * (10 - slot) + [False] * (slot + 1)
