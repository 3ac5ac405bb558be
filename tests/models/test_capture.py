"""Residual streams between blocks in every kind of pass; tests/archs/test_families.py compares every family with
transformers."""

from typing import Any

import pytest
import torch
from float8_models import LLAMA as FLOAT8_LLAMA
from torch import Tensor, nn
from zoo import BASE, CONFIGS

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.integrations import wrap
from ligermodels.layers import BlockOutput, TreeTokens
from ligermodels.models.capture import boundaries_of, default_boundaries, layer_ids_of

IDS = torch.randint(3, BASE["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 12, dtype=torch.long)
MASK[1, 8:] = 0


def make(name: str, **changes: Any) -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config({**CONFIGS[name], **changes}, dtype=torch.float32)


class PlusOne(nn.Module):
    """A block that adds 1 to each state, and says that it mixes no tokens."""

    token_wise = True

    def forward(self, x: Tensor, context: Any, state: Any = None) -> BlockOutput:
        return BlockOutput(x + 1)


def test_the_state_of_boundary_l_has_passed_l_blocks() -> None:
    """In this model s_L is L everywhere, so a boundary that is one off shows. Its blocks mix no tokens: labels narrow
    the pass to few tokens from the first block on, and the states are still of all tokens."""
    model = make("llama-3")
    model.decoder.blocks = nn.ModuleList(PlusOne() for _ in range(5))
    nn.init.zeros_(model.decoder.embed.weight)
    labels = torch.full_like(IDS, -100).index_fill(1, torch.tensor([3]), 7)
    some = torch.tensor([0, 13])
    for options in ({}, {"labels": labels}, {"token_indices": some}, {"attention_mask": torch.ones_like(MASK)}):
        for asked in ((0,), (5, 0, 3), range(6), [2, 2]):
            states = model(IDS, **options, return_hidden_states=asked).hidden_states
            assert [state.unique().tolist() for state in states] == [[each] for each in asked]
            assert all(state.shape == (2, 12, 60) for state in states)
    states = lm.capture(model, IDS, [4, 1]).states
    assert states.shape == (2, 12, 120) and [half.unique().tolist() for half in states.chunk(2, -1)] == [[1], [4]]
    assert lm.capture(model, IDS, boundaries_of([-1, 2])).states[0, 0, ::60].tolist() == [0, 3]


@pytest.mark.parametrize(
    "name", ["llama-3", "gemma4_text-per-layer-inputs", "qwen3_5_text", "lfm2", "gpt_oss", "phi3-long"]
)
def test_every_kind_of_pass(name: str) -> None:
    """Labels, chosen tokens, padding; a prefill, a decode step and a tree: the states of the plain pass."""
    model = make(name)
    every = range(len(model.decoder.blocks) + 1)
    with torch.no_grad():
        plain = model(IDS, return_hidden_states=every)
        torch.testing.assert_close(plain.logits, model(IDS).logits, rtol=0, atol=0)
        wanted = plain.hidden_states
        torch.testing.assert_close(model.logits(model.decoder.norm(wanted[-1])), plain.logits)
        labels = torch.full_like(IDS, -100).index_fill(1, torch.tensor([3]), 7)
        for options in ({"labels": labels}, {"token_indices": torch.tensor([0, 13])}):
            found = model(IDS, **options, return_hidden_states=every)
            torch.testing.assert_close(found.hidden_states, wanted)
            for key, value in model(IDS, **options).items():
                torch.testing.assert_close(found[key], value)
        if "phi3" in name:  # frequencies that go by a row's length take no padding
            return

        def check(found: tuple[Tensor, ...], length: int) -> None:
            for state, full in zip(found, wanted, strict=True):
                torch.testing.assert_close(state[0], full[0, :length], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(state[1, :8], full[1, :8], rtol=1e-4, atol=1e-5)
                assert not state[1, 8:].any()

        check(model(IDS, attention_mask=MASK, return_hidden_states=every).hidden_states, 12)
        captured = lm.capture(model, IDS, every, attention_mask=MASK)
        check(captured.states.chunk(len(every), -1), 12)

        state = model.new_state(2, 16)
        check(model(IDS[:, :9], attention_mask=MASK[:, :9], state=state, return_hidden_states=every).hidden_states, 9)
        state = model.new_state(2, 16)
        model(IDS[:, :9], state=state)
        step = model(IDS[:, 9:10], state=state, return_hidden_states=every, return_logits=True)
        torch.testing.assert_close(step.logits[:, 0], plain.logits[:, 9], rtol=1e-4, atol=1e-5)
        # A root with two children; the second child is the next token.
        mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
        tree = TreeTokens(mask, torch.tensor([0, 0, 0]), torch.tensor([0, 1, 1]))
        nodes = IDS[:, [10, 3, 11]]
        found = model(nodes, state=state, tree=tree, return_hidden_states=every).hidden_states
        for one, three, full in zip(step.hidden_states, found, wanted, strict=True):
            torch.testing.assert_close(one[:, 0], full[:, 9], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(three[:, [0, 2]], full[:, 10:12], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_gradients_through_states(mode: str) -> None:
    """Equal to gradients through a hook on the block; beside a loss that narrows the pass to tokens with a target."""
    found = []
    for hooked in (False, True):
        model, seen = make("qwen3_moe"), []
        model.activation_checkpointing = mode
        labels = IDS.masked_fill(torch.arange(12) % 3 > 0, -100)
        if hooked:
            block = model.decoder.blocks[1]
            block.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.hidden))
            loss = model(IDS, labels=labels).loss
        else:
            output = model(IDS, labels=labels, return_hidden_states=[2])
            seen, loss = list(output.hidden_states), output.loss
        (loss + seen[0].square().mean()).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*found)


def test_compiled_float8_and_wrapped() -> None:
    model = make("gemma2", num_hidden_layers=2)
    wanted = lm.capture(model, IDS, [0, 1, 2])
    padded = {"attention_mask": MASK}
    compiled = torch.compile(lambda ids: lm.capture(model, ids, [0, 1, 2], **padded), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(IDS), lm.capture(model, IDS, [0, 1, 2], **padded))
    step = torch.compile(
        lambda ids: model(ids, labels=ids, return_hidden_states=(0, 1)), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(step(IDS).hidden_states, model(IDS, return_hidden_states=(0, 1)).hidden_states)
    wrap(model)
    torch.testing.assert_close(lm.capture(model, IDS, [0, 1, 2]), wanted)

    torch.manual_seed(0)
    model = lm.float8(lm.from_config(FLOAT8_LLAMA)).train()
    seen: list[Tensor] = []
    for block in model.decoder.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(out.hidden))
    states, last = lm.capture(model, IDS, [1, 2, 3])
    assert model.training and not states.requires_grad and not last.requires_grad
    torch.testing.assert_close(states, torch.cat(seen, -1), rtol=0, atol=0)
    torch.testing.assert_close(last, model.decoder.norm(seen[-1]), rtol=0, atol=0)


def test_what_is_refused() -> None:
    model = make("llama-3")
    most = len(model.decoder.blocks)
    for wrong, message in (
        (True, "must be a list of numbers of blocks, .* got True"),
        (2, "must be a list"),
        ("12", "must be a list"),
        ([0, most + 1], f"must be at most {most}, got {most + 1}"),
        ([-1], "at least 0, got -1"),
        ([1.0], r"got 1\.0"),
        ([True], "got True"),
        (["1"], "got '1'"),
    ):
        with pytest.raises(InputError, match=f"^boundaries: .*{message}"):
            lm.capture(model, IDS, wrong)
        with pytest.raises(InputError, match=f"^return_hidden_states: .*{message}"):
            model(IDS, return_hidden_states=wrong)
    for wrong in ([], [1, 2, 1]):
        with pytest.raises(InputError, match="boundaries: must be at least one, and all different"):
            lm.capture(model, IDS, wrong)
    with pytest.raises(InputError, match="capture: takes a native CausalLM"):
        lm.capture(model.decoder, IDS, [1])
    with pytest.raises(InputError, match=r"return_hidden_states: .*give no last_hidden_state"):
        model(last_hidden_state=torch.zeros(1, 2, 60), targets=IDS[:1, :2], return_hidden_states=[1])


def test_default_boundaries_and_ids() -> None:
    """Of 32 and 36 layers as vLLM and speculators have them, and as the layer ids of SGLang."""
    assert default_boundaries(32) == (2, 16, 29) and default_boundaries(36) == (2, 18, 33)
    assert layer_ids_of(default_boundaries(36)) == (1, 17, 32) and boundaries_of((1, 17, 32)) == (2, 18, 33)
    for layers in range(1, 64):
        found = default_boundaries(layers)
        assert len(found) == min(3, layers + 1) and sorted(set(found)) == list(found)
        assert found[0] >= 0 and found[-1] < max(layers, 3) and found[-1] <= layers
    assert (layer_ids_of([0, 5]), boundaries_of([-1, 4])) == ((-1, 4), (0, 5))
