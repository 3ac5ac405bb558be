"""What models with several kinds of decoding state compute after whatever passes a text came by."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import BASE, CONFIGS, HYBRIDS, KIMI, LATENT, MAMBAS, OF_EACH_KIND, SHORT_CONVS, make_checkpoint, relative_error

import ligermodels as lm
from ligermodels.layers import Block, TreeTokens
from ligermodels.ops.runtime import checks

TOLERANCE = 1e-5
STATEFUL = {*HYBRIDS, *KIMI, *MAMBAS, *LATENT, *SHORT_CONVS} & {*OF_EACH_KIND, "qwen3_5_text-other-sizes", "bamba"}


@pytest.fixture(scope="module", params=sorted(STATEFUL))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lm.CausalLM:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, {**CONFIGS[request.param], "max_position_embeddings": 512})
    return lm.from_pretrained(folder).eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, BASE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_states_after_prefill_steps_and_trees(model: lm.CausalLM) -> None:
    """Whatever passes a text came by, hidden states are those of one pass; a tree's are those of its paths."""
    lengths = torch.tensor([70, 2])
    parent = torch.tensor([0, 0, 0, 1, 3, 2])
    mask = torch.eye(6, dtype=torch.bool)
    for node in range(1, 6):
        mask[node] |= mask[parent[node]]
    tree = TreeTokens(mask, parent, mask.sum(1) - 1)
    prompt, more, nodes, last = tokens(2, 90).split([70, 5, 6, 9], dim=1)
    state = model.new_state(2, 128)
    addresses = [tensor.data_ptr() for tensor in tensors_of(state)]
    run = model.decoder
    results: list[tuple[Tensor, ...]] = []
    for _ in range(2):  # the second time after a reset
        state.reset()
        run(prompt, state=state, seq_lens=lengths)
        stepped = run(more, state=state)
        branched = run(nodes, state=state, tree=tree)
        # Sequence 0 accepts nodes 0, 1, 3, 4, and sequence 1 the root alone.
        slots = state.cache_seqlens[:, None] + torch.tensor([[0, 1, 3, 4], [0, 0, 0, 0]])
        state.commit(slots)
        state.cache_seqlens += torch.tensor([4, 1])
        results.append((stepped, branched, run(last, state=state)))
    (stepped, branched, after), again = results
    for row, path in enumerate(([0, 1, 3, 4], [0])):
        known = torch.cat([prompt[row, : lengths[row]], more[row]])
        whole = torch.cat([known, nodes[row, path], last[row]])
        wanted = run(whole[None])[0]
        start = int(lengths[row])
        assert relative_error(stepped[row], wanted[start : start + 5]) < TOLERANCE
        assert relative_error(after[row], wanted[-9:]) < TOLERANCE
        for node in range(6):
            ancestors = mask[node].nonzero().flatten()
            alone = run(torch.cat([known, nodes[row, ancestors]])[None])[0, -1]
            assert relative_error(branched[row, node], alone) < TOLERANCE
    for one, two in zip(results[0], again, strict=True):
        assert relative_error(two, one) < TOLERANCE
    assert [tensor.data_ptr() for tensor in tensors_of(state)] == addresses


class NoSync(TorchDispatchMode):
    """Refuses what waits for a device: reading values back, and results whose shapes depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), name
        else:
            waits = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
            assert not waits, name
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_decoding_waits_for_nothing(model: lm.CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a CUDA graph can hold a step, or a pass over a tree and its commit. As on a GPU, where the host checks no
    values."""
    monkeypatch.setattr(checks, "checked_on_host", lambda _: False)
    state = model.new_state(2, 64)
    model.decoder(tokens(2, 9), state=state, seq_lens=torch.tensor([9, 4]))
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    tree = TreeTokens(mask, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 2]))
    slots = state.cache_seqlens[:, None] + torch.tensor([[0, 1], [0, 0]])
    with NoSync():
        model.decoder(tokens(2, 1), state=state)
        model.decoder(tokens(2, 3), state=state, tree=tree)
        state.commit(slots)


def tensors_of(state: Any) -> list[Tensor]:
    parts = [part for layer in state.layers for part in (layer if type(layer) is tuple else (layer,))]
    layers = [part._asdict() if hasattr(part, "_asdict") else vars(part) for part in parts if part is not None]
    return [tensor for layer in layers for tensor in layer.values() if isinstance(tensor, Tensor)]


POST_NORMED = ("gemma2", "gemma4_text-per-layer-inputs")
"""Families whose post-norms make the addition, the second one before a scale of the sum."""


@pytest.mark.parametrize("name", ["llama-3", "qwen3_moe", "granite", "cohere2", *POST_NORMED])
def test_blocks_leave_their_last_addition_to_the_next_norm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a decoding pass, to the same bits, whatever the next block is."""
    torch.manual_seed(0)
    decoder = lm.from_config(CONFIGS[name]).eval().decoder
    left: list[bool] = []
    ids, found, forward = tokens(2, 5), [], Block.forward
    for defers in (True, False):

        def watched(self: Block, x: Tensor, c: Any, s: Any, *more: Any, defers: bool = defers) -> Any:
            output = forward(self, x, c, s, *(more if defers else ()))
            left.append(output.pending is not None)
            return output

        monkeypatch.setattr(Block, "forward", watched)
        state = decoder.new_state(2, 8)
        with torch.no_grad():
            found += [torch.cat([decoder(part, state=state) for part in ids.split([4, 1], dim=1)], dim=1)]
    assert torch.equal(*found)
    blocks = len(decoder.blocks)
    first = [name not in POST_NORMED and i + 1 < blocks for i in range(blocks)]
    assert left == 2 * first + 2 * blocks * [False]
    monkeypatch.undo()
    decoder.blocks[1] = Old(decoder.blocks[1])
    with torch.no_grad():
        assert torch.equal(decoder(ids[:, :4], state=decoder.new_state(2, 8)), found[0][:, :4])


class Old(torch.nn.Module):
    """A module in the place of a block, which takes no additions."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self.token_wise = block, block.token_wise

    def forward(self, x: Tensor, context: Any, state: Any = None) -> Any:
        return self.block(x, context, state)
