"""Tensors in, tensors out: each op a torch reference, Triton kernels, and one public function that picks."""

from ligermodels.ops.accept_path import Paths, Rows, accept_path, accept_path_reference
from ligermodels.ops.adamw import adamw_step
from ligermodels.ops.add_rows import add_rows, add_rows_reference
from ligermodels.ops.attention import attention
from ligermodels.ops.cross_entropy import cross_entropy, cross_entropy_reference
from ligermodels.ops.decode_attention import decode_attention, decode_attention_reference
from ligermodels.ops.dispatch import force, use_kernels
from ligermodels.ops.experts import Routes, gather_rows, grouped_mm, grouped_mm_reference, sort_by_expert
from ligermodels.ops.glu import geglu, geglu_reference, glu_linear, swiglu, swiglu_reference
from ligermodels.ops.largest import largest, largest_reference
from ligermodels.ops.layer_norm import layer_norm, layer_norm_reference
from ligermodels.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from ligermodels.ops.move_slots import move_slots, move_slots_reference
from ligermodels.ops.multi_head_linear_cross_entropy import (
    multi_head_linear_cross_entropy,
    multi_head_linear_cross_entropy_reference,
)
from ligermodels.ops.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from ligermodels.ops.rope import rope, rope_qkv, rope_qkv_reference, rope_reference
from ligermodels.ops.rope_cache import rope_qkv_cached, rope_qkv_cached_reference
from ligermodels.ops.tree_inputs import tree_inputs, tree_inputs_reference

__all__ = [
    "Paths",
    "Routes",
    "Rows",
    "accept_path",
    "accept_path_reference",
    "adamw_step",
    "add_rms_norm",
    "add_rms_norm_reference",
    "add_rows",
    "add_rows_reference",
    "attention",
    "cross_entropy",
    "cross_entropy_reference",
    "decode_attention",
    "decode_attention_reference",
    "force",
    "gather_rows",
    "geglu",
    "geglu_reference",
    "glu_linear",
    "grouped_mm",
    "grouped_mm_reference",
    "largest",
    "largest_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "move_slots",
    "move_slots_reference",
    "multi_head_linear_cross_entropy",
    "multi_head_linear_cross_entropy_reference",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_qkv",
    "rope_qkv_cached",
    "rope_qkv_cached_reference",
    "rope_qkv_reference",
    "rope_reference",
    "sort_by_expert",
    "swiglu",
    "swiglu_reference",
    "tree_inputs",
    "tree_inputs_reference",
    "use_kernels",
]
