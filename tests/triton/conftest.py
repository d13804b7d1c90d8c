"""Makes the folder's helper modules importable; the tensors are tiny, so threads would only wait for each other."""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "scripts")]
torch.set_num_threads(1)
