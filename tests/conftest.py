"""What all tests share: the mark of those that need a GPU, and which files begin."""

# Each takes minutes. They begin, so that no worker is left alone with one of them at the end.
LONG = ("hostile", "browser", "record", "cli", "gpu", "referee", "without_master", "evidence", "docs")


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: computes on a GPU, and is skipped where there is none; see `make gpu`")


def pytest_collection_modifyitems(items):
    order = {f"test_{name}.py": k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))
