"""BERT and GPT-2 as Hugging Face builds them from a configuration, small enough to be trained in a lesson."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from torch import nn


def bert_and_gpt2() -> dict[str, tuple[Callable[[], nn.Module], type[nn.Module]]]:
    """By name: what makes the model, with random weights and without dropout, and the class of its units.

    {} where transformers is not installed. Nothing is downloaded.
    """
    if importlib.util.find_spec("transformers") is None:
        return {}
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.utils import logging

    logging.set_verbosity_error()
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    small |= {"vocab_size": 4096, "max_position_embeddings": 32}
    bert = BertConfig(**small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    small = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    small |= {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2Config(**small, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return {
        "BERT": (lambda: BertForSequenceClassification(bert), BertLayer),
        "GPT-2": (lambda: GPT2LMHeadModel(gpt2), GPT2Block),
    }
