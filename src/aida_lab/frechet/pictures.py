"""Images as the public code measures them: stretched to the full range one by one, and rounded as in a PNG file."""

from __future__ import annotations

import torch
from torch import Tensor


def as_saved(images: Tensor) -> Tensor:
    """uint8 images, each with its own minimum at 0 and maximum at 255 over all channels.

    The stretch is for the eye and belongs to saving; the public code measures the saved files, so it is part of
    every FID it reports. It is applied to real and generated images alike.
    """
    values = images.float()
    low, high = values.amin((1, 2, 3), keepdim=True), values.amax((1, 2, 3), keepdim=True)
    # a flat image has no range to stretch: it becomes black, as there
    share = (values - low) / (high - low).clamp_min(1e-5)
    return (share * 255.0 + 0.5).clamp(0.0, 255.0).to(torch.uint8)
