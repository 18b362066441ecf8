"""Files of weights by strangers: cut, edited, and made to contradict themselves."""
import json
import struct
from functools import partial
from typing import Any, Callable, Iterator

from .core import Case, Place, either, refused


def _model() -> Any:
    import torch
    from altgrad.model.surgery import quantize_model
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    quantize_model(model, "E4M3")
    return model


def _file(place: Place) -> bytes:
    from altgrad.geometry.interchange import save_codes
    path = place.folder / "whole.safetensors"
    save_codes(_model(), path)
    return path.read_bytes()


def _apart(data: bytes) -> tuple[dict, bytes]:
    "Header and body of a safetensors file, by its specification."
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _together(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def _refused(place: Place, data: bytes) -> None:
    "By both readers; a model stays as it is."
    from altgrad.geometry.interchange import load_codes
    path = place.folder / "m.safetensors"
    path.write_bytes(data)
    refused(load_codes, path)
    _untouched(path)


def _untouched(path: Any) -> None:
    import torch
    from altgrad.geometry.interchange import load_model
    model = _model()
    with torch.no_grad():
        for p in model.parameters(): p.add_(0.5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    refused(load_model, model, path)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items()), "half loaded"


def _cut(share: float, place: Place) -> None:
    data = _file(place)
    _refused(place, data[: int(len(data) * share)])


def _metadata(change: Callable[[dict], Any], place: Place) -> None:
    header, body = _apart(_file(place))
    facts = json.loads(header["__metadata__"]["altgrad"])
    new = change(facts)
    header["__metadata__"]["altgrad"] = new if isinstance(new, str) else json.dumps(new)
    _refused(place, _together(header, body))


def _header(change: Callable[[dict], Any], place: Place) -> None:
    header, body = _apart(_file(place))
    _refused(place, _together(change(header), body))


def _fuzz(seed: int, place: Place) -> None:
    "A header with bytes changed: refused, or the same codes as before under the same names."
    import random
    from altgrad.geometry.interchange import Codes, load_codes
    rng, data = random.Random(seed), bytearray(_file(place))
    size = struct.unpack("<Q", data[:8])[0]
    for _ in range(rng.randint(1, 3)): data[rng.randrange(8 + size)] = rng.randrange(256)
    path = place.folder / "m.safetensors"
    path.write_bytes(bytes(data))
    found = either(load_codes, path)
    for value in (found or {}).values():
        if isinstance(value, Codes):
            assert value.dequantize().shape == value.codes.shape
            assert (value.scale > 0).all()
            assert value.scale.isfinite().all()


def _tensor(name: str, make: Callable[[Any], Any], place: Place) -> None:
    "Another tensor under a name, the rest as it was."
    from safetensors import safe_open
    from safetensors.torch import save_file
    _file(place)
    with safe_open(place.folder / "whole.safetensors", "pt") as file:
        metadata = file.metadata()
        tensors = {k: file.get_tensor(k) for k in file.keys()}
    new = make(tensors[name])
    tensors = {k: v for k, v in tensors.items() if k != name} | (
        {name: new} if new is not None else {}
    )
    save_file(tensors, place.folder / "m.safetensors", metadata)
    _refused(place, (place.folder / "m.safetensors").read_bytes())


def _save(kind: str, place: Place) -> None:
    from altgrad.geometry.interchange import save_codes
    import torch
    path = place.folder / "out.safetensors"
    what, target, metadata = _model(), path, None
    if kind == "to a folder": path.mkdir()
    if kind == "under nothing": target = place.folder / "none/out.safetensors"
    if kind == "a number": what = {"a": 3}
    if kind == "no mapping": what = 3
    if kind == "a model that is not quantized": what = torch.nn.Linear(2, 2)
    if kind == "a key that is a number": what = {3: torch.ones(2)}
    if kind == "metadata that is a number": metadata = {"a": 3}
    if kind == "metadata that is text": metadata = "x"
    refused(save_codes, what, target, metadata)
    assert not path.is_file()


def _place(kind: str, place: Place) -> None:
    import os
    from altgrad.geometry.interchange import load_codes
    path = place.folder / "p"
    if kind == "a folder": path.mkdir()
    if kind == "a pipe": os.mkfifo(path)
    if kind == "a link to itself": path.symlink_to(path)
    if kind == "a device": path.symlink_to("/dev/zero")
    refused(load_codes, path)
    _untouched(path)


def _whole(fmt: str, granularity: Any, place: Place) -> None:
    "What was written is read, and loaded into another model, to the last bit."
    import torch
    from altgrad.geometry.interchange import Codes, load_codes, save_codes
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    codes = Codes.of(x, fmt, granularity)
    save_codes({"w": codes, "b": torch.ones(3)}, place.folder / "w.safetensors")
    back = load_codes(place.folder / "w.safetensors")
    assert torch.equal(back["w"].dequantize(), codes.dequantize())
    assert torch.equal(back["b"], torch.ones(3))
    assert back["w"].fmt == codes.fmt


def cases(rng) -> Iterator[Case]:
    import torch

    for i in range(40): yield Case("interchange", f"cut to {i / 40:.1%}", partial(_cut, i / 40))
    for seed in range(80):
        yield Case("interchange", f"header fuzz {seed}", partial(_fuzz, rng.randrange(10**9)))
    spec = "E4M3b7fn"
    edits: dict[str, Any] = {
        "not JSON": "{x", "a list": [], "null": None, "a number": 3, "deep": "[" * 100_000,
        "no formats": {"weights": {}}, "no weights": {"formats": {}}, "text": '"x"', "nothing": "",
        "NaN": "NaN",
    }
    for name, value in edits.items():
        yield Case("interchange", f"facts: {name}", partial(_metadata, partial(_const, value)))
    for key, values in {
        "exponent_bits": (5, "4", None, -1, 4.0, True),
        "mantissa_bits": (2, None, "3"),
        "bias": (3, None, 7.5, "7"),
        "specials": ("none", "all", None),
        "signed": (False, 1, None),
        "subnormals": (False, None),
        "z": (1,),
        "name": ("", None, 7),
    }.items():
        for value in values:
            yield Case(
                "interchange", f"format: {key} = {value!r}",
                partial(_metadata, partial(_fact, spec, key, value)),
            )
    for key, values in {
        "format": ("zz", None, 7, [], "E5M2"),
        "block": (0, -3, "x", 10**9, True, 1.5, [], 7),
    }.items():
        for value in values:
            yield Case(
                "interchange", f"weight: {key} = {value!r}",
                partial(_metadata, partial(_how, key, value)),
            )
    yield Case("interchange", "a weight of another name", partial(_metadata, _renamed))
    for value in (None, [], {}, 3, "x"):
        yield Case(
            "interchange", f"formats = {value!r}",
            partial(_metadata, partial(_top, "formats", value)),
        )
    for value in (None, [], 3, "x", {"zz": {"format": spec, "block": None}}):
        yield Case(
            "interchange", f"weights = {value!r}",
            partial(_metadata, partial(_top, "weights", value)),
        )
    headers = {
        "empty": b"", "a list": b"[]", "null": b"null", "text": b"hello", "deep": b"[" * 100_000,
        "not UTF-8": b"\xff" * 40, "no metadata": None,
    }
    for name, value in headers.items():
        yield Case("interchange", f"header: {name}", partial(_header, partial(_head, value)))
    for name in ("0.weight", "0.weight_scale"):
        for key, value in (
            ("dtype", "F99"),
            ("dtype", None),
            ("shape", [10**9, 10**9]),
            ("shape", [-1]),
            ("shape", None),
            ("data_offsets", [0, 10**12]),
            ("data_offsets", [5, 1]),
            ("data_offsets", None),
            ("data_offsets", [0]),
            ("dtype", "I8"),
        ):
            yield Case(
                "interchange", f"header: {name} {key} = {value!r}",
                partial(_header, partial(_in_header, name, key, value)),
            )
    for value in (0.0, -1.0, float("nan"), float("inf")): yield Case("interchange", f"scale {value}",
        partial(_tensor, "0.weight_scale", partial(_filled, value)))
    for name, make in {
        "of seven": lambda t: torch.ones(7),
        "of integers": lambda t: torch.ones((), dtype=torch.int32),
        "of float64": lambda t: t.double(),
        "complex": lambda t: torch.ones((), dtype=torch.complex64),
        "gone": lambda t: None,
        "of four dimensions": lambda t: torch.ones(1, 1, 1, 1),
    }.items():
        yield Case("interchange", f"scale {name}", partial(_tensor, "0.weight_scale", make))
    for name, make in {
        "float32": lambda t: t.float(),
        "bfloat16": lambda t: t.bfloat16(),
        "int32": lambda t: t.view(torch.uint8).int(),
        "bool": lambda t: t.float() > 0,
        "gone": lambda t: None,
        "e5m2": lambda t: t.view(torch.uint8).view(torch.float8_e5m2),
    }.items():
        yield Case("interchange", f"codes {name}", partial(_tensor, "0.weight", make))
    for kind in (
        "to a folder", "under nothing", "a number", "no mapping", "a model that is not quantized",
        "a key that is a number", "metadata that is a number", "metadata that is text",
    ):
        yield Case("interchange", f"save {kind}", partial(_save, kind))
    for kind in ("a folder", "a pipe", "a link to itself", "a device", "nothing"):
        yield Case("interchange", f"load {kind}", partial(_place, kind))
    for fmt in ("E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0", "bfloat16"):
        for granularity in ("tensor", "channel", 16):
            yield Case(
                "interchange", f"whole {fmt} {granularity}", partial(_whole, fmt, granularity),
                right=True,
            )


def _const(value: Any, _: Any) -> Any: return value if value != "" else " "


def _head(value: Any, header: dict) -> Any:
    return {k: v for k, v in header.items() if k != "__metadata__"} if value is None else value


def _fact(spec: str, key: str, value: Any, facts: dict) -> dict:
    return {**facts, "formats": {spec: {**facts["formats"][spec], key: value}}}


def _how(key: str, value: Any, facts: dict) -> dict: return {**facts,
    "weights": {**facts["weights"], "0.weight": {**facts["weights"]["0.weight"], key: value}}}


def _renamed(facts: dict) -> dict:
    return {
        **facts,
        "weights": {("zz" if k == "0.weight" else k): v for k, v in facts["weights"].items()},
    }


def _top(key: str, value: Any, facts: dict) -> dict: return {**facts, key: value}


def _in_header(name: str, key: str, value: Any, header: dict) -> dict:
    return {**header, name: {**header[name], key: value}}


def _filled(value: float, t: Any) -> Any:
    import torch
    return torch.full_like(t, value)
