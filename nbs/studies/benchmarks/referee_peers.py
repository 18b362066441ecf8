"""What packages outside the package's own requirements call a cast, for referee_agreement.py."""
import os
from dataclasses import dataclass
from typing import Callable, Iterator

import numpy as np

from altgrad.numbers.formats import get_format

EITHER = ("saturate", "special")  # a standard allows both: which one is it?
E8M0 = "float8_e8m0fnu"
NARROW = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"} | {n: n for n in (
    "float8_e4m3fnuz", "float8_e5m2fnuz")}
ALL = NARROW | {n: n for n in ("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float4_e2m1fn",
                               E8M0)}  # name here -> name of numpy's type


@dataclass
class Case:
    "One function, and what it is asked."
    function: str
    format: str
    f: Callable
    policies: tuple[str, ...] = ("saturate",)
    rounding: str = "nearest"
    signature: str = "x"
    codes: bool = True
    arrays: str = "torch"


def policies(name: str) -> tuple[str, ...]:
    "What overflow may become in a format."
    return ("saturate",) if get_format(name).specials == "none" else EITHER


def of_jax() -> Iterator[Case]:
    "Casts as XLA makes them for a CPU."
    import jax

    for name, short in ALL.items():
        dtype = getattr(jax.numpy, short)
        cast = jax.jit(lambda x, d=dtype: x.astype(d))
        def f(x, cast=cast): return np.asarray(cast(x)).view(np.uint8)
        for rounding in ("nearest", "away") if name == E8M0 else ("nearest",):
            yield Case("x.astype(dtype)", name, f, policies(name), rounding, arrays="numpy")


def of_tensorflow() -> Iterator[Case]:
    "tf.cast on a CPU, which has two of the narrow types."
    import tensorflow as tf

    for name in ("E4M3", "E5M2"):
        dtype = getattr(tf.dtypes.experimental, NARROW[name])
        def f(x, d=dtype): return tf.cast(tf.constant(x), d).numpy().view(np.uint8)
        yield Case("tf.cast", name, f, EITHER, arrays="numpy")


def of_paddle() -> Iterator[Case]:
    "Tensor.astype on a CPU."
    import paddle

    for name in ("E4M3", "E5M2"):
        def f(x, d=NARROW[name]): return paddle.to_tensor(x).astype(d).astype("float32").numpy()
        yield Case("x.astype(dtype)", name, f, EITHER, codes=False, arrays="numpy")


def of_onnx() -> Iterator[Case]:
    "The operator Cast of the reference evaluator; to E8M0 by its three ways to round."
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    def cast(kind: str, **how) -> Callable:
        to = getattr(TensorProto, kind)
        node = helper.make_node("Cast", ["x"], ["y"], to=to, **how)
        graph = helper.make_graph(
            [node], "cast", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])],
            [helper.make_tensor_value_info("y", to, [None])])
        run = ReferenceEvaluator(helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 24)]))
        return lambda x: run.run(None, {"x": x})[0].view(np.uint8)

    kinds = {"E4M3": "FLOAT8E4M3FN", "E5M2": "FLOAT8E5M2", "float8_e4m3fnuz": "FLOAT8E4M3FNUZ",
             "float8_e5m2fnuz": "FLOAT8E5M2FNUZ"}
    for name, kind in kinds.items():
        for policy, saturate in (("saturate", 1), ("special", 0)):
            yield Case(f"Cast(saturate={saturate})", name, cast(kind, saturate=saturate), (policy,),
                       arrays="numpy")
    yield Case("Cast", "float4_e2m1fn", cast("FLOAT4E2M1"), arrays="numpy")
    for rounding, mode in (("up", "up"), ("toward_zero", "down"), ("away", "nearest")):
        f = cast("FLOAT8E8M0", saturate=1, round_mode=mode)
        yield Case(f"Cast(round_mode={mode})", E8M0, f, rounding=rounding, arrays="numpy")


def of_qtorch() -> Iterator[Case]:
    "float_quantize: no exponent is reserved, and it has no infinity and no NaN."
    from qtorch.quant import float_quantize

    for name, (exp, man) in {"E5M2b15": (5, 2), "E4M3b7": (4, 3), "E3M4b3": (3, 4)}.items():
        def f(x, e=exp, m=man): return float_quantize(x, exp=e, man=m, rounding="nearest")
        for rounding in ("nearest", "away"):
            yield Case(f"float_quantize({exp}, {man})", name, f, rounding=rounding, codes=False)
    yield Case("float_quantize(4, 3, stochastic)", "E4M3b7",
               lambda x: float_quantize(x, exp=4, man=3, rounding="stochastic"),
               rounding="stochastic", codes=False)


def of_pychop() -> Iterator[Case]:
    "Chop, to nearest and toward zero."
    import pychop

    pychop.backend("numpy")
    modes = {"nearest": 1, "toward_zero": 4}
    for name, (exp, man) in {"E5M2": (5, 2), "float8_e4m3": (4, 3), "float8_e3m4": (3, 4)}.items():
        for rounding, mode in modes.items():
            chop = pychop.Chop(exp_bits=exp, sig_bits=man, rmode=mode, subnormal=True)
            def f(x, chop=chop): return np.asarray(chop(x)).astype(np.float32)
            yield Case(f"Chop({exp}, {man}, rmode={mode})", name, f, EITHER, rounding, codes=False,
                       arrays="numpy")


def of_brevitas() -> Iterator[Case]:
    "FloatQuant with a scale of 1, clamping as OCP has it."
    import torch
    from brevitas.core.bit_width import BitWidthConst
    from brevitas.core.bit_width.float import ComputeMaxMantissa
    from brevitas.core.function_wrapper.clamp import FloatClamp, TensorClamp
    from brevitas.core.quant.float import FloatQuant
    from brevitas.core.utils import StatelessBuffer

    shapes = {"E4M3": (4, 3, 7.0, 448.0, ("111",), None),
              "E5M2": (5, 2, 15.0, 57344.0, ("01", "11", "10"), ("00",)),
              "float6_e2m3fn": (2, 3, 1.0, 7.5, None, None),
              "float6_e3m2fn": (3, 2, 3.0, 28.0, None, None),
              "float4_e2m1fn": (2, 1, 1.0, 6.0, None, None)}
    for name, (exp, man, bias, top, nan, inf) in shapes.items():
        clamp = FloatClamp(TensorClamp(), True, inf_values=inf, nan_values=nan, saturating=True,
                           max_available_float=torch.tensor(top))
        quant = FloatQuant(True, BitWidthConst(exp), BitWidthConst(man),
                           StatelessBuffer(torch.tensor(bias)), clamp, torch.nn.Identity(),
                           ComputeMaxMantissa())
        def f(x, quant=quant):
            with torch.no_grad(): return quant(x)[0]
        yield Case(f"FloatQuant({exp}, {man})", name, f, codes=False)


def of_compressed_tensors() -> Iterator[Case]:
    "Rounding to 8, 6 and 4 bits after a division by the scale."
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    for name, bits in {"E4M3": 8, "float4_e2m1fn": 4}.items():
        args = QuantizationArgs(num_bits=bits, type="float", symmetric=True, strategy="tensor")
        def f(x, scale, a=args): return fake_quantize(x, scale.reshape(1), None, a)
        yield Case(f"fake_quantize({bits} bits)", name, f, signature="x, scale -> q * scale",
                   codes=False)


def of_quanto() -> Iterator[Case]:
    "quantize_symmetric."
    import torch
    import optimum.quanto  # noqa: F401

    for name in NARROW:
        dtype = getattr(torch, NARROW[name])
        def f(x, scale, d=dtype): return torch.ops.quanto.quantize_symmetric(x, d, None, scale)
        yield Case("quantize_symmetric", name, f, signature="x, scale")


def of_modelopt() -> Iterator[Case]:
    "Casts to E4M3 and E2M1, and the scales of blocks."
    import torch
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    from modelopt.torch.quantization.tensor_quant import fp8_eager

    yield Case("fp8_eager", "E4M3", lambda x: fp8_eager(x, None), codes=False)
    yield Case("NVFP4QTensor._cast_fp4", "float4_e2m1fn",
               lambda x: NVFP4QTensor._cast_fp4(x.clone()))  # it takes |x| in place

    def mxfp4(x):
        "Codes: each block's largest magnitude is 6, so that its scale is 1."
        blocks = torch.full((-(-x.numel() // 30), 32), 6.0)
        blocks[:, :30] = torch.nn.functional.pad(
            x.ravel().clamp(-6, 6), (0, -x.numel() % 30)).view(-1, 30)
        pairs = MXFP4QTensor.quantize(blocks, 32)[0]._quantized_data.view(-1, 16)
        codes = torch.stack([pairs & 15, pairs >> 4], -1).view(-1, 32)
        return codes[:, :30].reshape(-1)[: x.numel()].reshape(x.shape)

    yield Case("MXFP4QTensor.quantize", "float4_e2m1fn", mxfp4)
    scales = {"E4M3": MXFP8QTensor.get_weights_scaling_factor,
              "float4_e2m1fn": lambda x: MXFP4QTensor.quantize(x, 32)[1]}
    for name, scale in scales.items():
        def f(amax, scale=scale): return scale(amax[:, None].repeat(1, 32)).reshape(amax.shape)
        yield Case("scales of MX blocks", name, f, rounding="up", signature="amax")


def of_triton() -> Iterator[Case]:
    "The cast of Triton's language under its interpreter."
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def cast(x, y, n, kind: tl.constexpr, SIZE: tl.constexpr):
        i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        value = tl.load(x + i, mask=i < n, other=0.0).to(kind)
        tl.store(y + i, value.to(tl.uint8, bitcast=True), mask=i < n)

    for name, kind in {"E4M3": tl.float8e4nv, "E5M2": tl.float8e5}.items():
        def f(x, kind=kind):
            y = torch.empty(x.shape, dtype=torch.uint8)
            cast[(triton.cdiv(x.numel(), 2**16),)](x, y, x.numel(), kind, 2**16)
            return y
        yield Case("x.to(dtype), interpreted", name, f, EITHER)


PEERS: dict[str, tuple[str, Callable[[], Iterator[Case]]]] = {  # distribution -> module, cases
    "jax": ("jax", of_jax), "tensorflow": ("tensorflow", of_tensorflow),
    "paddlepaddle": ("paddle", of_paddle), "onnx": ("onnx", of_onnx),
    "qtorch": ("qtorch", of_qtorch),
    "pychop": ("pychop", of_pychop), "brevitas": ("brevitas", of_brevitas),
    "compressed-tensors": ("compressed_tensors", of_compressed_tensors),
    "optimum-quanto": ("optimum.quanto", of_quanto), "nvidia-modelopt": ("modelopt", of_modelopt),
    "triton": ("triton", of_triton),
}
