"""Tensors in, tensors out: each op a torch reference, Triton kernels, and one public function that picks."""

from ligermodels.ops.attention import attention
from ligermodels.ops.cross_entropy import cross_entropy, cross_entropy_reference
from ligermodels.ops.dispatch import force, use_kernels
from ligermodels.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from ligermodels.ops.rms_norm import rms_norm, rms_norm_reference
from ligermodels.ops.rope import rope, rope_qkv, rope_qkv_reference, rope_reference
from ligermodels.ops.swiglu import swiglu, swiglu_reference

__all__ = [
    "attention",
    "cross_entropy",
    "cross_entropy_reference",
    "force",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_qkv",
    "rope_qkv_reference",
    "rope_reference",
    "swiglu",
    "swiglu_reference",
    "use_kernels",
]
