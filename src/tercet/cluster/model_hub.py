"""Check that vLLM will find a model: as a checkpoint's directory, in the cache of the model hub, or at the hub.

Without this check every engine fails after half a minute, with a page of errors.
"""

from __future__ import annotations

import difflib
import http.client
import os
import re
import urllib.error
import urllib.request
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

from tercet.cluster.model import BUILT_IN, OnProgress, resolve_model
from tercet.protocol import BadRequest
from tercet.wire.client.bounded_answers import reason_of

HUB = "https://huggingface.co"
ASK_SECONDS = 5.0
# A directory that vLLM loads has one of these files.
DESCRIPTIONS = ("config.json", "params.json")
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MISSING = (HTTPStatus.NOT_FOUND, HTTPStatus.UNAUTHORIZED)


def find_model(name: str, on_progress: OnProgress) -> str:
    """Return :func:`~tercet.cluster.model.resolve_model`, after a check that the model exists.

    Raises :class:`~tercet.protocol.BadRequest` if it does not.
    """
    model = resolve_model(name, on_progress)
    require_model(model)
    return model


def known_model(name: str) -> str:
    """Check a model as :func:`find_model` does, without a conversion; return a name for ``resolve_model``.

    Commands use it to check their ports before a conversion, which takes half a minute.
    """
    return name if name == BUILT_IN else find_model(name, lambda _: None)


def require_model(name: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless vLLM will find the resolved model ``name``.

    If the model is not on this machine, the hub is asked, with a timeout of ``ASK_SECONDS``.
    """
    path = Path(name)
    if path.is_dir():
        if not _is_described(path) and not [*path.glob("*.gguf")]:
            raise BadRequest(f"model: {path} is not a checkpoint: it has no {DESCRIPTIONS[0]}", "model")
    elif not path.exists() and not _is_elsewhere(name) and cached_snapshot(name) is None:
        _require_at_hub(name)


def cached_snapshot(name: str) -> Path | None:
    """Return the newest directory of a model's files in the hub's cache; None if there is none."""
    snapshots = _hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [each for each in snapshots.glob("*") if _is_described(each)]
    return max(found, key=lambda each: each.stat().st_mtime, default=None)


def _is_described(checkpoint: Path) -> bool:
    return any((checkpoint / description).is_file() for description in DESCRIPTIONS)


def _is_elsewhere(name: str) -> bool:
    """True if only vLLM can interpret the name: a URL, a file in a repository, or another hub."""
    return "://" in name or ":" in name or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")


def _require_at_hub(name: str) -> None:
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
        if error.code in _MISSING:
            hint = "" if request.has_header("Authorization") else ", or shows it only with HF_TOKEN"
            raise _unknown(name, f"it is not a directory here, and {hub} has no such model{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", None)
        reason = reason_of(cause if isinstance(cause, BaseException) else error)
        where = f"it is neither a directory here nor in {_hub_cache()}"
        raise _unknown(name, f"{where}, and {hub} does not answer ({reason})") from None


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
