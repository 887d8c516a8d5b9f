"""Models of transformers whose tensors have other names in files than in memory, out and back, through transformers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")

from compressed_tensors.utils import match_named_modules
from transformers import LlamaForSequenceClassification
from transformers.utils.quantization_config import CompressedTensorsConfig

from dcp_adapters import WeightStream, digest, export_hf, import_hf
from dcp_adapters.hf.exporting import expected
from dcp_adapters.hf.reading.verify_directory import verify_directory
from fsdp_hooks.torch_private import local_of
from layerwise import Max, calibrate
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, QuantizedTensor, quantize_
from tests.dcp_adapters.hf.renamed_models import CONFIGS, PROMPT, built, logits
from tests.ranks import agreed, run_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = Float8CurrentScaling()
VISION = ("*vision_tower*", "*visual*", "*projector*")
MODELS = pytest.mark.parametrize("name", CONFIGS)
LLAVA = "LlavaForConditionalGeneration"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory that transformers has written of each model, made when it is first asked for."""
    root = tmp_path_factory.mktemp("saved")

    def directory(name: str) -> Path:
        if not (root / name).exists():
            built(name).save_pretrained(root / name)
        return root / name

    return directory


def quantized(name: str, path: Path) -> PreTrainedModel:
    """As transformers loads it, its linears quantized."""
    model: PreTrainedModel = type(built(name)).from_pretrained(path, dtype=torch.bfloat16).eval()
    quantize_(model, ROWS, exclude=["lm_head"])
    return model


def only_quantized(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: value for name, value in state.items() if isinstance(local_of(value), QuantizedTensor)}


def loaded(model: nn.Module, path: Path) -> PreTrainedModel:
    """What transformers makes of a directory; it may find nothing that is missing, unexpected or of another shape."""
    kind: Any = type(model)
    with warnings.catch_warnings():
        # transformers says of every such option that the checkpoint's own config is used beside it.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`", category=UserWarning)
        found, told = kind.from_pretrained(
            path,
            dtype=torch.bfloat16,
            quantization_config=CompressedTensorsConfig(dequantize=True),
            output_loading_info=True,
        )
    assert not any(told.values()), told
    result: PreTrainedModel = found.eval()
    return result


def dequantized(name: str, model: nn.Module) -> PreTrainedModel:
    """The same values in a dense model."""
    dense = built(name)
    values = {
        own: value.dequantize() if isinstance(value, QuantizedTensor) else value
        for own, value in model.state_dict().items()
    }
    dense.load_state_dict(values)
    return dense


def bytes_of(value: Tensor) -> list[Tensor]:
    parts = list(value.parts().values()) if isinstance(value, QuantizedTensor) else [value.detach()]
    return [part.contiguous().view(-1).view(torch.uint8) for part in parts]


def assert_same_bytes(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        for own, its in zip(bytes_of(one[name]), bytes_of(two[name]), strict=True):
            assert torch.equal(own, its), name


@MODELS
def test_there_and_back(saved: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    dense = saved(name)
    model = quantized(name, dense)
    out = export_hf(only_quantized(model), tmp_path / "out", config=dense, rest=dense, progress=False)
    # each tensor once, under the names of the model's own directory
    held = load_file(out / "model.safetensors")
    own = {key.removesuffix("_scale") for key in held}
    if name != "Llama4ForCausalLM":  # whose experts transformers builds as linears, to read quantized weights
        assert own == set(load_file(dense / "model.safetensors"))
    assert verify_directory(out).findings == ()
    found = loaded(model, out)
    assert torch.equal(logits(found), logits(dequantized(name, model)))
    again = built(name, seed=8)
    quantize_(again, ROWS, exclude=["lm_head"])
    import_hf(out, again, progress=False)
    assert_same_bytes(again.state_dict(), model.state_dict())
    assert torch.equal(logits(again), logits(model))
    assert digest(out, like=again) == digest(model)


@MODELS
def test_a_dense_directory_is_read(saved: Callable[[str], Path], name: str) -> None:
    model = built(name, seed=8)
    import_hf(saved(name), model, progress=False)
    assert_same_bytes(model.state_dict(), built(name).state_dict())
    assert digest(saved(name), like=model) == digest(model)


@pytest.mark.parametrize("name", [LLAVA, "MixtralForCausalLM"])
def test_a_model_by_itself_tells_its_names(saved: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Without a directory, they are those that save_pretrained would write."""
    model = quantized(name, saved(name))
    stream = WeightStream(model)
    out = export_hf(model, tmp_path / "out", progress=False)
    held = load_file(out / "model.safetensors")
    assert {key.removesuffix("_scale") for key in held} == set(load_file(saved(name) / "model.safetensors"))
    streamed = {key: tensor for bucket in stream for key, tensor in bucket.items()}
    assert_same_bytes(streamed, {key: held[key] for key in streamed})
    assert streamed.keys() == held.keys()
    assert torch.equal(logits(loaded(model, out)), logits(dequantized(name, model)))


def test_a_stream_quantizes_what_is_named_as_in_memory(saved: Callable[[str], Path]) -> None:
    model = built(LLAVA)
    stream = WeightStream(model, recipe=MXFP8BlockScaling(), include=["model.language_model.layers.*"])
    scaled = {each.name for each in stream.metadata() if each.name.endswith("weight_scale")}
    assert len(scaled) == 14
    assert all(each.startswith("language_model.model.layers.") for each in scaled)


@pytest.mark.parametrize("name", ["Gemma3ForConditionalGeneration", "MixtralForCausalLM", "Llama4ForCausalLM"])
def test_calibrated_from_the_files(saved: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """The weights of each layer are read from the files, and the result goes into a directory of its own."""
    kind: Any = type(built(name))
    with torch.device("meta"):
        model = kind._from_config(CONFIGS[name](), dtype=torch.bfloat16).eval()
    for own, buffer in built(name).named_buffers():
        parent, _, attribute = own.rpartition(".")
        model.get_submodule(parent)._buffers[attribute] = buffer
    inner = getattr(model.model, "language_model", model.model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="calibrate: exclude pattern")
        result = calibrate(
            model,
            [{"input_ids": PROMPT}],
            recipe=ROWS,
            algorithm=Max(),
            layers=list(inner.layers),
            exclude=["lm_head", *VISION],
            weights=saved(name),
            progress=False,
        )
    out = export_hf(result, tmp_path / "out", config=saved(name), rest=saved(name), progress=False)
    assert verify_directory(out).findings == ()
    found = loaded(model, out).state_dict()
    dense = built(name).state_dict()
    held = result.state_dict()
    for own, value in found.items():
        expected_value = held[own].dequantize() if own in held else dense.get(own)
        if expected_value is not None and expected_value.shape == value.shape:  # Llama 4 has a linear for each expert
            assert torch.equal(value, expected_value), own
    assert sum(own in held for own in found) >= 8


def sharded(path: str, out: str) -> None:
    """FSDP gives modules other classes; transformers' rules are still found."""
    model: Any = quantized(LLAVA, Path(path))
    for layer in model.model.language_model.layers:
        fully_shard(layer)
    fully_shard(model)
    export_hf(model, out, config=path, progress=False)
    with torch.no_grad():
        for value in model.parameters():
            local_of(value).zero_()
    import_hf(out, model, progress=False)
    export_hf(only_quantized(model), f"{out}-again", config=path, rest=path, progress=False)


def test_shards(saved: Callable[[str], Path], tmp_path: Path) -> None:
    there = Path(agreed(str(tmp_path)))
    path = Path(agreed(str(saved(LLAVA))))
    run_ranks(2, sharded, str(path), str(there / "ranks"))
    export_hf(quantized(LLAVA, path), tmp_path / "one", config=path, progress=False)
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert_same_bytes(load_file(there / "ranks" / "model.safetensors"), one)
    assert_same_bytes(load_file(there / "ranks-again" / "model.safetensors"), one)


class TestOtherNames:
    """Names of a module inside the model, and of one that holds it."""

    def test_of_a_module_inside(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        model = quantized(LLAVA, saved(LLAVA))
        text = only_quantized(model.model.language_model)
        assert "layers.0.self_attn.q_proj.weight" in text
        out = export_hf(text, tmp_path / "out", config=saved(LLAVA), rest=saved(LLAVA), progress=False)
        held = load_file(out / "model.safetensors")
        assert held["language_model.model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
        assert held["vision_tower.encoder.layers.0.mlp.fc1.weight"].dtype == torch.bfloat16
        assert verify_directory(out).findings == ()

    def test_of_a_module_that_holds_the_model(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        model = quantized(LLAVA, saved(LLAVA))
        holder = nn.ModuleDict({"policy": model})
        out = export_hf(
            only_quantized(holder), tmp_path / "out", config=saved(LLAVA), rest=saved(LLAVA), progress=False
        )
        assert verify_directory(out).findings == ()
        assert torch.equal(logits(loaded(model, out)), logits(dequantized(LLAVA, model)))

    @pytest.mark.parametrize("prefix", [None, "policy."])
    def test_what_only_holds_the_model_tells_its_names(
        self, saved: Callable[[str], Path], tmp_path: Path, prefix: str | None
    ) -> None:
        """Without a directory, too; with a head beside the model, by the prefix."""
        model = quantized(LLAVA, saved(LLAVA))
        holder = nn.ModuleDict({"policy": model} | ({} if prefix is None else {"value": nn.Linear(64, 1)}))
        out = export_hf(holder, tmp_path / "out", prefix=prefix, progress=False)
        assert verify_directory(out).findings == ()
        assert torch.equal(logits(loaded(model, out)), logits(dequantized(LLAVA, model)))
        streamed = {key: value for bucket in WeightStream(holder, prefix=prefix) for key, value in bucket.items()}
        assert streamed.keys() == load_file(out / "model.safetensors").keys()

    def test_with_a_tied_projection_that_no_file_has(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        """Gemma ties it, and a module that holds the model gives it."""
        name = "Gemma3ForConditionalGeneration"
        holder = nn.ModuleDict({"policy": quantized(name, saved(name))})
        assert "policy.lm_head.weight" in holder.state_dict()
        out = export_hf(holder, tmp_path / "out", config=saved(name), progress=False)
        assert not [key for key in load_file(out / "model.safetensors") if "lm_head" in key]
        assert torch.equal(logits(loaded(built(name), out)), logits(dequantized(name, holder["policy"])))

    def test_a_directory_with_the_names_in_memory_keeps_them(
        self, saved: Callable[[str], Path], tmp_path: Path
    ) -> None:
        """Of a version of transformers that did not rename when it wrote."""
        model = built(LLAVA)
        model.save_pretrained(tmp_path / "own")
        state = {name: value.clone() for name, value in model.state_dict().items()}
        save_file(state, tmp_path / "own" / "model.safetensors", metadata={"format": "pt"})
        quantize_(model, ROWS, exclude=["lm_head"])
        out = export_hf(
            only_quantized(model), tmp_path / "out", config=tmp_path / "own", rest=saved(LLAVA), progress=False
        )
        assert {key.removesuffix("_scale") for key in load_file(out / "model.safetensors")} == set(state)
        assert torch.equal(logits(loaded(model, out)), logits(dequantized(LLAVA, model)))


class TestRefused:
    @pytest.fixture
    def state(self, saved: Callable[[str], Path]) -> dict[str, Tensor]:
        return only_quantized(quantized(LLAVA, saved(LLAVA)))

    def test_names_of_none(self, saved: Callable[[str], Path], state: dict[str, Tensor], tmp_path: Path) -> None:
        head = {"value_head.weight": torch.zeros(1, 64, dtype=torch.bfloat16)}
        with pytest.raises(ValueError, match="the config's model has no such tensor, so engines would not read it"):
            export_hf({**state, **head}, tmp_path / "out", config=saved(LLAVA), rest=saved(LLAVA), progress=False)
        assert not (tmp_path / "out").exists()

    def test_a_tensor_under_both_names(
        self, saved: Callable[[str], Path], state: dict[str, Tensor], tmp_path: Path
    ) -> None:
        twin = {f"language_model.model.{Q}": torch.zeros(64, 64, dtype=torch.bfloat16)}
        both = rf"are both language_model\.model\.{Q} of the model, which would be written twice|are both .*{Q} in"
        with pytest.raises(ValueError, match=both):
            export_hf({**state, **twin}, tmp_path / "out", config=saved(LLAVA), rest=saved(LLAVA), progress=False)
        assert not (tmp_path / "out").exists()

    def test_what_the_directory_does_not_have(
        self, saved: Callable[[str], Path], state: dict[str, Tensor], tmp_path: Path
    ) -> None:
        """Transformers would read the name in memory; other engines know that of the directory."""
        gone = "layers.0.self_attn.o_proj.weight"
        path = TestVerify.changed(saved(LLAVA), tmp_path / "own", lambda held: held.pop(f"language_model.model.{gone}"))
        with pytest.raises(ValueError, match=rf"^model\.language_model\.{gone}: the config's model has no such tensor"):
            export_hf(state, tmp_path / "out", config=path, rest=path, progress=False)

    def test_the_config_of_another_size(
        self, saved: Callable[[str], Path], state: dict[str, Tensor], tmp_path: Path
    ) -> None:
        config = json.loads((saved(LLAVA) / "config.json").read_text())
        config["text_config"]["intermediate_size"] = 256
        with pytest.raises(ValueError, match=r"is \[64, 128\], and the model has \[64, 256\]"):
            export_hf(state, tmp_path / "out", config=config, rest=saved(LLAVA), progress=False)

    def test_without_the_rest(self, saved: Callable[[str], Path], state: dict[str, Tensor], tmp_path: Path) -> None:
        """Also where the config is no directory."""
        config = json.loads((saved(LLAVA) / "config.json").read_text())
        with pytest.raises(ValueError, match=r"the source lacks \d+ tensors of the model .*; say by rest="):
            export_hf(state, tmp_path / "out", config=config, progress=False)

    @pytest.fixture
    def unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No transformers, or none that knows the model."""
        monkeypatch.setattr(expected, "architecture_said", lambda config, **_: None)
        monkeypatch.setattr(expected, "architecture_of", lambda model: None)

    @pytest.mark.usefixtures("unknown")
    def test_names_in_memory_where_nothing_tells_those_in_the_files(
        self, saved: Callable[[str], Path], state: dict[str, Tensor], tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=r"language_model\.layers\..*: the config's model has no such tensor"):
            export_hf(state, tmp_path / "out", config=saved(LLAVA), rest=saved(LLAVA), progress=False)
        assert not (tmp_path / "out").exists()

    @pytest.mark.usefixtures("unknown")
    def test_names_in_the_files_behind_a_prefix_need_no_transformers(
        self, saved: Callable[[str], Path], tmp_path: Path
    ) -> None:
        llama = "LlamaForCausalLM"
        model = quantized(llama, saved(llama))
        out = export_hf(
            only_quantized(model.model), tmp_path / "out", config=saved(llama), rest=saved(llama), progress=False
        )
        assert torch.equal(logits(loaded(model, out)), logits(dequantized(llama, model)))


Q = "layers.0.self_attn.q_proj.weight"


class TestVerify:
    """A directory in which transformers would not find the weights."""

    @staticmethod
    def changed(source: Path, path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
        path.mkdir()
        (path / "config.json").write_text((source / "config.json").read_text())
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    def errors(self, path: Path) -> list[tuple[str, str]]:
        return [(each.entry, each.message) for each in verify_directory(path).findings if each.severity == "error"]

    def test_a_twin(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        own, its = f"model.language_model.{Q}", f"language_model.model.{Q}"
        path = self.changed(saved(LLAVA), tmp_path / "a", lambda held: held.update({own: held[its].clone()}))
        ((key, message),) = self.errors(path)
        assert key == own
        assert own in message
        assert its in message
        assert "twice" in message

    def test_one_that_is_lacking(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        path = self.changed(saved(LLAVA), tmp_path / "a", lambda held: held.pop(f"language_model.model.{Q}"))
        ((key, message),) = self.errors(path)
        assert key == f"model.language_model.{Q}"
        assert "the directory does not" in message

    def test_an_expert_that_is_lacking(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        gone = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
        path = self.changed(saved("MixtralForCausalLM"), tmp_path / "a", lambda held: held.pop(gone))
        assert [key for key, _ in self.errors(path)] == ["model.layers.0.mlp.experts.gate_up_proj"]

    def test_another_shape(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        name = f"model.{Q}"
        path = self.changed(
            saved("LlamaForCausalLM"), tmp_path / "a", lambda held: held.update({name: held[name][:32].clone()})
        )
        assert "is [32, 64], and the model has [64, 64]" in self.errors(path)[0][1]

    def test_one_that_nobody_reads_is_a_warning(self, saved: Callable[[str], Path], tmp_path: Path) -> None:
        path = self.changed(
            saved("LlamaForCausalLM"), tmp_path / "a", lambda held: held.update({"extra.weight": torch.zeros(2)})
        )
        assert self.errors(path) == []
        assert [each.entry for each in verify_directory(path).findings if "no such tensor" in each.message] == [
            "extra.weight"
        ]


def test_scales_of_inputs_go_with_their_linears(saved: Callable[[str], Path], tmp_path: Path) -> None:
    model = built(LLAVA)
    names = quantize_(model, ROWS, include=["model.language_model.layers.*"])
    scales = {f"{name.removesuffix('weight')}input_scale": torch.tensor(0.5) for name in names}
    attention = "model.language_model.layers.1.self_attn"
    scales |= {f"{attention}.{own}": torch.tensor(0.25) for own in ("k_scale", "v_scale")}
    scales |= {f"{attention.replace('1', '0')}.{own}": torch.tensor(0.25) for own in ("k_scale", "v_scale")}
    out = export_hf(
        {**only_quantized(model), **scales}, tmp_path / "out", config=saved(LLAVA), rest=saved(LLAVA), progress=False
    )
    held = load_file(out / "model.safetensors")
    assert {"q_proj.input_scale", "k_scale"} <= {
        name.removeprefix("language_model.model.layers.1.self_attn.") for name in held
    }
    back = import_hf(out, model, progress=False)
    assert {name: value for name, value in back.items() if name in scales} == scales


def test_ignored_modules_have_both_names(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Transformers looks up names in memory, other engines those in the files."""
    model = built(LLAVA)
    quantize_(model, ROWS, include=["model.language_model.layers.0.*"])
    quantize_(model, MXFP8BlockScaling(), include=["model.language_model.layers.1.*"])
    out = export_hf(only_quantized(model), tmp_path / "out", config=saved(LLAVA), rest=saved(LLAVA), progress=False)
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    tower = "vision_tower.encoder.layers.0.mlp.fc1"
    assert {tower, f"model.{tower}"} <= set(said["ignore"])
    found: list[str] = []
    for group in said["config_groups"].values():
        own = [name for name, _ in match_named_modules(model, group["targets"], said["ignore"])]
        its = [name.replace("model.language_model", "language_model.model") for name in own]
        assert sorted(group["targets"]) == sorted([*own, *its])
        found += own
    assert {f"{name}.weight" for name in found} == set(only_quantized(model))
    assert len(import_hf(out, progress=False)) == len(load_file(saved(LLAVA) / "model.safetensors"))


def test_a_config_of_another_class_of_the_same_models(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """A critic is built by the config of its policy: the class is its own, as save_pretrained writes it."""
    config = CONFIGS["LlamaForCausalLM"]()
    config.architectures, config.num_labels = ["LlamaForCausalLM"], 1
    critic: Any = LlamaForSequenceClassification._from_config(config, dtype=torch.bfloat16).eval()
    quantize_(critic, ROWS, exclude=["score"])
    out = export_hf(critic, tmp_path / "out", progress=False)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    assert verify_directory(out).findings == ()
    with torch.no_grad():
        assert torch.equal(loaded(critic, out)(PROMPT).logits, critic(PROMPT).logits)
    told = r"^score\.weight: the config's model has no such tensor"
    with pytest.raises(ValueError, match=told):
        export_hf(critic, tmp_path / "policy", config=saved("LlamaForCausalLM"), progress=False)
