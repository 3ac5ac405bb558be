"""Gated short convolutions on the projections and the convolution of a transformers layer."""

from __future__ import annotations

from ligermodels.integrations.gated_delta_net import HFCausalConv
from ligermodels.integrations.modules import OnModules, part_named
from ligermodels.layers.short_conv import ShortConv, ShortConvConfig


class HFShortCausalConv(HFCausalConv):
    """`HFCausalConv` without an activation."""

    activation = None


class HFShortConv(OnModules, ShortConv):
    """`ShortConv` on a transformers layer."""

    config: ShortConvConfig
    in_proj, conv, out = part_named("short_conv.in"), part_named("short_conv.conv"), part_named("short_conv.out")
