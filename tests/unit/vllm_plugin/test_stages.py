"""What pipeline stages hold, put together: the layout that every rank of an engine has."""

from __future__ import annotations

import pytest
import torch

from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.worker.kv_layout import AllStages, StageContents
from tercet.vllm_plugin.worker.kv_planes import LayerPlanes

BLOCKS = 4


def stage(groups: list[list[str]], apart: bool = False, width: int = 8) -> StageContents:
    """A worker's; ``apart``: keys and values are."""
    shape = (2, BLOCKS, width) if apart else (BLOCKS, width)
    caches = {name: torch.zeros(shape) for names in groups for name in names}
    return StageContents.of(groups, LayerPlanes(caches, BLOCKS, groups))


def test_one_stage_is_not_spoken_of() -> None:
    alone = AllStages([stage([["l.0", "l.1"], ["l.2"]])])
    assert (alone.layers, alone.plane_counts) == ([2, 1], ())


@pytest.mark.parametrize("apart", [False, True])
def test_stages_are_the_model_cut_up(apart: bool) -> None:
    whole = AllStages([stage([["l.0", "l.3"], ["l.1", "l.2"]], apart)])
    cut = AllStages([stage([["l.0"], ["l.1"]], apart), stage([["l.3"], ["l.2"]], apart)])
    assert cut.layers == whole.layers == [2, 2]
    assert cut.order == whole.order
    planes = 2 if apart else 1
    assert cut.plane_counts == ((planes, planes), (planes, planes))


def test_a_stage_may_have_no_layers_of_a_group() -> None:
    cut = AllStages([stage([["l.0", "l.1"], []]), stage([["l.2"], ["l.3"]])])
    assert cut.plane_counts == ((2, 0), (1, 1))
    assert cut.order == AllStages([stage([["l.0", "l.1", "l.2"], ["l.3"]])]).order


def test_layers_in_another_order_are_other_layers() -> None:
    orders = {
        AllStages([stage([["l.0", "l.1"]])]).order,
        AllStages([stage([["l.1", "l.0"]])]).order,
        AllStages([stage([["l.1"]]), stage([["l.0"]])]).order,
        AllStages([stage([["l.0"], ["l.1"]])]).order,
        AllStages([stage([["l.0", "l.1"]], apart=True)]).order,
    }
    assert len(orders) == 4  # the second and the third are the same


def test_blocks_of_different_sizes_are_refused() -> None:
    with pytest.raises(UnsupportedVLLM, match="different sizes"):
        AllStages([stage([["l.0"]]), stage([["l.1"]], width=16)])
