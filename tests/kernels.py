"""Cache folders that hold the C++ kernels, so that only tests of their making wait for the compiler."""
import shutil
from contextlib import suppress
from pathlib import Path

from altgrad.numbers import native


def with_kernels(
    cache: Path,  # a folder for `ALTGRAD_CACHE`
) -> str:
    "The folder, with the library that this process has built or found; without one as it was."
    with suppress(RuntimeError): native.build_library(wait=True)  # there is no compiler
    built = Path(native.state["looked"])
    if built.is_file():
        (cache / "native").mkdir(parents=True, exist_ok=True)
        shutil.copy(built, cache / "native")
    return str(cache)
