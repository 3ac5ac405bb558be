"""Heads of multi-token prediction in tiny checkpoints, by published names, and their formulas in plain torch around the
decoder layer of transformers."""

import copy
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from zoo_oracles import renamed

QWEN = {"fc": "fc", "e": "pre_fc_norm_embedding", "h": "pre_fc_norm_hidden", "norm": "norm"}
DEEPSEEK = {"fc": "eh_proj", "e": "enorm", "h": "hnorm", "norm": "shared_head.norm"}
LING = {**DEEPSEEK, "norm": "final_layernorm"}


def attention_layer(oracle: PreTrainedModel) -> int:
    """Number of the last layer of full attention."""
    layers = oracle.get_decoder().layers
    return max(i for i, layer in enumerate(layers) if hasattr(layer, "self_attn"))


def add_head(
    folder: Path, oracle: PreTrainedModel, like_deepseek: bool = False, num_layers: int = 1
) -> dict[str, torch.Tensor]:
    """Write random tensors of a head of so many layers into the checkpoint in `folder`; returns them by their names.

    The blocks' have the names of those of a layer of the model.
    """
    path, layer = folder / "model.safetensors", attention_layer(oracle)
    stored = load_file(path)
    prefix = next(match[1] for name in stored if (match := re.match(rf"(.*)layers\.{layer}\.", name)))
    count = len(oracle.get_decoder().layers)
    draw, size = torch.Generator().manual_seed(5), oracle.config.get_text_config().hidden_size
    dtype = stored[f"{prefix}norm.weight"].dtype

    def random(shape: list[int] | torch.Size, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * (0.3 if len(shape) == 1 else 0.15) + mean).to(dtype)

    found: dict[str, torch.Tensor] = {}
    for index in range(num_layers):
        numbered = LING if f"{prefix}word_embeddings.weight" in stored else DEEPSEEK
        there, names = (f"{prefix}layers.{count + index}.", numbered) if like_deepseek else ("mtp.", QWEN)
        block = there if like_deepseek else f"mtp.layers.{index}."
        found |= {
            block + name.removeprefix(f"{prefix}layers.{layer}."): random(tensor.shape).to(tensor.dtype)
            for name, tensor in stored.items()
            if name.startswith(f"{prefix}layers.{layer}.")
        }
        if index and not like_deepseek:  # all else is shared
            continue
        found |= {f"{there}{names[part]}.weight": random([size], 1.0) for part in ("e", "h", "norm")}
        found[f"{there}{names['fc']}.weight"] = random([size, 2 * size])
        if names is DEEPSEEK:
            found[f"{there}embed_tokens.weight"] = stored[f"{prefix}embed_tokens.weight"].clone()
            found[f"{there}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file({**stored, **found}, path, {"format": "pt"})
    return found


class Oracle:
    """Steps of a head by its formulas, of the tensors of `add_head`."""

    def __init__(self, model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
        self.model, self.tensors = model, tensors
        self.norm = copy.deepcopy(model.get_decoder().norm)
        self.is_ling = any(name.endswith(".final_layernorm.weight") for name in tensors)
        names = QWEN if "mtp.fc.weight" in tensors else LING if self.is_ling else DEEPSEEK
        if names is QWEN:
            numbers = {name.split(".")[2] for name in tensors if name.startswith("mtp.layers.")}
            places = [("mtp.", f"mtp.layers.{number}.") for number in sorted(numbers)]
        else:
            places = [(name[:-14],) * 2 for name in tensors if name.endswith("eh_proj.weight")]
        self.layers = [
            ({part: tensors[f"{prefix}{tail}.weight"] for part, tail in names.items()}, self._block(block))
            for prefix, block in places
        ]

    def _block(self, prefix: str) -> nn.Module:
        self.block = copy.deepcopy(self.model.get_decoder().layers[attention_layer(self.model)])
        self.block.layer_idx = 0
        self._fill(prefix)
        return self.block

    @torch.no_grad()
    def _fill(self, prefix: str) -> None:
        own = {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items()}
        if self.is_ling:
            own = {renamed(f".{name}")[1:]: tensor for name, tensor in own.items()}
        for name, parameter in [*self.block.named_parameters(), *self.block.named_buffers()]:
            if name in own:
                parameter.copy_(own[name])
            elif "experts.gate_up_proj" in name or "experts.down_proj" in name:  # files have each expert
                experts, _, part = name.rpartition(".")
                parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
                for i, each in enumerate(parameter):
                    each.copy_(torch.cat([own[f"{experts}.{i}.{p}.weight"] for p in parts]))

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.norm.weight = nn.Parameter(weight.float())
        return self.norm(x)

    @torch.no_grad()
    def steps(self, ids: torch.Tensor, count: int) -> list[torch.Tensor]:
        """ids (1, T) -> the logits (1, T - 1 - j, V) of each step j, by layer j, or by the last one."""
        decoder, found = self.model.get_decoder(), []
        hidden = decoder(ids).last_hidden_state
        for step in range(count):
            hidden, embeds = hidden[:, : ids.shape[1] - 1 - step], decoder.embed_tokens(ids[:, 1 + step :])
            parts, block = self.layers[min(step, len(self.layers) - 1)]
            x = torch.cat([self._rms(embeds, parts["e"]), self._rms(hidden, parts["h"])], -1) @ parts["fc"].float().T
            length = x.shape[1]
            places = torch.arange(length)[None]
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            rope = decoder.rotary_emb(x, position_ids=places)
            y = block(x, position_embeddings=rope, attention_mask=mask, position_ids=places)
            hidden = self._rms(y[0] if isinstance(y, tuple) else y, parts["norm"])
            found.append(self.model.lm_head(hidden))
        return found
