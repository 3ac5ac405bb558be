"""Classes for causal language models that transformers has only as parts of larger models."""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, Mistral4Config, Mistral4ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.muse_glimmer.modeling_muse_glimmer import (
    MuseGlimmerPreTrainedModel,
    MuseGlimmerTextConfig,
    MuseGlimmerTextModel,
)


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):
    """The language model of Muse Glimmer, with the logits of its multimodal model."""

    config: MuseGlimmerTextConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss of `labels`."""
        outputs = self.model(input_ids, **options)
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        cap = self.config.final_logit_softcapping
        logits = cap * torch.tanh(logits * self.config.output_multiplier / cap)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **options)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# It stands for a class of transformers; `nativize` leaves users' own forwards as they are.
MuseGlimmerForCausalLM.forward.__module__ = MuseGlimmerTextModel.__module__

# In transformers they count as models of images and text alone; some releases register no class of Mistral 4 itself.
CLASSES: dict[type, type] = {Mistral4Config: Mistral4ForCausalLM, MuseGlimmerTextConfig: MuseGlimmerForCausalLM}
AutoModelForCausalLM._model_mapping._extra_content.update(CLASSES)
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["muse_glimmer_text"] = MuseGlimmerForCausalLM.__name__
