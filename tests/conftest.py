"""Settings of the whole test run."""

from __future__ import annotations

import torch
import torch._dynamo  # FSDP asks for it; forked ranks then need not each import it

# two cores: more threads than ranks only get in each other's way, and results must not depend on the machine
torch.set_num_threads(1)
