"""How tests wait for what another process does."""
import time
from collections.abc import Callable
from pathlib import Path


def has_content(path: Path) -> bool: return path.is_file() and path.stat().st_size > 0


def until(condition: Callable[[], bool], alive: Callable[[], bool], seconds: float = 60) -> None:
    """Waits for a condition; fails at once if the process that should bring it about has ended,
    and when the time is over."""
    end = time.monotonic() + seconds
    while not condition():
        assert alive(), "the process ended before"
        assert time.monotonic() < end, f"nothing came for {seconds} s"
        time.sleep(0.01)
