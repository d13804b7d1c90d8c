"""`python -m jetflow_train` is the command `jetflow-train`; `torchrun -m jetflow_train` runs it on many ranks."""

import sys

from jetflow_train.cli import main

sys.exit(main())
