"""With a reduced draft vocabulary, acceptance and agreement of the training metrics are those of `generate`."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import ligermodels as lm
from ligermodels.layers import IGNORE_INDEX
from ligermodels.speculative.acceptance import chain_length
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.tree import chain

DRAFTS, VOCAB = 3, 61
KINDS: dict[str, Any] = {
    "eagle": lambda base, **options: lm.Eagle3Model.from_base(base, DRAFTS, **options),
    "dflash": lambda base, **options: lm.DFlashModel.from_base(base, DRAFTS + 1, num_layers=1, **options),
    "dspark": lambda base, **options: lm.DSparkModel.from_base(base, DRAFTS, num_layers=1, markov_rank=8, **options),
}


def target() -> lm.CausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return lm.from_config(sizes, dtype="float32").eval()


def trained(model: Any, parameters: Any, text: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()


@cache
def target_that_knows_a_text() -> tuple[lm.CausalLM, Tensor]:
    base = target()
    text = torch.randint(0, 60, (1, 48), generator=torch.Generator().manual_seed(3)).repeat(1, 2)[:, :60]
    trained(base, base.parameters(), text, 80)
    return base, text


def gains(model: Any, prompts: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The generated sequences, and how many drafts of the first step of each were accepted."""
    steps = list[list[list[int]]]()
    sequences = model.generate(prompts, max_new_tokens=DRAFTS + 2, on_tokens=steps.append, pad_token_id=0, **options)
    return sequences, torch.tensor([len(row) for row in steps[1]]) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_agreement_is_the_acceptance_of_greedy_decoding(kind: str) -> None:
    """Exactly, draft by draft: of each prefix of a text the drafts that the first step accepts."""
    base, text = copy.deepcopy(target_that_knows_a_text())
    ours = DraftVocabulary.counted([text], 25, VOCAB)
    model = KINDS[kind](base, vocabulary=ours)
    trained(model, model.head_parameters(), text, 40)
    first, end = 6, 50
    text = base.generate(text[:, :first], max_new_tokens=end - first, do_sample=False)
    assert 0.2 < torch.isin(text, ours.tokens).float().mean() < 0.9
    roots = range(first, end - 1)
    _, accepted = gains(model, [text[0, :root].tolist() for root in roots])
    assert accepted.min() == 0 and accepted.max() == DRAFTS
    left = end - 1 - torch.tensor(roots)  # targets after the root
    labels = text.masked_fill(torch.arange(end) < first, IGNORE_INDEX)
    with torch.no_grad():
        if kind != "eagle":  # the share of the drafts of which those before are accepted
            out = model(text, labels=labels)
            for k in range(DRAFTS):
                reached = (left > k) & (accepted >= k)
                assert out.trials["agreement"][k] == reached.sum()
                assert out.agreement[k] * reached.sum() == pytest.approx(int((reached & (accepted > k)).sum()))
            return
        labels[:, first] = IGNORE_INDEX
        every = torch.full((end, DRAFTS), torch.nan)  # by the position of the root
        for place in range(first + 1, end):
            alone = torch.full_like(text, IGNORE_INDEX).index_copy(1, torch.tensor([place]), text[:, place : place + 1])
            for k, agreement in enumerate(model(text, labels=alone).agreement):
                every[place - 1 - k, k] = agreement
        for root, count, targets in zip(roots, accepted.tolist(), left.tolist(), strict=True):
            for k in range(min(count + 1, DRAFTS, targets)):
                assert every[root, k] == (k < count)
        out = model(text, labels=labels)
        whole = [every[first - k :, k].nanmean() for k in range(DRAFTS)]
        torch.testing.assert_close(out.agreement, torch.stack(whole))
        decoded = model.generate(text[:, :first], max_new_tokens=end - first, return_stats=True)
        tau = chain_length(out.agreement.tolist())
        assert abs(decoded.tokens_per_step - tau) < 0.25 * tau


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_is_that_of_sampling(kind: str) -> None:
    """The share of first drafts that 1,000 samples accept; over the draft vocabulary alone it would be far higher."""
    base, draw = target(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        base.head.weight.normal_(0, 0.2, generator=draw)
    vocabulary, count = DraftVocabulary(torch.arange(1, VOCAB, 3), VOCAB), 1000
    model = KINDS[kind](base, vocabulary=vocabulary)
    options = {"do_sample": True, "num_return_sequences": count, "generator": draw, "tree": chain(1)}
    sequences, accepted = gains(model, [[3, 1, 4, 1, 5]], **options)
    roots, alpha = sequences[:, 5].unique(return_counts=True), 0.0
    with torch.no_grad():
        for root, share in zip(*roots, strict=True):
            text = torch.tensor([[3, 1, 4, 1, 5, int(root), 0]])
            labels = text.masked_fill(torch.arange(7) < 5, IGNORE_INDEX)
            alpha += float(model(text, labels=labels).acceptance[0] * share) / count
        mass = base(sequences[:1, :6]).logits[0, 5].softmax(-1)[vocabulary.tokens].sum()
    assert mass < 0.5 and alpha > 0.05  # a distribution over the draft vocabulary alone would accept far more
    assert abs(float(accepted.float().mean()) - alpha) < 0.04
