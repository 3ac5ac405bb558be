"""A vocabulary that grows, as by an adapter with new tokens: what depends on its size follows."""

from pathlib import Path

import pytest
import torch
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.models.vocabulary import grow_vocabulary

LLAMA = CONFIGS["llama-3"]
SIZE = LLAMA["vocab_size"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("pad", "row"), [(None, None), (5, 5), (-1, SIZE + 7), (SIZE, SIZE), (SIZE + 7, SIZE + 7), (SIZE + 8, None)]
)
def test_the_padding_row(pad: int | None, row: int | None, tied: bool, tmp_path: Path) -> None:
    """The pad token may be one of the new tokens, and -1 is the last one: saving refused the model as another one."""
    model = lm.from_config({**LLAMA, "pad_token_id": pad, "tie_word_embeddings": tied})
    grow_vocabulary(model, SIZE + 8)
    assert model.config.padding_idx == model.decoder.embed.padding_idx == row
    model.save_pretrained(tmp_path / "model")
    again = lm.from_pretrained(tmp_path / "model").train()
    assert again.config == model.config
    ids = torch.arange(SIZE + 8)[None]
    for each in (model, again):
        each(ids, labels=ids).loss.backward()
    assert torch.equal(model.decoder.embed.weight.grad, again.decoder.embed.weight.grad)
