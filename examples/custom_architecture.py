"""A custom architecture: a recurrent mixer, attention with a window on odd layers, an ungated squared-ReLU MLP.

Import it, or name it in `ligermodels --import`, and configs and checkpoints of `model_type` "decay" open.
"""

from dataclasses import dataclass

from torch import nn

import ligermodels as lm
from ligermodels.archs import Family, register
from ligermodels.layers import AttentionConfig, BlockConfig, Layer, LayerConfig, Linear, NormConfig, RecurrentState


class SquaredReLU(Layer, nn.Sequential):
    def forward(self, x, context):
        return self[1](self[0](x).relu().square())


@dataclass(frozen=True)
class SquaredReLUConfig(LayerConfig):
    size: int

    def build(self, hidden_size):
        return SquaredReLU(Linear(hidden_size, self.size), Linear(self.size, hidden_size))


class Decay(Layer, nn.Linear):  # h[t] = h[t - 1] / 2 + v(x[t])
    def forward(self, x, context, state=None):
        distance, before = context.paths(x.shape[1], x.device)
        h = (0.5 ** (distance[:, None] - distance).clamp(min=0) * before).to(x) @ super().forward(x)
        if state is not None:
            h = h + 0.5 ** (distance + 1.0).to(x)[:, None] * state.value[:, None]
            state.update(h, context)
        return h


@dataclass(frozen=True)
class DecayConfig(LayerConfig):
    def build(self, hidden_size):
        return Decay(hidden_size, hidden_size)

    def new_state(self, num_layers, batch_size, max_length, *, hidden_size, dtype, device):
        return RecurrentState(num_layers, batch_size, hidden_size, dtype=dtype, device=device)


def decoder_config(config):
    size, layers, norm = config["hidden_size"], config["num_hidden_layers"], NormConfig(1e-6)
    attention = AttentionConfig(4, 2, size // 4, rope=lm.layers.RopeConfig(size // 4), window=8)
    mixers = [attention if layer % 2 else DecayConfig() for layer in range(layers)]
    blocks = tuple(BlockConfig(mixer, SquaredReLUConfig(3 * size), norm) for mixer in mixers)
    return lm.DecoderConfig(config["vocab_size"], size, blocks, norm)


register(Family("decay", decoder_config))
