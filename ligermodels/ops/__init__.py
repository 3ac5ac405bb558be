"""Ops, functions from tensors to tensors.

Each op has a reference in plain torch, Triton kernels, and one public function that chooses between them."""

from ligermodels.arguments import QuantizedFormat
from ligermodels.ops.attention.attention import attention
from ligermodels.ops.attention.block_context import block_context_attention, block_context_attention_reference
from ligermodels.ops.attention.private_keys import private_key_attention, private_key_attention_reference
from ligermodels.ops.decoding.accept_path import Paths, Sequences, accept_path, accept_path_reference
from ligermodels.ops.decoding.compact_kv_cache import compact_kv_cache, compact_kv_cache_reference
from ligermodels.ops.decoding.decode_attention import decode_attention, decode_attention_reference
from ligermodels.ops.decoding.topk_indices import topk_indices, topk_indices_reference
from ligermodels.ops.decoding.tree_inputs import tree_inputs, tree_inputs_reference
from ligermodels.ops.float8.cast import float8_cast, float8_transpose
from ligermodels.ops.float8.glu import float8_gated_activation
from ligermodels.ops.float8.linear import Float8Form, Float8Recipe, check_float8_sizes, float8_linear
from ligermodels.ops.float8.lora import float8_lora_linear
from ligermodels.ops.float8.mm import float8_mm
from ligermodels.ops.float8.norm import float8_add_rms_norm
from ligermodels.ops.float8.scaling import float8_unsupported
from ligermodels.ops.float8.tail import tail_of
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.glu.glu import GLUOptions, gated_activation, geglu, geglu_reference, swiglu, swiglu_reference
from ligermodels.ops.linear.linear import dense_linear, linear
from ligermodels.ops.linear.lora_linear import lora_linear, lora_linear_reference
from ligermodels.ops.linear_attention.causal_conv import causal_conv, causal_conv_reference, conv_sources
from ligermodels.ops.linear_attention.conv_state import (
    causal_conv_step,
    causal_conv_step_reference,
    commit_conv_inputs,
    commit_conv_inputs_reference,
)
from ligermodels.ops.linear_attention.delta_gates import delta_gates, delta_gates_reference
from ligermodels.ops.linear_attention.delta_step import gated_delta_rule_step, gated_delta_rule_step_reference
from ligermodels.ops.linear_attention.delta_tree import commit_tree, gated_delta_rule_tree
from ligermodels.ops.linear_attention.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_reference,
    gated_delta_rule_tree_reference,
)
from ligermodels.ops.linear_attention.scan import TreeUpdates, tree_state
from ligermodels.ops.linear_attention.ssd import ssd, ssd_reference
from ligermodels.ops.linear_attention.ssd_decoding import ssd_step, ssd_step_reference, ssd_tree, ssd_tree_reference
from ligermodels.ops.loss.cross_entropy import cross_entropy, cross_entropy_reference
from ligermodels.ops.loss.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from ligermodels.ops.loss.linear_distillation import linear_distillation, linear_distillation_reference
from ligermodels.ops.loss.linear_log_probs import TokenLogProbs, linear_log_probs, linear_log_probs_reference
from ligermodels.ops.moe.chosen_rows import ChosenRows, gather_rows, sum_rows, take_rows
from ligermodels.ops.moe.experts import Routes, grouped_mm, grouped_mm_reference, sort_by_expert
from ligermodels.ops.moe.mix import by_expert, grouped_mlp, mix_experts, require_grouped_mm, set_experts_backend
from ligermodels.ops.moe.route_tokens import NOT_ROUTED, RouterOptions, route_tokens, route_tokens_reference
from ligermodels.ops.norm.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference
from ligermodels.ops.norm.layer_norm import layer_norm, layer_norm_reference
from ligermodels.ops.norm.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from ligermodels.ops.optimizer.adamw import adamw_step
from ligermodels.ops.quantized.dequantize import dequantize_weight
from ligermodels.ops.quantized.experts import (
    quantized_grouped_mm,
    quantized_grouped_mm_reference,
    quantized_mix_experts,
)
from ligermodels.ops.quantized.linear import quantized_linear, quantized_linear_reference
from ligermodels.ops.quantized.weights import QuantizedWeight, empty_quantized, quantize_weight
from ligermodels.ops.rope.rope import rope, rope_qkv, rope_qkv_reference, rope_reference
from ligermodels.ops.rope.rope_cache import rope_qkv_cached, rope_qkv_cached_reference
from ligermodels.ops.runtime.dispatch import (
    refuse_batch_invariant,
    set_backend,
    set_batch_invariant,
    set_host_checks,
    use_kernels,
)

__all__ = [
    "NOT_ROUTED",
    "ChosenRows",
    "Float8Form",
    "Float8Recipe",
    "Float8Tensor",
    "GLUOptions",
    "Paths",
    "QuantizedFormat",
    "QuantizedWeight",
    "RouterOptions",
    "Routes",
    "Sequences",
    "TokenLogProbs",
    "TreeUpdates",
    "accept_path",
    "accept_path_reference",
    "adamw_step",
    "add_rms_norm",
    "add_rms_norm_reference",
    "attention",
    "block_context_attention",
    "block_context_attention_reference",
    "by_expert",
    "causal_conv",
    "causal_conv_reference",
    "causal_conv_step",
    "causal_conv_step_reference",
    "check_float8_sizes",
    "commit_conv_inputs",
    "commit_conv_inputs_reference",
    "commit_tree",
    "compact_kv_cache",
    "compact_kv_cache_reference",
    "conv_sources",
    "cross_entropy",
    "cross_entropy_reference",
    "decode_attention",
    "decode_attention_reference",
    "delta_gates",
    "delta_gates_reference",
    "dense_linear",
    "dequantize_weight",
    "empty_quantized",
    "float8_add_rms_norm",
    "float8_cast",
    "float8_gated_activation",
    "float8_linear",
    "float8_lora_linear",
    "float8_mm",
    "float8_transpose",
    "float8_unsupported",
    "gated_activation",
    "gated_delta_rule",
    "gated_delta_rule_reference",
    "gated_delta_rule_step",
    "gated_delta_rule_step_reference",
    "gated_delta_rule_tree",
    "gated_delta_rule_tree_reference",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "gather_rows",
    "geglu",
    "geglu_reference",
    "grouped_mlp",
    "grouped_mm",
    "grouped_mm_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_distillation",
    "linear_distillation_reference",
    "linear_log_probs",
    "linear_log_probs_reference",
    "lora_linear",
    "lora_linear_reference",
    "mix_experts",
    "private_key_attention",
    "private_key_attention_reference",
    "quantize_weight",
    "quantized_grouped_mm",
    "quantized_grouped_mm_reference",
    "quantized_linear",
    "quantized_linear_reference",
    "quantized_mix_experts",
    "refuse_batch_invariant",
    "require_grouped_mm",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_qkv",
    "rope_qkv_cached",
    "rope_qkv_cached_reference",
    "rope_qkv_reference",
    "rope_reference",
    "route_tokens",
    "route_tokens_reference",
    "set_backend",
    "set_batch_invariant",
    "set_experts_backend",
    "set_host_checks",
    "sort_by_expert",
    "ssd",
    "ssd_reference",
    "ssd_step",
    "ssd_step_reference",
    "ssd_tree",
    "ssd_tree_reference",
    "sum_rows",
    "swiglu",
    "swiglu_reference",
    "tail_of",
    "take_rows",
    "topk_indices",
    "topk_indices_reference",
    "tree_inputs",
    "tree_inputs_reference",
    "tree_state",
    "use_kernels",
]
