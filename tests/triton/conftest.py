"""Makes the folder's helper modules importable; the tensors are tiny, so threads would only wait for each other."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
