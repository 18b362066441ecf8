"""What the tests of several modules do not ask of an old torch; CHANGELOG.md says what it cannot
do."""
import torch

# where a CPU has no vectors, or torch is told so, torch 2.13 writes C++ that no compiler takes
NO_COMPILER = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
OLD_TORCH = torch.__version__ < (2, 9)  # 2.8 was tried, and of the later ones 2.13 and 2.14
