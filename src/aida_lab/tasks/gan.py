"""WGAN-GP on CIFAR-10 at 64 x 64: critic steps, a generator step every fifth iteration, a final Fréchet distance."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from aida_lab.data import data_root, images, local, sets
from aida_lab.frechet.efficientnet import efficientnet_lite0
from aida_lab.frechet.inception import SCRIPT, inception_v3
from aida_lab.frechet.moments import Moments, cached_moments, frechet_distance
from aida_lab.frechet.networks import full_float32
from aida_lab.models.wgan import NOISE, Critic, Generator
from aida_lab.task import Task, TaskContext, backward_and_step, stream

#: λ of the gradient penalty.
PENALTY = 10.0
#: The generator takes a step in every iteration of an epoch that is a multiple of this.
CRITIC_STEPS = 5
#: Number of generated images for the distance: 1,000 batches of 64.
FAKES = 64_000

#: Batch size of the evaluation. It does not affect the result.
_MEASURED = 128


class WganGp(Task):
    """Critic and generator, all training images on the device, and the feature network."""

    def __init__(self, context: TaskContext) -> None:
        if context.spec.compiled:
            raise ValueError(
                "torch.compile does not support the double backward of the gradient penalty; train wgan-gp without it"
            )
        # load the feature network first, so that a run fails at its start if the weights are missing
        if context.spec.variant != "inception":
            self._network = efficientnet_lite0(context.device)
        else:
            weights = context.inception or local.require(sets.INCEPTION, context.data_root) / SCRIPT.name
            self._network = inception_v3(weights, context.device)
        self._pixels = images.cifar10(context.data_root).train.pixels.to(context.device)
        self._critic, self._generator = Critic(), Generator()
        super().__init__(context, critic=self._critic, generator=self._generator)
        self._order = torch.empty(0, dtype=torch.long)

    def begin_epoch(self, epoch: int) -> int:
        self._order = self._shuffled(len(self._pixels), epoch).to(self._device)
        return -(-self._limited(len(self._order)) // self._spec.batch)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        """uint8 images of 32 x 32 pixels. The step enlarges them, which saves memory and copies."""
        size = self._spec.batch
        return (self._pixels[self._order[index * size : (index + 1) * size]],)

    def kind(self, index: int) -> str:
        kind = "both" if index % CRITIC_STEPS == 0 else "critic"
        size, whole = self._spec.batch, len(self._order)
        return kind if (index + 1) * size <= whole else f"{kind} of {whole - index * size}"

    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        """Returns the critic's loss with its penalty, not the generator's loss."""
        real = normalised(doubled(batch[0]))
        noise = torch.randn(len(real), NOISE, device=real.device)
        # also if the generator takes no step: a stepsize probe must not see the gradients of an earlier step
        optimizers["generator"].zero_grad(set_to_none=True)
        # The nodes of the second derivative are made while the first is computed. In autograd's own thread they would
        # be numbered apart from the others, and the order in which gradients add up would depend on earlier runs.
        with torch.autograd.set_multithreading_enabled(False):
            loss = self._critic_step(real, noise, optimizers["critic"])
        if kind.startswith("both"):
            self._generator_step(noise, optimizers["generator"])
        return loss

    def evaluate(self, final: bool) -> Mapping[str, float]:
        """The Fréchet distance, only at the end of the run: it takes longer than an epoch."""
        if not final:
            return {}
        finite = all(bool(each.isfinite().all()) for each in self._generator.state_dict().values())
        distance = frechet_distance(self._real(), self._fake()) if finite else float("nan")
        return {self._network.metric: distance}

    def _critic_step(self, real: Tensor, noise: Tensor, optimizer: Optimizer) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with self._context.autocast(), torch.no_grad():
            fake = self._generator(noise).float()
        mix = torch.rand(len(real), 1, 1, 1, device=real.device)
        between = (mix * real + (1.0 - mix) * fake).requires_grad_()
        with self._context.autocast():
            # three separate calls, so that each set is normalised by its own batch statistics
            estimate = self._critic(real).float().mean() - self._critic(fake).float().mean()
            scores = self._critic(between).float()
        (slopes,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
        penalty = PENALTY * (slopes.flatten(1).norm(2, dim=1) - 1.0).square().mean()
        return backward_and_step(optimizer, penalty - estimate)

    def _generator_step(self, noise: Tensor, optimizer: Optimizer) -> None:
        with self._context.autocast():
            scores = self._critic(self._generator(noise).float())
        # gradients of the generator only: those of the critic are not needed
        (-scores.float().mean()).backward(inputs=list(self._generator.parameters()))
        optimizer.step()

    def _real(self) -> Moments:
        """Moments of all training images, cached. A limited run uses as many images as it generates, without cache."""
        limit = self._spec.limit
        if limit is not None:
            return self._network.moments(_saved(self._pixels[: limit * self._spec.batch]))
        content = hashlib.sha256(self._pixels.cpu().numpy().data).hexdigest()
        name = f"{self._network.name}-{content[:16]}.pt"
        origin = f"{self._network.name}: 64 x 64, as saved, of {content}"
        folder = data_root(self._context.data_root) / "frechet"
        return cached_moments(folder / name, origin, lambda: self._network.moments(_saved(self._pixels)))

    def _fake(self) -> Moments:
        count = FAKES if self._spec.limit is None else self._spec.limit * self._spec.batch
        # a separate random stream on the host, so that the noise depends neither on the training nor on the device
        noise = torch.randn(count, NOISE, generator=stream(self._spec.seed, 0, "fakes"))
        self._generator.eval()
        try:
            return self._network.moments(self._generated(noise))
        finally:
            self._generator.train()

    def _generated(self, noise: Tensor) -> Iterator[Tensor]:
        for part in noise.split(_MEASURED):
            # in float32, not in the run's precision: the feature network would see the rounding of bfloat16 images
            with torch.no_grad(), full_float32(self._device):
                made = self._generator(part.to(self._device))
            yield as_saved(made)


def doubled(pixels: Tensor) -> Tensor:
    """uint8 images at twice the size, bit by bit as Pillow's bilinear resize, which the public code uses.

    Every new pixel is 3/4 of one old pixel and 1/4 of its neighbour. Pillow rounds to 8 bits after the rows and again
    after the columns; a resize in floating point would differ by up to one level.
    """
    out = pixels
    for dim in (3, 2):
        wide = out.to(torch.int16)
        size = wide.size(dim)
        before = torch.cat([wide.narrow(dim, 0, 1), wide.narrow(dim, 0, size - 1)], dim)
        after = torch.cat([wide.narrow(dim, 1, size - 1), wide.narrow(dim, size - 1, 1)], dim)
        pair = torch.stack([3 * wide + before, 3 * wide + after], dim + 1)
        out = ((pair + 2) >> 2).flatten(dim, dim + 1).to(torch.uint8)
    return out


def normalised(pixels: Tensor) -> Tensor:
    """uint8 pixels scaled to [-1, 1]."""
    return pixels.float().div(127.5).sub(1.0)


def as_saved(images: Tensor) -> Tensor:
    """uint8 images, each stretched so that its minimum is 0 and its maximum 255 over all channels.

    The public code stretches images when it saves them and measures the saved files, so the stretch is part of every
    FID it reports. It applies to real and generated images.
    """
    values = images.float()
    low, high = values.amin((1, 2, 3), keepdim=True), values.amax((1, 2, 3), keepdim=True)
    # a constant image has no range to stretch: it becomes black, as in the public code
    share = (values - low) / (high - low).clamp_min(1e-5)
    return (share * 255.0 + 0.5).clamp(0.0, 255.0).to(torch.uint8)


def _saved(pixels: Tensor) -> Iterator[Tensor]:
    for part in pixels.split(_MEASURED):
        yield as_saved(normalised(doubled(part)))
