"""AdamW on float32 weights with the noise that stochastic rounding would add, and no rounding: a
control. Every step is rounded stochastically to whole spacings of the format at the weight, which
itself lies between two values, wherever the steps have led it."""
import torch

from altgrad.geometry.spacing import CodeSpace


class NoisyAdamW(torch.optim.AdamW):
    "AdamW whose steps are whole spacings of a format, on average what they were."
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
            gap = CodeSpace(old, self.format).step
            drawn = torch.rand(p.shape, generator=self.draws)
            p.copy_(old + gap * ((p - old) / gap + drawn).floor())
        return loss
