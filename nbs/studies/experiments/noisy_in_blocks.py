"""AdamW on float32 weights with the noise that stochastic rounding would add under the scales of
blocks, and no rounding: noisy_adamw.py for MXFP4 and NVFP4."""
import torch

from altgrad.geometry.spacing import CodeSpace
from altgrad.numbers.scaling import scale_of


class MXFP4(torch.optim.AdamW):
    "AdamW whose steps are whole spacings under the scales of blocks, on average what they were."
    granularity = 32

    def __init__(self, params, lr, format, betas=(0.9, 0.999), eps=1e-8, seed=0):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=0.0)
        self.format = format
        self.draws = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self, closure=None):
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in weights]
        loss = super().step(closure)
        for p, old in zip(weights, before):
            scale = scale_of(old, self.format, self.granularity)
            gap = CodeSpace(old, self.format, scale=scale).step
            drawn = torch.rand(p.shape, generator=self.draws)
            p.copy_(old + gap * ((p - old) / gap + drawn).floor())
        return loss


class NVFP4(MXFP4):
    "The same under NVFP4's scales."
    granularity = "nvfp4"
