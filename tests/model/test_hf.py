import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_models import their_model
from support.models import ARCHITECTURES, CONFIG, Arch, make_tokens

from mingpt.base.errors import UserError
from mingpt.model import GPT, parameter_shapes
from mingpt.model.hf import config_from_hf, from_hf, hf_fields, import_transformers, to_hf


@pytest.mark.parametrize("n_head", [1, 3, 12])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_computes_the_same_logits_and_the_weights_come_back_as_they_were(
    arch: Arch, n_head: int
) -> None:
    config = replace(CONFIG, arch=arch, n_head=n_head)
    theirs = their_model(config)
    assert config_from_hf(theirs.config) == config
    shapes = parameter_shapes(config, vocab_size=31, block_size=24)
    tensors = from_hf(theirs.state_dict(), config, shapes)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    ours = GPT(config, vocab_size=31, block_size=24).eval()
    ours.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        expected, logits = theirs(make_tokens()).logits, ours(make_tokens())[0]
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() < 1e-5
    again = to_hf(tensors, config)
    assert theirs.state_dict().keys() - again.keys() == ({"lm_head.weight"} if arch == "gpt2" else set())
    assert all(torch.equal(theirs.state_dict()[name], tensor) for name, tensor in again.items())
    assert all(tensor.is_contiguous() for tensor in again.values())


OTHERS: list[tuple[Arch, dict[str, Any], str]] = [
    ("gpt2", {"n_inner": 100}, "n_inner is 100, and only None and 192 can be used"),
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config is"),
    ("gpt2", {"num_attention_heads": 5}, r"n_embd \(48\) must be divisible by .*n_head \(5\)"),
    ("modern", {"intermediate_size": 100}, "intermediate_size is 100, and only 192"),
    ("modern", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    ("modern", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    ("modern", {"final_logit_softcapping": 15.0}, "final_logit_softcapping is 15.0, and only None"),
    ("modern", {"num_key_value_heads": 2}, "num_key_value_heads is 2, and only 4"),
    ("modern", {"attention_bias": True}, "attention_bias is True"),
    ("modern", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ("modern", {"head_dim": 24}, "head_dim is 24, and only 12"),
    ("modern", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta': 500000.0"),
    ("modern", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'rope_type': 'linear'"),
]


@pytest.mark.parametrize(("arch", "change", "sentence"), OTHERS, ids=lambda value: str(value)[:60])
def test_another_model_is_one_sentence_that_names_the_field(
    arch: Arch, change: dict[str, Any], sentence: str
) -> None:
    transformers = import_transformers()
    config_class = transformers.GPT2Config if arch == "gpt2" else transformers.NanoChatConfig
    fields = hf_fields(replace(CONFIG, arch=arch), vocab_size=31, block_size=24)
    with pytest.raises(UserError, match=sentence):
        config_from_hf(config_class(**{**fields, **change}))


def test_a_model_of_another_type_names_the_types_that_can_be_used() -> None:
    with pytest.raises(UserError, match="model_type is 'llama', and only 'gpt2' and 'nanochat' can be used"):
        config_from_hf(import_transformers().LlamaConfig())


@pytest.mark.parametrize("why", ["safetensors>=0.8.0 is required", "No module named 'transformers'"])
def test_transformers_that_cannot_be_imported_is_one_sentence(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text(f"raise ImportError({why!r} + '\\nTry:')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with pytest.raises(UserError, match=rf"\(ImportError: {why}\): pip install --upgrade 'tr.*the extra hf"):
        import_transformers()
