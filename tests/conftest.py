"""What all tests share: the mark of those that need a GPU."""


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: computes on a GPU, and is skipped where there is none; see `make gpu`")
