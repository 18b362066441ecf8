"""AdamW on float32 weights with the noise of a residual's grid, and no rounding: a control. It is
noisy_adamw.py with the finer spacing that a residual of 2 or 4 bits has between two values of the format."""
import torch

from altgrad.geometry.spacing import CodeSpace


class TwoBits(torch.optim.AdamW):
    "AdamW whose steps are whole levels of a residual of two bits, on average what they were."
    levels = 2  # in a spacing of the format: 2 (2^(b-1) - 1)

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
            level = CodeSpace(old, self.format).step / self.levels
            drawn = torch.rand(p.shape, generator=self.draws)
            p.copy_(old + level * ((p - old) / level + drawn).floor())
        return loss


class FourBits(TwoBits):
    "The same for a residual of four bits."
    levels = 14
