"""Hostile input, generated: what is wrong must be refused in one line, what is right must work, and
damage is never kept in silence.

Each module yields `Case`s of one or two groups; `core` runs them in processes of their own with a
limit of ten seconds.
"""
from . import (
    commands, configs, formats, interchange, ledgers, matrices, mirrors, models, places, runs,
    texts,
)

MODULES = (
    commands, configs, matrices, texts, ledgers, runs, places, mirrors, formats, models,
    interchange,
)
