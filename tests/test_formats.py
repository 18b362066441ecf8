"""Formats where other parts of the package meet them: stored results, checkpoints, the compiler,
the hot path. Values are proved in nbs/numbers/00_formats."""
import copy
import json
import pickle
import timeit
from pathlib import Path

import pytest
import torch

from altgrad.numbers import formats
from altgrad.numbers.formats import EIGHT_BIT, FORMATS, FP8Format, get_format

RESULTS = Path(__file__).parents[1] / "nbs" / "results"
SPECS = ("E0M7b1", "E1M6b0", "E2M5b1", "E3M4b1", "E4M3b7fn", "E5M2b15ieee", "E6M1b31", "E7M0b63")


def stored_facts(node):
    "Every dict in a JSON document that holds a format's facts."
    if isinstance(node, dict) and {"name", "mantissa_bits"} <= node.keys(): yield node
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from stored_facts(child)


def test_the_eight_splits_are_what_stored_results_were_made_with():
    assert tuple(FORMATS[name].spec for name in EIGHT_BIT) == SPECS
    found = [
        facts
        for path in sorted(RESULTS.glob("*.json"))
        for facts in stored_facts(json.loads(path.read_text()))
    ]
    assert {"E5M2", "E7M0"} <= {facts["name"] for facts in found}
    for facts in found: assert FP8Format(**facts) == FORMATS[facts["name"]]


def test_a_checkpoint_from_before_the_newer_facts_loads():
    from altgrad.geometry.optim import StiffnessSGD

    def optimizer(): return StiffnessSGD([torch.nn.Parameter(torch.ones(3))], fmt="E4M3b9", lr=1e-3)
    state = optimizer().state_dict()
    facts = state["param_groups"][0]["fmt"]
    assert facts["bias"] == 9
    assert facts.pop("subnormals") is True
    assert facts.pop("twos_complement") is False
    loaded = optimizer()
    loaded.load_state_dict(state)
    assert loaded.param_groups[0]["fmt"] == get_format("E4M3b9")


@pytest.mark.parametrize("name", ["E4M3", "mxint8", "E8M0", "E5M3b15u"])
def test_copies_are_equal(name):
    fmt = get_format(name)
    assert fmt.values.numel() == 2**fmt.bits
    for twin in (copy.deepcopy(fmt), pickle.loads(pickle.dumps(fmt))):
        assert twin == fmt
        assert hash(twin) == hash(fmt)
        assert twin.spec == fmt.spec


@pytest.mark.parametrize("name", ["E4M3", "e4m3", "E4M3b7fn", "E4M3b9", FORMATS["E4M3"]], ids=str)
def test_a_lookup_takes_less_than_two_microseconds(name):
    get_format(name)
    assert min(timeit.repeat(lambda: get_format(name), number=2000, repeat=7)) / 2000 < 2e-6


@pytest.mark.parametrize("name", ["E5M2", "e5m2", "E5M2b15ieee", "E5M2b12"])
def test_a_compiled_function_can_look_a_format_up(name):
    def clamp(x): return x.clamp(get_format(name).min, get_format(name).max)

    torch._dynamo.reset()
    formats._FOUND.clear()
    x = torch.tensor([-1e9, 1.0, 1e9])
    assert torch.equal(torch.compile(clamp, backend="eager", fullgraph=True)(x), clamp(x))
