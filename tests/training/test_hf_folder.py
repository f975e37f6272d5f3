import http.server
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf_models import BLOCK_SIZE, CONFIG, VOCAB_SIZE, drop_prefix, their_model
from support.models import ARCHITECTURES, Arch, make_tokens

from mingpt.base.errors import UserError
from mingpt.model import GPT
from mingpt.tools.jobs import free_port
from mingpt.training.initial_weights import Folder, HuggingFaceFolder, folder_url, is_hf_folder, read_folder
from mingpt.training.state import load_weights

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A copy of the folder that transformers writes for a model of each architecture, sharded or not."""
    written: dict[tuple[Arch, bool], Path] = {}

    def save(arch: Arch, target: Path, is_sharded: bool = False) -> Path:
        if (arch, is_sharded) not in written:
            folder = tmp_path_factory.mktemp(f"{arch}-{is_sharded}")
            options = {"max_shard_size": "20KB"} if is_sharded else {}
            their_model(arch).save_pretrained(folder, **options)
            assert (folder / INDEX).exists() == is_sharded
            written[arch, is_sharded] = folder
        return Path(shutil.copytree(written[arch, is_sharded], target / "model"))

    return save


def logits_of(found: HuggingFaceFolder) -> torch.Tensor:
    model = GPT(found.model.config, vocab_size=found.model.vocab_size, block_size=found.model.block_size)
    load_weights(model.eval(), found.tensors, "the folder")
    with torch.no_grad():
        logits = model(make_tokens(length=BLOCK_SIZE))[0]
    assert logits is not None
    return logits


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_folder_in_any_layout_has_the_logits_of_transformers(
    arch: Arch, has_prefix: bool, is_sharded: bool, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved(arch, tmp_path, is_sharded)
    if not has_prefix:
        drop_prefix(folder, "transformer." if arch == "gpt2" else "model.")
    found = read_folder(str(folder))
    assert (found.model.config, found.model.vocab_size) == (CONFIG[arch], VOCAB_SIZE)
    assert found.folder == str(folder) and found.tokenizer_json is None
    with torch.no_grad():
        expected = their_model(arch)(make_tokens(length=BLOCK_SIZE)).logits
    assert expected.abs().max() > 1
    assert (logits_of(found) - expected).abs().max() < 1e-4


def test_masks_and_a_tied_head_of_old_gpt2_files_are_ignored(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved("gpt2", tmp_path)
    expected = read_folder(str(folder))
    drop_prefix(folder, "transformer.")
    tensors = load_file(folder / "model.safetensors")
    tensors["h.0.attn.bias"] = torch.ones(1, 1, BLOCK_SIZE, BLOCK_SIZE)
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    again = read_folder(str(folder))
    assert again.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in expected.tensors.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensors_of_half_precision_become_float32(
    arch: Arch, dtype: torch.dtype, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved(arch, tmp_path)
    exact = read_folder(str(folder)).tensors
    halves = {name: one.to(dtype) for name, one in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors")
    found = read_folder(str(folder)).tensors
    assert all(torch.equal(found[name], tensor.to(dtype).float()) for name, tensor in exact.items())
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def test_a_tokenizer_comes_with_its_bytes_and_a_url_will_do(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved("gpt2", tmp_path, is_sharded=True)
    (folder / "tokenizer.json").write_bytes(b'{"any": "thing"}')
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/hf_folder_test", recursive=True)
    found = read_folder("memory://hf_folder_test")
    assert found.tokenizer_json == b'{"any": "thing"}'
    expected = read_folder(str(folder)).tensors
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.items())
    assert is_hf_folder("memory://hf_folder_test") and not is_hf_folder("memory://hf_folder_none")


def test_the_names_of_gpt2_are_on_the_hub_unless_there_is_such_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        assert folder_url(name) == f"https://huggingface.co/openai-community/{name}/resolve/main"
    (tmp_path / "gpt2").mkdir()
    assert folder_url("gpt2") == "gpt2" and folder_url("out/gpt2-xl") == "out/gpt2-xl"
    assert not is_hf_folder("gpt2")


def write_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def write_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """In the file, or in the first shard."""
    path = min(folder.glob("model*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def duplicate_key(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {"lm": "a", "lm": "a",'))


def pickle_alone(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def first(names: dict[str, Any]) -> str:
    return min(names)


WTE = "transformer.wte.weight"
WHOLE: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: (at / "config.json").unlink(), "there is no config.json"),
    (lambda at: (at / "config.json").write_text("[1]"), "config.json is damaged: it is no JSON object"),
    (lambda at: (at / "config.json").write_text("{" * 9), "config.json is damaged"),
    (lambda at: (at / "config.json").write_text('{"a": 1, "a": 2}'), "'a' is there twice"),
    (lambda at: (at / "config.json").write_text(" " * (5 << 20)), "config.json has more than"),
    (lambda at: (at / "config.json").write_text('{"model_type": "llama"}'), "model_type is 'llama'"),
    (lambda at: (at / "model.safetensors").unlink(), "there is neither model.safetensors nor"),
    (pickle_alone, "pytorch_model.bin alone, a pickle"),
    (
        lambda at: (at / "model.safetensors").write_bytes(b"\x80\x04" + bytes(50)),
        "model.safetensors: the head",
    ),
    (lambda at: write_tensors(at, lambda one: one.pop(WTE)), f"the tensor {WTE} is missing"),
    (lambda at: write_tensors(at, lambda one: one.update({WTE: torch.ones(9, 24)})), r"has shape \[9, 24\]"),
    (lambda at: write_tensors(at, lambda one: one.update({WTE: torch.ones(31, 24).long()})), "int64"),
    (lambda at: write_tensors(at, lambda one: one.update({WTE: one[WTE] * torch.nan})), "not finite"),
    (lambda at: write_tensors(at, lambda one: one.update(score=torch.ones(1))), "it holds 'score'"),
    (lambda at: write_tensors(at, lambda one: one.update({"wte.weight": torch.ones(31, 24)})), "it holds"),
    (lambda at: (at / "tokenizer.json").mkdir(), "tokenizer.json is not a file"),
]
SHARDED: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: (at / INDEX).write_text("{}"), "has no weight_map"),
    (lambda at: (at / INDEX).write_text('{"weight_map": ["a"]}'), "has no weight_map"),
    (duplicate_key, "'lm' is there twice"),
    (lambda at: write_index(at, lambda names: names.update(x="../other.safetensors")), r"lists '\.\./other"),
    (lambda at: write_index(at, lambda names: names.update(x="/etc/passwd")), "lists '/etc/passwd'"),
    (lambda at: write_index(at, lambda names: names.update(x="a/b.safetensors")), "lists 'a/b.safe"),
    (lambda at: write_index(at, lambda names: names.update(x="a..safetensors")), "lists 'a..safe"),
    (lambda at: write_index(at, lambda names: names.update(x="model.bin")), "lists 'model.bin'"),
    (lambda at: write_index(at, lambda names: names.update(x=7)), "lists 7"),
    (
        lambda at: write_index(at, lambda names: names.update(x="gone.safetensors")),
        "gone.safetensors: the file is",
    ),
    (lambda at: write_index(at, lambda names: names.pop(first(names))), "which is not listed for it"),
    (lambda at: write_tensors(at, lambda one: one.pop(first(one))), "lacks '"),
    (
        lambda at: write_tensors(at, lambda one: one.update({"transformer.ln_f.bias": torch.ones(24)})),
        "listed",
    ),
]


@pytest.mark.parametrize("number", range(len(WHOLE) + len(SHARDED)))
def test_a_damaged_or_hostile_folder_is_one_sentence(
    number: int, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved("gpt2", tmp_path, is_sharded=number >= len(WHOLE))
    read_folder(str(folder))
    spoil, sentence = (WHOLE + SHARDED)[number]
    spoil(folder)
    with pytest.raises(UserError, match=sentence) as caught:
        read_folder(str(folder))
    assert str(caught.value).startswith(f"the model in {folder} cannot be used: ")
    assert "\n" not in str(caught.value)


def test_a_huge_number_of_blocks_is_refused_at_once(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"n_layer": 10**8}))
    with pytest.raises(UserError, match="speaks of 100,000,000 blocks and there are 28 tensors"):
        read_folder(str(folder))
    huge = {"n_embd": 3 << 26, "vocab_size": 1 << 28, "n_positions": 1 << 28}
    (folder / "config.json").write_text(json.dumps(fields | huge))
    with pytest.raises(UserError, match=r"has shape \[31, 24\], and config.json asks for \[268435456"):
        read_folder(str(folder))


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the class's `folder` with ranges; `status`, if it is not 0, is the answer to everything."""

    folder: Path
    status = 0
    largest = 0  # bytes in an answer

    def do_GET(self) -> None:
        path = self.folder / self.path.lstrip("/")
        status = self.status or (200 if path.is_file() else 404)
        content = path.read_bytes() if status == 200 else b""
        asked = self.headers.get("Range")
        if status == 200 and asked:
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            content, status = content[int(begin) : int(end) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            type(self).largest = max(self.largest, len(content))
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    class Own(Handler):
        pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}", Own
        serving.shutdown()
        thread.join()


def test_a_server_is_read_as_a_folder_is_and_large_files_in_pieces(
    saved: Callable[..., Path],
    server: tuple[str, type[Handler]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, handler = server
    monkeypatch.setattr("mingpt.snapshot.reading.PIECE_BYTES", 5000)
    handler.folder = saved("gpt2", tmp_path, is_sharded=True)
    found, expected = read_folder(url), read_folder(str(handler.folder))
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert found.tokenizer_json is None and 1000 < handler.largest <= 5000
    (handler.folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"there is no config\.json"):
        read_folder(url)
    handler.status = 503
    with pytest.raises(UserError, match=r"config.json cannot be read: .*503"):
        Folder(url, retries_s=()).exists("config.json")


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"config.json cannot be read: .*Cannot connect"):
        Folder(f"http://127.0.0.1:{free_port()}", retries_s=()).exists("config.json")
    with pytest.raises(UserError, match="needs a driver that is not installed"):
        read_folder("nosuch://bucket/model")
