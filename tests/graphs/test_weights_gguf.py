"""GGUF files: every block format, metadata, split and broken files."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

from treadle.graphs.models.adapters.base import Placement
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.spec import DivisorScaling, LinearScaling, LongRopeScaling, YarnScaling
from treadle.graphs.weights.gguf_file import read_gguf, read_metadata
from treadle.graphs.weights.gguf_source import GgufSource
from treadle.graphs.weights.load import CheckpointError, read_spec
from treadle.graphs.weights.parts import Part
from treadle.tools.tiny_model import make_folder, make_gguf

Load = Callable[..., Decoder]
PLAIN = ["F32", "F16", "BF16"]
BLOCKS = [kind.name for kind in GGMLQuantizationType if hasattr(gguf.quants, kind.name)]
WRITABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]


def write(path: Path, tensors: dict[str, tuple[Any, str]], **metadata: object) -> Path:
    writer = GGUFWriter(path, str(metadata.pop("architecture", "llama")))
    for key, value in metadata.items():
        key = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, rows: int, columns: int) -> Any:
    """Random bytes are legal blocks in every format; scales may come out as anything."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return np.random.default_rng().integers(0, 256, (rows, columns // block * size), dtype=np.uint8)


def read(source: GgufSource, shape: Sequence[int], heads: int = 0) -> Tensor:
    out = torch.full(tuple(shape), torch.nan)
    place = Placement("w", "w", "w", 0, tuple(shape), heads)
    source.read(Part(place, place, tuple(map(range, shape))), out)
    return out


def metadata(**changes: object) -> dict[str, Any]:
    """What a llama file of one layer needs, and what changes about it; None removes a key."""
    values: dict[str, object] = {
        "llama__block_count": 1,
        "llama__embedding_length": 64,
        "llama__feed_forward_length": 96,
        "llama__context_length": 128,
        "llama__attention__head_count": 4,
        "llama__attention__head_count_kv": 2,
        **changes,
    }
    return {key: value for key, value in values.items() if value is not None}


def embedding() -> dict[str, tuple[Any, str]]:
    return {"token_embd.weight": (np.zeros((100, 64), np.float32), "F32")}


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_block_format_equals_the_gguf_package(kind: str, tmp_path: Path) -> None:
    rows, columns = 300, 1024  # several chunks, the last one short
    with np.errstate(all="ignore"):
        blocks = random_blocks(kind, rows, columns)
        expected = gguf.dequantize(blocks, GGMLQuantizationType[kind]).reshape(rows, columns)
        file = read_gguf(write(tmp_path / "w.gguf", {"w": (blocks, kind)}))
        found = read(GgufSource(file, interleaved=True), (rows, columns))
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_formats_are_exact(kind: str, tmp_path: Path) -> None:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    values = torch.randn(7, 40).to(dtype)
    raw = values.view(torch.uint8).numpy()
    file = read_gguf(write(tmp_path / "w.gguf", {"w": (raw, kind)}))
    assert torch.equal(read(GgufSource(file, interleaved=False), (7, 40)), values.float())


@pytest.mark.parametrize("kind", [*PLAIN, *WRITABLE])
def test_quantized_model_equals_quantized_tensors(
    kind: str, tmp_path: Path, load_host: Load
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    folder = make_folder(tmp_path, overrides={**sizes, "attention_bias": True})
    decoder = load_host(make_gguf(folder, tmp_path / "tiny.gguf", kind))
    tensors = load_file(folder / "model.safetensors")

    def rounded(name: str) -> Tensor:
        qtype = GGMLQuantizationType[kind]
        data = gguf.quantize(tensors[name].numpy(), qtype)
        if kind == "BF16":
            return tensors[name].bfloat16().float()
        return torch.from_numpy(gguf.dequantize(data, qtype).reshape(tensors[name].shape))

    attention, prefix = decoder.layers[0].attention, "model.layers.0.self_attn"
    qkv = torch.cat([rounded(f"{prefix}.{name}_proj.weight") for name in "qkv"])
    assert torch.equal(attention.qkv.weight, qkv)
    assert torch.equal(decoder.head.weight, rounded("lm_head.weight"))
    biases = torch.cat([tensors[f"{prefix}.{name}_proj.bias"] for name in "qkv"])
    assert attention.qkv.bias is not None
    assert torch.equal(attention.qkv.bias, biases)


def test_dtype_is_plain_only_where_every_matrix_is(tmp_path: Path) -> None:
    def dtype(kind: str) -> str:
        half = (np.zeros((8, 64), np.float16), kind)
        values = metadata()
        return read_spec(write(tmp_path / "m.gguf", {**embedding(), "w": half}, **values)).dtype

    assert read_spec(write(tmp_path / "m.gguf", embedding(), **metadata())).dtype == "float32"
    assert dtype("F16") == "quantized"
    folder = make_folder(tmp_path)
    for kind, expected in (("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "quantized")):
        assert read_spec(make_gguf(folder, tmp_path / "tiny.gguf", kind)).dtype == expected


def test_bf16_is_rounded_once_from_fp32(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    file = make_gguf(folder, tmp_path / "tiny.gguf", "Q8_0")
    exact, narrow = load_host(file), load_host(file, dtype=torch.bfloat16)
    assert torch.equal(narrow.head.weight, exact.head.weight.bfloat16())


def test_format_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    raw = np.zeros((4, 32), np.uint8)
    file = read_gguf(write(tmp_path / "w.gguf", {"w": (raw.view(np.int8), "I8")}))
    with pytest.raises(CheckpointError, match="w is stored as I8, which the gguf package cannot"):
        read(GgufSource(file, interleaved=False), (4, 32))


def test_wrong_shape_names_tensor_expected_and_found(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    file = make_gguf(folder, tmp_path / "tiny.gguf")
    content = file.read_bytes()
    key = b"llama.feed_forward_length"
    at = content.index(key) + len(key) + 4
    file.write_bytes(content[:at] + (64).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(
        CheckpointError,
        match=r"blk\.0\.ffn_gate\.weight .* expected shape \[64, 64\], found \[96, 64\]",
    ):
        load_host(file)


def test_metadata_becomes_the_spec(tmp_path: Path) -> None:
    spec = read_spec(
        write(
            tmp_path / "m.gguf",
            {**embedding(), "output.weight": (np.zeros((100, 64), np.float32), "F32")},
            **metadata(
                llama__attention__key_length=32,
                llama__attention__sliding_window=9,
                llama__attention__layer_norm_rms_epsilon=0.5,
                llama__rope__dimension_count=8,
                llama__rope__freq_base=777.0,
                tokenizer__ggml__eos_token_id=5,
                tokenizer__ggml__eot_token_id=6,
            ),
        )
    )
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (100, 64, 96)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32)
    assert (spec.windows, spec.norm_eps, spec.max_position) == ((9,), 0.5, 128)
    assert (spec.rope.theta, spec.rope.rotary_dim) == (777.0, 8)
    assert spec.eos_token_ids == (5, 6)
    assert not spec.tied_head
    assert spec.dtype == "float32"


def test_rope_scaling_keys_become_the_spec(tmp_path: Path) -> None:
    def scaling(extra: dict[str, tuple[Any, str]], **keys: object) -> object:
        file = write(tmp_path / "m.gguf", {**embedding(), **extra}, **metadata(**keys))
        return read_spec(file).rope.scaling

    assert scaling({}) is None
    assert scaling({}, llama__rope__scaling__type="none") is None
    linear: dict[str, object] = {"llama__rope__scaling__type": "linear"}
    assert scaling({}, **linear, llama__rope__scaling__factor=4.0) == LinearScaling(4.0)
    assert scaling({}, llama__rope__scale_linear=2.0) == LinearScaling(2.0)
    yarn: dict[str, object] = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 32,
        "llama__rope__scaling__attn_factor": 0.5,
    }
    found = scaling({}, **yarn)
    assert isinstance(found, YarnScaling)
    assert (found.factor, found.original_max_position) == (4.0, 32)
    assert found.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1))
    divisors = np.arange(1, 9, dtype=np.float32)
    assert scaling({"rope_freqs.weight": (divisors, "F32")}) == DivisorScaling(tuple(divisors))
    sets = {
        "rope_factors_short.weight": (divisors, "F32"),
        "rope_factors_long.weight": (divisors * 2, "F32"),
    }
    longrope = {**yarn, "llama__rope__scaling__type": "longrope"}
    expected = LongRopeScaling(tuple(divisors), tuple(divisors * 2), 32, 0.5)
    assert scaling(sets, **longrope) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "GGUF architecture mamba is not supported; known: llama"),
        ({"llama__block_count": None}, "metadata key llama.block_count is missing"),
        ({"llama__expert_count": 8}, "llama with experts is not supported"),
        ({"llama__attention__head_count_kv": [1, 2]}, "head_count_kv differs between layers"),
        ({"llama__rope__scaling__type": "spiral"}, "rope_type 'spiral' is not supported"),
        ({"llama__rope__scaling__type": "longrope"}, "rope_factors_short.weight is missing"),
        ({"llama__attention__head_count_kv": 3}, "4 query heads cannot share 3"),
    ],
)
def test_wrong_metadata_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", embedding(), **metadata(**changes))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_spec(path)
    assert "m.gguf" in str(caught.value)


def test_file_without_embedding_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": (np.zeros(4, np.float32), "F32")}, **metadata())
    with pytest.raises(CheckpointError, match="token_embd.weight is missing"):
        read_spec(path)


def test_per_layer_values_that_agree_are_one_value(tmp_path: Path) -> None:
    values = metadata(llama__attention__head_count_kv=[2, 2, 2])
    assert read_spec(write(tmp_path / "m.gguf", embedding(), **values)).num_kv_heads == 2


def test_split_file_equals_whole(tmp_path: Path, load_host: Load) -> None:
    whole = make_gguf(make_folder(tmp_path), tmp_path / "whole.gguf", "Q8_0")
    reader = gguf.GGUFReader(whole)
    writer = GGUFWriter(tmp_path / "parts.gguf", "llama", split_max_tensors=11)
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) == 3
    expected, found = load_host(whole), load_host(parts[0])
    assert torch.equal(found.head.weight, expected.head.weight)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(ours.mlp.down.weight, theirs.mlp.down.weight)
    with pytest.raises(CheckpointError, match="name the first"):
        read_spec(parts[1])
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*parts-00003-of-00003\.gguf"):
        read_spec(parts[0])


def test_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = make_gguf(make_folder(tmp_path), tmp_path / "tiny.gguf", "Q8_0")
    content = path.read_bytes()
    cuts = random.sample(range(len(content) - 32), 60)
    for cut in [0, 3, 4, 8, 20, *cuts]:
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            read_gguf(path)


def test_metadata_of_every_type_reads_as_the_gguf_package_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -8)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -1600)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "né 😀")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 2.0])
    writer.add_array("texts", ["a", "", "bé"])
    writer.add_uint32("last", 5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = {
        "general.architecture": "llama", "u8": 255, "i8": -8, "u16": 65535, "i16": -1600,
        "u32": 2**32 - 1, "i32": -(2**31), "u64": 2**64 - 1, "i64": -(2**63), "f32": 0.5,
        "f64": 0.1, "yes": True, "text": "né 😀", "ints": [1, -2, 3], "floats": [0.5, 2.0],
        "texts": ["a", "", "bé"], "last": 5,
    }  # fmt: skip
    assert read_metadata(path) == expected
    del expected["texts"]
    assert read_gguf(path).metadata == expected


def test_vocabulary_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    texts = ["x" * random.randrange(9) for _ in range(200)]
    content = write(path, {}, texts=texts, numbers=[1.5] * 100).read_bytes().rstrip(b"\0")
    for size in [0, 3, 4, 20, *random.sample(range(24, len(content) - 1), 40)]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_metadata(path)


@pytest.mark.parametrize(
    "raw",
    [
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**62),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**62),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1),
    ],
    ids=["keys", "string", "array", "texts", "type", "nested"],
)
def test_nonsense_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "nonsense.gguf"
    path.write_bytes(raw)
    for read_header in (read_metadata, read_gguf):
        with pytest.raises(CheckpointError, match=r"nonsense\.gguf"):
            read_header(path)


def test_corrupt_header_raises_nothing_else(tmp_path: Path) -> None:
    path = make_gguf(make_folder(tmp_path), tmp_path / "tiny.gguf", "Q8_0")
    content = path.read_bytes()
    refused = 0
    for _ in range(300):
        broken = bytearray(content)
        for _ in range(3):
            broken[random.randrange(12_000)] = random.randrange(256)
        path.write_bytes(broken)
        for read_header in (read_gguf, read_metadata):
            try:
                read_header(path)
            except CheckpointError:
                refused += 1
    assert refused


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="m.gguf is not a GGUF file"):
        read_spec(path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF version 50331648 is not supported"):
        read_spec(path)
