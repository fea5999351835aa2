"""What all tests share: one compute thread, as the machines that run them are small."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
