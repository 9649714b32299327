"""The contents of an engine's pipeline stages: a worker knows only its own layers, and layouts describe all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tercet.vllm_plugin.hooks import UnsupportedVLLM

if TYPE_CHECKING:
    from tercet.vllm_plugin.worker.kv_planes import LayerPlanes


def engine_rank() -> int:
    """Return this worker's rank in its engine; ranks of the first stage come first."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor_parallel = get_tp_group()
    return get_pp_group().rank_in_group * tensor_parallel.world_size + tensor_parallel.rank_in_group


def over_stages(mine: Any) -> list[Any]:
    """Return the values of the workers with this tensor-parallel rank, by pipeline stage.

    All these workers must call this function at the same time.
    """
    import torch.distributed
    from vllm.distributed.parallel_state import get_pp_group

    stages = get_pp_group()
    if stages.world_size == 1:
        return [mine]
    found: list[Any] = [None] * stages.world_size
    torch.distributed.all_gather_object(found, mine, group=stages.cpu_group)
    return found


@dataclass(frozen=True)
class StageContents:
    """Contents of one stage, by group of layers: the number of layers, and each plane's layer in order."""

    layers: list[int]
    planes: list[list[str]]
    block_bytes: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[str]], planes: LayerPlanes) -> StageContents:
        """Return the contents of this worker."""
        names = [[""] * count for count in planes.group_planes]
        for group, layers in enumerate(groups):
            first = sum(planes.group_planes[:group])
            for name in layers:
                for plane in planes.planes_of[name]:
                    names[group][plane - first] = name
        return cls([len(layers) for layers in groups], names, planes.block_bytes)


class AllStages:
    """Contents of all stages together."""

    def __init__(self, stages: Sequence[StageContents]) -> None:
        if len({stage.block_bytes for stage in stages}) > 1:
            sizes = ", ".join(str(stage.block_bytes) for stage in stages)
            raise UnsupportedVLLM(f"the pipeline stages have KV blocks of different sizes ({sizes} bytes)")
        self._stages = stages

    @property
    def layers(self) -> list[int]:
        """Number of layers of each group."""
        return [sum(counts) for counts in zip(*(stage.layers for stage in self._stages), strict=True)]

    @property
    def plane_counts(self) -> tuple[tuple[int, ...], ...]:
        """Number of planes of each group in each stage; empty if one stage holds all."""
        if len(self._stages) == 1:
            return ()
        return tuple(tuple(map(len, stage.planes)) for stage in self._stages)

    @property
    def order(self) -> str:
        """A hash of the layers' names in the order of their planes, group by group over all stages."""
        digest = hashlib.sha256()
        for group in zip(*(stage.planes for stage in self._stages), strict=True):
            digest.update("\n".join(name for names in group for name in names).encode() + b"\0")
        return digest.hexdigest()[:16]
