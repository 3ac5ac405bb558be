"""Fields of a config that its family does not read: they pass, or cause an error or a warning."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ligermodels.arguments import nearest
from ligermodels.convert.json_values import is_list_of, is_number
from ligermodels.errors import ConfigError, ConfigWarning, short, warn_caller


def _names(text: str) -> list[str]:
    return text.split()


HARMLESS = frozenset(
    _names("""
    _name_or_path architectures auto_map model_type transformers_version transformers.js_config task_specific_params
    dtype torch_dtype use_bfloat16 torchscript use_cache cache_implementation attn_implementation
    experts_implementation use_flash_attn use_flash_attention flash_attention gradient_checkpointing
    return_dict output_attentions output_hidden_states output_scores tie_last_hidden_states chunk_size_feed_forward
    pretraining_tp tie_encoder_decoder is_decoder finetuning_task id2label label2id num_labels problem_type prefix
    eod_token_id tokenizer_class tokenizer_model_max_length tokenizer_padding_side model_max_length
    max_sequence_length max_seq_len
    max_seq_length seq_length classifier_dropout summary_type is_llama_config license tags base_model_name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id
    bos_token eos_token pad_token bad_words_ids begin_suppress_tokens suppress_tokens forced_bos_token_id
    forced_eos_token_id max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty generation_config tf_legacy_loss neftune_noise_alpha
    unsloth_fixed unsloth_version mlx_version init_std load_balance_coeff use_grouped_mm cla_share_factor
    layer_switch use_embedding_sharing use_parallel_embedding ep_size seq_aux aux_loss_alpha
    num_nextn_predict_layers num_mtp_layers num_mtp_modules mtp_transformer_layers use_mtp
    block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init block_norm_eps
    mtp_layer_types mtp_mlp_layer_types mtp_num_hidden_layers mtp_use_dedicated_embeddings language_model_only
    mtp_loss_scaling_factor
    linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor
    mamba_chunk_size num_logits_to_keep init_method
    chunk_size use_mamba_kernels mamba_ssm_cache_dtype time_step_max time_step_floor rescale_prenorm_residual
    mamba_dt_max mamba_dt_init_floor
    moe_shared_expert_overlap mtp_layers_block_type mtp_hybrid_override_pattern mlp_expansion_factor
    """)
)
"""Fields that do not change the computation of a model, with any value. `pretraining_tp` and `chunk_size_feed_forward`
split a computation without changing it; layers of multi-token prediction are not part of the model."""

COUNTS = frozenset(
    _names("""
    num_nextn_predict_layers num_mtp_layers num_mtp_modules mtp_transformer_layers mtp_num_hidden_layers
    mamba_chunk_size chunk_size num_logits_to_keep ep_size cla_share_factor original_max_position_embeddings
    head_dim intermediate_size moe_intermediate_size moe_shared_expert_intermediate_size num_layers max_window_layers
    num_experts num_local_experts n_routed_experts num_experts_per_tok n_shared_experts num_shared_experts
    n_group topk_group moe_layer_freq
    """)
)
"""Numbers of things in fields that some families do not read. A number that counts nothing is an error there too."""

ACTIVATIONS = _names("activation activation_function mlp_activation mlp_hidden_act mamba_hidden_act")
COMPUTATION: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        _names("""
        hidden_act hidden_activation head_dim
        attention_bias mlp_bias use_bias bias qkv_bias use_qkv_bias add_qkv_bias o_bias lm_head_bias add_bias_linear
        attention_out_bias use_attention_bias
        qk_norm use_qk_norm qk_layernorm use_qk_layernorm query_key_norm use_query_key_norm
        sliding_window layer_types use_sliding_window max_window_layers sliding_window_pattern sliding_window_size
        attention_window_size window_size attention_chunk_size global_attn_every_n_layers layers_block_type
        block_types attn_type_list full_attention_interval
        layer_rope_theta post_norm post_norm_eps layer_norm_eps rms_norm_eps
        order_of_interleaved_layers use_parallel_block
        query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping attention_sink attention_sinks
        use_bidirectional_attention clip_qkv multi_query new_decoder_architecture num_kv_shared_layers
        rope_local_base_freq rope_interleaved use_mrope mrope_section mrope_interleaved no_rope_layers
        no_rope_layer_interval nope_layer_interval rotary_dim rotary_base rotary_emb_base local_rope_theta
        global_rope_theta use_dynamic_ntk use_logn_attn attn_temperature_tuning alibi use_alibi
        use_parallel_residual parallel_residual parallel_attn
        num_experts num_local_experts num_experts_per_tok num_experts_per_token num_shared_experts moe_num_experts
        moe_intermediate_size shared_expert_intermediate_size mlp_only_layers mlp_layer_types norm_topk_prob
        output_router_logits router_aux_loss_coef router_jitter_noise n_routed_experts n_shared_experts
        moe_k moe_num_shared_experts moe_layer_start_index moe_layer_end_index moe_layer_interval moe_norm_min
        linear_attn_config linear_head_dim linear_num_heads mla_use_nope use_grouped_topk
        layer_group_size short_conv_kernel_size kda_safe_gate kda_lower_bound expert_swiglu_limit_list
        share_expert_swiglu_limit_list no_kda_lora use_kda_lora gated_attention_proj_granularity_type
        linear_attention linear_silu group_norm_size score_function num_layers q_head_dim
        use_cla use_mla num_shared_expert attention_head_dim use_mixed_mlp_moe group_limited_greedy
        moe_layer_num_skipped position_embedding_xdrope
        expert_selection_fn shared_expert_combination_strategy prefix_dense_sliding_window_pattern
        prefix_dense_intermediate_size
        num_dense_layers route_scale route_norm score_func num_expert_groups num_limited_groups router_scaling_factor
        moe_router_use_sigmoid moe_router_enable_expert_bias enable_moe_fp32_combine
        experts_per_token swiglu_alpha swiglu_limit initial_context_length
        first_k_dense_replace moe_layer_freq n_group topk_group topk_method scoring_func moe_topk enable_moe_block
        use_routing_bias shared_intermediate_size shared_moe_mode mlp_intermediate_size qk_norm_type
        kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave
        linear_num_key_heads linear_num_value_heads linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
        linear_allow_neg_eigval use_sandwich_norm use_attention_gate gating num_attention_heads_per_layer
        moe_apply_router_weight_on_input moe_router_logit_softcapping
        attn_output_gate output_gate_type mamba_ssm_dtype mamba_d_state mamba_d_conv ssm_state_size
        mamba_n_heads mamba_n_groups mamba_d_head mamba_expand mamba_conv_bias mamba_proj_bias time_step_limit
        attn_layer_indices z_loss_coefficient mamba_d_ssm mamba_rms_norm mamba_norm_before_gate projectors_bias
        n_groups conv_kernel use_conv_bias mamba_num_heads mamba_head_dim time_step_min mamba_dt_min mamba_dt_limit
        expand residual_in_fp32
        layer_norm_epsilon moe_latent_size moe_shared_expert_intermediate_size hybrid_override_pattern
        hidden_size_per_layer_input vocab_size_per_layer_input attention_k_eq_v use_double_wide_mlp global_head_dim
        num_global_key_value_heads top_k_experts laurel_rank
        conv_L_cache conv_bias conv_dim conv_dim_out full_attn_idxs norm_eps num_heads tie_embedding use_expert_bias
        block_dim block_ff_dim block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim
        cross_attention_layers add_cross_attention cross_attention_hidden_size
        is_encoder_decoder pruned_heads text_config vision_config per_layer_config
        quantization_config quantization compression_config sparsity_config transformers_weights
        swa_num_attention_heads swa_num_key_value_heads swa_head_dim swa_v_head_dim swa_rope_theta layernorm_epsilon
        hybrid_layer_pattern hybrid_block_size add_swa_attention_sink_bias add_full_attention_sink_bias
        intermediate_size_mlp moe_layers interleave_moe_layer_step floor_scale attn_scale
        embed_scale scale_emb scale_depth scale_embedding dim_model_base mup_enabled use_mup
        moe_router_score_func swa_attention_sink_enabled swa_rope_parameters sliding_windows swiglu_limits
        swiglu_limits_shared
        """),
        (),
    ),
    **dict.fromkeys(
        _names("""
        qk_scale_factor output_multiplier attention_value_scale use_gated_activation
        attention_multiplier embedding_multiplier logits_scaling residual_multiplier logit_scale lm_head_multiplier
        routed_scaling_factor moe_routed_scaling_factor partial_rotary_factor rotary_pct rotary_percentage
        rope_scaling_factor alpha
        is_neox_style rope_is_neox_style
        decoder_sparse_step full_attn_mod interpolate_factor is_causal use_rope apply_rope use_rotary gated_mlp
        use_pos_enc use_rotary_pos_emb block_use_swiglu mamba_use_mlp
        mlp_multipliers ssm_multipliers key_multiplier
        attention_in_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier
        """),
        (1,),
    ),
    **dict.fromkeys(ACTIVATIONS, ("silu", "swiglu", "swish")),
    "position_embedding_type": ("rope", "rotary"),
    "normalization_function": ("rmsnorm",),
    "router_dtype": ("fp32",),
}
"""Field that changes the computation -> values, besides EMPTY, with which it does not (True is 1). Fields that a family
here reads, and well-known fields of other models; also fields of rotary settings."""

EMPTY: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values with which a field changes nothing, except fields of COMPUTATION with the value 1, where 0 (false) does."""

NULL_IS_FALSE = {"is_causal"}
"""Fields of COMPUTATION where transformers reads null as false (`is_causal`: with eager attention, not with SDPA)."""

DROPOUT = _names("""
    attention_dropout resid_pdrop embd_pdrop attn_pdrop resid_dropout attn_dropout hidden_dropout residual_dropout
    hidden_dropout_prob attention_probs_dropout_prob ffn_dropout embed_dropout embedding_dropout output_dropout
    """)
"""Probabilities of dropout: fields that change the computation in training only."""

BY_LAYER = {"swiglu_limits", "swiglu_limits_shared", "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"}
"""Fields of COMPUTATION with a list of one value per layer, of which 0 and null change nothing."""

INACTIVE = {"sliding_window", "max_window_layers", "sliding_window_pattern"}
"""Fields without effect if `use_sliding_window` is false."""


def check_unread(config: Mapping[str, Any], read: Collection[str], where: str) -> None:
    """Check the fields of a config that its family has not read.

    Fields of HARMLESS, with an EMPTY value, or with a leading "_" pass. Any other unknown field is a ConfigWarning that
    names the most similar known field.

    Args:
        config: the config.
        read: names of the fields that the family has read.
        where: name of the config in messages.

    Raises:
        ConfigError: a field of COMPUTATION has a value that changes the computation; or a field of COUNTS, read or not,
            is true, below 0 or has a fraction.
    """
    for name in (each for each in config if each in COUNTS and not _may_count(config[each])):
        raise ConfigError(f"{where}: field {name!r} must be a whole number from 0 on, got {short(config[name])}")
    model_type = f" for model_type {short(config['model_type'])}" if config.get("model_type") else ""
    for name, value in unread_fields(config, read):
        if name in COMPUTATION:
            raise ConfigError(
                f"{where}: {name} = {short(value)} is not implemented{model_type}; remove the field if the checkpoint "
                "was made without it"
            )
        hint = nearest(name, {*read, *HARMLESS, *COMPUTATION})
        warn_caller(
            f"{where}: field {name!r} = {short(value)} is unknown{model_type} and not used{hint}", ConfigWarning
        )


def unread_fields(config: Mapping[str, Any], read: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(name, value) of the fields that are unknown, or of COMPUTATION with a value that changes the computation.

    Args:
        config: the config.
        read: names of fields that are read; they are left out.
    """
    for name, value in config.items():
        if name in read or name in HARMLESS or name.startswith("_") or _is_empty(name, value):
            continue
        if name not in COMPUTATION or _matters(name, value, config):
            yield name, value


def _may_count(value: Any) -> bool:
    """Whether `value` is a whole number from 0 on, or no number: null, false (none, in HunYuan), a list by layer."""
    return value is not True and (not is_number(value) or (value >= 0 and value % 1 == 0))


def _is_empty(name: str, value: Any) -> bool:
    if value is None:
        return name not in NULL_IS_FALSE
    return value in EMPTY and 1 not in COMPUTATION.get(name, ())


def _matters(name: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Whether field `name` of COMPUTATION changes the computation with this `value`."""
    if name == "layer_types":
        return not is_list_of(value, lambda layer_type: layer_type == "full_attention")
    if name in BY_LAYER and is_list_of(value, lambda limit: not limit):
        return False
    if name in INACTIVE and config.get("use_sliding_window") is False:
        return False
    if name == "hidden_activation" and value == config.get("hidden_act"):
        return False
    return value not in COMPUTATION[name]
