"""Any name is any type: a type checker takes long over the hundreds of models of the real one, and learns little."""

from typing import Any

def __getattr__(name: str) -> Any: ...
