from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import ARCHITECTURES, CONFIG, Arch, make_model, make_tokens

from mingpt.base.errors import UserError
from mingpt.config import ModelConfig
from mingpt.model import GPT, from_gpt2, from_hf, hf_config, hf_model_of, parameter_shapes, to_hf
from mingpt.training.state import load_weights

CLASSES = {"gpt2": "GPT2", "modern": "NanoChat"}


def weights_of(model: GPT) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def their_classes(arch: Arch) -> tuple[Any, Any]:
    """The configuration's class and the model's."""
    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt installs it")
    name = "GPT2LMHeadModel" if arch == "gpt2" else "NanoChatForCausalLM"
    return getattr(transformers, f"{CLASSES[arch]}Config"), getattr(transformers, name)


def test_gpt2_gives_the_logits_of_transformers() -> None:
    """Random weights, copied by the same path that reads a GPT-2 file."""
    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt installs it")
    torch.manual_seed(2)
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=24, n_embd=48, n_layer=3, n_head=4, initializer_range=0.3
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = make_model("gpt2")
    load_weights(ours, from_gpt2(theirs.state_dict()), "transformers")
    with torch.no_grad():
        expected, logits = theirs(make_tokens()).logits, ours(make_tokens())[0]
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("n_head", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_computes_the_same_logits_for_any_number_of_heads(arch: Arch, n_head: int) -> None:
    config_class, model_class = their_classes(arch)
    torch.manual_seed(n_head)
    config = replace(CONFIG, arch=arch, n_head=n_head)
    ours = GPT(config, vocab_size=31, block_size=24).eval()
    with torch.no_grad():
        for weight in ours.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    theirs = model_class(config_class(**hf_config(config, vocab_size=31, block_size=24))).eval()
    tensors = to_hf(weights_of(ours), config)
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert unexpected == [] and missing == (["lm_head.weight"] if arch == "gpt2" else [])
    theirs.tie_weights()
    with torch.no_grad():
        expected, logits = theirs(make_tokens()).logits, ours(make_tokens())[0]
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("n_head", [1, 2, 4, 12])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_there_and_back_again_the_tensors_are_the_same_bits(arch: Arch, n_head: int) -> None:
    config = replace(CONFIG, arch=arch, n_head=n_head)
    shapes = parameter_shapes(config, vocab_size=31, block_size=24)
    ours = {name: torch.randn(shape) for name, shape in shapes.items()}
    theirs = to_hf(ours, config)
    assert all(tensor.is_contiguous() for tensor in theirs.values())
    back = from_hf(theirs, config)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.items())
    without_prefix = {name.partition(".")[2] if name[:2] != "lm" else name: theirs[name] for name in theirs}
    again = from_hf(without_prefix, config)
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.items())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_configuration_comes_back_and_holds_only_fields_that_transformers_knows(arch: Arch) -> None:
    config_class, _ = their_classes(arch)
    config = ModelConfig(arch=arch, n_layer=5, n_head=6, n_embd=96, dropout=0.125)
    fields = hf_config(config, vocab_size=77, block_size=40, end_of_text=76)
    assert fields.keys() - {"architectures", "model_type"} <= config_class().to_dict().keys()
    for theirs in (fields, config_class(**fields).to_dict(), config_class(**fields).to_diff_dict()):
        there = hf_model_of(theirs)
        assert (there.config, there.vocab_size, there.block_size) == (config, 77, 40)
    assert fields["bos_token_id"] == fields["eos_token_id"] == 76
    assert hf_config(config, vocab_size=77, block_size=40)["eos_token_id"] is None


def test_an_empty_gpt2_configuration_has_the_defaults_of_transformers() -> None:
    there = hf_model_of({"model_type": "gpt2"})
    assert (there.vocab_size, there.block_size, there.config.n_layer) == (50257, 1024, 12)
    assert hf_model_of({"model_type": "gpt2", "num_attention_heads": 16}).config.n_head == 16


OTHERS: list[tuple[Arch, dict[str, Any], str]] = [
    ("gpt2", {"model_type": "llama"}, "model_type is 'llama'"),
    ("gpt2", {"model_type": None}, "model_type is null"),
    ("gpt2", {"n_inner": 100}, "n_inner is 100, and only 192"),
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is false"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is true"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings is false"),
    ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config is"),
    ("gpt2", {"n_head": 5}, r"n_embd \(48\) must be divisible by .*n_head \(5\)"),
    ("gpt2", {"n_layer": True}, "n_layer is true, and only a whole number"),
    ("gpt2", {"n_embd": 0}, "n_embd is 0"),
    ("gpt2", {"vocab_size": "31"}, "vocab_size is '31'"),
    ("gpt2", {"n_positions": 2**40}, "n_positions is 1099511627776"),
    ("gpt2", {"resid_pdrop": 2.0}, "resid_pdrop is 2.0"),
    ("modern", {"intermediate_size": 100}, "intermediate_size is 100, and only 192"),
    ("modern", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    ("modern", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    ("modern", {"final_logit_softcapping": 15.0}, "final_logit_softcapping is 15.0, and only null"),
    ("modern", {"num_key_value_heads": 2}, "num_key_value_heads is 2, and only 4"),
    ("modern", {"attention_bias": True}, "attention_bias is true"),
    ("modern", {"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    ("modern", {"head_dim": 24}, "head_dim is 24, and only 12"),
    ("modern", {"rope_theta": 5e5}, "rope_theta is 500000.0"),
    ("modern", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is"),
    ("modern", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'"),
    ("modern", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta is 500000.0"),
    ("modern", {"rope_parameters": {"factor": 4.0}}, "rope_parameters.factor is 4.0"),
    ("modern", {"rope_parameters": [1]}, "rope_parameters is"),
    ("modern", {"num_attention_heads": 16}, "head"),
]


@pytest.mark.parametrize(("arch", "change", "sentence"), OTHERS, ids=lambda value: str(value)[:60])
def test_another_model_is_one_sentence_that_names_the_field(
    arch: Arch, change: dict[str, Any], sentence: str
) -> None:
    fields = hf_config(replace(CONFIG, arch=arch), vocab_size=31, block_size=24)
    hf_model_of(fields)
    with pytest.raises(UserError, match=sentence) as caught:
        hf_model_of(fields | change)
    assert "\n" not in str(caught.value)


def test_a_nanochat_configuration_without_softcapping_means_the_default_of_15() -> None:
    fields = hf_config(replace(CONFIG, arch="modern"), vocab_size=31, block_size=24)
    del fields["final_logit_softcapping"]
    with pytest.raises(UserError, match=r"final_logit_softcapping is 15.0, and only null"):
        hf_model_of(fields)
