"""The heads of Nemotron 3, whose files have attention and experts as two layers: their formulas in plain torch around
transformers' blocks, which skips the head's tensors; loss and gradients, drafting, and files."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from zoo import CONFIGS, make_checkpoint, relative_error, stored_as

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.speculative.tree import DynamicTree, Tree

TOLERANCE = 1e-5
NAMES = ["nemotron_h", "nemotron_h-latent-experts-and-biases"]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 6, 7]]
IDS = torch.randint(3, 131, (2, 23), generator=torch.Generator().manual_seed(1))


def layers_of(oracle: PreTrainedModel) -> tuple[int, int]:
    """Numbers of a layer of attention and of a layer of experts."""
    kinds = oracle.config.layers_block_type
    return kinds.index("full_attention"), kinds.index("moe")


def add_head(folder: Path, oracle: PreTrainedModel, num_layers: int = 1) -> dict[str, Tensor]:
    """Write random tensors of so many MTP layers, by published names, into the checkpoint in `folder`."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    stored, draw, size = load_file(path), torch.Generator().manual_seed(5), oracle.config.hidden_size

    def random(like: Tensor, mean: float = 0.0) -> Tensor:
        values = torch.randn(*like.shape, generator=draw) * (0.3 if like.dim() == 1 else 0.15) + mean
        return values.to(like.dtype)

    norm = stored["backbone.norm_f.weight"]
    found: dict[str, Tensor] = {}
    for index in range(num_layers):
        first, second = (f"mtp.layers.{2 * index + i}." for i in range(2))
        for place, layer in zip((first, second), layers_of(oracle), strict=True):
            prefix = f"backbone.layers.{layer}."
            found |= {place + n.removeprefix(prefix): random(t) for n, t in stored.items() if n.startswith(prefix)}
        found |= {f"{first}{name}.weight": random(norm, 1.0) for name in ("enorm", "hnorm")}
        found[f"{second}final_layernorm.weight"] = random(norm, 1.0)
        found[f"{first}eh_proj.weight"] = random(norm.new_empty(size, 2 * size))
    save_file({**stored, **found}, path, {"format": "pt"})
    fields = {"num_nextn_predict_layers": num_layers, "mtp_hybrid_override_pattern": "*E"}
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return found


class Head(nn.Module):
    """MTP layers by vLLM's and SGLang's formulas (`NemotronHMTP`), of the tensors of `add_head`."""

    def __init__(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = (model,)
        count = sum(name.endswith("eh_proj.weight") for name in tensors)
        pairs = [[copy.deepcopy(model.model.layers[layer]) for layer in layers_of(model)] for _ in range(count)]
        self.layers = nn.ModuleList(block for pair in pairs for block in pair)
        for number, block in enumerate(self.layers):
            block.mixer.layer_idx = 0
            block.load_state_dict(stored_as(dict(block.state_dict()), self._own(tensors, f"mtp.layers.{number}.")))
        outside = {name: nn.Parameter(t.float()) for name, t in tensors.items() if "norm." in name or "eh_proj" in name}
        self.outside = {name: t for name, t in outside.items() if not name.endswith((".norm.weight",))}

    def _own(self, tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        own = {name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}
        return {name: tensor for name, tensor in own.items() if name.startswith(("norm.", "mixer."))}

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.model[0].config.layer_norm_epsilon
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.outside[f"mtp.layers.{name}.weight"]

    def forward(self, ids: Tensor, count: int) -> list[Tensor]:
        """ids (B, T) -> the logits (B, T - 1 - j, V) of each step j, by layer j, or by the last one."""
        (model,), found = self.model, []
        hidden = model.model(ids).last_hidden_state.detach()
        for step in range(count):
            first = 2 * min(step, len(self.layers) // 2 - 1)
            hidden, embeds = hidden[:, : ids.shape[1] - 1 - step], model.model.embeddings(ids[:, 1 + step :]).detach()
            parts = [self._norm(embeds, f"{first}.enorm"), self._norm(hidden, f"{first}.hnorm")]
            x = torch.cat(parts, -1) @ self.outside[f"mtp.layers.{first}.eh_proj.weight"].T
            mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
            x = self.layers[first + 1](self.layers[first](x, attention_mask=mask))
            hidden = self._norm(x, f"{first + 1}.final_layernorm")
            found.append(model.lm_head(hidden))
        return found


@pytest.mark.parametrize(("name", "num_layers"), [(NAMES[0], 1), (NAMES[1], 1), (NAMES[0], 2)])
def test_logits_loss_and_gradients(name: str, num_layers: int, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, CONFIGS[name])
    tensors = add_head(tmp_path, oracle, num_layers)
    head = Head(oracle, tensors)
    model = lm.MTPModel.from_pretrained(tmp_path, num_steps=3, decay=0.5)
    losses = [
        F.cross_entropy(logits.flatten(0, 1), IDS[:, 2 + step :].flatten())
        for step, logits in ((step, logits[:, :-1]) for step, logits in enumerate(head(IDS, 3)))
    ]
    output = model(IDS, labels=IDS)
    assert output.head_losses.tolist() == pytest.approx([loss.item() for loss in losses], rel=TOLERANCE)
    output.loss.backward()
    sum(weight * loss for weight, loss in zip((4 / 7, 2 / 7, 1 / 7), losses, strict=True)).backward()
    gradients = {n: p.grad for n, p in head.outside.items()}
    gradients |= {f"mtp.{n}": p.grad for n, p in head.named_parameters() if p.requires_grad}
    found = model.layout.weight_map
    native = {f"mtp.{n}": p.grad for n, p in model.head.named_parameters()}
    mappings = [each for each in found.mappings if each.target in native]
    published = {each.name: each.read() for each in found.__class__(mappings).export(native)}
    ours = stored_as(gradients, published)
    assert ours.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert relative_error(ours[key], gradient) < 10 * TOLERANCE, key


TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])


@pytest.mark.parametrize(("num_layers", "tree"), [(1, None), (1, TREE), (1, DynamicTree(3, 3, 9)), (2, None)])
def test_drafting_gives_the_tokens_of_the_model_alone(num_layers: int, tree: Any, tmp_path: Path) -> None:
    """And the drafts are those of the formulas: the chain's first step accepts a token where the formula finds it."""
    oracle = make_checkpoint(tmp_path, CONFIGS["nemotron_h"])
    add_head(tmp_path, oracle, num_layers)
    model = lm.MTPModel.from_pretrained(tmp_path)
    options: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
    wanted = model.base.generate(PROMPTS, 12, do_sample=False, **options)
    found = model.generate(PROMPTS, 12, tree=tree, return_stats=True, **options)
    assert found.sequences.tolist() == wanted.tolist()
    alone = oracle.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert wanted[0, -12:].tolist() == alone[0, -12:].tolist()


def test_training_raises_acceptance(tmp_path: Path) -> None:
    """A new head learns a text of the model, and its drafts of this text are then accepted."""
    torch.manual_seed(0)
    make_checkpoint(tmp_path, CONFIGS["nemotron_h"])
    base = lm.from_pretrained(tmp_path)
    model = lm.MTPModel.from_base(base, num_steps=2)
    text = base.generate(PROMPTS[:1], 40, do_sample=False, eos_token_id=None, pad_token_id=0)
    optimizer = torch.optim.AdamW(model.head_parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = model(text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    out = model.generate(PROMPTS[:1], 40, eos_token_id=None, pad_token_id=0, return_stats=True)
    assert out.sequences.tolist() == text.tolist() and out.tokens_per_step > 2


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_stock_checkpoint_goes_out_as_it_came(num_layers: int, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "in", CONFIGS[NAMES[1]], dtype=torch.bfloat16)
    tensors = add_head(tmp_path / "in", oracle, num_layers)
    model = lm.MTPModel.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    assert model.head.num_layers == num_layers
    model.save_pretrained(tmp_path / "out")
    model.save_head(tmp_path / "head")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]) for name in before)
    own = load_file(tmp_path / "head" / "model.safetensors")
    assert own.keys() == tensors.keys() and all(torch.equal(own[name], tensors[name]) for name in own)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == num_layers and config["mtp_hybrid_override_pattern"] == "*E"
    base = lm.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)  # without the head, which is no part of the model
    base.save_pretrained(tmp_path / "kept")
    kept = load_file(tmp_path / "kept" / "model.safetensors")
    assert all(torch.equal(kept[name], tensors[name]) for name in tensors)
    again = lm.MTPModel.from_pretrained(base, tmp_path / "head")
    assert all(torch.equal(a, b) for a, b in zip(again.head.parameters(), model.head.parameters(), strict=True))


def test_a_new_head_is_written_by_published_names(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "base", CONFIGS["nemotron_h"])
    model = lm.MTPModel.from_base(lm.from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {n for n in stored if n.startswith("mtp.")} == add_head(tmp_path / "base", oracle).keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_bad_files_and_configs(tmp_path: Path) -> None:
    add_head(tmp_path, make_checkpoint(tmp_path, CONFIGS["nemotron_h"]), 2)
    stored = load_file(tmp_path / "model.safetensors")
    stored.pop("mtp.layers.3.final_layernorm.weight")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.3\.final_layernorm\.weight"):
        lm.MTPModel.from_pretrained(tmp_path)
    for pattern in ("*", "M*", "*EM", "**"):  # the model alone is opened all the same
        base = lm.from_config({**CONFIGS["nemotron_h"], "mtp_hybrid_override_pattern": pattern})
        with pytest.raises(ConfigError, match="has attention and no feed-forward layer"):
            lm.MTPModel.from_base(base)
    with pytest.raises(ConfigError, match="'mtp_hybrid_override_pattern' must have one of"):
        lm.from_config({**CONFIGS["nemotron_h"], "mtp_hybrid_override_pattern": "*X"})
    lists = {"mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": ["attention", "mlp"]}
    with pytest.raises(ConfigError, match="mtp_layers_block_type and mtp_hybrid_override_pattern contradict"):
        lm.from_config({**CONFIGS["nemotron_h"], **lists})
    with pytest.raises(ConfigError, match="has attention and no feed-forward layer"):
        lm.MTPModel.from_base(lm.from_config(CONFIGS["nemotron_h-without-experts"]))
    dense = {"mtp_hybrid_override_pattern": "*-", "mtp_layers_block_type": ["full_attention", "moe"]}
    model = lm.MTPModel.from_base(lm.from_config({**CONFIGS["nemotron_h-without-experts"], **dense}))
    model(IDS, labels=IDS).loss.backward()
