"""HTTP answers of the page: its files, JSON and errors, each with the security headers."""

from __future__ import annotations

import msgspec
from starlette.types import Scope, Send

from tercet.protocol import TercetError, UnknownPath
from tercet.router.page.page_files import SAFETY, page_files
from tercet.wire.serving.answers import error_headers


async def send_file(scope: Scope, name: str, send: Send) -> None:
    """Send the file ``name`` of the page; raise :class:`~tercet.protocol.UnknownPath` for an unknown name."""
    file = page_files().get(name)
    if file is None:
        raise UnknownPath(f"the page has no file {name[:80]!r}")
    headers = {"etag": file.tag, "cache-control": "no-cache"}
    if (b"if-none-match", file.tag.encode()) in scope["headers"]:
        await answer(send, 304, b"", file.media_type, headers)
        return
    await answer(send, 200, file.content, file.media_type, headers, is_head=scope["method"] == "HEAD")


async def answer(
    send: Send, status: int, body: bytes, media_type: str, headers: dict[str, str] | None = None, is_head: bool = False
) -> None:
    """Send a whole answer, without its body for HEAD."""
    await send(start_of(status, media_type, {**(headers or {}), "content-length": str(len(body))}))
    await send({"type": "http.response.body", "body": b"" if is_head else body})


def start_of(status: int, media_type: str, headers: dict[str, str]) -> dict[str, object]:
    """Return the ASGI message that starts an answer."""
    shown = {"content-type": media_type, **SAFETY, **headers}
    listed = [(name.lower().encode(), value.encode("latin-1")) for name, value in shown.items()]
    return {"type": "http.response.start", "status": status, "headers": listed}


async def answer_error(send: Send, error: TercetError) -> None:
    """Send an error in OpenAI's form, the form of all errors of a router."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    await answer(send, error.status, msgspec.json.encode(error.to_wire()), "application/json", headers)
