"""AltGrad: train in every 8-bit floating-point format, and update weights along the geometry of the format.

The names below are loaded when they are first used, so that `import altgrad` costs nothing."""
from importlib import import_module

__version__ = "0.1.0"
TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` would cost more than all the rest

if TYPE_CHECKING:
    from .geometry.manifold import FP8Manifold
    from .geometry.optim import RiemannianAdamW, StiffnessAdamW
    from .geometry.storage import store_on_grid
    from .model.surgery import quantize_model
    from .model.without_master import without_master
    from .numbers.formats import get_format
    from .numbers.quantize import dequantize, fake_quantize, quantize
    from .training.trainer import Trainer
    from .views.explorer import explore
    from .watching.monitors import Monitors
    from .watching.record import record
    from .watching.stall import stall

_PLACES = {
    "get_format": "numbers.formats",
    "fake_quantize": "numbers.quantize",
    "quantize": "numbers.quantize",
    "dequantize": "numbers.quantize",
    "FP8Manifold": "geometry.manifold",
    "store_on_grid": "geometry.storage",
    "StiffnessAdamW": "geometry.optim",
    "RiemannianAdamW": "geometry.optim",
    "quantize_model": "model.surgery",
    "without_master": "model.without_master",
    "Monitors": "watching.monitors",
    "stall": "watching.stall",
    "record": "watching.record",
    "Trainer": "training.trainer",
    "explore": "views.explorer",
}

__all__ = [
    "FP8Manifold", "Monitors", "RiemannianAdamW", "StiffnessAdamW", "Trainer", "dequantize", "explore",
    "fake_quantize", "get_format", "quantize", "quantize_model", "record", "stall",
    "store_on_grid", "without_master",
]


def __getattr__(name: str) -> object:
    if name not in _PLACES: raise AttributeError(f"module 'altgrad' has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]: return sorted({*globals(), *_PLACES})
