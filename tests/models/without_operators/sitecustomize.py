"""Lets torchvision be imported whose operators are built for another torch than the one that is there.

Its wheels in package indices want CUDA, and what it says of two of its operators then fails at import. The processors
of pictures and videos call none of them. Python reads this at its start, in engines that have it on their path.
"""

import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
