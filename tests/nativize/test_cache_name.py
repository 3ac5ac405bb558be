"""The cache of transformers, whose name was `past_key_values` before transformers 5.24."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.integrations.cache_name import NAME, NEW, OLD


@pytest.mark.parametrize("name", [OLD, NEW])
def test_a_cache_under_both_names(name: str) -> None:
    """The second half of a text after the first, with left padding: as the whole text at once."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=51, num_key_value_heads=2, **sizes)).eval()
    ids, mask = torch.randint(3, 51, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    with torch.no_grad():
        wanted = plain(ids, attention_mask=mask).logits
        model = lm.nativize(plain)
        cache = DynamicCache(config=model.config)
        first = model(ids[:, :7], attention_mask=mask[:, :7], use_cache=True, **{name: cache})
        second = model(ids[:, 7:], attention_mask=mask, **{name: first[NAME]})
        torch.testing.assert_close(second.logits, wanted[:, 7:])
        with pytest.raises(InputError, match="cache: is given beside past_key_values"):
            model(ids[:, 7:], attention_mask=mask, cache=cache, past_key_values=cache)
