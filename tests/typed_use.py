"""A user's program, for the type checker: what the public names take and give. Not run; `mypy
--config-file .ci/mypy.ini` reads it."""
from collections.abc import Iterator
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

from altgrad.numbers.formats import EIGHT_BIT, FORMATS, FP8Format, get_format, ulp
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.scaling import compute_scale, scale_of
from altgrad.geometry.interchange import Codes, load_codes, load_model, save_codes
from altgrad.geometry.optim import RiemannianAdamW, StiffnessAdamW
from altgrad.geometry.spacing import code_coordinate, stiffness
from altgrad.geometry.storage import GridTensor, grid_weights, make_grid_tensor, store_on_grid
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.products import Quantized
from altgrad.model.surgery import (
    QuantizationReport, quantize_model, quantized_layers, quantized_weights,
)
from altgrad.watching.monitors import Measurement, Monitors

fmt = get_format("E4M3")
x = torch.randn(4, 4)
assert_type(fmt, FP8Format)
assert_type(FORMATS[EIGHT_BIT[0]], FP8Format)
assert_type(
    (fmt.max, fmt.bits, fmt.values, fmt.to_bits(x), fmt.spec),
    tuple[float, int, Tensor, Tensor, str],
)
assert_type(
    fake_quantize(x, "E5M2", compute_scale(x.abs().amax(), fmt), rounding="stochastic", key=1),
    Tensor,
)
assert_type(
    (ulp(fmt, x), scale_of(x, fmt, "channel"), stiffness(x, fmt), code_coordinate(x, fmt)),
    tuple[Tensor, Tensor, Tensor, Tensor],
)

model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 1))
assert_type(
    quantize_model(
        model, config=PrecisionConfig((LayerPrecisionRule("*", weight="E4M3", gradient=True),))
    ),
    QuantizationReport,
)
assert_type(quantized_layers(model), Iterator[tuple[str, Quantized]])
assert_type(store_on_grid(model, "grid_nearest"), list[str])
assert_type(grid_weights(model), dict[str, GridTensor])
assert_type(make_grid_tensor(x, fmt, "grid_nearest").dequantize(), Tensor)
optimizers: list[torch.optim.Optimizer] = [
    StiffnessAdamW(quantized_weights(model).values(), fmt),
    RiemannianAdamW(model.parameters(), "E4M3", 0.1),
]

monitors = Monitors(model, optimizers, every=1)
assert_type(monitors.end(), Measurement)
assert_type(monitors.end().overall(), dict[str, float])
save_codes(model, Path("model.safetensors"))
assert_type(load_codes("model.safetensors"), dict[str, Codes | Tensor])
load_model(model, "model.safetensors")
